//! Training checkpoints: all that a run needs to go on as if it had never stopped.
//!
//! ```text
//! checkpoints/step-00000300/     one whole state of the run
//!     model.safetensors          the weights that are evaluated: with `ema`, the average
//!     config.toml, tokenizer.json
//!     trained.safetensors        with `ema`: the weights that go on learning
//!     optimizer.safetensors      what the optimiser remembers, under the parameters' names
//!     run.toml                   the resolved config of the run
//!     state.toml                 the rest: position, best so far, guards, lengths of the metrics
//!     manifest.toml              length and SHA-256 of all of them
//! checkpoints/last, best         model, config and tokenizer of one of them, for generation and evaluation
//! checkpoints/damaged-step-…     one that was found damaged and set aside
//! ```
//!
//! A checkpoint is written beside its place and renamed, so that at every moment it is there whole or not at all.
//! `last` and `best` share their files with the checkpoints (hard links, copies where there are none); of the three
//! only the weights ever change, by one rename, so they too are whole at every moment.

mod differences;
mod folder;
mod manifest;
mod optimizer_file;
mod state;

pub use differences::{Difference, differences};
pub(crate) use differences::{flat, is_free};
pub(crate) use folder::CHECKPOINTS;
pub use folder::{Checkpoints, Contents, Damaged, Found};
pub use manifest::DamageError;
pub(crate) use manifest::file_hash;
pub use state::{Best, MadeWith, Measured, TrainState};

use std::path::PathBuf;

use photon_core::checkpoint::CheckpointError;

/// The files of a checkpoint that are a model by themselves; the weights come last, because they alone ever change.
const MODEL_FILES: [&str; 3] = ["config.toml", "tokenizer.json", "model.safetensors"];
const MODEL: &str = "model.safetensors";
const TRAINED: &str = "trained.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const RUN: &str = "run.toml";
const STATE: &str = "state.toml";

/// Why a checkpoint could not be written or taken up.
#[derive(Debug, thiserror::Error)]
pub enum TrainingCheckpointError {
    /// The system refuses.
    #[error("cannot {action} {path}: {reason}")]
    Io {
        /// `read`, `rename`, ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// The system refuses to write, mostly for want of space.
    #[error("cannot write {path}: {reason}; is the disk full? Earlier checkpoints are untouched")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        reason: String,
    },
    /// The weights.
    #[error(transparent)]
    Weights(#[from] CheckpointError),
    /// The optimiser's memory is another model's.
    #[error("{path} does not fit the model: {}", .problems.join("; "))]
    Optimizer {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        problems: Vec<String>,
    },
    /// There are checkpoints, but none that can be trusted.
    #[error("{path} holds no checkpoint that is whole:\n{}\nbring one back from a copy, or begin anew with --overwrite", list(.damaged))]
    NoneWhole {
        /// The folder of checkpoints.
        path: PathBuf,
        /// What is wrong with each.
        damaged: Vec<Damaged>,
    },
    /// The run would not be the one that was begun.
    #[error(
        "{path} cannot go on, because this would be another run:\n{}\ntake that back, or begin a run of its own with \
         another --out", list(.differences)
    )]
    Differs {
        /// The run folder.
        path: PathBuf,
        /// What is not as it was.
        differences: Vec<Difference>,
    },
}

fn list(items: &[impl std::fmt::Display]) -> String {
    items.iter().map(|item| format!("  {item}")).collect::<Vec<_>>().join("\n")
}
