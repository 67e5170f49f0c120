//! The optimiser of a run: its rule, its rates, and what differs from part to part of the model.

use photon_core::config::{ConfigError, ModelConfig};
use serde::{Deserialize, Serialize};

use super::{is_default, rule};
use crate::parts::{Part, Place};
use crate::schedule::Schedule;

/// AdamW or Muon with decoupled decay on matrices, linear warm-up, then a schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Which rule updates the matrices inside the stacks and between them.
    #[serde(skip_serializing_if = "is_default")]
    pub kind: OptimizerKind,
    /// Learning rate at the end of the warm-up.
    pub learning_rate: f64,
    /// The schedule ends at this share of `learning_rate`.
    pub final_share: f64,
    /// Updates over which the rate rises from zero.
    pub warmup_steps: u64,
    /// How the rate goes on from there.
    #[serde(skip_serializing_if = "is_default")]
    pub schedule: Schedule,
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decay of matrices; vectors have none.
    pub weight_decay: f32,
    /// The gradient of all parameters together is scaled down to this norm.
    pub clip_norm: f64,
    /// Muon's own numbers, where `kind` asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muon: Option<MuonConfig>,
    /// What differs in parts of the model; where several select a parameter, later ones win key by key.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupConfig>,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::AdamW,
            learning_rate: 1e-3,
            final_share: 0.1,
            warmup_steps: 100,
            schedule: Schedule::Cosine,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            clip_norm: 1.0,
            muon: None,
            groups: Vec::new(),
        }
    }
}

/// The rule of the hidden matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OptimizerKind {
    /// AdamW for everything.
    #[default]
    #[serde(rename = "adamw")]
    AdamW,
    /// Muon for the matrices of stacks, chunkers and converters; AdamW for embeddings, head and vectors.
    #[serde(rename = "muon")]
    Muon,
}

/// Muon: momentum whose matrix is made orthogonal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MuonConfig {
    /// Learning rate at the end of the warm-up. Absent: `optimizer.learning_rate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Share of the old momentum that stays at each update.
    pub momentum: f64,
    /// Whether the update looks one step ahead along the momentum.
    pub nesterov: bool,
    /// Newton-Schulz steps towards the orthogonal matrix.
    pub ns_steps: usize,
    /// Decay of the matrices. Absent: `optimizer.weight_decay`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,
    /// How the size of an update depends on the shape of its matrix.
    pub adjust: Adjust,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            learning_rate: None,
            momentum: 0.95,
            nesterov: true,
            ns_steps: 5,
            weight_decay: None,
            adjust: Adjust::MatchRmsAdamW,
        }
    }
}

/// What an update of Muon, a matrix of singular values near 1, is multiplied with beside the learning rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Adjust {
    /// `0.2 √max(d_in, d_out)`: numbers as large as AdamW's, so that its rate and decay fit (Moonshot, arXiv 2502.16982).
    #[serde(rename = "match_rms_adamw")]
    MatchRmsAdamW,
    /// `√max(1, d_out / d_in)` (Keller Jordan's rule); rates are near 0.02.
    #[serde(rename = "original")]
    Original,
}

/// What differs in a part of the model; what is absent stays as it is elsewhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupConfig {
    /// Which part.
    pub select: Part,
    /// Times every learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate_factor: Option<f64>,
    /// Decay of its matrices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,
    /// Whether it stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen: Option<bool>,
}

/// What the groups say of one place of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupSettings {
    /// Times every learning rate.
    pub learning_rate_factor: f64,
    /// Decay of matrices, where a group says it.
    pub weight_decay: Option<f32>,
    /// Whether it stays as it is.
    pub frozen: bool,
}

impl OptimizerConfig {
    /// What the groups say of a place in a model of so many levels.
    pub fn settings(&self, place: Place, n_levels: usize) -> GroupSettings {
        let plain = GroupSettings { learning_rate_factor: 1.0, weight_decay: None, frozen: false };
        let groups = self.groups.iter().filter(|group| group.select.contains(place, n_levels));
        groups.fold(plain, |settings, group| GroupSettings {
            learning_rate_factor: group.learning_rate_factor.unwrap_or(settings.learning_rate_factor),
            weight_decay: group.weight_decay.or(settings.weight_decay),
            frozen: group.frozen.unwrap_or(settings.frozen),
        })
    }

