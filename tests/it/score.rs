//! What is scored is what the training forward says.

use burn::tensor::Device;
use photon_core::model::Model;
use photon_core::score::{ScoreRow, score};

use crate::support::{flat_case, flat_cases, forward, photon_cases, random_rows, shaken};

/// `-ln p` of the token and whether it is the likeliest, in f64.
fn expected(logits: &[f32], token_id: u32) -> (f64, bool) {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let nats = sum.ln() - f64::from(logits[token_id as usize] - largest);
    (nats, logits.iter().position(|&logit| logit == largest) == Some(token_id as usize))
}

#[test]
fn ragged_rows_score_as_each_in_a_forward_of_its_own() {
    let mut n_likeliest = 0;
    for case in photon_cases().into_iter().chain(flat_cases()) {
        let model = shaken(&case.config, &Device::flex());
        let tokens = random_rows(1, 40, 5).remove(0);
        let rows = [(1, 0), (40, 17), (7, 7), (23, 0), (30, 29)]
            .map(|(len, first)| ScoreRow { token_ids: tokens[40 - len..].to_vec(), first });
        let scores = score(&model, &rows);
        assert_eq!(scores.len(), rows.len());
        for (row, scores) in rows.iter().zip(scores) {
            let logits = forward(&model, std::slice::from_ref(&row.token_ids)).remove(0);
            assert_eq!(scores.len(), row.token_ids.len() - row.first, "{}", case.name);
            for (place, score) in (row.first..).zip(scores) {
                let (nats, is_likeliest) = expected(&logits[place], row.token_ids[place]);
                assert!((f64::from(score.nats) - nats).abs() < 1e-4, "{}: {score:?}, {nats}", case.name);
                assert_eq!(score.is_likeliest, is_likeliest, "{}, token {place}", case.name);
                n_likeliest += usize::from(is_likeliest);
            }
        }
    }
    assert!(n_likeliest > 50, "{n_likeliest} likeliest tokens test little");
}

#[test]
fn of_equally_likely_tokens_the_lowest_is_the_likeliest() {
    let model = shaken(&flat_case("\"full\"").config, &Device::flex());
    let Model::Flat(model) = model else { unreachable!("a flat case") };
    // All logits are zero.
    let model = Model::Flat(burn::module::Module::map(model, &mut Zero));
    let scores = score(&model, &[ScoreRow { token_ids: vec![0, 3, 0], first: 0 }]).remove(0);
    assert_eq!(scores.iter().map(|score| score.is_likeliest).collect::<Vec<_>>(), [true, false, true]);
    assert!(scores.iter().all(|score| (score.nats - 13_f32.ln()).abs() < 1e-6), "{scores:?}");
}

struct Zero;

impl burn::module::ModuleMapper for Zero {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<burn::tensor::Tensor<D>>,
    ) -> burn::module::Param<burn::tensor::Tensor<D>> {
        param.map(|tensor| tensor.zeros_like())
    }
}
