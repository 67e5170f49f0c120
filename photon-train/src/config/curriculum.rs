//! Rows that grow: a run may begin with short ones.

use photon_core::config::ConfigError;
use serde::{Deserialize, Serialize};

use super::{TrainConfig, rule};
use crate::data::RowShape;

/// The rows of the steps before one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CurriculumStage {
    /// The first step that is no longer of this stage, steps counted from 0.
    pub until_step: u64,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Rows of an update. Absent: so many that an update has as many tokens as in the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<usize>,
}

impl TrainConfig {
    /// The rows of every stage, in order; the last stage is the run's own `seq_len` and `batch_size`.
    pub fn row_shapes(&self) -> Vec<RowShape> {
        let starts = std::iter::once(0).chain(self.curriculum.iter().map(|stage| stage.until_step));
        let rows = self.curriculum.iter().map(|stage| (stage.seq_len, self.stage_batch_size(stage)));
        let rows = rows.chain([(self.seq_len, self.batch_size)]);
        starts.zip(rows).map(|(from_step, (seq_len, batch_size))| RowShape { from_step, seq_len, batch_size }).collect()
    }

    fn stage_batch_size(&self, stage: &CurriculumStage) -> usize {
        stage.batch_size.unwrap_or(self.batch_size * self.seq_len / stage.seq_len)
    }

    /// `check_len` is what a row of the model and the data asks of its length.
    pub(super) fn validate_curriculum(
        &self,
        check_len: impl Fn(&str, usize) -> Result<(), ConfigError>,
    ) -> Result<(), ConfigError> {
        let mut before = 0;
        for (index, stage) in self.curriculum.iter().enumerate() {
            let key = |name: &str| format!("curriculum.{index}.{name}");
            if stage.until_step <= before {
                return rule(key("until_step"), stage.until_step, format!("must be above {before}, where it begins"));
            }
            before = stage.until_step;
            check_len(&key("seq_len"), stage.seq_len)?;
            if stage.seq_len > self.seq_len {
                return rule(key("seq_len"), stage.seq_len, format!("must be at most seq_len = {}", self.seq_len));
            }
            match stage.batch_size {
                Some(0) => return rule(key("batch_size"), 0, "must be at least 1"),
                None if !(self.batch_size * self.seq_len).is_multiple_of(stage.seq_len) => {
                    let fix = format!(
                        "rows of this length do not add up to the {} tokens of an update: set batch_size beside it",
                        self.batch_size * self.seq_len
                    );
                    return rule(key("seq_len"), stage.seq_len, fix);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(curriculum: &str) -> TrainConfig {
        let text = format!("steps = 9\nseq_len = 32\nbatch_size = 3\n{curriculum}\n[data]\npaths = [\"a.txt\"]\n");
        toml::from_str(&text).unwrap()
    }

    fn fault(curriculum: &str) -> String {
        config(curriculum).validate_curriculum(|_, _| Ok(())).unwrap_err().to_string()
    }

    #[test]
    fn an_update_keeps_its_tokens_unless_told_otherwise() {
        let stages = "curriculum = [{ until_step = 2, seq_len = 8 }, { until_step = 5, seq_len = 16, batch_size = 1 }]";
        let config = config(stages);
        assert_eq!(
            config.row_shapes(),
            [(0, 8, 12), (2, 16, 1), (5, 32, 3)].map(|(from_step, seq_len, batch_size)| RowShape {
                from_step,
                seq_len,
                batch_size
            })
        );
        config.validate_curriculum(|_, _| Ok(())).unwrap();
    }

    #[test]
    fn errors_name_the_stage() {
        let stage = |stage: &str| fault(&format!("curriculum = [{{ until_step = 2, seq_len = 8 }}, {stage}]"));
        assert!(stage("{ until_step = 2, seq_len = 8 }").starts_with("curriculum.1.until_step = 2: must be above 2"));
        assert!(
            stage("{ until_step = 3, seq_len = 64 }").contains("curriculum.1.seq_len = 64: must be at most seq_len")
        );
        assert!(stage("{ until_step = 3, seq_len = 20 }").contains("curriculum.1.seq_len = 20: rows of this length"));
        assert!(stage("{ until_step = 3, seq_len = 8, batch_size = 0 }").contains("curriculum.1.batch_size = 0"));
        let long = config("curriculum = [{ until_step = 2, seq_len = 8 }]");
        let error = long.validate_curriculum(|key, len| rule(key, len, "too short")).unwrap_err().to_string();
        assert_eq!(error, "curriculum.0.seq_len = 8: too short");
    }
}
