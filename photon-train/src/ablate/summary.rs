//! Results of one or more experiments over their seeds.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::AblateError;
use super::outcome::{Outcome, Timings};
use super::results::{AllTimings, ArmResults, CacheResults, Results, RunResults, Status};
use super::spread::{Difference, Spread};

/// Several experiments.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// In the order in which they were named.
    pub experiments: Vec<ExperimentSummary>,
}

/// An experiment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExperimentSummary {
    /// Its name.
    pub name: String,
    /// What it is to find out.
    pub question: String,
    /// The arm that others are compared with.
    pub reference: String,
    /// By its unit.
    pub budget: BTreeMap<String, f64>,
    /// What the programs were built from.
    pub commits: Vec<String>,
    /// In the order of the plan.
    pub arms: Vec<ArmSummary>,
    /// Runs that ended with an error, and those that a program could not measure.
    pub failed: Vec<FailedRun>,
    /// Runs that have not come to an end.
    pub waiting: usize,
    /// Where it lies.
    #[serde(skip)]
    pub folder: PathBuf,
}

/// A run that ended with an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FailedRun {
    /// Its arm.
    pub arm: String,
    /// Its seed.
    pub seed: u64,
    /// What it said.
    pub error: String,
}

/// An arm over its seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ArmSummary {
    /// Its name.
    pub name: String,
    /// Parameters, the start vector left out.
    pub parameters: usize,
    /// Of training.
    pub training_flops_per_token: f64,
    /// Of the whole training.
    pub training_flops: f64,
    /// Trained on.
    pub tokens: f64,
    /// Updates.
    pub steps: u64,
    /// On held-out text after the last update.
    pub bits_per_byte: Option<Spread>,
    /// The same where it was best.
    pub best_bits_per_byte: Option<Spread>,
    /// Of `bits_per_byte`; none for the reference.
    pub difference: Option<Difference>,
    /// Cross-entropy of each slot of a level-1 chunk.
    pub slot_nats: Vec<Spread>,
    /// Held-out bits per byte of each source, where there are several.
    pub sources: BTreeMap<String, Spread>,
    /// Of training.
    pub tokens_per_sec: Option<Spread>,
    /// In f16.
    pub caches: Vec<CacheResults>,
    /// All of them together, at the training length.
    pub cache_bytes_per_token: f64,
    /// What ways to generate cost, where it was measured.
    pub fidelity: Vec<FidelitySummary>,
    /// Other numbers that programs measured, by measure and key path.
    pub measures: BTreeMap<String, BTreeMap<String, Spread>>,
    /// Names of the folders of finished runs.
    pub run_ids: Vec<String>,
}

/// A way to generate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FidelitySummary {
    /// Its name.
    pub preset: String,
    /// From the training forward.
    pub kl_mean_nats: Option<Spread>,
    /// Share of equal likeliest tokens.
    pub top1_agreement: Option<Spread>,
    /// By how much it is worse.
    pub bits_per_byte_change: Option<Spread>,
    /// Of the caches.
    pub bytes_per_token: Option<Spread>,
    /// Tokens of all rows a second.
    pub decode_tokens_per_sec: Option<Spread>,
}

impl Summary {
    /// Of the folders of experiments.
    ///
    /// # Errors
    ///
    /// Results that cannot be read.
    pub fn read(folders: &[PathBuf]) -> Result<Self, AblateError> {
        let experiments = folders.iter().map(|folder| ExperimentSummary::read(folder));
        Ok(Self { experiments: experiments.collect::<Result<_, _>>()? })
    }

    /// All arms, each with a name that no other has.
    pub fn arms(&self) -> Vec<(String, &ExperimentSummary, &ArmSummary)> {
        let is_joined = self.experiments.len() > 1;
        let mut found = Vec::new();
        for experiment in &self.experiments {
            let full = |arm: &ArmSummary| match is_joined {
                true => format!("{}: {}", experiment.name, arm.name),
                false => arm.name.clone(),
            };
            found.extend(experiment.arms.iter().map(|arm| (full(arm), experiment, arm)));
        }
        found
    }
}

impl ExperimentSummary {
    fn read(folder: &Path) -> Result<Self, AblateError> {
        let results = Results::read(folder)?;
        let timings = AllTimings::read(folder);
        let reference = results.arms.iter().find(|arm| arm.name == results.reference);
        let reference = reference.and_then(|arm| Spread::of(final_bits(arm)));
        let arm = |arm: &ArmResults| {
            let is_reference = arm.name == results.reference;
            ArmSummary::of(arm, &timings, reference.as_ref().filter(|_| !is_reference))
        };
        let runs = || results.arms.iter().flat_map(|arm| arm.runs.iter().map(move |run| (arm, run)));
        let failed = runs().flat_map(|(arm, run)| {
            let errors = match &run.status {
                Status::Failed { error } => vec![error.clone()],
                Status::Finished(outcome) => {
                    outcome.failed_measures.iter().map(|(name, error)| format!("measure {name}: {error}")).collect()
                }
                Status::Waiting => Vec::new(),
            };
            errors.into_iter().map(|error| FailedRun { arm: arm.name.clone(), seed: run.seed, error })
        });
        let finished = results.arms.iter().flat_map(ArmResults::finished);
        let mut commits: Vec<String> = finished.map(|(_, outcome)| outcome.commit.clone()).collect();
        commits.sort();
        commits.dedup();
        Ok(Self {
            arms: results.arms.iter().map(arm).collect(),
            failed: failed.collect(),
            waiting: runs().filter(|(_, run)| run.status == Status::Waiting).count(),
            commits,
            name: results.name.clone(),
            question: results.question.clone(),
            reference: results.reference.clone(),
            budget: results.budget.clone(),
            folder: if folder.is_dir() { folder.into() } else { folder.parent().unwrap_or(folder).into() },
        })
    }
}

