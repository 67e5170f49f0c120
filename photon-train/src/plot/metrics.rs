//! The `metrics.jsonl` of a run, read back.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// What a run tells of itself, as far as curves need it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunMetrics {
    /// The name of its folder.
    pub name: String,
    /// Updates, those that were skipped left out.
    pub steps: Vec<StepPoint>,
    /// Evaluations.
    pub evaluations: Vec<EvalPoint>,
}

/// One update.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPoint {
    /// Steps gone.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Time spent on updates up to here: evaluations, pauses and updates that were skipped count for nothing.
    pub secs: f64,
    /// Of the batch.
    pub loss_nats: f64,
    /// Of the batch.
    pub bits_per_byte: f64,
    /// Before clipping.
    pub gradient_norm: f64,
    /// The same of each stage.
    pub stage_gradient_norms: BTreeMap<String, f64>,
    /// Of the update.
    pub learning_rate: f64,
    /// Over the update.
    pub tokens_per_sec: f64,
    /// Where it was known.
    pub share_of_peak: Option<f64>,
}

/// One evaluation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EvalPoint {
    /// Steps gone.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// As in [`StepPoint::secs`].
    pub secs: f64,
    /// On all held-out text.
    pub bits_per_byte: f64,
    /// On that of each source, where there are several.
    pub sources: BTreeMap<String, f64>,
}

/// Why metrics cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The file.
    #[error("cannot read {path}: {source}; is it a run folder?")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Something in it.
    #[error("{path}, line {line}: no line of metrics: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: serde_json::Error,
    },
    /// Nothing in it.
    #[error("{path} holds no step and no evaluation yet")]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// A line; numbers that are not finite are `null`.
#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line {
    Step {
        step: u64,
        tokens: u64,
        loss_nats: Option<f64>,
        bits_per_byte: Option<f64>,
        gradient_norm: Option<f64>,
        #[serde(default)]
        stage_gradient_norms: BTreeMap<String, Option<f64>>,
        learning_rate: Option<f64>,
        tokens_per_sec: Option<f64>,
        #[serde(default)]
        share_of_peak: Option<f64>,
    },
    Skip {
        tokens: u64,
    },
    Evaluation {
        step: u64,
        held_out: HeldOut,
        #[serde(default)]
        sources: BTreeMap<String, HeldOut>,
    },
    /// Of a later version.
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct HeldOut {
    bits_per_byte: Option<f64>,
}

impl RunMetrics {
    /// Of a run folder, or a file like its `metrics.jsonl`. The last line may be cut, as by a run that was killed.
    ///
    /// # Errors
    ///
    /// A file that is not there, damaged or empty.
    pub fn read(path: &Path) -> Result<Self, MetricsError> {
        let (folder, file) = match path.is_dir() {
            true => (path, path.join("metrics.jsonl")),
            false => (path.parent().unwrap_or(path), path.to_owned()),
        };
        let text =
            std::fs::read_to_string(&file).map_err(|source| MetricsError::Read { path: file.clone(), source })?;
        let name = match folder.file_name() {
            Some(name) => name.to_string_lossy().into_owned(),
            None => folder.display().to_string(),
        };
        let mut run = Self { name, ..Self::default() };
        let (mut tokens, mut secs) = (0, 0.0);
        let whole_lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        for (index, line) in whole_lines.enumerate() {
            let damaged = |reason| MetricsError::Damaged { path: file.clone(), line: index + 1, reason };
            run.take(serde_json::from_str(line).map_err(damaged)?, &mut tokens, &mut secs);
        }
        match run.steps.is_empty() && run.evaluations.is_empty() {
            true => Err(MetricsError::Empty { path: file }),
            false => Ok(run),
        }
    }

