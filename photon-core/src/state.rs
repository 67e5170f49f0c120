//! What generation carries from token to token: one field per stage, mirroring the models.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::advance::{AdvanceError, AdvanceRule};
use crate::cache::error::CacheError;
use crate::cache::kv_cache::KvCache;
use crate::cache::offload::OffloadUse;
use crate::cache::row_store::RowStore;
use crate::config::ModelConfig;
use crate::decoder::DecoderState;
use crate::encoder::EncoderState;
use crate::infer_config::{InferPlan, Stage};
use crate::nn::activations::Activations;
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

/// Why a state cannot go back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TruncateError {
    /// It has not come so far.
    #[error("row {row} holds {current} tokens, so it cannot be cut to {wanted}")]
    Ahead {
        /// The row.
        row: usize,
        /// Tokens that it holds.
        current: usize,
        /// Tokens asked for.
        wanted: usize,
    },
    /// The units of a chunk are kept only until it is complete.
    #[error("{wanted} tokens end inside a meta-chunk of {meta_chunk}: cut at a multiple, then take the rest up again")]
    InsideChunk {
        /// Tokens asked for.
        wanted: usize,
        /// Tokens of a meta-chunk.
        meta_chunk: usize,
    },
    /// A light advance rule keeps too little.
    #[error("the state goes on by {rule}, which keeps too little to go back")]
    LightRule {
        /// The rule of the state.
        rule: AdvanceRule,
    },
    /// A cache no longer holds what is needed.
    #[error("{stage}: {source}")]
    Cache {
        /// The stage.
        stage: String,
        /// The cache's reason.
        source: CacheError,
    },
}

