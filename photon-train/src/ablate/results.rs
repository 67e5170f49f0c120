//! What came of an experiment: `results.json` and `results.csv`, the same bytes whenever the experiment is run again, and
//! `timings.json`, which holds what a clock decides.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use photon_core::accounting::{CacheCost, CacheDtype};
use photon_core::atomic_file;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::experiment::{Budget, Match};
use super::identity::portable;
use super::outcome::{Outcome, Timings};
use super::plan::{Plan, PlannedArm};
use super::{AblateError, io};

/// Version of `results.json`.
const FORMAT_VERSION: u32 = 1;
/// In an experiment's folder.
pub(super) const RESULTS: &str = "results.json";
/// In an experiment's folder.
pub(super) const TIMINGS: &str = "timings.json";

/// What `results.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    format_version: u32,
    /// The experiment.
    pub name: String,
    /// What it is to find out.
    pub question: String,
    /// The arm that others are compared with.
    pub reference: String,
    /// As the file states it, by its unit.
    pub budget: BTreeMap<String, f64>,
    /// The arms in the order of the plan.
    pub arms: Vec<ArmResults>,
}

/// An arm: what was planned, and what came of its runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmResults {
    /// Its name.
    pub name: String,
    /// What it has in common with the reference within 1 %.
    #[serde(rename = "match")]
    pub matching: Vec<Match>,
    /// Keys whose values are not the reference's: there and here.
    pub differences: BTreeMap<String, [Value; 2]>,
    /// Parameters, the start vector left out.
    pub parameters: usize,
    /// Training FLOPs per token.
    pub training_flops_per_token: f64,
    /// Training FLOPs of the whole run.
    pub training_flops: f64,
    /// Tokens of all updates, as planned.
    pub tokens: f64,
    /// Updates.
    pub steps: u64,
    /// Tokens of a row.
    pub seq_len: usize,
    /// The cache of each stage, in f16.
    pub caches: Vec<CacheResults>,
    /// Resolved; without seed and the places of files.
    pub config: Value,
    /// One for each seed, in the order of the file.
    pub runs: Vec<RunResults>,
}

/// The cache of a stage in f16 with nothing evicted that can still be seen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheResults {
    /// `encoder 1`, `decoder 1`, ... or `stack`.
    pub stage: String,
    /// Bytes that every further token adds in the long run.
    pub growth_bytes_per_token: f64,
    /// Bytes that it holds after a row of the training length, over the tokens of the row.
    pub bytes_per_token: f64,
    /// The most entries; `null` where they grow.
    pub max_entries: Option<usize>,
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunResults {
    /// Its seed.
    pub seed: u64,
    /// The name of its folder.
    pub id: String,
    /// How far it is.
    #[serde(flatten)]
    pub status: Status,
    /// Where its training curve lies, from the experiment's folder.
    pub curve: String,
}

/// How far a run is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Status {
    /// Not begun or under way.
    Waiting,
    /// It came to its end.
    Finished(Box<Outcome>),
    /// It ended with an error.
    Failed {
        /// What it said last.
        error: String,
    },
}

/// What `timings.json` holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AllTimings {
    /// Runs side by side.
    pub jobs: usize,
    /// By the runs' names.
    pub runs: BTreeMap<String, Timings>,
}

/// A run that is planned, with its name.
#[derive(Clone, Debug)]
pub struct PlannedRun {
    /// Index of its arm.
    pub arm: usize,
    /// Its seed.
    pub seed: u64,
    /// Its name.
    pub id: String,
}

impl Results {
    /// Of a plan, with what is known of its runs.
    pub fn new(plan: &Plan, runs: &[PlannedRun], statuses: &BTreeMap<String, Status>) -> Self {
        let file = &plan.experiment.file;
        let arm = |(index, arm): (usize, &PlannedArm)| {
            let own = runs.iter().filter(|run| run.arm == index);
            let run = |run: &PlannedRun| RunResults {
                seed: run.seed,
                id: run.id.clone(),
                status: statuses.get(&run.id).cloned().unwrap_or(Status::Waiting),
                curve: format!("{}/metrics.jsonl", run.id),
            };
            ArmResults::new(arm, own.map(run).collect())
        };
        let (unit, amount) = match plan.experiment.budget() {
            Ok(Budget::Tokens(amount)) => ("tokens", amount),
            Ok(Budget::Steps(amount)) => ("steps", amount as f64),
            Ok(Budget::Flops(amount)) => ("flops", amount),
            Ok(Budget::Minutes(amount)) => ("minutes", amount),
            Err(_) => unreachable!("a plan has a budget"),
        };
        Self {
            format_version: FORMAT_VERSION,
            name: plan.experiment.name.clone(),
            question: file.question.clone(),
            reference: file.reference.clone(),
            budget: [(unit.to_owned(), amount)].into(),
            arms: plan.arms.iter().enumerate().map(arm).collect(),
        }
    }

    /// Reads `results.json` of an experiment's folder, or a file like it.
    ///
    /// # Errors
    ///
    /// A file that is not there or not of this version.
    pub fn read(folder: &Path) -> Result<Self, AblateError> {
        let path = if folder.is_dir() { folder.join(RESULTS) } else { folder.to_owned() };
        let text = std::fs::read(&path).map_err(io("read", &path))?;
        let damaged = |reason: String| AblateError::Damaged {
            path: path.clone(),
            reason,
            fix: "run the experiment again: finished runs are found",
        };
        let results: Self = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
        match results.format_version {
            FORMAT_VERSION => Ok(results),
            other => Err(damaged(format!("format version {other}, expected {FORMAT_VERSION}"))),
        }
    }

