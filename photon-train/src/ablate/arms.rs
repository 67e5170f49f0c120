//! Axes and arms as tables of run configs, each with its name.

use photon_core::config_file;
use toml::{Table, Value};

use super::experiment::{ArmConfig, ArmKind, Experiment, axes};
use super::{AblateError, baseline};
use crate::config::RunConfig;

/// An arm before its parameters are fitted.
#[derive(Clone, Debug)]
pub(super) struct Arm {
    pub(super) name: String,
    /// Of the file; none for an arm of the grid alone.
    pub(super) stated: Option<ArmConfig>,
    pub(super) table: Table,
}

/// An arm by its name: as the file states it, and the values that the grid gives it.
struct Named<'a> {
    name: String,
    stated: Option<&'a ArmConfig>,
    values: &'a [(String, Value)],
}

/// One value for each axis, and what the arm is called by them.
struct Combination {
    name: String,
    values: Vec<(String, Value)>,
}

/// All arms, those of the file first where no grid multiplies them.
pub(super) fn arms(experiment: &Experiment) -> Result<Vec<Arm>, AblateError> {
    let file = &experiment.file;
    let combinations = combinations(&axes(&file.grid));
    let mut found: Vec<Named> = Vec::new();
    for arm in file.arms.iter().filter(|arm| !arm.grid) {
        found.push(Named { name: arm.name.clone(), stated: Some(arm), values: &[] });
    }
    let multiplied: Vec<Option<&ArmConfig>> = file.arms.iter().filter(|arm| arm.grid).map(Some).collect();
    if let Some(Some(arm)) = multiplied.first()
        && file.grid.is_empty()
    {
        return Err(experiment.rule(format!("arms {:?}: grid = true", arm.name), "there is no [grid]: add one"));
    }
    let multiplied = if multiplied.is_empty() && !file.grid.is_empty() { vec![None] } else { multiplied };
    for arm in multiplied {
        for Combination { name, values } in &combinations {
            let name = arm.map_or(name.clone(), |arm| format!("{}, {name}", arm.name));
            found.push(Named { name, stated: arm, values });
        }
    }
    for (index, Named { name, .. }) in found.iter().enumerate() {
        if found[..index].iter().any(|earlier| earlier.name == *name) {
            return Err(experiment.rule(format!("arms: {name:?}"), "two arms have this name: give each its own"));
        }
    }
    let names: Vec<&str> = found.iter().map(|arm| arm.name.as_str()).collect();
    if !names.contains(&file.reference.as_str()) {
        let fix = format!("names no arm; there are {}", quoted(&names));
        return Err(experiment.rule(format!("reference = {:?}", file.reference), fix));
    }
    let tables = Tables { experiment, found: &found };
    let arm = |index: usize| {
        let Named { name, stated, .. } = &found[index];
        Ok(Arm { name: name.clone(), stated: stated.cloned(), table: tables.table(index, 0)? })
    };
    (0..found.len()).map(arm).collect()
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
}

/// Makes the tables of arms, some of which are derived from others.
struct Tables<'a> {
    experiment: &'a Experiment,
    found: &'a [Named<'a>],
}

