//! How well a model predicts a text: nats, perplexity, bits per byte, and where in the chunk the nats are lost.

use burn::tensor::{Int, Tensor};
use photon_core::loss::token_nats;
use photon_core::model::Model;
use serde::Serialize;

use crate::data::{Batch, TokenStore, eval_windows};
use crate::replicas::{Replicas, batch_ids};

/// Rows that go through the model at once.
const EVAL_ROWS: usize = 8;

/// The outcome of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Tokens predicted, end-of-document tokens included.
    pub n_tokens: usize,
    /// Mean cross-entropy.
    pub nats_per_token: f64,
    /// `exp` of it; comparable between models of one tokenizer only.
    pub perplexity: f64,
    /// Nats over the bytes of text that the tokens stand for, in bits; comparable between all models.
    pub bits_per_byte: f64,
    /// Mean cross-entropy of each slot of a level-1 chunk, first slot first; one slot for a flat model.
    pub slot_nats: Vec<f64>,
}

/// Evaluates on at most `max_tokens` tokens, in rows of `seq_len` that start without context.
///
/// The bytes of the tokens looked at are taken in the proportion of the whole store, which is exact for bytes and
/// for a store looked at whole.
pub fn evaluate(
    model: &Model,
    store: &TokenStore,
    seq_len: usize,
    max_tokens: usize,
    replicas: &Replicas,
) -> Evaluation {
    let n_slots = model.hierarchy().map_or(1, |config| config.levels[0].chunk_len);
    let windows = eval_windows(store, seq_len, max_tokens);
    let batches: Vec<Batch> = windows.chunks(EVAL_ROWS).map(|rows| Batch::read(store, rows, seq_len)).collect();
    let sums = replicas.map(model, &batches, |model, batch| slot_sums(model, batch, n_slots));

    let mut slots = vec![(0.0, 0); n_slots];
    for sum in sums {
        slots.iter_mut().zip(sum).for_each(|(slot, (nats, n))| *slot = (slot.0 + nats, slot.1 + n));
    }
    let nats: f64 = slots.iter().map(|(nats, _)| nats).sum();
    let n_tokens: usize = slots.iter().map(|(_, n)| n).sum();
    let nats_per_token = nats / n_tokens as f64;
    let bytes_per_token = store.text_bytes() as f64 / store.len() as f64;
    Evaluation {
        n_tokens,
        nats_per_token,
        perplexity: nats_per_token.exp(),
        bits_per_byte: bits_per_byte(nats_per_token, bytes_per_token),
        slot_nats: slots.into_iter().map(|(nats, n)| nats / n as f64).collect(),
    }
}

/// Nats a token as bits a byte.
pub fn bits_per_byte(nats_per_token: f64, bytes_per_token: f64) -> f64 {
    nats_per_token / std::f64::consts::LN_2 / bytes_per_token
}

/// Nats and tokens of each slot.
fn slot_sums(model: &Model, batch: &Batch, n_slots: usize) -> Vec<(f64, usize)> {
    let token_ids: Tensor<2, Int> = batch_ids(batch, model);
    let [rows, seq_len] = token_ids.dims();
    let hidden = model.hidden(token_ids.clone()).tokens;
    let d_model = hidden.dims()[2];
    let n = rows * seq_len;
    let nats = token_nats(hidden.reshape([n, d_model]), model.head().weight.val(), token_ids.reshape([n]));
    let nats: Vec<f32> = nats.try_into_vec_as().expect("nats are f32");
    let mut slots = vec![(0.0, 0); n_slots];
    for (row, &len) in batch.lens.iter().enumerate() {
        for (position, &nats) in nats[row * seq_len..row * seq_len + len].iter().enumerate() {
            let slot = &mut slots[position % n_slots];
            *slot = (slot.0 + f64::from(nats), slot.1 + 1);
        }
    }
    slots
}