    /// Writes `results.json` and `results.csv`.
    ///
    /// # Errors
    ///
    /// The system's; files are then as they were.
    pub fn write(&self, folder: &Path) -> Result<(), AblateError> {
        let json = serde_json::to_string_pretty(self).expect("results are plain data") + "\n";
        for (name, text) in [(RESULTS, json), ("results.csv", self.csv())] {
            let path = folder.join(name);
            atomic_file::write(&path, text.as_bytes()).map_err(io("write", &path))?;
        }
        Ok(())
    }

    /// One line a run.
    fn csv(&self) -> String {
        let mut csv = "experiment,arm,seed,id,status,parameters,training_flops,training_flops_per_token,steps,tokens,\
                       bits_per_byte,nats_per_token,best_bits_per_byte,best_step,cache_bytes_per_token,\
                       cache_growth_bytes_per_token,commit,error\n"
            .to_owned();
        for arm in &self.arms {
            let sum = |of: &dyn Fn(&CacheResults) -> f64| arm.caches.iter().map(of).sum::<f64>();
            let cache = [sum(&|cache| cache.bytes_per_token), sum(&|cache| cache.growth_bytes_per_token)];
            for run in &arm.runs {
                let (status, numbers, commit, error) = match &run.status {
                    Status::Waiting => ("waiting", String::from(",,,"), "", ""),
                    Status::Failed { error } => ("failed", String::from(",,,"), "", error.as_str()),
                    Status::Finished(outcome) => {
                        let (last, best) = (&outcome.last.held_out, &outcome.best);
                        let numbers = format!(
                            "{},{},{},{}",
                            last.bits_per_byte, last.nats_per_token, best.held_out.bits_per_byte, best.step
                        );
                        ("finished", numbers, outcome.commit.as_str(), "")
                    }
                };
                let [name, arm_name, error] = [&self.name, &arm.name, error].map(csv_field);
                let _ = writeln!(
                    csv,
                    "{name},{arm_name},{},{},{status},{},{},{},{},{},{numbers},{},{},{commit},{error}",
                    run.seed,
                    run.id,
                    arm.parameters,
                    arm.training_flops,
                    arm.training_flops_per_token,
                    arm.steps,
                    arm.tokens,
                    cache[0],
                    cache[1],
                );
            }
        }
        csv
    }
}

impl ArmResults {
    fn new(arm: &PlannedArm, runs: Vec<RunResults>) -> Self {
        let mut config = serde_json::to_value(portable(&arm.config)).unwrap_or_default();
        config.as_object_mut().and_then(|config| config.remove("seed"));
        let seq_len = arm.config.train.seq_len;
        Self {
            name: arm.name.clone(),
            matching: arm.matching.clone(),
            differences: arm.differences.clone(),
            parameters: arm.parameters,
            training_flops_per_token: arm.flops_per_token,
            training_flops: arm.training_flops,
            tokens: arm.tokens,
            steps: arm.config.train.steps,
            seq_len,
            caches: cache_results(&arm.caches, seq_len),
            config,
            runs,
        }
    }

    /// What came of the runs that came to their end, by seed.
    pub fn finished(&self) -> impl Iterator<Item = (&RunResults, &Outcome)> {
        self.runs.iter().filter_map(|run| match &run.status {
            Status::Finished(outcome) => Some((run, &**outcome)),
            _ => None,
        })
    }
}

impl CacheResults {
    fn new(cache: &CacheCost, seq_len: usize) -> Self {
        let bytes = (cache.numbers_per_entry * CacheDtype::F16.bytes()) as f64;
        let grown = seq_len.div_ceil(cache.tokens_per_entry) as f64 / cache.kept_one_in as f64;
        let entries = cache.max_entries.map_or(grown, |most| grown.min(most as f64));
        Self {
            stage: cache.stage.clone(),
            growth_bytes_per_token: cache.growth_bytes_per_token(CacheDtype::F16),
            bytes_per_token: entries * bytes / seq_len as f64,
            max_entries: cache.max_entries,
        }
    }
}

impl AllTimings {
    /// Those that the folder of an experiment holds; none where there is no such file.
    pub fn read(folder: &Path) -> Self {
        let text = std::fs::read(folder.join(TIMINGS)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Writes `timings.json`.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn write(&self, folder: &Path) -> Result<(), AblateError> {
        let path = folder.join(TIMINGS);
        let text = serde_json::to_string_pretty(self).expect("timings are plain data") + "\n";
        atomic_file::write(&path, text.as_bytes()).map_err(io("write", &path))
    }
}

/// The caches of an arm, for rows of `seq_len` tokens.
pub fn cache_results(caches: &[CacheCost], seq_len: usize) -> Vec<CacheResults> {
    caches.iter().map(|cache| CacheResults::new(cache, seq_len)).collect()
}

/// A field, quoted where it must be.
fn csv_field(text: &(impl AsRef<str> + ?Sized)) -> String {
    let text = text.as_ref();
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}