impl Tables<'_> {
    fn table(&self, index: usize, depth: usize) -> Result<Table, AblateError> {
        let experiment = self.experiment;
        let Named { name, stated, values } = &self.found[index];
        let mut table = experiment.file.run.clone();
        if let Some(arm) = stated {
            if let Some(model) = &arm.model {
                let path = experiment.path.with_file_name(model);
                table.insert("model".into(), Value::Table(config_file::load_table(&path, &[])?));
            }
            if arm.kind != ArmKind::Stated {
                table = self.source(name, arm, depth)?;
                let config = run_config(experiment, name, &table)?;
                table.insert("model".into(), Value::Table(baseline::derive(arm.kind, &config)));
            }
        }
        let set = stated.map(|arm| axes(&arm.set)).unwrap_or_default();
        for (key, value) in set.iter().chain(*values) {
            config_file::set_value(&mut table, key, value)
                .map_err(|error| experiment.rule(format!("arm {name:?}: {key}"), error.to_string()))?;
        }
        Ok(table)
    }

    /// The table that a baseline is derived from.
    fn source(&self, name: &str, arm: &ArmConfig, depth: usize) -> Result<Table, AblateError> {
        let file = &self.experiment.file;
        let from = match &arm.from {
            None if *name == file.reference => return Ok(file.run.clone()),
            from => from.as_ref().unwrap_or(&file.reference),
        };
        let key = format!("arms {name:?}: from = {from:?}");
        let index = self.found.iter().position(|found| found.name == *from);
        let index = index.ok_or_else(|| self.experiment.rule(&key, "names no arm"))?;
        if depth >= self.found.len() {
            return Err(self.experiment.rule(key, "arms are derived from each other in a ring"));
        }
        let mut table = self.table(index, depth + 1)?;
        // Only the model is the other arm's: how to train is the experiment's.
        let model = table.remove("model");
        let mut own = file.run.clone();
        model.map(|model| own.insert("model".into(), model));
        Ok(own)
    }
}

/// The table of an arm as a checked config. Steps are those of the file: the budget comes later.
pub(super) fn run_config(experiment: &Experiment, arm: &str, table: &Table) -> Result<RunConfig, AblateError> {
    RunConfig::from_table(table.clone(), &experiment.path)
        .map_err(|source| AblateError::Arm { arm: arm.into(), source: Box::new(source) })
}

fn combinations(axes: &[(String, Value)]) -> Vec<Combination> {
    let short = short_names(axes);
    let mut found = vec![Combination { name: String::new(), values: Vec::new() }];
    for ((key, values), short) in axes.iter().zip(short) {
        let values = values.as_array().cloned().unwrap_or_default();
        let with = |before: &Combination| {
            let one = |value: &Value| {
                let comma = if before.name.is_empty() { "" } else { ", " };
                let name = format!("{}{comma}{short}={}", before.name, value_name(value));
                Combination { name, values: [&before.values[..], &[(key.clone(), value.clone())]].concat() }
            };
            values.iter().map(one).collect::<Vec<_>>()
        };
        found = found.iter().flat_map(with).collect();
    }
    found
}

fn value_name(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// The last parts of each key path, as many as tell it from the others.
fn short_names(axes: &[(String, Value)]) -> Vec<String> {
    let last = |key: &str, n: usize| {
        let parts: Vec<&str> = key.split('.').collect();
        parts[parts.len().saturating_sub(n)..].join(".")
    };
    let longest = axes.iter().map(|(key, _)| key.split('.').count()).max().unwrap_or(1);
    let is_unique = |n: usize, key: &str| axes.iter().filter(|(other, _)| last(other, n) == last(key, n)).count() == 1;
    axes.iter().map(|(key, _)| last(key, (1..=longest).find(|&n| is_unique(n, key)).unwrap_or(longest))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(grid: &str) -> Vec<String> {
        combinations(&axes(&grid.parse().unwrap())).into_iter().map(|combination| combination.name).collect()
    }

    #[test]
    fn a_grid_is_every_combination_named_by_what_tells_it_apart() {
        assert_eq!(
            names("alpha = [0.0, 0.3]\nx.len = [1, 2]"),
            ["alpha=0.0, len=1", "alpha=0.0, len=2", "alpha=0.3, len=1", "alpha=0.3, len=2"]
        );
        // Two keys end alike: as much of them as tells them apart. A quoted path is the same path.
        assert_eq!(names("a.len = [1]\n\"b.len\" = [2]"), ["a.len=1, b.len=2"]);
        assert_eq!(names("kind = [\"muon\", { x = 1 }]"), ["kind=muon", "kind={ x = 1 }"]);
    }
}
