//! Cached generation equals the training forward.

use burn::tensor::Device;
use photon_core::model::Model;
use photon_core::nn::compute::Compute;
use photon_core::state::State;

use crate::support::{Case, flat_cases, forward, max_difference, photon_cases, random_rows, rows_of, shaken};

/// f32, sums in another order, a few layers deep.
const TOLERANCE: f32 = 1e-4;

/// Sequences are at least so long: in shorter ones the sparse models of few levels have nothing to choose from.
const MIN_TOKENS: usize = 20;

fn all_cases() -> impl Iterator<Item = Case> {
    photon_cases().into_iter().chain(flat_cases())
}

/// Takes up `tokens` in pieces of the given size and returns the logits of the next token.
fn prefill(model: &Model, state: &mut State, row: usize, tokens: &[u32], piece_len: usize) -> Option<Vec<f32>> {
    tokens.chunks(piece_len).map(|piece| rows_of(model.extend(state, &[row], &[piece.to_vec()])).remove(0)).last()
}

#[test]
fn every_prompt_length_gives_the_forward_logits_whole_or_in_pieces() {
    for case in all_cases() {
        let model = shaken(&case.config, &Device::flex());
        let n_tokens = (2 * case.config.meta_chunk_tokens() + 1).max(MIN_TOKENS);
        let tokens = random_rows(1, n_tokens + 1, 11).remove(0);
        let expected = forward(&model, std::slice::from_ref(&tokens)).remove(0);
        let (_, first) = model.begin(1);
        let difference = max_difference(&rows_of(first)[0], &expected[0]);
        assert!(difference <= TOLERANCE, "{}: empty prompt: {difference}", case.name);
        for prompt_len in 1..=n_tokens {
            for piece_len in [prompt_len, 1, 3] {
                let (mut state, _) = model.begin(1);
                let logits = prefill(&model, &mut state, 0, &tokens[..prompt_len], piece_len).unwrap();
                let difference = max_difference(&logits, &expected[prompt_len]);
                let pieces = format!("prompt of {prompt_len} in pieces of {piece_len}");
                assert!(difference <= TOLERANCE, "{}: {pieces}: {difference}", case.name);
            }
        }
    }
}

#[test]
fn decoding_after_any_prompt_gives_the_forward_logits() {
    for case in all_cases() {
        let model = shaken(&case.config, &Device::flex());
        let meta_chunk = case.config.meta_chunk_tokens();
        let n_tokens = (3 * meta_chunk + 4).max(MIN_TOKENS);
        let tokens = random_rows(1, n_tokens + 1, 12).remove(0);
        let expected = forward(&model, std::slice::from_ref(&tokens)).remove(0);
        for prompt_len in [1, meta_chunk.saturating_sub(1).max(1), meta_chunk, meta_chunk + 1] {
            let (mut state, _) = model.begin(1);
            prefill(&model, &mut state, 0, &tokens[..prompt_len], prompt_len);
            for position in prompt_len..n_tokens {
                let logits = prefill(&model, &mut state, 0, &tokens[position..=position], 1).unwrap();
                let difference = max_difference(&logits, &expected[position + 1]);
                assert!(difference <= TOLERANCE, "{}: position {position}: {difference}", case.name);
            }
        }
    }
}

#[test]
fn rows_at_different_places_decode_together() {
    for case in all_cases() {
        let model = shaken(&case.config, &Device::flex());
        let prompt_lens = [1, 4, case.config.meta_chunk_tokens(), 7];
        let n_steps = (case.config.meta_chunk_tokens() + 2).max(MIN_TOKENS - 7);
        let n_tokens = prompt_lens.iter().max().unwrap() + n_steps;
        let rows = random_rows(prompt_lens.len(), n_tokens + 1, 13);
        let expected = forward(&model, &rows);
        let (mut state, _) = model.begin(rows.len());
        let all: Vec<usize> = (0..rows.len()).collect();
        let prompts: Vec<Vec<u32>> = rows.iter().zip(prompt_lens).map(|(row, n)| row[..n].to_vec()).collect();
        let mut logits = rows_of(model.extend(&mut state, &all, &prompts));
        for step in 0..n_steps {
            for (row, prompt_len) in prompt_lens.into_iter().enumerate() {
                let difference = max_difference(&logits[row], &expected[row][prompt_len + step]);
                assert!(difference <= TOLERANCE, "{}: row {row}, step {step}: {difference}", case.name);
            }
            let next: Vec<Vec<u32>> =
                rows.iter().zip(prompt_lens).map(|(row, prompt_len)| vec![row[prompt_len + step]]).collect();
            logits = rows_of(model.extend(&mut state, &all, &next));
        }
    }
}

