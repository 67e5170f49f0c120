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
