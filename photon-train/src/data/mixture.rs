//! Several sources of text in given proportions: which source a row comes from, and how often each was gone through.

use super::TokenStore;

/// Shares are multiples of two to the minus this.
const SHARE_BITS: u32 = 32;

/// The training side of one or more sources.
#[derive(Clone, Debug)]
pub struct Mixture {
    sources: Vec<MixtureSource>,
    /// The share of each source among the rows that the sources before it leave.
    nested_shares: Vec<u64>,
}

/// One source of a mixture.
#[derive(Clone, Debug)]
pub struct MixtureSource {
    /// What reports call it.
    pub name: String,
    /// Share of the rows, relative to the other sources' weights.
    pub weight: f64,
    /// Its tokens.
    pub store: TokenStore,
}

impl Mixture {
    /// A mixture of these sources.
    ///
    /// # Panics
    /// When there is none, or a weight is not above 0.
    pub fn new(sources: Vec<MixtureSource>) -> Self {
        assert!(!sources.is_empty(), "a mixture of nothing");
        let mut rest: f64 = sources.iter().map(|source| source.weight).sum();
        let last = sources.len() - 1;
        let share = |(index, source): (usize, &MixtureSource)| {
            assert!(source.weight > 0.0, "{}: a weight of {}", source.name, source.weight);
            let share = if index == last { 1.0 } else { source.weight / rest };
            rest -= source.weight;
            (share * (1u64 << SHARE_BITS) as f64).round() as u64
        };
        Self { nested_shares: sources.iter().enumerate().map(share).collect(), sources }
    }

    /// The sources, in the order of the config.
    pub fn sources(&self) -> &[MixtureSource] {
        &self.sources
    }

    /// Tokens of all sources.
    pub fn len(&self) -> usize {
        self.sources.iter().map(|source| source.store.len()).sum()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of text of all sources.
    pub fn text_bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.store.text_bytes()).sum()
    }

    /// Mean bytes of text of a token in the proportions of the mixture.
    pub fn bytes_per_token(&self) -> f64 {
        let weights: f64 = self.sources.iter().map(|source| source.weight).sum();
        let of = |source: &MixtureSource| source.weight * source.store.text_bytes() as f64 / source.store.len() as f64;
        self.sources.iter().map(of).sum::<f64>() / weights
    }

    /// The same mixture with each store changed.
    #[must_use]
    pub(super) fn map_stores(self, change: impl Fn(TokenStore) -> TokenStore) -> Self {
        let of = |source: MixtureSource| MixtureSource { store: change(source.store), ..source };
        Self { sources: self.sources.into_iter().map(of).collect(), ..self }
    }

    /// The source that row `n` of a run comes from, and how many rows before it came from there.
    ///
    /// Rows are spread evenly: after any number of rows each source has had its share of them, give or take one row for
    /// each source before it.
    pub(super) fn source_of_row(&self, n: u64) -> (usize, u64) {
        let mut index = n;
        for (source, &share) in self.nested_shares.iter().enumerate() {
            let taken = n_taken(index, share);
            if n_taken(index + 1, share) > taken {
                return (source, taken);
            }
            index -= taken;
        }
        unreachable!("the last source takes all that is left")
    }

    /// How many of the first `n` rows come from each source.
    pub(super) fn rows_of_sources(&self, n: u64) -> Vec<u64> {
        let mut rest = n;
        let taken = self.nested_shares.iter().map(|&share| {
            let taken = n_taken(rest, share);
            rest -= taken;
            taken
        });
        taken.collect()
    }
}

/// How many of `n` rows a share takes, rounded to the nearest.
fn n_taken(n: u64, share: u64) -> u64 {
    ((u128::from(n) * u128::from(share) + (1 << (SHARE_BITS - 1))) >> SHARE_BITS) as u64
}

#[cfg(test)]
pub(super) mod tests {
    use super::{super::store::tests::store_of, *};

    /// Sources of these weights and texts.
    pub(crate) fn mixture_of(folder: &tempfile::TempDir, sources: &[(f64, &[&str])]) -> Mixture {
        let source = |(index, (weight, texts)): (usize, &(f64, &[&str]))| {
            let store = store_of(folder, texts);
            MixtureSource { name: format!("s{index}"), weight: *weight, store }
        };
        Mixture::new(sources.iter().enumerate().map(source).collect())
    }

    #[test]
    fn rows_come_from_the_sources_in_proportion_at_every_moment() {
        let folder = tempfile::tempdir().unwrap();
        let mixture = mixture_of(&folder, &[(5.0, &["a"]), (3.0, &["b"]), (2.0, &["c"])]);
        let mut counts = [0; 3];
        for n in 0..10_000 {
            let (source, before) = mixture.source_of_row(n);
            assert_eq!(before, counts[source], "row {n}");
            counts[source] += 1;
            assert_eq!(mixture.rows_of_sources(n + 1), counts);
            for (count, share) in counts.iter().zip([0.5, 0.3, 0.2]) {
                assert!((*count as f64 - share * (n + 1) as f64).abs() < 2.0, "{counts:?} of {n}");
            }
        }
        assert_eq!(counts, [5000, 3000, 2000]);
    }

    #[test]
    fn far_rows_are_counted_exactly() {
        let folder = tempfile::tempdir().unwrap();
        let mixture = mixture_of(&folder, &[(1.0, &["a"]), (2.0, &["b"])]);
        let n = 1 << 45;
        let (source, before) = mixture.source_of_row(n);
        assert_eq!(mixture.rows_of_sources(n)[source], before);
        assert_eq!(mixture.rows_of_sources(n).iter().sum::<u64>(), n);
        let alone = mixture_of(&folder, &[(0.3, &["a"])]);
        assert_eq!(alone.source_of_row(n), (0, n));
    }

    #[test]
    fn bytes_of_a_token_are_those_of_the_rows_drawn() {
        let folder = tempfile::tempdir().unwrap();
        // A document of one byte has two tokens, one of three bytes four.
        let mixture = mixture_of(&folder, &[(1.0, &["a"]), (3.0, &["bbb"])]);
        assert_eq!(mixture.bytes_per_token(), 0.25 * 0.5 + 0.75 * 0.75);
    }
}
