//! What may reach the logits of a token, and what must.

use burn::tensor::Device;

use crate::support::{Case, VOCAB_SIZE, flat_cases, forward, photon_case, photon_cases, random_rows, shaken};

/// Longer than one meta-chunk, ragged, and long enough for sparse attention to leave something out.
fn n_tokens(case: &Case) -> usize {
    (case.config.meta_chunk_tokens() + 3).max(21)
}

/// Which logits move, bit by bit, when token `p` changes: `moved[p][i]`.
fn influence(case: &Case) -> Vec<Vec<bool>> {
    let model = shaken(&case.config, &Device::flex());
    let tokens = random_rows(1, n_tokens(case), 3).remove(0);
    // All perturbations in one batch: rows do not touch each other.
    let mut rows = vec![tokens.clone()];
    for p in 0..tokens.len() {
        let mut changed = tokens.clone();
        changed[p] = (changed[p] + 1) % VOCAB_SIZE as u32;
        rows.push(changed);
    }
    let logits = forward(&model, &rows);
    let moved =
        |p: usize, i: usize| logits[p + 1][i].iter().zip(&logits[0][i]).any(|(a, b)| a.to_bits() != b.to_bits());
    (0..tokens.len()).map(|p| (0..tokens.len()).map(|i| moved(p, i)).collect()).collect()
}

#[test]
fn future_tokens_do_not_change_past_logits_and_past_tokens_do() {
    for case in photon_cases().into_iter().chain(flat_cases()) {
        let moved = influence(&case);
        let n_tokens = moved.len();
        for (p, moved) in moved.iter().enumerate() {
            assert!(!moved[..=p].contains(&true), "{}: token {p} changes logits at or before it", case.name);
            let some_later = moved[p + 1..].contains(&true);
            assert!(p + 1 == n_tokens || some_later, "{}: token {p} reaches no later logits", case.name);
        }
    }
}

#[test]
fn with_default_attention_every_earlier_token_reaches_the_logits() {
    let cases = (1..=4).map(|n_levels| photon_case(n_levels, "\"full\"", "\"chunk\""));
    for case in cases.chain(flat_cases().into_iter().take(1)) {
        for (p, moved) in influence(&case).iter().enumerate() {
            assert!(!moved[p + 1..].contains(&false), "{}: token {p} is lost on later logits", case.name);
        }
    }
}

#[test]
fn a_ragged_sequence_equals_the_aligned_one_where_they_overlap() {
    for case in photon_cases().into_iter().chain(flat_cases()) {
        let model = shaken(&case.config, &Device::flex());
        let aligned = random_rows(1, 2 * case.config.meta_chunk_tokens().max(4), 5);
        let whole = forward(&model, &aligned);
        for n_tokens in 1..aligned[0].len() {
            let part = forward(&model, &[aligned[0][..n_tokens].to_vec()]);
            for i in 0..n_tokens {
                let difference = crate::support::max_difference(&part[0][i], &whole[0][i]);
                // Matrix products of other sizes sum in another order.
                assert!(difference < 1e-5, "{}: position {i} of {n_tokens}: {difference}", case.name);
            }
        }
    }
}

/// The toy example of the model's documentation: L = 2, C = (2, 2), tokens t0...t7.
#[test]
fn the_toy_example_holds() {
    let case = photon_case(2, "\"full\"", "\"chunk\"");
    let moved = influence(&case);
    for i in 0..moved.len() {
        let seen: Vec<usize> = (0..moved.len()).filter(|&p| moved[p][i]).collect();
        assert_eq!(seen, (0..i).collect::<Vec<_>>(), "logits of token {i}");
    }
}
