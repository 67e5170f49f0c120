//! What generation carries from token to token: one field per stage, mirroring the models.

use serde::Serialize;

use crate::decoder::DecoderState;
use crate::encoder::EncoderState;
use crate::nn::kv_cache::KvCache;

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
    pub(crate) caches: Vec<KvCache>,
}

/// What the caches of one stage hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheUse {
    /// `encoder 1`, `decoder 2`, ... or `stack`.
    pub stage: String,
    /// Entries stored for one row in each of the stage's layers (the longest row's).
    pub entries: usize,
    /// Bytes that the entries of all rows take.
    pub used_bytes: usize,
    /// Bytes that the cache's tensors hold, room to grow included.
    pub allocated_bytes: usize,
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
                state.caches.iter_mut().for_each(|cache| cache.select_rows(rows));
            }
        }
    }

    /// What the caches hold, stage by stage, encoders first.
    pub fn cache_use(&self) -> Vec<CacheUse> {
        match self {
            Self::Flat(state) => vec![stage_use("stack".into(), &state.caches)],
            Self::Photon(state) => {
                let encoders = state.encoders.iter().enumerate();
                let decoders = state.decoders.iter().enumerate();
                encoders
                    .map(|(index, encoder)| stage_use(format!("encoder {}", index + 1), &encoder.caches))
                    .chain(
                        decoders.map(|(index, decoder)| stage_use(format!("decoder {}", index + 1), &decoder.caches)),
                    )
                    .collect()
            }
        }
    }
}

fn stage_use(stage: String, caches: &[KvCache]) -> CacheUse {
    CacheUse {
        stage,
        entries: caches.iter().map(KvCache::longest_row).max().unwrap_or(0),
        used_bytes: caches.iter().map(KvCache::used_bytes).sum(),
        allocated_bytes: caches.iter().map(KvCache::bytes).sum(),
    }
}
