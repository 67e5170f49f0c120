//! Where in a text it is looked at.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Where windows of `len` tokens start among `n_tokens`: as many as wanted and as fit side by side, one in each of as many
/// equal parts of the text, at a random place of its part.
pub(super) fn starts(n_tokens: usize, len: usize, n_wanted: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
    let n_windows = n_wanted.min(n_tokens / len);
    let part = |index: usize| index * n_tokens / n_windows;
    let start = |index: usize| part(index) + rng.random_range(0..=part(index + 1) - part(index) - len);
    (0..n_windows).map(start).collect()
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    #[test]
    fn windows_lie_apart_and_the_seed_decides_where() {
        let starts_of = |n_tokens, n_wanted, seed| starts(n_tokens, 10, n_wanted, &mut ChaCha8Rng::seed_from_u64(seed));
        for (n_tokens, n_wanted, expected) in [(1000, 7, 7), (1003, 7, 7), (95, 100, 9), (10, 1, 1), (9, 5, 0)] {
            let starts = starts_of(n_tokens, n_wanted, 1);
            assert_eq!(starts.len(), expected);
            assert!(starts.windows(2).all(|pair| pair[0] + 10 <= pair[1]), "{starts:?}");
            assert!(starts.last().is_none_or(|last| last + 10 <= n_tokens), "{starts:?}");
            assert_eq!(starts, starts_of(n_tokens, n_wanted, 1));
        }
        assert_ne!(starts_of(1000, 7, 1), starts_of(1000, 7, 2));
        // The whole text is reached.
        assert!(starts_of(1000, 4, 3)[3] >= 750);
    }
}
