//! What generation carries from token to token: one field per stage, mirroring the models.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::advance::{AdvanceError, AdvanceRule};
use crate::cache::kv_cache::KvCache;
use crate::cache::row_store::RowStore;
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
    /// How the units of further tokens are made.
    pub(crate) rule: AdvanceRule,
    pub(crate) encoders: Vec<EncoderState>,
    /// What stands in for the unit under way of each level from 1 to L-1: what was emitted for it, `[B, 1, 1, D]`.
    pub(crate) emitted: Vec<RowStore>,
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

    /// How the units of further tokens are made.
    pub fn advance_rule(&self) -> AdvanceRule {
        match self {
            Self::Photon(state) => state.rule,
            Self::Flat(_) => AdvanceRule::Hierarchical,
        }
    }

    /// Makes the units of further tokens by `rule`, in all rows, wherever they stand.
    ///
    /// A state begins as `hierarchical`; a light rule gives up the caches of all encoders below the top. Asking for
    /// the rule that holds changes nothing.
    ///
    /// # Errors
    ///
    /// A rule that needs what the present one has not kept, a light rule for a flat model. The state is as before.
    pub fn switch_rule(&mut self, rule: AdvanceRule) -> Result<(), AdvanceError> {
        match self {
            Self::Photon(state) => state.switch_rule(rule),
            Self::Flat(_) if rule == AdvanceRule::Hierarchical => Ok(()),
            Self::Flat(_) => Err(AdvanceError::Flat { wanted: rule }),
        }
    }

    /// Keeps the given rows, in the given order; a row may be taken several times.
    pub fn select_rows(&mut self, rows: &[usize]) {
        match self {
            Self::Photon(state) => {
                state.n_tokens = rows.iter().map(|&row| state.n_tokens[row]).collect();
                state.encoders.iter_mut().for_each(|encoder| encoder.select_rows(rows));
                state.emitted.iter_mut().for_each(|emitted| emitted.select_rows(rows));
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

impl PhotonState {
    fn switch_rule(&mut self, rule: AdvanceRule) -> Result<(), AdvanceError> {
        if rule < self.rule {
            return Err(AdvanceError::NoWayBack { current: self.rule, wanted: rule });
        }
        self.rule = rule;
        if rule != AdvanceRule::Hierarchical {
            let below_top = self.encoders.len() - 1;
            self.encoders[..below_top].iter_mut().for_each(EncoderState::release_caches);
        }
        Ok(())
    }

    /// What was emitted for the unit under way of `level`, from 1 to L-1: `[b, 1, D]`.
    pub(crate) fn emitted_for(&self, level: usize, rows: &[usize]) -> Tensor<3> {
        let emitted: Tensor<4> = self.emitted[level - 1].read(rows, 0, 1);
        emitted.squeeze_dim(1)
    }

    /// Keeps what is emitted for the next unit of `level`, from 1 to L-1: `[b, D]`.
    pub(crate) fn keep_emitted(&mut self, level: usize, rows: &[usize], emitted: Tensor<2>) {
        let [batch, d_model] = emitted.dims();
        self.emitted[level - 1].write(rows, &vec![0; batch], emitted.reshape([batch, 1, 1, d_model]));
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
