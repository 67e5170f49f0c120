//! From an experiment to the resolved config of every arm, with what it costs.

use std::collections::BTreeMap;

use photon_core::accounting::{CacheCost, cache_cost, model_cost};
use photon_core::config::ModelConfig;
use serde_json::Value as Json;
use toml::Table;

use super::arms::{Arm, arms, run_config};
use super::budget::{planned_flops, planned_tokens, steps_for, with_steps};
use super::experiment::{Budget, Experiment, Match};
use super::fit::Fit;
use super::identity::portable;
use super::{AblateError, Decided, MATCH_TOLERANCE, Mismatch};
use crate::checkpoint::flat;
use crate::config::RunConfig;

/// An experiment that can be run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What it was made of.
    pub experiment: Experiment,
    /// The arms: those of the file, then those of the grid.
    pub arms: Vec<PlannedArm>,
    /// Index of the reference.
    pub reference: usize,
}

/// An arm with its numbers, which its runs have in common.
#[derive(Clone, Debug)]
pub struct PlannedArm {
    /// Its name.
    pub name: String,
    /// Resolved, but for the seed.
    pub config: RunConfig,
    /// What it has in common with the reference.
    pub matching: Vec<Match>,
    /// Widths that were fitted.
    pub fitted: Vec<(String, i64)>,
    /// Parameters, the start vector left out.
    pub parameters: usize,
    /// Training FLOPs per token, at the length of the last rows.
    pub flops_per_token: f64,
    /// Tokens of all updates.
    pub tokens: f64,
    /// FLOPs of all updates.
    pub training_flops: f64,
    /// The cache of each stage.
    pub caches: Vec<CacheCost>,
    /// Keys whose values are not the reference's, with both; `null` where there is none.
    pub differences: BTreeMap<String, [Json; 2]>,
}

/// Who knows how many tokens a second an arm trains on here.
pub type AskSpeed<'a> = dyn FnMut(&str, &RunConfig) -> Result<f64, AblateError> + 'a;

impl Plan {
    /// Resolves, fits and checks all arms. Speeds are asked for where a budget in minutes needs them and none is decided
    /// yet; then they are.
    ///
    /// # Errors
    ///
    /// A file that breaks a rule, an arm whose config does, an arm that cannot be matched.
    pub fn new(experiment: Experiment, decided: &mut Decided, ask: &mut AskSpeed) -> Result<Self, AblateError> {
        let arms = arms(&experiment)?;
        let reference_name = experiment.file.reference.clone();
        let reference = arms.iter().position(|arm| arm.name == reference_name).expect("arms have the reference");
        let mut making = Making { experiment: &experiment, decided, ask };
        let (own, _) = making.resolved(&arms[reference], None)?;
        let target = parameters(&own.model, own.train.seq_len);
        let reference_run = making.with_budget(&reference_name, &own)?;
        let mut planned = Vec::with_capacity(arms.len());
        for (index, arm) in arms.iter().enumerate() {
            let matching = arm.stated.as_ref().and_then(|arm| arm.matching.clone());
            let matching = matching.unwrap_or_else(|| experiment.file.matching.clone());
            let fit_to = (index != reference && matching.contains(&Match::Params)).then_some(target);
            let (config, fitted) = making.resolved(arm, fit_to)?;
            let config = match () {
                () if index == reference => reference_run.clone(),
                () if matching.contains(&Match::Flops) => {
                    steps_for(&config, planned_flops(&reference_run), &planned_flops)
                }
                () if matching.contains(&Match::Tokens) => {
                    steps_for(&config, planned_tokens(&reference_run.train), &|run| planned_tokens(&run.train))
                }
                () => making.with_budget(&arm.name, &config)?,
            };
            planned.push(PlannedArm::of(arm.name.clone(), config, matching, fitted));
        }
        let plan = Self { experiment, arms: planned, reference };
        plan.check_matches()?;
        Ok(plan.with_differences())
    }

    fn check_matches(&self) -> Result<(), AblateError> {
        let reference = &self.arms[self.reference];
        for arm in &self.arms {
            for what in &arm.matching {
                let raise = "an update is too large a step: raise the budget, or lower batch_size";
                let (name, found, expected, fix) = match what {
                    Match::Params => {
                        let fix = "free more widths, or in smaller steps: fit = { keys = [..], multiple_of = .. }";
                        ("parameters", arm.parameters as f64, reference.parameters as f64, fix)
                    }
                    Match::Flops => ("training FLOPs", arm.training_flops, reference.training_flops, raise),
                    Match::Tokens => ("training tokens", arm.tokens, reference.tokens, raise),
                };
                if (found - expected).abs() / expected > MATCH_TOLERANCE {
                    let (arm, reference) = (arm.name.clone(), reference.name.clone());
                    let mismatch = Mismatch { arm, what: name, found, reference, expected, fix };
                    return Err(AblateError::Unmatched(Box::new(mismatch)));
                }
            }
        }
        Ok(())
    }