#[test]
fn rows_leave_a_batch_without_a_trace() {
    for case in all_cases() {
        let model = shaken(&case.config, &Device::flex());
        let rows = random_rows(3, 20, 14);
        let expected = forward(&model, &rows);
        let (mut state, _) = model.begin(3);
        let prompts: Vec<Vec<u32>> = rows.iter().map(|row| row[..9].to_vec()).collect();
        model.extend(&mut state, &[0, 1, 2], &prompts);
        state.select_rows(&[2, 0]);
        for position in 9..19 {
            let next = vec![vec![rows[2][position]], vec![rows[0][position]]];
            let logits = rows_of(model.extend(&mut state, &[0, 1], &next));
            for (logits, row) in logits.iter().zip([2, 0]) {
                let difference = max_difference(logits, &expected[row][position + 1]);
                assert!(difference <= TOLERANCE, "{}: row {row}, position {position}: {difference}", case.name);
            }
        }
    }
}

/// Matrices in 16 bits: both paths round alike, but for sums in another order, which fewer bits show more.
#[test]
fn matrices_in_16_bits_serve_generation_as_they_serve_the_forward() {
    for case in [photon_cases().swap_remove(20), flat_cases().remove(0)] {
        let exact = shaken(&case.config, &Device::flex());
        let tokens = random_rows(1, 31, 16).remove(0);
        let of = |model: &Model| forward(model, std::slice::from_ref(&tokens)).remove(0);
        let expected = of(&exact).concat();
        let mut distances = Vec::new();
        for (stored, tolerance) in [(Compute::F16, 3e-2), (Compute::Bf16, 1e-1)] {
            let model = exact.clone().with_weights(stored);
            let logits = of(&model);
            let (mut state, _) = model.begin(1);
            prefill(&model, &mut state, 0, &tokens[..9], 9);
            for position in 9..30 {
                let found = prefill(&model, &mut state, 0, &tokens[position..=position], 1).unwrap();
                let difference = max_difference(&found, &logits[position + 1]);
                assert!(difference <= tolerance, "{}, {stored}, position {position}: {difference}", case.name);
            }
            distances.push(max_difference(&logits.concat(), &expected));
        }
        assert!(distances.is_sorted() && distances[0] > 0.0 && distances[1] < 0.5, "{}: {distances:?}", case.name);
    }
}

/// The small models as shipped: a prompt in one piece, cut at chunk borders, and token by token.
#[test]
fn shipped_small_models_generate_what_they_were_trained_to() {
    for toml in [
        include_str!("../../configs/model/photon-3l-tiny.toml"),
        include_str!("../../configs/model/photon-2l-small.toml"),
        include_str!("../../configs/model/photon-3l-small.toml"),
        include_str!("../../configs/model/photon-4l-small.toml"),
        include_str!("../../configs/model/block-small.toml"),
        include_str!("../../configs/model/flat-small.toml"),
    ] {
        let model = Model::new(&crate::support::parse(toml), 1, &Device::flex());
        let tokens = random_rows(1, 171, 15).remove(0);
        let expected = forward(&model, std::slice::from_ref(&tokens)).remove(0);
        for (prompt_len, piece_len) in [(170, 170), (170, 64), (128, 48), (64, 64), (63, 63), (33, 1)] {
            let (mut state, _) = model.begin(1);
            let logits = prefill(&model, &mut state, 0, &tokens[..prompt_len], piece_len).unwrap();
            let difference = max_difference(&logits, &expected[prompt_len]);
            assert!(difference <= TOLERANCE, "{prompt_len} in pieces of {piece_len}: {difference}\n{toml}");
        }
    }
}
