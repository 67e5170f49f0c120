//! What was decided when an experiment began, because a clock or the machine decides it, and is then kept: an experiment
//! that goes on must be the one that was begun.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use photon_core::atomic_file;
use serde::{Deserialize, Serialize};

use super::AblateError;

/// Kept in `decided.json` of the experiment's folder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decided {
    /// Models side by side in a run, where its config leaves that open: it changes sums by rounding.
    pub replicas: usize,
    /// Tokens a second that a short benchmark measured of the arms whose steps follow from minutes.
    pub tokens_per_sec: BTreeMap<String, f64>,
}

impl Decided {
    /// What the folder of an experiment holds, or else what is given.
    ///
    /// # Errors
    ///
    /// A file that cannot be read.
    pub fn read_or(folder: &Path, new: Self) -> Result<Self, AblateError> {
        let path = place(folder);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(new),
            Err(error) => return Err(super::io("read", &path)(error)),
        };
        serde_json::from_slice(&text).map_err(|error| AblateError::Damaged {
            path,
            reason: error.to_string(),
            fix: "remove it to decide anew: runs that depend on it then begin anew too",
        })
    }

    /// Keeps it.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn write(&self, folder: &Path) -> Result<(), AblateError> {
        let path = place(folder);
        let text = serde_json::to_string_pretty(self).expect("numbers are plain data") + "\n";
        atomic_file::write(&path, text.as_bytes()).map_err(super::io("write", &path))
    }
}

fn place(folder: &Path) -> PathBuf {
    folder.join("decided.json")
}