    pub(super) fn validate(&self, model: &ModelConfig) -> Result<(), ConfigError> {
        let &Self { learning_rate, final_share, beta_1, beta_2, epsilon, weight_decay, clip_norm, .. } = self;
        require_rate("optimizer.learning_rate", learning_rate)?;
        if !(0.0..=1.0).contains(&final_share) {
            return rule("optimizer.final_share", final_share, "must lie between 0 and 1");
        }
        for (key, beta) in [("optimizer.beta_1", beta_1), ("optimizer.beta_2", beta_2)] {
            if !(0.0..1.0).contains(&beta) {
                return rule(key, beta, "must lie between 0 and 1, 1 excluded");
            }
        }
        if !(epsilon > 0.0 && epsilon.is_finite()) {
            return rule("optimizer.epsilon", epsilon, "must be above 0, for example 1e-8");
        }
        require_decay("optimizer.weight_decay", weight_decay)?;
        if clip_norm.is_nan() || clip_norm <= 0.0 {
            return rule("optimizer.clip_norm", clip_norm, "must be above 0; inf switches clipping off");
        }
        match (&self.muon, self.kind) {
            (Some(_), OptimizerKind::AdamW) => {
                return rule(
                    "optimizer.kind",
                    "adamw",
                    "has no table optimizer.muon: set kind = \"muon\", or leave it out",
                );
            }
            (Some(muon), OptimizerKind::Muon) => muon.validate()?,
            (None, _) => {}
        }
        self.validate_groups(model)
    }

    fn validate_groups(&self, model: &ModelConfig) -> Result<(), ConfigError> {
        let (places, n_levels) = (Place::all_of(model), model.n_levels());
        for (index, group) in self.groups.iter().enumerate() {
            let key = |name: &str| format!("optimizer.groups.{index}.{name}");
            if !places.iter().any(|&place| group.select.contains(place, n_levels)) {
                let fix = format!("selects nothing of this model; it has {}", Part::all_of(model));
                return rule(key("select"), group.select, fix);
            }
            if let Some(factor) = group.learning_rate_factor
                && !(factor > 0.0 && factor.is_finite())
            {
                return rule(key("learning_rate_factor"), factor, "must be above 0; frozen = true is for no updates");
            }
            if let Some(decay) = group.weight_decay {
                require_decay(key("weight_decay"), decay)?;
            }
        }
        match places.iter().all(|&place| self.settings(place, n_levels).frozen) {
            true => rule("optimizer.groups", "everything is frozen", "leave a part that learns"),
            false => Ok(()),
        }
    }
}

impl MuonConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        match (self.learning_rate, self.adjust) {
            (Some(rate), _) => require_rate("optimizer.muon.learning_rate", rate)?,
            (None, Adjust::Original) => {
                let fix = "needs a rate of its own: set optimizer.muon.learning_rate, for example 0.02";
                return rule("optimizer.muon.adjust", "original", fix);
            }
            (None, Adjust::MatchRmsAdamW) => {}
        }
        if !(0.0..1.0).contains(&self.momentum) {
            return rule("optimizer.muon.momentum", self.momentum, "must lie between 0 and 1, 1 excluded");
        }
        if self.ns_steps == 0 {
            return rule("optimizer.muon.ns_steps", 0, "must be at least 1; 5 is usual");
        }
        self.weight_decay.map_or(Ok(()), |decay| require_decay("optimizer.muon.weight_decay", decay))
    }
}

fn require_rate(key: &str, rate: f64) -> Result<(), ConfigError> {
    match rate > 0.0 && rate.is_finite() {
        true => Ok(()),
        false => rule(key, rate, "must be above 0, for example 1e-3"),
    }
}

fn require_decay(key: impl Into<String>, decay: f32) -> Result<(), ConfigError> {
    match decay >= 0.0 && decay.is_finite() {
        true => Ok(()),
        false => rule(key, decay, "must be 0 or more"),
    }
}