    fn take(&mut self, line: Line, tokens: &mut u64, secs: &mut f64) {
        let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
        match line {
            Line::Step {
                step,
                tokens: now,
                loss_nats,
                bits_per_byte,
                gradient_norm,
                stage_gradient_norms,
                learning_rate,
                tokens_per_sec,
                share_of_peak,
            } => {
                *secs += tokens_per_sec.map_or(0.0, |speed| now.saturating_sub(*tokens) as f64 / speed);
                *tokens = now;
                let stages = stage_gradient_norms.into_iter();
                self.steps.push(StepPoint {
                    step,
                    tokens: now,
                    secs: *secs,
                    loss_nats: number(loss_nats),
                    bits_per_byte: number(bits_per_byte),
                    gradient_norm: number(gradient_norm),
                    stage_gradient_norms: stages.map(|(stage, norm)| (stage, number(norm))).collect(),
                    learning_rate: number(learning_rate),
                    tokens_per_sec: number(tokens_per_sec),
                    share_of_peak,
                });
            }
            Line::Skip { tokens: now } => *tokens = now,
            Line::Other => {}
            Line::Evaluation { step, held_out, sources } => self.evaluations.push(EvalPoint {
                step,
                tokens: *tokens,
                secs: *secs,
                bits_per_byte: number(held_out.bits_per_byte),
                sources: sources.into_iter().map(|(name, of)| (name, number(of.bits_per_byte))).collect(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, tokens: u64, speed: &str) -> String {
        format!(
            "{{\"kind\":\"step\",\"step\":{step},\"tokens\":{tokens},\"loss_nats\":2.0,\"bits_per_byte\":3.0,\
             \"gradient_norm\":null,\"learning_rate\":0.1,\"tokens_per_sec\":{speed},\"of_a_later_version\":[]}}\n"
        )
    }

    fn read(text: &str) -> Result<RunMetrics, String> {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("a run");
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("metrics.jsonl"), text).unwrap();
        let (of_folder, of_file) = (RunMetrics::read(&run), RunMetrics::read(&run.join("metrics.jsonl")));
        // As texts, because NaN is not equal to itself.
        assert_eq!(format!("{:?}", of_folder.as_ref().ok()), format!("{:?}", of_file.as_ref().ok()));
        of_folder.map_err(|error| error.to_string())
    }

    #[test]
    fn time_and_tokens_are_those_of_updates() {
        let evaluation = |step: u64| {
            format!(
                "{{\"kind\":\"evaluation\",\"step\":{step},\"held_out\":{{\"bits_per_byte\":4.5}},\"sample\":null}}\n"
            )
        };
        let skip = "{\"kind\":\"skip\",\"step\":2,\"tokens\":200}\n{\"kind\":\"of_a_later_version\",\"a\":1}\n";
        let lines =
            [&evaluation(0), &step(1, 100, "50.0"), skip, &step(3, 300, "25.0"), &evaluation(3), "{\"kind\":\"st"];
        let run = read(&lines.concat()).unwrap();
        assert_eq!(run.name, "a run");
        assert_eq!(run.steps.iter().map(|step| step.secs).collect::<Vec<_>>(), [2.0, 6.0]);
        assert!(run.steps[0].gradient_norm.is_nan());
        let evaluations = run.evaluations.iter().map(|at| (at.step, at.tokens, at.secs, at.bits_per_byte));
        assert_eq!(evaluations.collect::<Vec<_>>(), [(0, 0, 0.0, 4.5), (3, 300, 6.0, 4.5)]);
    }

    #[test]
    fn damage_is_named() {
        let said = read(&(step(1, 100, "50.0") + "{\"kind\":\"step\"}\n")).unwrap_err();
        assert!(said.contains("metrics.jsonl, line 2: no line of metrics: missing field"), "{said}");
        assert!(read("{\"kind\":\"step\"").unwrap_err().contains("metrics.jsonl holds no step"));
        let missing = RunMetrics::read(Path::new("no such run")).unwrap_err().to_string();
        assert!(missing.starts_with("cannot read no such run: "), "{missing}");
    }
}