/// What the caches of one stage hold, and what they have done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheUse {
    /// `encoder 1`, `decoder 2`, ... or `stack`.
    pub stage: String,
    /// Entries stored for one row in each of the stage's layers (the longest row's).
    pub entries: usize,
    /// Bytes that the entries of all rows take on the device.
    pub used_bytes: usize,
    /// Bytes that the cache's tensors hold on the device, room to grow included.
    pub allocated_bytes: usize,
    /// The part of both that continuations of one prompt share.
    pub shared_bytes: usize,
    /// Bytes of the units of unfinished chunks and of what was emitted for them, which stand beside the caches.
    pub unfinished_bytes: usize,
    /// Bytes of host memory for the positions of entries, and for what the policy has noted of them.
    pub notes_bytes: usize,
    /// Entries written so far, over rows and layers.
    pub written_entries: usize,
    /// Entries that the policy evicted so far, over rows and layers.
    pub evicted_entries: usize,
    /// Time spent storing entries, quantising included, as the host sees it.
    pub storing_secs: f64,
    /// What is in host memory, and how often it was needed, where there is a tier for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<OffloadUse>,
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

    /// Rounding of the inputs of matrix products.
    pub fn activations(&self) -> Activations {
        match self {
            Self::Photon(state) => state.decoders[0].stack.activations,
            Self::Flat(state) => state.stack.activations,
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

    /// Ends the prompt of all rows: policies that wait for it have their way, and further tokens go by the plan's rule.
    ///
    /// # Errors
    ///
    /// As [`State::switch_rule`].
    pub fn end_prompt(&mut self, plan: &InferPlan) -> Result<(), AdvanceError> {
        self.switch_rule(plan.advance)?;
        self.caches_mut().into_iter().flat_map(|(_, caches)| caches).for_each(KvCache::end_prompt);
        Ok(())
    }

    /// A continuation of its own. Of a state with one row, caches that never drop anything share what they hold.
    pub fn fork(&mut self) -> Self {
        self.caches_mut().into_iter().flat_map(|(_, caches)| caches).for_each(KvCache::share_for_fork);
        self.clone()
    }

    /// Goes back to the first `n_tokens` tokens of every row. The next call has to bring at least one token.
    ///
    /// A hierarchical state can go back to whole meta-chunks only, because it keeps no units of completed chunks.
    ///
    /// # Errors
    ///
    /// A place in the middle of a meta-chunk or beyond the state's, a light advance rule, or a cache that no longer
    /// holds what is needed. The state is then as before.
    pub fn truncate(&mut self, model: &ModelConfig, n_tokens: &[usize]) -> Result<(), TruncateError> {
        let rows = self.n_tokens().iter().zip(n_tokens).enumerate();
        for (row, (&current, &wanted)) in rows {
            if wanted > current {
                return Err(TruncateError::Ahead { row, current, wanted });
            }
            let meta_chunk = model.meta_chunk_tokens();
            if !wanted.is_multiple_of(meta_chunk) && wanted != current {
                return Err(TruncateError::InsideChunk { wanted, meta_chunk });
            }
        }
        if self.advance_rule() != AdvanceRule::Hierarchical {
            return Err(TruncateError::LightRule { rule: self.advance_rule() });
        }
        let mut cut = self.clone();
        for (stage, caches) in cut.caches_mut() {
            let n_positions: Vec<usize> = n_tokens.iter().map(|&n| positions_after(model, stage, n)).collect();
            for cache in caches {
                cache
                    .truncate(&n_positions)
                    .map_err(|source| TruncateError::Cache { stage: stage.to_string(), source })?;
            }
        }
        cut.set_n_tokens(n_tokens.to_vec());
        *self = cut;
        Ok(())
    }

    /// Bytes that the caches would hold on the device after `n_new` more tokens of every row: an upper bound.
    pub fn bytes_after(&self, model: &ModelConfig, n_new: usize) -> usize {
        let bytes_after = |(stage, caches): (Stage, &[KvCache])| {
            let n_positions = most_new_positions(model, stage, n_new);
            caches.iter().map(|cache| cache.bytes_after(n_positions)).sum::<usize>()
        };
        let units = self.units().into_iter().map(|(_, store)| store.bytes());
        self.caches().into_iter().map(bytes_after).chain(units).sum()
    }

    /// Bytes that caches and unfinished chunks hold on the device.
    pub fn bytes(&self) -> usize {
        let caches = self.caches().into_iter().flat_map(|(_, caches)| caches).map(KvCache::bytes);
        caches.chain(self.units().into_iter().map(|(_, store)| store.bytes())).sum()
    }

    /// The caches of every stage, encoders first.
    pub fn caches(&self) -> Vec<(Stage, &[KvCache])> {
        match self {
            Self::Flat(state) => vec![(Stage::Stack, &state.stack.caches)],
            Self::Photon(PhotonState { encoders, decoders, .. }) => {
                let encoders = encoders.iter().enumerate();
                let encoders = encoders.map(|(index, state)| (Stage::Encoder(index + 1), &*state.stack.caches));
                let decoders = decoders.iter().enumerate();
                encoders
                    .chain(decoders.map(|(index, state)| (Stage::Decoder(index + 1), &*state.stack.caches)))
                    .collect()
            }
        }
    }

    /// The caches of every stage, encoders first.
    pub fn caches_mut(&mut self) -> Vec<(Stage, &mut [KvCache])> {
        match self {
            Self::Flat(state) => vec![(Stage::Stack, &mut state.stack.caches)],
            Self::Photon(PhotonState { encoders, decoders, .. }) => {
                let encoders = encoders.iter_mut().enumerate();
                let encoders = encoders.map(|(index, state)| (Stage::Encoder(index + 1), &mut *state.stack.caches));
                let decoders = decoders.iter_mut().enumerate();
                encoders
                    .chain(decoders.map(|(index, state)| (Stage::Decoder(index + 1), &mut *state.stack.caches)))
                    .collect()
            }
        }
    }

    /// What stands beside the caches: units of unfinished chunks, and what was emitted for units under way.
    pub(crate) fn units(&self) -> Vec<(String, &RowStore)> {
        let Self::Photon(PhotonState { encoders, emitted, .. }) = self else { return Vec::new() };
        let unfinished = encoders.iter().enumerate().map(|(index, state)| (unfinished_name(index), &state.unfinished));
        unfinished.chain(emitted.iter().enumerate().map(|(index, store)| (emitted_name(index), store))).collect()
    }

    /// What stands beside the caches.
    pub(crate) fn units_mut(&mut self) -> Vec<(String, &mut RowStore)> {
        let Self::Photon(PhotonState { encoders, emitted, .. }) = self else { return Vec::new() };
        let encoders = encoders.iter_mut().enumerate();
        let unfinished = encoders.map(|(index, state)| (unfinished_name(index), &mut state.unfinished));
        unfinished.chain(emitted.iter_mut().enumerate().map(|(index, store)| (emitted_name(index), store))).collect()
    }

    pub(crate) fn set_n_tokens(&mut self, n_tokens: Vec<usize>) {
        match self {
            Self::Photon(state) => state.n_tokens = n_tokens,
            Self::Flat(state) => state.n_tokens = n_tokens,
        }
    }

    /// What the caches hold, stage by stage, encoders first.
    pub fn cache_use(&self) -> Vec<CacheUse> {
        let unfinished_bytes = |stage: Stage| match (self, stage) {
            (Self::Photon(state), Stage::Encoder(level)) => {
                let emitted = state.emitted.get(level - 1).map_or(0, RowStore::bytes);
                state.encoders[level - 1].unfinished.bytes() + emitted
            }
            _ => 0,
        };
        let of_stage = |(stage, caches)| stage_use(stage, caches, unfinished_bytes(stage));
        self.caches().into_iter().map(of_stage).collect()
    }
}

fn unfinished_name(index: usize) -> String {
    format!("unfinished {}", index + 1)
}

fn emitted_name(index: usize) -> String {
    format!("emitted {}", index + 1)
}

/// Positions that the stack of a stage has run when `n_tokens` tokens, whole meta-chunks, are taken up.
fn positions_after(model: &ModelConfig, stage: Stage, n_tokens: usize) -> usize {
    match (model, stage) {
        (ModelConfig::Photon(config), Stage::Encoder(level)) => n_tokens / config.tokens_per_unit(level),
        (ModelConfig::Photon(config), Stage::Decoder(level)) => {
            // The prefix of the next group has run as well.
            let n_groups = n_tokens / config.tokens_per_unit(level);
            n_groups * config.group_len(level) + config.levels[level - 1].converter.prefix_len
        }
        // The start embedding is a position.
        _ => n_tokens + 1,
    }
}

/// The most positions that the stack of a stage runs for `n_new` tokens.
fn most_new_positions(model: &ModelConfig, stage: Stage, n_new: usize) -> usize {
    match (model, stage) {
        (ModelConfig::Photon(config), Stage::Encoder(level)) => n_new.div_ceil(config.tokens_per_unit(level)),
        (ModelConfig::Photon(config), Stage::Decoder(level)) => {
            let n_units = n_new.div_ceil(config.tokens_per_unit(level - 1));
            let n_groups = n_new.div_ceil(config.tokens_per_unit(level));
            n_units + n_groups * config.levels[level - 1].converter.prefix_len
        }
        _ => n_new,
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
        notes_bytes: sum(KvCache::notes_bytes),
        written_entries: sum(|cache| cache.counters().written),
        evicted_entries: sum(|cache| cache.counters().evicted),
        storing_secs: caches.iter().map(|cache| cache.counters().storing.as_secs_f64()).sum(),
        offload: caches.iter().filter_map(KvCache::offload_use).reduce(|sum, one| sum + one),
    }
}
