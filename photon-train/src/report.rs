//! What a run tells of itself: to whoever watches it, and line by line in `metrics.jsonl`.

use std::fmt;
use std::path::PathBuf;

use burn::tensor::Device;
use photon_core::memory::{peak_memory_bytes, resident_memory_bytes};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::eval::Evaluation;
use crate::guard::SkipReason;

/// One update in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Steps gone, this one included.
    pub step: u64,
    /// Tokens seen, this step's included.
    pub tokens: u64,
    /// Mean cross-entropy of the batch before the update.
    pub loss_nats: f64,
    /// The same in bits a byte of text.
    pub bits_per_byte: f64,
    /// Reconstruction distance before `alpha`.
    pub reconstruction: f64,
    /// Mean square of the log of the softmax's denominator, before its weight; 0 where that is.
    pub z: f64,
    /// Tokens of a row, padding included.
    pub seq_len: usize,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// The same of each stage, in the order of the model; in the file an object.
    #[serde(serialize_with = "as_object")]
    pub stage_gradient_norms: Vec<(String, f64)>,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Tokens a second over this update.
    pub tokens_per_sec: f64,
    /// Useful arithmetic a second over [the machine's peak](crate::peak::Peak), where that is known.
    pub share_of_peak: Option<f64>,
    /// What the process holds.
    pub memory: Memory,
}

/// What a process holds, in bytes, each where the system tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Now, in the host's memory.
    pub resident_bytes: Option<usize>,
    /// The most there so far.
    pub peak_bytes: Option<usize>,
    /// What the allocator of a GPU has reserved there.
    pub device_bytes: Option<u64>,
}

impl Memory {
    /// At this moment.
    pub fn now(device: &Device) -> Self {
        Self {
            resident_bytes: resident_memory_bytes(),
            peak_bytes: peak_memory_bytes(),
            device_bytes: device.memory_pool_usage().map(|usage| usage.bytes_reserved),
        }
    }
}

/// Pairs as an object that keeps their order.
fn as_object<S: Serializer, V: Serialize>(pairs: &[(String, V)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, value)| (name, value)))
}

/// An update that was not made.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SkipReport {
    /// Steps gone, this one included.
    pub step: u64,
    /// Tokens seen, this step's included.
    pub tokens: u64,
    /// Why.
    pub reason: SkipReason,
    /// Mean cross-entropy of the batch; `null` in the file where it is not finite.
    pub loss_nats: f64,
    /// Norm of all gradients, likewise.
    pub gradient_norm: f64,
    /// Running mean of the norms of the updates made; none in the beginning.
    pub usual_norm: Option<f64>,
    /// Learning rate that the update would have had.
    pub learning_rate: f64,
    /// Parts of the model whose gradient is not finite.
    pub bad_parts: Vec<String>,
    /// Updates skipped in a row, this one included.
    pub skipped_in_a_row: u64,
}

/// A run that only skips.
#[derive(Debug, thiserror::Error)]
pub struct StuckReport {
    /// The last update that was skipped.
    pub last: SkipReport,
    /// The newest steps, one a line.
    pub recent: String,
    /// The newest checkpoint.
    pub checkpoint: Option<PathBuf>,
}

impl fmt::Display for StuckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SkipReport { step, reason, learning_rate, usual_norm, bad_parts, skipped_in_a_row, .. } = &self.last;
        writeln!(f, "{skipped_in_a_row} updates in a row were skipped, the last at step {step}: {reason}")?;
        writeln!(f, "{}", self.recent)?;
        writeln!(f, "learning rate {learning_rate:e}, usual gradient norm {usual_norm:?}")?;
        if !bad_parts.is_empty() {
            writeln!(f, "gradients that are not finite: {}", bad_parts.join(", "))?;
        }
        match &self.checkpoint {
            Some(path) => writeln!(f, "the newest checkpoint is as it was: {}", path.display())?,
            None => writeln!(f, "there is no checkpoint yet")?,
        }
        f.write_str(match reason {
            SkipReason::GradientSpike => {
                "what to do: look at the texts of these steps; if gradients are rightly this large, raise \
                 guards.spike_factor and go on with --resume"
            }
            _ => {
                "what to do: begin another run with a lower optimizer.learning_rate, a longer optimizer.warmup_steps or a \
                 lower optimizer.clip_norm"
            }
        })
    }
}

/// One evaluation in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalReport {
    /// Steps gone.
    pub step: u64,
    /// On held-out text.
    pub held_out: Evaluation,
    /// On the held-out text of each source, where there are several; in the file an object.
    #[serde(serialize_with = "as_object", skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<(String, Evaluation)>,
    /// Text from the model.
    pub sample: Option<String>,
    /// Whether no evaluation before was better; never so for fresh weights, which are no result.
    pub is_best: bool,
}

/// Who watches a run.
pub trait Observer {
    /// After each update.
    fn step(&mut self, report: &StepReport);
    /// After each evaluation.
    fn evaluation(&mut self, report: &EvalReport);
    /// After each update that was not made.
    fn skip(&mut self, _report: &SkipReport) {}
    /// Something that a person should know.
    fn notice(&mut self, _text: &str) {}
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Steps gone.
    pub steps: u64,
    /// The last evaluation.
    pub last: Evaluation,
    /// Fewest held-out bits per byte of any evaluation after a step; infinite if there was none.
    pub best_bits_per_byte: f64,
    /// Whether it was asked to stop before the last step.
    pub interrupted: bool,
}

/// One line of `metrics.jsonl`.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Line<'a> {
    Step(&'a StepReport),
    Skip(&'a SkipReport),
    Evaluation(&'a EvalReport),
}
