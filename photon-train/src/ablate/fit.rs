//! Widths that give a model as many parameters as another.

use photon_core::config_file;
use toml::{Table, Value};

use super::experiment::{Experiment, FitConfig};
use super::{AblateError, MATCH_TOLERANCE};

/// Where `[fit]` names no keys.
const DEFAULT_KEYS: [&str; 2] = ["model.levels.*.encoder.d_ff", "model.levels.*.decoder.d_ff"];
const DEFAULT_KEYS_FLAT: [&str; 1] = ["model.stack.d_ff"];

/// Widths shrink and grow by this factor at most.
const MAX_FACTOR: f64 = 64.0;

/// What fits, with what came out.
pub(super) struct Fitted {
    pub(super) table: Table,
    /// Key paths and their values.
    pub(super) values: Vec<(String, i64)>,
}

/// An arm whose widths are to be fitted.
pub(super) struct Fit<'a> {
    pub(super) experiment: &'a Experiment,
    pub(super) arm: &'a str,
    pub(super) config: &'a FitConfig,
    /// Parameters of a table.
    pub(super) parameters: &'a dyn Fn(&Table) -> Result<usize, AblateError>,
}

impl Fit<'_> {
    /// Multiplies the widths by one factor and rounds each to its step, so that parameters come as near to `target` as that
    /// allows; then moves the last step of single widths. Nothing moves where they are near enough already.
    pub(super) fn fit(&self, table: &Table, target: usize) -> Result<Fitted, AblateError> {
        let found = (self.parameters)(table)?;
        if found.abs_diff(target) as f64 <= MATCH_TOLERANCE * target as f64 {
            return Ok(Fitted { table: table.clone(), values: Vec::new() });
        }
        let widths = self.widths(table)?;
        let scaled = |factor: f64| -> Vec<i64> {
            let step = self.config.multiple_of as f64;
            let scale = |(_, width): &(String, i64)| (*width as f64 * factor / step).round().max(1.0) * step;
            widths.iter().map(|width| scale(width) as i64).collect()
        };
        let with = |values: &[i64]| -> Result<Table, AblateError> {
            let mut table = table.clone();
            for ((key, _), &value) in widths.iter().zip(values) {
                config_file::set_value(&mut table, key, &Value::Integer(value))
                    .map_err(|error| self.experiment.rule(format!("fit.keys: {key}"), error.to_string()))?;
            }
            Ok(table)
        };
        let parameters = |values: &[i64]| (self.parameters)(&with(values)?);
        let (mut low, mut high) = (1.0 / MAX_FACTOR, MAX_FACTOR);
        for _ in 0..60 {
            let middle = (low * high).sqrt();
            match parameters(&scaled(middle))? < target {
                true => low = middle,
                false => high = middle,
            }
        }
        // Between the two sides of the last step, one width after the other.
        let (below, above) = (scaled(low), scaled(high));
        let between = (0..=below.len()).map(|n| [&above[..n], &below[n..]].concat());
        let mut best: Option<(usize, Vec<i64>)> = None;
        for values in between {
            let distance = parameters(&values)?.abs_diff(target);
            if best.as_ref().is_none_or(|(least, _)| distance < *least) {
                best = Some((distance, values));
            }
        }
        let (_, values) = best.expect("there is one more than widths");
        Ok(Fitted { table: with(&values)?, values: widths.into_iter().map(|(key, _)| key).zip(values).collect() })
    }

    /// The free widths as they stand.
    fn widths(&self, table: &Table) -> Result<Vec<(String, i64)>, AblateError> {
        let is_flat = config_file::value_at(table, "model.architecture").and_then(Value::as_str) == Some("flat");
        let keys: Vec<String> = match (self.config.keys.is_empty(), is_flat) {
            (false, _) => self.config.keys.clone(),
            (true, true) => DEFAULT_KEYS_FLAT.map(str::to_owned).to_vec(),
            (true, false) => DEFAULT_KEYS.map(str::to_owned).to_vec(),
        };
        let mut widths = Vec::new();
        for key in &keys {
            let fault = |fix: String| self.experiment.rule(format!("arm {:?}: fit.keys: {key}", self.arm), fix);
            for path in config_file::key_paths(table, key).map_err(|error| fault(error.to_string()))? {
                let width = config_file::value_at(table, &path).and_then(Value::as_integer).filter(|&width| width > 0);
                let width = width.ok_or_else(|| {
                    fault("is no whole number above 0 of this arm's model: give the arm a `fit` of its own".into())
                })?;
                widths.push((path, width));
            }
        }
        Ok(widths)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use photon_core::accounting::model_cost;

    use super::super::test_data::table;
    use super::*;
    use crate::config::RunConfig;

    fn fit(more: &str, keys: &[&str], target: usize) -> Result<(Vec<(String, i64)>, usize), AblateError> {
        let text = "seeds = [1]\nreference = \"a\"\n[budget]\nsteps = 1\n[run]\n[[arms]]\nname = \"a\"\n";
        let file = toml::from_str(text).unwrap();
        let experiment = Experiment { path: PathBuf::from("/here/experiment.toml"), name: "e".into(), file };
        let config = FitConfig { keys: keys.iter().map(|&key| key.into()).collect(), ..FitConfig::default() };
        let count = |table: &Table| {
            let run = RunConfig::from_table(table.clone(), "a.toml".as_ref()).unwrap();
            Ok(model_cost(&run.model, 64).parameters())
        };
        let fit = Fit { experiment: &experiment, arm: "a", config: &config, parameters: &count };
        let fitted = fit.fit(&table(more), target)?;
        let n = count(&fitted.table)?;
        Ok((fitted.values, n))
    }

    #[test]
    fn widths_keep_their_proportions_and_come_as_near_as_their_steps_allow() {
        let (_, own) = fit("", &[], 1).unwrap();
        assert!(own < 170_000, "the smallest widths: {own}");
        let (values, found) = fit("", &[], 300_000).unwrap();
        assert!(found.abs_diff(300_000) <= 3 * 64 * 8 * 2, "a step of one width at most: {found}");
        let (wide, narrow) = (values[0].1, values[1].1);
        assert!((wide - 2 * narrow).abs() <= 16 && values.iter().all(|(_, width)| width % 8 == 0), "{values:?}");
        // One key alone.
        let (values, found) = fit("", &["model.levels.0.encoder.d_ff"], 300_000).unwrap();
        assert!(values.len() == 1 && found.abs_diff(300_000) <= 3 * 64 * 8, "{values:?} {found}");
    }

    #[test]
    fn what_is_near_enough_is_left_alone_and_a_wrong_key_is_named() {
        let (_, own) = fit("", &[], 300_000).unwrap();
        let (as_stated, stated) = {
            let run = RunConfig::from_table(table(""), "a.toml".as_ref()).unwrap();
            let n = model_cost(&run.model, 64).parameters();
            fit("", &[], n + n / 200).unwrap()
        };
        assert!(as_stated.is_empty() && stated != own);
        let error = fit("", &["model.levels.0.encoder.width"], 300_000).unwrap_err().to_string();
        assert!(error.contains("fit.keys: model.levels.0.encoder.width: is no whole number"), "{error}");
    }
}
