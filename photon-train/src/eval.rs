//! How well a model predicts a text: nats, perplexity, bits per byte, and where in the chunk the nats are lost.

use burn::tensor::{Int, Tensor};
use photon_core::loss::{bits_per_byte, token_nats};
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::data::{Batch, TokenStore, eval_windows};
use crate::ranks::Ranks;
use crate::replicas::{Replicas, batch_ids};

/// Rows that go through the model at once.
const EVAL_ROWS: usize = 8;

/// The outcome of an evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// Evaluates on at most `max_tokens` tokens, in rows of `seq_len` that start without context; so do documents where the
/// store says that they are kept apart.
///
/// Each rank looks at its share of the rows, and has the sums of all. Bytes are those of the tokens looked at. For a
/// tokenizer that is not byte-level and a store not looked at whole, they are what each token decodes to alone, which can
/// miss blanks.
pub fn evaluate(
    model: &Model,
    tokenizer: &Tokenizer,
    store: &TokenStore,
    seq_len: usize,
    max_tokens: usize,
    replicas: &Replicas,
) -> Evaluation {
    let n_slots = model.hierarchy().map_or(1, |config| config.levels[0].chunk_len);
    let ranks = replicas.ranks();
    let windows = eval_windows(store, seq_len, max_tokens);
    let own = &windows[ranks.share(windows.len())];
    let batches: Vec<Batch> = own.chunks(EVAL_ROWS).map(|rows| Batch::read(store, rows, seq_len)).collect();
    let shares = replicas.map(model, &batches, |model, share| {
        share.iter().fold(vec![(0.0, 0); n_slots], |slots, batch| add(slots, slot_sums(model, batch, n_slots)))
    });
    // A row shorter than a chunk never comes to the last slots.
    let own = shares.into_iter().fold(vec![(0.0, 0); n_slots], add);
    let slots = sum_over_ranks(ranks, own).into_iter().filter(|(_, n)| *n > 0);
    let slots: Vec<(f64, usize)> = slots.collect();
    let nats: f64 = slots.iter().map(|(nats, _)| nats).sum();
    let n_tokens: usize = slots.iter().map(|(_, n)| n).sum();
    let nats_per_token = nats / n_tokens as f64;
    let n_bytes = match n_tokens == store.len() {
        true => store.text_bytes() as usize,
        false => {
            let own: usize = batches.iter().flat_map(real_tokens).map(|id| tokenizer.text_len(id)).sum();
            let mut sum = [own as f64];
            ranks.sum(&mut sum);
            sum[0] as usize
        }
    };
    let bytes_per_token = n_bytes as f64 / n_tokens as f64;
    Evaluation {
        n_tokens,
        nats_per_token,
        perplexity: nats_per_token.exp(),
        bits_per_byte: bits_per_byte(nats_per_token, bytes_per_token),
        slot_nats: slots.into_iter().map(|(nats, n)| nats / n as f64).collect(),
    }
}

fn add(a: Vec<(f64, usize)>, b: Vec<(f64, usize)>) -> Vec<(f64, usize)> {
    a.into_iter().zip(b).map(|((nats, n), (more_nats, more))| (nats + more_nats, n + more)).collect()
}

fn sum_over_ranks(ranks: &Ranks, slots: Vec<(f64, usize)>) -> Vec<(f64, usize)> {
    let mut sums: Vec<f64> = slots.into_iter().flat_map(|(nats, n)| [nats, n as f64]).collect();
    ranks.sum(&mut sums);
    sums.chunks_exact(2).map(|slot| (slot[0], slot[1] as usize)).collect()
}

/// The tokens of a batch without its padding.
fn real_tokens(batch: &Batch) -> impl Iterator<Item = u32> {
    batch.token_ids.iter().zip(batch.is_real()).filter_map(|(&id, is_real)| is_real.then_some(id))
}

/// Nats and tokens of each slot.
fn slot_sums(model: &Model, batch: &Batch, n_slots: usize) -> Vec<(f64, usize)> {
    let token_ids: Tensor<2, Int> = batch_ids(batch, model);
    let [rows, seq_len] = token_ids.dims();
    let hidden = model.hidden_apart(token_ids.clone(), &batch.apart).tokens;
    let d_model = hidden.dims()[2];
    let n = rows * seq_len;
    let nats = token_nats(hidden.reshape([n, d_model]), &model.head().weights(), token_ids.reshape([n]));
    let nats: Vec<f32> = nats.try_into_vec_as().expect("nats are f32");
    let mut slots = vec![(0.0, 0); n_slots];
    for (place, (nats, _)) in nats.into_iter().zip(batch.is_real()).enumerate().filter(|(_, (_, is_real))| *is_real) {
        let slot = &mut slots[place % seq_len % n_slots];
        *slot = (slot.0 + f64::from(nats), slot.1 + 1);
    }
    slots
}
