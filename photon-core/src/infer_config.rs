//! How a model generates: the advance rule, and storage, policy and budget of every cache.
//!
//! Nothing here changes what the weights mean. An [`InferConfig`] is written for any model; [`InferConfig::plan`]
//! lays it out for one, stage by stage, and is where everything is checked.

use std::fmt;

use burn::tensor::DType;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::advance::AdvanceRule;
use crate::cache::config::{Budget, CacheConfig, MAX_ROOM, Storage};
use crate::cache::offload::Offload;
use crate::cache::policy::{Evidence, PolicyConfig};
use crate::config::{ConfigError, ModelConfig, StackSpec, error, require_positive};
use crate::device::OpenDevice;
use crate::nn::activations::Activations;
use crate::nn::block_pick::BlockPick;

/// How to generate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InferConfig {
    /// What goes up while tokens are generated.
    pub advance: AdvanceRule,
    /// Rounding of the inputs of matrix products.
    pub activations: Activations,
    /// Bytes that the caches of a session may take. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_budget_bytes: Option<usize>,
    /// Rules for the caches; where several fit a stage, later ones win key by key. Without any, caches are f32 and
    /// keep all that attention can see.
    pub caches: Vec<CacheRule>,
}

/// Settings for the caches of some stages; what is absent stays as it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheRule {
    /// Whose caches.
    pub stages: Stages,
    /// See [`CacheConfig::keys`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<Storage>,
    /// See [`CacheConfig::values`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub values: Option<Storage>,
    /// See [`CacheConfig::group`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<usize>,
    /// See [`CacheConfig::residual`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residual: Option<usize>,
    /// See [`CacheConfig::block`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<usize>,
    /// See [`CacheConfig::policy`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyConfig>,
    /// See [`CacheConfig::floor`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Budget>,
    /// See [`CacheConfig::lightest`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lightest: Option<Storage>,
    /// See [`CacheConfig::offload`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offload: Option<Offload>,
}

/// A stage that has caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// The encoder of a level, counted from 1.
    Encoder(usize),
    /// The decoder of a level, counted from 1.
    Decoder(usize),
    /// The one stack of a flat model.
    Stack,
}

/// Which stages a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stages {
    /// `all`
    All,
    /// `encoders`
    Encoders,
    /// `lower encoders`: all but the top one.
    LowerEncoders,
    /// `top encoder`
    TopEncoder,
    /// `decoders`
    Decoders,
    /// `token decoder`: the one of level 1.
    TokenDecoder,
    /// `encoder 2`, `decoder 1`, `stack`
    One(Stage),
}

/// A config laid out for one model.
#[derive(Clone, Debug, PartialEq)]
pub struct InferPlan {
    /// What goes up while tokens are generated.
    pub advance: AdvanceRule,
    /// Rounding of the inputs of matrix products.
    pub activations: Activations,
    /// Bytes that the caches of a session may take.
    pub memory_budget_bytes: Option<usize>,
    /// One for each stage, encoders first, finest first.
    pub caches: Vec<StageCache>,
}

/// The caches of one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageCache {
    /// Whose.
    pub stage: Stage,
    /// How they store and keep entries.
    pub config: CacheConfig,
    /// Newest entries that no policy evicts: the newest chunk.
    pub n_newest: usize,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Encoder(level) => write!(f, "encoder {level}"),
            Self::Decoder(level) => write!(f, "decoder {level}"),
            Self::Stack => f.write_str("stack"),
        }
    }
}

impl fmt::Display for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Encoders => f.write_str("encoders"),
            Self::LowerEncoders => f.write_str("lower encoders"),
            Self::TopEncoder => f.write_str("top encoder"),
            Self::Decoders => f.write_str("decoders"),
            Self::TokenDecoder => f.write_str("token decoder"),
            Self::One(stage) => stage.fmt(f),
        }
    }
}