fn final_bits(arm: &ArmResults) -> impl Iterator<Item = f64> {
    arm.finished().map(|(_, outcome)| outcome.last.held_out.bits_per_byte)
}

impl ArmSummary {
    fn of(arm: &ArmResults, timings: &AllTimings, reference: Option<&Spread>) -> Self {
        let runs: Vec<(&RunResults, &Outcome)> = arm.finished().collect();
        let over = |value: &dyn Fn(&Outcome) -> Option<f64>| Spread::of(runs.iter().filter_map(|(_, run)| value(run)));
        let timed: Vec<&Timings> = runs.iter().filter_map(|(run, _)| timings.runs.get(&run.id)).collect();
        let bits_per_byte = over(&|run| Some(run.last.held_out.bits_per_byte));
        let n_slots = runs.iter().map(|(_, run)| run.last.held_out.slot_nats.len()).min().unwrap_or(0);
        let slot = |slot: usize| over(&|run| run.last.held_out.slot_nats.get(slot).copied());
        let names = runs.first().map(|(_, run)| run.sources.keys().cloned().collect::<Vec<_>>()).unwrap_or_default();
        let source = |name: String| {
            let spread = over(&|run| run.sources.get(&name).map(|of| of.bits_per_byte))?;
            Some((name, spread))
        };
        Self {
            name: arm.name.clone(),
            parameters: arm.parameters,
            training_flops_per_token: arm.training_flops_per_token,
            training_flops: arm.training_flops,
            tokens: arm.tokens,
            steps: arm.steps,
            difference: bits_per_byte.as_ref().zip(reference).map(|(own, other)| own.difference_from(other)),
            bits_per_byte,
            best_bits_per_byte: over(&|run| Some(run.best.held_out.bits_per_byte)),
            slot_nats: (0..n_slots).filter_map(slot).collect(),
            sources: names.into_iter().filter_map(source).collect(),
            tokens_per_sec: Spread::of(timed.iter().filter_map(|timings| timings.tokens_per_sec)),
            cache_bytes_per_token: arm.caches.iter().map(|cache| cache.bytes_per_token).sum(),
            caches: arm.caches.clone(),
            fidelity: fidelity(&runs, &timed),
            measures: other_measures(&runs),
            run_ids: runs.iter().map(|(run, _)| run.id.clone()).collect(),
        }
    }

    /// Decoding speed of the first way to generate that was measured.
    pub fn decode_tokens_per_sec(&self) -> Option<&Spread> {
        self.fidelity.first().and_then(|way| way.decode_tokens_per_sec.as_ref())
    }
}

/// Whether a measure is what `photon-infer fidelity` prints.
fn is_fidelity(value: &Value) -> bool {
    let first = value.as_array().and_then(|ways| ways.first());
    first.is_some_and(|way| way["preset"].is_string() && way["kl_mean_nats"].is_number())
}

fn fidelity(runs: &[(&RunResults, &Outcome)], timed: &[&Timings]) -> Vec<FidelitySummary> {
    let Some((_, first)) = runs.first() else { return Vec::new() };
    let mut found = Vec::new();
    for (name, value) in first.measures.iter().filter(|(_, value)| is_fidelity(value)) {
        for (index, way) in value.as_array().into_iter().flatten().enumerate() {
            let over =
                |key: &str| Spread::of(runs.iter().filter_map(|(_, run)| run.measures.get(name)?[index][key].as_f64()));
            let speed = |timings: &&Timings| {
                timings.measures.get(name)?.get(&format!("{index}.decode_tokens_per_sec"))?.as_f64()
            };
            found.push(FidelitySummary {
                preset: way["preset"].as_str().unwrap_or_default().to_owned(),
                kl_mean_nats: over("kl_mean_nats"),
                top1_agreement: over("top1_agreement"),
                bits_per_byte_change: over("bits_per_byte_change"),
                bytes_per_token: over("bytes_per_token"),
                decode_tokens_per_sec: Spread::of(timed.iter().filter_map(speed)),
            });
        }
    }
    found
}

/// All numbers of measures, under their key paths.
fn other_measures(runs: &[(&RunResults, &Outcome)]) -> BTreeMap<String, BTreeMap<String, Spread>> {
    let Some((_, first)) = runs.first() else { return BTreeMap::new() };
    let of = |(name, value): (&String, &Value)| {
        let mut paths = Vec::new();
        numbers(value, "", &mut paths);
        let over = |path: String| {
            let value = |(_, run): &(&RunResults, &Outcome)| run.measures.get(name)?.pointer(&path)?.as_f64();
            let spread = Spread::of(runs.iter().filter_map(value))?;
            Some((path.trim_start_matches('/').replace('/', "."), spread))
        };
        (name.clone(), paths.into_iter().filter_map(over).collect())
    };
    first.measures.iter().filter(|(_, value)| !is_fidelity(value)).map(of).collect()
}

/// JSON pointers of all numbers.
fn numbers(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(path.to_owned()),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            numbers(value, &format!("{path}/{}", key.replace('~', "~0").replace('/', "~1")), found);
        }),
        Value::Array(values) => {
            values.iter().enumerate().for_each(|(index, value)| numbers(value, &format!("{path}/{index}"), found));
        }
        _ => {}
    }
}
