//! The file of an experiment.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use photon_core::config_file;
use serde::{Deserialize, Deserializer, Serialize};
use toml::{Table, Value};

use super::AblateError;

/// An experiment as its file states it.
///
/// # Examples
/// ```toml
/// question = "Does a longer chunk cost quality?"
/// seeds = [1, 2]
/// reference = "four"
/// match = ["params", "flops"]
///
/// [budget]
/// tokens = 4e6                       # or steps, flops, minutes
///
/// [run]                              # a run config, or a base and the lines that differ
/// base = "base.toml"
///
/// [[arms]]
/// name = "four"
///
/// [[arms]]
/// name = "eight"
/// set.model.levels.0.chunk_len = 8   # key paths as for --set
///
/// [[arms]]
/// name = "flat"
/// kind = "flat"                      # derived from the reference
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Experiment {
    /// The file.
    pub path: PathBuf,
    /// What results and the run folder are called.
    pub name: String,
    /// Everything else.
    pub file: ExperimentFile,
}

/// The keys of the file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExperimentFile {
    /// What it is to find out.
    #[serde(default)]
    pub question: String,
    /// The name. Absent: that of the file's folder.
    name: Option<String>,
    /// Each arm runs once with each.
    pub seeds: Vec<u64>,
    /// The arm that others are compared and matched with.
    pub reference: String,
    /// What all arms have in common with the reference.
    #[serde(default, rename = "match", deserialize_with = "one_or_several")]
    pub matching: Vec<Match>,
    /// How long to train.
    budget: Table,
    /// What is free to move where parameters are matched.
    #[serde(default)]
    pub fit: FitConfig,
    /// A run config.
    pub run: Table,
    /// Key paths and the values that they take, in all combinations.
    #[serde(default)]
    pub grid: Table,
    /// Named arms.
    #[serde(default)]
    pub arms: Vec<ArmConfig>,
    /// What is measured of each finished run.
    #[serde(default)]
    pub measures: BTreeMap<String, MeasureConfig>,
}

/// A named arm.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmConfig {
    /// Its name.
    pub name: String,
    /// Which model it has.
    #[serde(default)]
    pub kind: ArmKind,
    /// The arm that a baseline is derived from. Absent: the reference, and for the reference itself `[run]`.
    pub from: Option<String>,
    /// A model config in place of that of `[run]`, as a path relative to the file.
    pub model: Option<String>,
    /// What differs: key paths as for `--set`, with or without quotes, and `*` for all entries of a list.
    #[serde(default)]
    pub set: Table,
    /// Whether the grid multiplies this arm; without such an arm it multiplies `[run]`.
    #[serde(default)]
    pub grid: bool,
    /// In place of the experiment's.
    #[serde(default, rename = "match", deserialize_with = "maybe_one_or_several")]
    pub matching: Option<Vec<Match>>,
    /// In place of the experiment's.
    pub fit: Option<FitConfig>,
}

/// Where the model of an arm comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArmKind {
    /// The run's, with the lines that differ.
    #[default]
    Stated,
    /// A flat transformer of as many parameters.
    Flat,
    /// A Block Transformer of as many parameters.
    Block,
}

/// What an arm has in common with the reference, within [`super::MATCH_TOLERANCE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Match {
    /// Parameters: widths are fitted.
    Params,
    /// FLOPs of the whole training: steps are chosen.
    Flops,
    /// Tokens trained on: steps are chosen.
    Tokens,
}

/// What is free to move where parameters are matched.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FitConfig {
    /// Key paths below `[run]`, which keep their proportions. Absent: all `d_ff` of the model.
    #[serde(default, deserialize_with = "one_or_several")]
    pub keys: Vec<String>,
    /// Values are multiples of this.
    #[serde(default = "default_multiple_of")]
    pub multiple_of: usize,
}

/// A program whose output is kept with the results of a run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasureConfig {
    /// The command line. `photon-train` and `photon-infer` are the programs beside this one; `{model}` stands for the
    /// checkpoint of the run's end, `{best}` for its best one, `{run}` for its folder, `{held_out}` for a file of its held-out
    /// text, `{experiment}` for the folder of the experiment's file. It prints one JSON value.
    pub command: Vec<String>,
}

/// How long to train.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// Tokens trained on.
    Tokens(f64),
    /// Updates.
    Steps(u64),
    /// Of the whole training: three forwards for each token.
    Flops(f64),
    /// Of training on this machine: a short benchmark says once how many steps that will be.
    Minutes(f64),
}

impl Default for FitConfig {
    fn default() -> Self {
        Self { keys: Vec::new(), multiple_of: default_multiple_of() }
    }
}

fn default_multiple_of() -> usize {
    8
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrSeveral<T> {
    One(T),
    Several(Vec<T>),
}

fn one_or_several<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Ok(match OneOrSeveral::deserialize(deserializer)? {
        OneOrSeveral::One(value) => vec![value],
        OneOrSeveral::Several(values) => values,
    })
}

fn maybe_one_or_several<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<T>>, D::Error> {
    one_or_several(deserializer).map(Some)
}

