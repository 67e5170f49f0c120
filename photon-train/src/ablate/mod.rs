//! One file describes an experiment; one command runs it, goes on with it, and writes what came of it.
//!
//! ```text
//! experiment  the file: a run, axes and arms of lines that differ, seeds, a budget, what arms have in common
//! arms        axes and arms -> one config each
//! baseline    a config -> the flat transformer and the Block Transformer of its size
//! fit         widths -> as many parameters as the reference
//! budget      tokens, steps, FLOPs or minutes -> steps, and the schedule that goes with them
//! plan        all of that together, checked
//! decided     what was decided when the experiment began, because a clock or a machine decides it
//! identity    config, seed and data -> the name of a run
//! runner, child
//!             runs -> child processes, some side by side
//! measure     a finished run -> the JSON that another program prints of it
//! outcome     a run folder -> numbers
//! results     numbers -> results.json, results.csv, timings.json
//! spread      numbers over seeds -> means, differences, and whether these are more than the spread
//! summary     results of several experiments -> the same of every arm
//! tables, pictures
//!             summaries -> a report
//! ```
//!
//! A run is `photon-train run` in a process of its own: one that fails or is killed takes no other with it, and what it
//! can go on from is what any run can.

mod arms;
mod baseline;
mod budget;
mod child;
mod decided;
mod experiment;
mod fit;
mod identity;
mod measure;
mod outcome;
mod pictures;
mod plan;
mod results;
mod runner;
mod spread;
mod summary;
mod tables;
#[cfg(test)]
mod test_data;

pub use budget::{planned_flops, planned_tokens};
pub use decided::Decided;
pub use experiment::{ArmConfig, ArmKind, Budget, Experiment, FitConfig, Match, MeasureConfig};
pub use identity::run_id;
pub use measure::MeasurePlaces;
pub use outcome::{Measured, Outcome, Timings};
pub use plan::{AskSpeed, Plan, PlannedArm};
pub use results::{AllTimings, ArmResults, CacheResults, PlannedRun, Results, RunResults, Status, cache_results};
pub use runner::{Event, Progress, Runner};
pub use spread::{Difference, Rule, Spread};
pub use summary::{ArmSummary, ExperimentSummary, FailedRun, FidelitySummary, Summary};

use std::path::PathBuf;

use photon_core::config_file::ConfigFileError;

use crate::config::RunConfigError;

/// Two budgets are matched if they differ by no more than this share of the reference's.
pub const MATCH_TOLERANCE: f64 = 0.01;

/// Why an experiment cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum AblateError {
    /// The file.
    #[error(transparent)]
    File(#[from] ConfigFileError),
    /// A value of the file breaks a rule.
    #[error("{path}: {key}: {fix}")]
    Rule {
        /// The file.
        path: PathBuf,
        /// Path of the key, and its value.
        key: String,
        /// What would be right.
        fix: String,
    },
    /// The config of an arm.
    #[error("arm {arm:?}: {source}")]
    Arm {
        /// Its name.
        arm: String,
        /// What is wrong with it.
        source: Box<RunConfigError>,
    },
    /// An arm that is not matched with the reference.
    #[error(transparent)]
    Unmatched(Box<Mismatch>),
    /// A file of the experiment's folder.
    #[error("cannot {what} {path}: {source}")]
    Io {
        /// Read or write.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file of the experiment's folder holds something else.
    #[error("{path} is damaged: {reason}; {fix}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What to do.
        fix: &'static str,
    },
    /// Somebody who was asked, for the speed of an arm for instance, has no answer.
    #[error("{0}")]
    Asked(String),
}

/// Two arms that do not have in common what they should.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "arm {arm:?} has {found} {what}, the reference {reference:?} has {expected}: they differ by {:.2} %, and at most 1 % is \
     a match; {fix}", 100.0 * (.found - .expected).abs() / .expected
)]
pub struct Mismatch {
    /// The arm.
    pub arm: String,
    /// Parameters, tokens or FLOPs.
    pub what: &'static str,
    /// The arm's.
    pub found: f64,
    /// The arm that it should match.
    pub reference: String,
    /// The reference's.
    pub expected: f64,
    /// What to do.
    pub fix: &'static str,
}

fn io(what: &'static str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> AblateError {
    let path = path.to_owned();
    move |source| AblateError::Io { what, path, source }
}