impl std::str::FromStr for Stages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let level = |number: &str| number.parse().ok().filter(|&level: &usize| level > 0);
        let found = match text {
            "all" => Some(Self::All),
            "encoders" => Some(Self::Encoders),
            "lower encoders" => Some(Self::LowerEncoders),
            "top encoder" => Some(Self::TopEncoder),
            "decoders" => Some(Self::Decoders),
            "token decoder" => Some(Self::TokenDecoder),
            "stack" => Some(Self::One(Stage::Stack)),
            _ => match text.split_once(' ') {
                Some(("encoder", number)) => level(number).map(|level| Self::One(Stage::Encoder(level))),
                Some(("decoder", number)) => level(number).map(|level| Self::One(Stage::Decoder(level))),
                _ => None,
            },
        };
        found.ok_or_else(|| {
            format!(
                "unknown stages \"{text}\"; use \"all\", \"encoders\", \"lower encoders\", \"top encoder\", \
                 \"decoders\", \"token decoder\", \"encoder 1\", \"decoder 1\", ... or \"stack\" (of a flat model)"
            )
        })
    }
}

impl Serialize for Stages {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Stages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

impl Stage {
    /// Every stage of a model: encoders first, finest first.
    pub fn all_of(model: &ModelConfig) -> Vec<Self> {
        stages_of(model).into_iter().map(|(stage, ..)| stage).collect()
    }
}

impl Stages {
    /// Whether a stage of a model of so many levels is one of these.
    pub fn contains(self, stage: Stage, n_levels: usize) -> bool {
        match (self, stage) {
            (Self::All, _) => true,
            (Self::Encoders, Stage::Encoder(_)) | (Self::Decoders, Stage::Decoder(_)) => true,
            (Self::LowerEncoders, Stage::Encoder(level)) => level < n_levels,
            (Self::TopEncoder, Stage::Encoder(level)) => level == n_levels,
            (Self::TokenDecoder, Stage::Decoder(level)) => level == 1,
            (Self::One(one), stage) => one == stage,
            _ => false,
        }
    }
}

impl CacheRule {
    fn apply(&self, config: &mut CacheConfig) {
        let Self { stages: _, keys, values, group, residual, block, policy, floor, lightest, offload } = self.clone();
        config.keys = keys.unwrap_or(config.keys);
        config.values = values.unwrap_or(config.values);
        config.group = group.unwrap_or(config.group);
        config.residual = residual.unwrap_or(config.residual);
        config.block = block.unwrap_or(config.block);
        config.lightest = lightest.unwrap_or(config.lightest);
        config.floor = floor.or(config.floor);
        config.offload = offload.or(config.offload);
        if let Some(policy) = policy {
            config.policy = policy;
        }
    }
}

impl InferConfig {
    /// Lays the config out for a model.
    ///
    /// # Errors
    ///
    /// The first broken rule, naming the key, its value and the fix.
    pub fn plan(&self, model: &ModelConfig) -> Result<InferPlan, ConfigError> {
        let stages = stages_of(model);
        let n_levels = stages.iter().filter(|(stage, ..)| matches!(stage, Stage::Encoder(_))).count();
        if n_levels == 0 && self.advance != AdvanceRule::Hierarchical {
            return error(
                "advance",
                format!("{:?}", self.advance).to_lowercase(),
                "a flat model has no levels: use hierarchical",
            );
        }
        if self.memory_budget_bytes == Some(0) {
            return error("memory_budget_bytes", 0, "must be at least 1; leave it out for no limit");
        }
        for (index, rule) in self.caches.iter().enumerate() {
            let Stages::One(stage) = rule.stages else { continue };
            if !stages.iter().any(|&(found, ..)| found == stage) {
                let found: Vec<String> = stages.iter().map(|(stage, ..)| stage.to_string()).collect();
                let fix = format!("this model has {}", found.join(", "));
                return error(&format!("caches.{index}.stages"), stage, fix);
            }
        }
        let caches: Vec<StageCache> = stages
            .into_iter()
            .map(|(stage, spec, n_newest)| {
                let mut config = CacheConfig::default();
                let rules = self.caches.iter().filter(|rule| rule.stages.contains(stage, n_levels));
                rules.for_each(|rule| rule.apply(&mut config));
                check(stage, &config, &spec, n_newest)?;
                Ok(StageCache { stage, config, n_newest })
            })
            .collect::<Result<_, _>>()?;
        let Self { advance, activations, memory_budget_bytes, .. } = *self;
        Ok(InferPlan { advance, activations, memory_budget_bytes, caches })
    }
}

impl InferPlan {
    /// The caches of a stage.
    ///
    /// # Panics
    ///
    /// If the plan was made for a model without that stage.
    pub fn cache(&self, stage: Stage) -> &StageCache {
        let found = self.caches.iter().find(|cache| cache.stage == stage);
        found.unwrap_or_else(|| panic!("the plan is for another model: it has no {stage}"))
    }

