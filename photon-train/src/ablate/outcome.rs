//! A run folder as numbers: those that are the same whenever the run is made again, and those that a clock decides.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bench::median;
use crate::checkpoint::Checkpoints;
use crate::eval::Evaluation;
use crate::plot::RunMetrics;

/// What came of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// What the program that began it was built from.
    pub commit: String,
    /// Updates, those skipped included.
    pub steps: u64,
    /// Updates skipped.
    pub skipped_updates: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// On held-out text, after the last update.
    pub last: Measured,
    /// The same where it was best.
    pub best: Measured,
    /// On the held-out text of each source after the last update, where there are several.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, Evaluation>,
    /// What other programs measured of it, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measures: BTreeMap<String, Value>,
    /// What the programs said that could not measure it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub failed_measures: BTreeMap<String, String>,
}

/// An evaluation and when it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Steps gone.
    pub step: u64,
    /// On held-out text.
    pub held_out: Evaluation,
}

/// What the machine decided of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Training tokens a second, of the median update.
    pub tokens_per_sec: Option<f64>,
    /// Time spent on updates.
    pub training_secs: f64,
    /// The most that the process held in the host's memory.
    pub peak_memory_bytes: Option<u64>,
    /// What measures took time for, by their name and then by key path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measures: BTreeMap<String, BTreeMap<String, Value>>,
}

/// What a run folder says of itself if the run in it has come to `steps`; measures are left out.
///
/// # Errors
///
/// A finished run whose files cannot be read.
pub(super) fn read_outcome(folder: &Path, steps: u64) -> io::Result<Option<(Outcome, Timings)>> {
    let Ok((Some(found), _)) = Checkpoints::of_run(folder).newest_whole() else { return Ok(None) };
    let state = found.state;
    if state.step != steps {
        return Ok(None);
    }
    let metrics = std::fs::read_to_string(folder.join("metrics.jsonl"))?;
    let mut evaluations = Vec::new();
    let mut peak_memory_bytes = None;
    for line in metrics.lines() {
        let mut line: Value = serde_json::from_str(line)?;
        peak_memory_bytes = peak_memory_bytes.max(line["memory"]["peak_bytes"].as_u64());
        if line["kind"] == "evaluation" {
            let sources: BTreeMap<String, Evaluation> = match line["sources"].take() {
                Value::Null => BTreeMap::new(),
                sources => serde_json::from_value(sources)?,
            };
            let step = line["step"].as_u64().unwrap_or_default();
            evaluations.push((Measured { step, held_out: serde_json::from_value(line["held_out"].take())? }, sources));
        }
    }
    let Some((last, sources)) = evaluations.last().cloned().filter(|(last, _)| last.step == steps) else {
        return Err(io::Error::other("metrics.jsonl does not end with the evaluation of the last step"));
    };
    let bits = |measured: &Measured| measured.held_out.bits_per_byte;
    let trained = evaluations.into_iter().map(|(measured, _)| measured).filter(|measured| measured.step > 0);
    let best = trained.reduce(|best, next| if bits(&next) < bits(&best) { next } else { best });
    let facts: Value = serde_json::from_slice(&std::fs::read(folder.join("run.json"))?)?;
    let run = RunMetrics::read(folder).map_err(io::Error::other)?;
    let speeds: Vec<f64> = run.steps.iter().map(|step| step.tokens_per_sec).filter(|n| n.is_finite()).collect();
    let outcome = Outcome {
        commit: facts["commit"].as_str().unwrap_or("unknown").to_owned(),
        steps,
        skipped_updates: state.guard.skipped,
        tokens: state.tokens,
        best: best.unwrap_or_else(|| last.clone()),
        last,
        sources,
        measures: BTreeMap::new(),
        failed_measures: BTreeMap::new(),
    };
    let timings = Timings {
        tokens_per_sec: (!speeds.is_empty()).then(|| median(speeds)),
        training_secs: run.steps.last().map_or(0.0, |last| last.secs),
        peak_memory_bytes,
        measures: BTreeMap::new(),
    };
    Ok(Some((outcome, timings)))
}
