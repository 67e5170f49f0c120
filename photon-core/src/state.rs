//! What generation carries from token to token: one field per stage, mirroring the models.

use serde::Serialize;

use crate::cache::kv_cache::KvCache;
use crate::decoder::DecoderState;
use crate::encoder::EncoderState;
use crate::infer_config::Stage;
use crate::nn::stack::StackState;

/// The decode state of any model.
#[derive(Clone, Debug)]
pub enum State {
    /// Of a [`crate::photon::Photon`].
    Photon(PhotonState),
    /// Of a [`crate::flat::Flat`].
    Flat(FlatState),
}

/// The decode state of the hierarchical model, for a batch of rows at positions of their own.
#[derive(Clone, Debug)]
pub struct PhotonState {
    /// Tokens taken up so far, by row.
    pub(crate) n_tokens: Vec<usize>,
    pub(crate) encoders: Vec<EncoderState>,
    pub(crate) decoders: Vec<DecoderState>,
}

/// The decode state of the flat model, for a batch of rows at positions of their own.
#[derive(Clone, Debug)]
pub struct FlatState {
    /// Tokens taken up so far, by row.
    pub(crate) n_tokens: Vec<usize>,
    pub(crate) stack: StackState,
}

/// What the caches of one stage hold, and what they have done.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheUse {
    /// `encoder 1`, `decoder 2`, ... or `stack`.
    pub stage: String,
    /// Entries stored for one row in each of the stage's layers (the longest row's).
    pub entries: usize,
    /// Bytes that the entries of all rows take.
    pub used_bytes: usize,
    /// Bytes that the cache's tensors hold, room to grow included.
    pub allocated_bytes: usize,
    /// The part of both that continuations of one prompt share.
    pub shared_bytes: usize,
    /// Bytes of the units of unfinished chunks, which stand beside the caches.
    pub unfinished_bytes: usize,
    /// Entries written so far, over rows and layers.
    pub written_entries: usize,
    /// Entries that the policy evicted so far, over rows and layers.
    pub evicted_entries: usize,
    /// Time spent storing entries, quantising included, as the host sees it.
    pub storing_secs: f64,
}

impl State {
    /// Rows of the batch.
    pub fn n_rows(&self) -> usize {
        self.n_tokens().len()
    }

    /// Tokens taken up so far, by row.
    pub fn n_tokens(&self) -> &[usize] {
        match self {
            Self::Photon(state) => &state.n_tokens,
            Self::Flat(state) => &state.n_tokens,
        }
    }

    /// Keeps the given rows, in the given order; a row may be taken several times.
    pub fn select_rows(&mut self, rows: &[usize]) {
        match self {
            Self::Photon(state) => {
                state.n_tokens = rows.iter().map(|&row| state.n_tokens[row]).collect();
                state.encoders.iter_mut().for_each(|encoder| encoder.select_rows(rows));
                state.decoders.iter_mut().for_each(|decoder| decoder.select_rows(rows));
            }
            Self::Flat(state) => {
                state.n_tokens = rows.iter().map(|&row| state.n_tokens[row]).collect();
                state.stack.select_rows(rows);
            }
        }
    }

    /// What the caches hold, stage by stage, encoders first.
    pub fn cache_use(&self) -> Vec<CacheUse> {
        match self {
            Self::Flat(state) => vec![stage_use(Stage::Stack, &state.stack.caches, 0)],
            Self::Photon(state) => {
                let encoders = state.encoders.iter().enumerate().map(|(index, encoder)| {
                    stage_use(Stage::Encoder(index + 1), &encoder.stack.caches, encoder.unfinished.bytes())
                });
                let decoders = state.decoders.iter().enumerate();
                encoders
                    .chain(
                        decoders.map(|(index, decoder)| stage_use(Stage::Decoder(index + 1), &decoder.stack.caches, 0)),
                    )
                    .collect()
            }
        }
    }
}

fn stage_use(stage: Stage, caches: &[KvCache], unfinished_bytes: usize) -> CacheUse {
    let sum = |of: fn(&KvCache) -> usize| caches.iter().map(of).sum();
    CacheUse {
        stage: stage.to_string(),
        entries: caches.iter().map(KvCache::longest_row).max().unwrap_or(0),
        used_bytes: sum(KvCache::used_bytes),
        allocated_bytes: sum(KvCache::bytes),
        shared_bytes: sum(KvCache::shared_bytes),
        unfinished_bytes,
        written_entries: sum(|cache| cache.counters().written),
        evicted_entries: sum(|cache| cache.counters().evicted),
        storing_secs: caches.iter().map(|cache| cache.counters().storing.as_secs_f64()).sum(),
    }
}
