//! What the training forward makes of given tokens: the nats of each, and whether it is the likeliest.
//!
//! Rows of any length go through together, padded on the right, where by causality no token notices. Only hidden states
//! of the tokens asked for meet the head, and their logits never exist all at once.

use std::iter;

use burn::tensor::{Tensor, TensorData};

use crate::cache::row_store::indices;
use crate::loss::token_nats_and_likeliest;
use crate::model::Model;

/// Places of a batch, padding included, at most (unless one row alone has more).
const PLACES_AT_ONCE: usize = 4096;

/// Fills places past the end of a row.
const PAD_ID: u32 = 0;

/// A row that starts without context, and which of its tokens are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoreRow {
    /// At least one.
    pub token_ids: Vec<u32>,
    /// Tokens from this one on are scored; those before are context.
    pub first: usize,
}

/// What the model makes of a token, given those before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenScore {
    /// `-ln p` of the token.
    pub nats: f32,
    /// Whether greedy decoding would choose it.
    pub is_likeliest: bool,
}

/// The rows in runs of neighbours that fit through a model together. Rows of like length leave little padding.
pub fn batches(mut rows: &[ScoreRow]) -> Vec<&[ScoreRow]> {
    let next = || {
        let mut longest = 0;
        let fits = |(index, row): (usize, &ScoreRow)| {
            longest = row.token_ids.len().max(longest);
            index == 0 || longest * (index + 1) <= PLACES_AT_ONCE
        };
        let n = rows.iter().enumerate().map(fits).take_while(|&fits| fits).count();
        let (batch, rest) = rows.split_at(n);
        rows = rest;
        (!batch.is_empty()).then_some(batch)
    };
    iter::from_fn(next).collect()
}

/// The scores of each row, from its `first` token on.
///
/// # Panics
///
/// If a row is empty.
pub fn score(model: &Model, rows: &[ScoreRow]) -> Vec<Vec<TokenScore>> {
    let longest = rows.iter().map(|row| row.token_ids.len()).max().unwrap_or(0);
    let asked_for = rows.iter().enumerate();
    let asked_for = asked_for.flat_map(|(row, it)| (it.first..it.token_ids.len()).map(move |token| (row, token)));
    let asked_for: Vec<(usize, usize)> = asked_for.collect();
    if asked_for.is_empty() {
        return vec![Vec::new(); rows.len()];
    }
    let device = model.device();
    let padded = rows.iter().flat_map(|row| row.token_ids.iter().copied().chain(iter::repeat(PAD_ID)).take(longest));
    let token_ids: Vec<i64> = padded.map(i64::from).collect();
    let token_ids = Tensor::from_data(TensorData::new(token_ids, [rows.len(), longest]), &device); // [B, T]
    let hidden = model.hidden(token_ids).tokens; // [B, T, D]
    let d_model = hidden.dims()[2];
    let places: Vec<usize> = asked_for.iter().map(|&(row, token)| row * longest + token).collect();
    let hidden = hidden.reshape([rows.len() * longest, d_model]).select(0, indices(&places, &device)); // [N, D]
    let targets: Vec<u32> = asked_for.iter().map(|&(row, token)| rows[row].token_ids[token]).collect();
    let target_ids: Vec<i64> = targets.iter().copied().map(i64::from).collect();
    let target_ids = Tensor::from_data(TensorData::new(target_ids, [targets.len()]), &device);
    let (nats, likeliest) = token_nats_and_likeliest(hidden, &model.head().weights(), target_ids);
    let nats: Vec<f32> = nats.try_into_vec_as().expect("nats are f32");
    let likeliest: Vec<i64> = likeliest.into_data().iter().collect();
    let scores = nats.into_iter().zip(likeliest).zip(targets);
    let mut scores =
        scores.map(|((nats, likeliest), target)| TokenScore { nats, is_likeliest: likeliest == i64::from(target) });
    rows.iter().map(|row| scores.by_ref().take(row.token_ids.len() - row.first).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_the_order_and_count_padding() {
        let row = |len: usize| ScoreRow { token_ids: vec![0; len], first: 0 };
        let lens = |lens: &[usize]| {
            let rows: Vec<ScoreRow> = lens.iter().map(|&len| row(len)).collect();
            let lens = |batch: &&[ScoreRow]| batch.iter().map(|row| row.token_ids.len()).collect::<Vec<_>>();
            batches(&rows).iter().map(lens).collect::<Vec<_>>()
        };
        assert_eq!(lens(&[2048, 2048, 2048]), [vec![2048, 2048], vec![2048]]);
        assert_eq!(lens(&[1, 2049, 1]), [vec![1], vec![2049], vec![1]]);
        assert_eq!(lens(&[5000, 1, 9000]), [vec![5000], vec![1], vec![9000]]);
        assert!(lens(&[]).is_empty());
    }
}