impl Experiment {
    /// Reads an experiment; overrides change any key, such as `budget.tokens=1e5` or `run.batch_size=4`.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or parsed, an unknown key, a value that breaks a rule.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, AblateError> {
        let file: ExperimentFile = config_file::parse(config_file::load_table(path, overrides)?, path)?;
        let path = std::path::absolute(path).map_err(super::io("read", path))?;
        let of_folder = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        let name = file.name.clone().or(of_folder).unwrap_or_else(|| "experiment".into());
        let experiment = Self { path, name, file };
        experiment.validate()?;
        Ok(experiment)
    }

    /// How long the reference trains.
    ///
    /// # Errors
    ///
    /// None or several stated, or one that is not above 0.
    pub fn budget(&self) -> Result<Budget, AblateError> {
        let table = &self.file.budget;
        let Some((key, value)) = table.iter().next().filter(|_| table.len() == 1) else {
            let given: Vec<&str> = table.keys().map(String::as_str).collect();
            let given = if given.is_empty() { "nothing".to_owned() } else { given.join(", ") };
            return Err(self.rule("budget", format!("states {given}: state one of tokens, steps, flops, minutes")));
        };
        let amount = value.as_float().or(value.as_integer().map(|n| n as f64));
        let amount = amount.filter(|amount| *amount > 0.0 && amount.is_finite());
        let amount = amount.ok_or_else(|| self.rule(format!("budget.{key} = {value}"), "must be a number above 0"))?;
        match key.as_str() {
            "tokens" => Ok(Budget::Tokens(amount)),
            "steps" if amount.fract() == 0.0 => Ok(Budget::Steps(amount as u64)),
            "steps" => Err(self.rule(format!("budget.steps = {value}"), "must be a whole number")),
            "flops" => Ok(Budget::Flops(amount)),
            "minutes" => Ok(Budget::Minutes(amount)),
            _ => Err(self.rule(format!("budget.{key}"), "is unknown: state one of tokens, steps, flops, minutes")),
        }
    }

    fn validate(&self) -> Result<(), AblateError> {
        let file = &self.file;
        let seeds: BTreeSet<&u64> = file.seeds.iter().collect();
        if seeds.is_empty() || seeds.len() < file.seeds.len() {
            let fix = "list at least one seed, each once, for example [1, 2]";
            return Err(self.rule(format!("seeds = {:?}", file.seeds), fix));
        }
        self.budget()?;
        self.check_match("match", &file.matching)?;
        self.check_fit("fit", &file.fit)?;
        if file.arms.is_empty() && file.grid.is_empty() {
            return Err(self.rule("arms", "there is none: add [[arms]] with a name each, or axes to [grid]"));
        }
        for (key, values) in axes(&file.grid) {
            match values {
                Value::Array(values) if !values.is_empty() => {}
                Value::Array(_) => {
                    return Err(self.rule(format!("grid.{key} = []"), "an axis needs at least one value"));
                }
                _ => return Err(self.rule(format!("grid.{key} = {values}"), "an axis is a list of values")),
            }
            self.check_key(&format!("grid.{key}"), &key)?;
        }
        for arm in &file.arms {
            let of = |key: &str| format!("arms {:?}: {key}", arm.name);
            if arm.name.trim().is_empty() {
                return Err(self.rule("arms.name", "an arm needs a name"));
            }
            for (key, _) in axes(&arm.set) {
                self.check_key(&of(&format!("set.{key}")), &key)?;
            }
            if arm.kind != ArmKind::Stated && arm.model.is_some() {
                return Err(self.rule(of("model"), "the model of a baseline is derived: leave `model` or `kind` out"));
            }
            if arm.kind == ArmKind::Stated && arm.from.is_some() {
                return Err(
                    self.rule(of("from"), "is for baselines: add kind = \"flat\" or \"block\", or leave it out")
                );
            }
            self.check_match(&of("match"), arm.matching.as_deref().unwrap_or_default())?;
            arm.fit.iter().try_for_each(|fit| self.check_fit(&of("fit"), fit))?;
        }
        for (name, measure) in &file.measures {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            if name.is_empty() || !name.chars().all(is_plain) {
                return Err(self.rule(format!("measures.{name:?}"), "a name has letters, digits, - and _ only"));
            }
            if measure.command.is_empty() {
                return Err(self.rule(format!("measures.{name}.command = []"), "name a program and its arguments"));
            }
        }
        Ok(())
    }

    /// Keys that the experiment itself decides.
    fn check_key(&self, at: &str, key: &str) -> Result<(), AblateError> {
        match key {
            "seed" => Err(self.rule(at, "seeds stand in `seeds`: every arm runs with all of them")),
            "steps" => Err(self.rule(at, "steps follow from [budget]")),
            _ => Ok(()),
        }
    }

    fn check_match(&self, at: &str, matching: &[Match]) -> Result<(), AblateError> {
        match matching.contains(&Match::Flops) && matching.contains(&Match::Tokens) {
            true => Err(self.rule(at, "\"flops\" and \"tokens\" both choose the steps: take one of them")),
            false => Ok(()),
        }
    }

    fn check_fit(&self, at: &str, fit: &FitConfig) -> Result<(), AblateError> {
        match fit.multiple_of {
            0 => Err(self.rule(format!("{at}.multiple_of = 0"), "must be at least 1")),
            _ => Ok(()),
        }
    }

    pub(super) fn rule(&self, key: impl Into<String>, fix: impl Into<String>) -> AblateError {
        AblateError::Rule { path: self.path.clone(), key: key.into(), fix: fix.into() }
    }
}

/// The values of nested tables under their key paths: lists and plain values, in order of the paths.
pub(super) fn axes(table: &Table) -> Vec<(String, Value)> {
    fn add(found: &mut Vec<(String, Value)>, key: &str, value: &Value) {
        match value {
            Value::Table(table) if !table.is_empty() => {
                table.iter().for_each(|(part, value)| add(found, &format!("{key}.{part}"), value));
            }
            value => found.push((key.to_owned(), value.clone())),
        }
    }
    let mut found = Vec::new();
    table.iter().for_each(|(key, value)| add(&mut found, key, value));
    found
}