    /// Whether the device knows the numbers that the caches hold, and those that they turn to when memory is short.
    ///
    /// # Errors
    ///
    /// If not, naming the key, the device and what it has.
    pub fn check_formats(&self, device: &OpenDevice) -> Result<(), ConfigError> {
        self.check_formats_with(device, |dtype| device.device.supports_dtype(dtype))
    }

    /// The first stage whose caches read numbers back from the device in the midst of a step: to judge what to drop, or to
    /// move entries to host memory. In a browser nobody can wait for a graphics card there.
    pub fn waits_for_device(&self) -> Option<Stage> {
        let waits = |StageCache { config, .. }: &&StageCache| {
            let ranking = config.policy.ranking();
            config.offload.is_some() || ranking.is_some_and(|ranking| ranking.evidence() != Evidence::Positions)
        };
        self.caches.iter().find(waits).map(|cache| cache.stage)
    }

    fn check_formats_with(&self, device: impl fmt::Display, knows: impl Fn(DType) -> bool) -> Result<(), ConfigError> {
        let is_there = |storage: Storage| storage.dtype().is_none_or(&knows);
        for StageCache { stage, config, .. } in &self.caches {
            for (name, storage) in [("keys", config.keys), ("values", config.values)] {
                let lighter = |&storage: &Storage| storage.lighter().filter(|&lighter| lighter <= config.lightest);
                let n_taken = if self.memory_budget_bytes.is_some() { usize::MAX } else { 1 };
                let mut taken = std::iter::successors(Some(storage), lighter).take(n_taken);
                let Some(missing) = taken.find(|&storage| !is_there(storage)) else { continue };
                let others = Storage::ALL.into_iter().filter(|&other| is_there(other));
                let others = others.map(|other| other.to_string()).collect::<Vec<_>>().join(", ");
                let when = if missing == storage { "" } else { ", which memory pressure turns to" };
                let fix = format!("{device} has no {missing}{when}: use one of {others}, or another --device");
                return error(&format!("caches ({stage}).{name}"), storage, fix);
            }
        }
        Ok(())
    }
}

/// Every stage with caches, its stack, and the length of its chunks in entries.
fn stages_of(model: &ModelConfig) -> Vec<(Stage, StackSpec, usize)> {
    match model {
        ModelConfig::Flat(config) => vec![(Stage::Stack, config.spec(), 1)],
        ModelConfig::Photon(config) => {
            let n_levels = config.n_levels();
            // The newest chunk of an encoder is the one that the level above folds; above the top there is none.
            let parent_chunk = |level: usize| if level < n_levels { config.levels[level].chunk_len } else { 1 };
            let encoders =
                (1..=n_levels).map(|level| (Stage::Encoder(level), config.encoder_spec(level), parent_chunk(level)));
            let decoders = (1..=n_levels)
                .map(|level| (Stage::Decoder(level), config.decoder_spec(level), config.group_len(level)));
            encoders.chain(decoders).collect()
        }
    }
}

fn check(stage: Stage, config: &CacheConfig, spec: &StackSpec, n_newest: usize) -> Result<(), ConfigError> {
    let key = |name: &str| format!("caches ({stage}).{name}");
    require_positive(&key("group"), config.group)?;
    require_positive(&key("block"), config.block)?;
    if let Some((name, room)) = config.beyond_room() {
        return error(&key(name), room, format!("must be at most {MAX_ROOM}: room for so many is taken at once"));
    }
    let policy_key = key(&format!("policy.{}", config.policy.name()));
    match &config.policy {
        PolicyConfig::Window(window) if window.recent == 0 => {
            return error(&format!("{policy_key}.recent"), 0, "must be at least 1: a position sees itself");
        }
        PolicyConfig::AttentionMass(policy) => {
            if let Some(coverage) = policy.coverage
                && !(coverage > 0.0 && coverage <= 1.0)
            {
                return error(&format!("{policy_key}.coverage"), coverage, "lies above 0 and is at most 1");
            }
            if !(policy.floor >= 0.0 && policy.floor.is_finite()) {
                return error(&format!("{policy_key}.floor"), policy.floor, "must be 0 or more");
            }
        }
        PolicyConfig::Lru(policy) if !(policy.floor >= 0.0 && policy.floor.is_finite()) => {
            return error(&format!("{policy_key}.floor"), policy.floor, "must be 0 or more");
        }
        PolicyConfig::SnapKv(policy) => {
            require_positive(&format!("{policy_key}.observation"), policy.observation)?;
            if policy.pool.is_multiple_of(2) {
                return error(&format!("{policy_key}.pool"), policy.pool, "must be odd");
            }
        }
        _ => {}
    }
    if spec.pick.is_some() && (config.policy != PolicyConfig::Full || config.residual > 0) {
        let fix = "attention that picks blocks by their scores needs all entries at hand: policy full and residual 0";
        return error(&key("policy"), config.policy.name(), fix);
    }
    if let Some(Offload { resident_blocks, .. }) = config.offload {
        let key = key("offload.resident_blocks");
        match spec.pick {
            None => {
                let fix = "only attention that picks blocks by their scores (sparse, with pick = { top = .. }) leaves \
                           entries that may lie in host memory: name the stages that have it, or leave offload out";
                return error(&key, resident_blocks, fix);
            }
            Some(BlockPick { top, .. }) if resident_blocks < top => {
                let fix = format!("a position picks {top} blocks, which must fit on the device: at least {top}");
                return error(&key, resident_blocks, fix);
            }
            Some(_) => {}
        }
    }
    let Some(ranking) = config.policy.ranking() else {
        return match config.floor {
            Some(floor) => error(&key("floor"), format!("{floor:?}"), "only a policy with a budget can be lowered"),
            None => Ok(()),
        };
    };
    let entry_bytes = config.entry_bytes(spec.n_kv_heads, spec.head_dim());
    let n_newest = n_newest.max(ranking.recent());
    let n_least = ranking.sinks() + n_newest + config.block;
    let budgets = [(format!("{policy_key}.budget"), Some(ranking.budget())), (key("floor"), config.floor)];
    for (key, budget) in budgets {
        let Some(budget) = budget else { continue };
        if let Some(fault) = budget.fault() {
            return error(&key, format!("{budget:?}"), fault);
        }
        if !matches!(budget, Budget::Share(_)) && budget.entries(0, entry_bytes) < n_least {
            let fix = format!(
                "must hold {n_least} entries of {entry_bytes} bytes: {} sinks, the newest {n_newest}, and \
                 a block of {}; raise it or lower those",
                ranking.sinks(),
                config.block
            );
            return error(&key, format!("{budget:?}"), fix);
        }
    }
    match config.floor {
        Some(floor) if std::mem::discriminant(&floor) != std::mem::discriminant(&ranking.budget()) => {
            error(&key("floor"), format!("{floor:?}"), format!("must be of the budget's unit: {:?}", ranking.budget()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file;

    #[test]
    fn numbers_that_a_device_lacks_are_named_before_a_model_runs() {
        let model = "architecture = \"flat\"\nvocab_size = 13\nd_model = 8\n\
                     [stack]\nn_layers = 1\nn_heads = 2\nd_ff = 12\n";
        let model = config_file::parse_model(model.parse().unwrap(), "test.toml".as_ref()).unwrap();
        let complaint = |infer: &str, missing: &[DType]| {
            let config = config_file::parse_infer(infer, "test.toml".as_ref(), &[]).unwrap();
            let plan = config.plan(&model).unwrap();
            plan.check_formats_with("wgpu (a card)", |dtype| !missing.contains(&dtype)).map_err(|e| e.to_string())
        };
        let bf16 = "caches = [{ stages = \"all\", values = \"bf16\" }]";
        assert_eq!(complaint(bf16, &[DType::F16]), Ok(()));
        let error = complaint(bf16, &[DType::BF16]).unwrap_err();
        assert!(error.contains("caches (stack).values = bf16"), "{error}");
        assert!(error.contains("wgpu (a card) has no bf16: use one of f32, f16, int8, int4"), "{error}");

        // Memory pressure turns f32 to f16, where the config lets it.
        assert_eq!(complaint("", &[DType::F16]), Ok(()));
        let error = complaint("memory_budget_bytes = 1000000", &[DType::F16]).unwrap_err();
        assert!(error.contains("has no f16, which memory pressure turns to"), "{error}");
        let stays = "memory_budget_bytes = 1000000\ncaches = [{ stages = \"all\", lightest = \"f32\" }]";
        assert_eq!(complaint(stays, &[DType::F16]), Ok(()));
    }
}
