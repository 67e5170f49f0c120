//! Where a run stands, apart from its tensors.
//!
//! Batches, learning rates and samples are pure functions of the config and the step, so the step is the position in
//! the text and in the schedule, and no random generator has to be kept.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::eval::Evaluation;
use crate::guard::Guard;

/// Version of the layout and the meaning of training checkpoints.
pub(super) const FORMAT_VERSION: u32 = 1;

/// Where a run stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    pub(super) format_version: u32,
    /// Steps gone, updates made and skipped.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Weights taken into the average.
    pub average_updates: u64,
    /// The best evaluation.
    pub best: Option<Best>,
    /// The last evaluation.
    pub last: Option<Measured>,
    /// What the run was made with.
    pub made_with: MadeWith,
    /// The guard's memory.
    pub guard: Guard,
    /// Bytes of each file of metrics, by its path in the run folder.
    pub files: BTreeMap<String, u64>,
}

/// An evaluation that no earlier one beat.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its step.
    pub step: u64,
    /// On held-out text.
    pub bits_per_byte: f64,
}

/// An evaluation and when it was made.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Its step.
    pub step: u64,
    /// On held-out text.
    pub held_out: Evaluation,
}

/// What a run was made with beside its config.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadeWith {
    /// `cpu`, `cuda` or `wgpu`.
    pub device: String,
    /// Processes on the run; decides the order of sums.
    #[serde(default = "one")]
    pub ranks: usize,
    /// Models side by side in each of them; decides the order of sums.
    pub replicas: usize,
    /// Rows that go through a model at once; decides the order of sums.
    pub micro_batch_size: usize,
    /// Fingerprint of the tokenizer.
    pub tokenizer: String,
    /// Fingerprint of the texts and their split.
    pub data: String,
    /// The program.
    pub version: String,
    /// What the program was built from.
    pub commit: String,
}

/// The ranks of a run whose checkpoints do not name them.
fn one() -> usize {
    1
}

impl TrainState {
    /// Before the first step.
    pub fn new(made_with: MadeWith) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            step: 0,
            tokens: 0,
            average_updates: 0,
            best: None,
            last: None,
            made_with,
            guard: Guard::default(),
            files: BTreeMap::new(),
        }
    }
}