    fn with_differences(mut self) -> Self {
        let values = |arm: &PlannedArm| -> BTreeMap<String, Json> {
            let json = |value| serde_json::to_value(value).unwrap_or_default();
            let values = flat(&portable(&arm.config)).into_iter();
            values.filter(|(key, _)| key != "checkpoint_every_steps").map(|(key, value)| (key, json(value))).collect()
        };
        let reference = values(&self.arms[self.reference]);
        for arm in &mut self.arms {
            let own = values(arm);
            let keys = reference.keys().chain(own.keys());
            let both = keys.map(|key| {
                (key.clone(), [&reference, &own].map(|values| values.get(key).cloned().unwrap_or(Json::Null)))
            });
            arm.differences = both.filter(|(_, [reference, own])| reference != own).collect();
        }
        self
    }
}

impl PlannedArm {
    fn of(name: String, config: RunConfig, matching: Vec<Match>, fitted: Vec<(String, i64)>) -> Self {
        let cost = model_cost(&config.model, config.train.seq_len);
        Self {
            name,
            matching,
            fitted,
            parameters: cost.parameters(),
            flops_per_token: cost.training_flops_per_token(),
            tokens: planned_tokens(&config.train),
            training_flops: planned_flops(&config),
            caches: cache_cost(&config.model),
            differences: BTreeMap::new(),
            config,
        }
    }

    /// The config of the run with a seed.
    pub fn run(&self, seed: u64) -> RunConfig {
        let mut config = self.config.clone();
        config.train.seed = seed;
        config
    }

    /// Tokens that the whole run takes time for: those of evaluations cost a third of those trained on.
    pub fn tokens_of_work(&self) -> f64 {
        let train = &self.config.train;
        let n_evaluations = 2 + train.steps.saturating_sub(1) / train.eval.every_steps;
        let n_passes = if train.data.sources.len() > 1 { 2.0 } else { 1.0 };
        self.tokens + n_evaluations as f64 * n_passes * train.eval.max_tokens as f64 / 3.0
    }
}

/// What resolving an arm takes.
struct Making<'a, 'b> {
    experiment: &'a Experiment,
    decided: &'a mut Decided,
    ask: &'a mut AskSpeed<'b>,
}

impl Making<'_, '_> {
    /// The config of an arm before its budget, fitted if that is wanted.
    fn resolved(&self, arm: &Arm, fit_to: Option<usize>) -> Result<(RunConfig, Vec<(String, i64)>), AblateError> {
        let of = |table: &Table| run_config(self.experiment, &arm.name, table);
        let count = |table: &Table| of(table).map(|run| parameters(&run.model, run.train.seq_len));
        let (table, values) = match fit_to {
            None => (arm.table.clone(), Vec::new()),
            Some(target) => {
                let own = arm.stated.as_ref().and_then(|arm| arm.fit.as_ref());
                let config = own.unwrap_or(&self.experiment.file.fit);
                let fit = Fit { experiment: self.experiment, arm: &arm.name, config, parameters: &count };
                let fitted = fit.fit(&arm.table, target)?;
                (fitted.table, fitted.values)
            }
        };
        let mut config = of(&table)?;
        config.train.replicas.get_or_insert(self.decided.replicas.min(config.train.batch_size));
        Ok((config, values))
    }

    /// The run as long as the budget says.
    fn with_budget(&mut self, name: &str, config: &RunConfig) -> Result<RunConfig, AblateError> {
        Ok(match self.experiment.budget()? {
            Budget::Steps(steps) => with_steps(config, steps),
            Budget::Tokens(tokens) => steps_for(config, tokens, &|run| planned_tokens(&run.train)),
            Budget::Flops(flops) => steps_for(config, flops, &planned_flops),
            Budget::Minutes(minutes) => {
                let tokens_per_sec = match self.decided.tokens_per_sec.get(name) {
                    Some(&known) => known,
                    None => (self.ask)(name, config)?,
                };
                self.decided.tokens_per_sec.insert(name.into(), tokens_per_sec);
                steps_for(config, minutes * 60.0 * tokens_per_sec, &|run| planned_tokens(&run.train))
            }
        })
    }
}

fn parameters(model: &ModelConfig, seq_len: usize) -> usize {
    model_cost(model, seq_len).parameters()
}
