//! The run folder: what was asked for, written before the first step, and what came of it, line by line.
//!
//! ```text
//! run.toml            the resolved config
//! run.json            seed, commit, device, parameters, data
//! metrics.jsonl       one line a logged step, one an evaluation
//! samples.txt         the samples
//! tensorboard/        events
//! checkpoints/last    the newest weights
//! checkpoints/best    the weights with the fewest held-out bits per byte
//! ```

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use photon_core::atomic_file;
use serde::Serialize;

use crate::events::EventFile;

/// Why something could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The folder holds another run.
    #[error("{path} exists and is not empty: choose another --out, or add --overwrite to replace that run")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The folder to be replaced holds something that no run has written.
    #[error("{path} is not a run folder (it has no run.toml): not removed; choose another --out")]
    NotARun {
        /// The folder.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("cannot write {path}: {source}; is the disk full?")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// What becomes of a run folder that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is an error.
    Refuse,
    /// The run in it is removed.
    Replace,
}

/// Whether a run may go to `path`: a check to make before long work.
///
/// # Errors
///
/// A folder with something in it that is not to be, or never is, replaced.
pub fn check_free(path: &Path, existing: Existing) -> Result<(), RecordError> {
    let is_empty = std::fs::read_dir(path).map_or(true, |mut entries| entries.next().is_none());
    match existing {
        _ if is_empty => Ok(()),
        Existing::Refuse => Err(RecordError::Exists { path: path.into() }),
        Existing::Replace if path.join("run.toml").is_file() => Ok(()),
        Existing::Replace => Err(RecordError::NotARun { path: path.into() }),
    }
}

/// Somewhere that numbers over steps are drawn as curves.
pub trait EventWriter {
    /// One point of a curve.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    fn scalar(&mut self, tag: &str, value: f64, step: u64) -> std::io::Result<()>;
}

/// An open run folder.
pub struct RunFolder {
    path: PathBuf,
    metrics: File,
    samples: File,
    events: Box<dyn EventWriter>,
}

impl RunFolder {
    /// Makes the folder and writes what was asked for.
    ///
    /// # Errors
    ///
    /// A folder that is taken, a system that refuses.
    pub fn create(
        path: &Path,
        existing: Existing,
        resolved_config: &str,
        facts: &impl Serialize,
    ) -> Result<Self, RecordError> {
        let write = |path: &Path| {
            let path = path.to_owned();
            move |source| RecordError::Write { path, source }
        };
        check_free(path, existing)?;
        if existing == Existing::Replace && path.join("run.toml").is_file() {
            std::fs::remove_dir_all(path).map_err(write(path))?;
        }
        std::fs::create_dir_all(path).map_err(write(path))?;
        let facts = serde_json::to_string_pretty(facts).expect("run facts are plain data");
        for (name, text) in [("run.toml", resolved_config), ("run.json", &facts)] {
            let file = path.join(name);
            atomic_file::write(&file, text.as_bytes()).map_err(write(&file))?;
        }
        let append = |name: &str| {
            let file = path.join(name);
            OpenOptions::new().create(true).append(true).open(&file).map_err(write(&file))
        };
        let events_folder = path.join("tensorboard");
        let events = EventFile::create(&events_folder).map_err(write(&events_folder))?;
        Ok(Self {
            metrics: append("metrics.jsonl")?,
            samples: append("samples.txt")?,
            events: Box::new(events),
            path: path.into(),
        })
    }

    /// Appends one line to `metrics.jsonl`.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn metrics(&mut self, line: &impl Serialize) -> Result<(), RecordError> {
        let line = serde_json::to_string(line).expect("metrics are plain data");
        let path = self.path.join("metrics.jsonl");
        writeln!(self.metrics, "{line}").map_err(|source| RecordError::Write { path, source })
    }

    /// Appends a sample.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn sample(&mut self, step: u64, text: &str) -> Result<(), RecordError> {
        let path = self.path.join("samples.txt");
        writeln!(self.samples, "--- step {step}\n{text}\n").map_err(|source| RecordError::Write { path, source })
    }

    /// One point of a curve.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn scalar(&mut self, tag: &str, value: f64, step: u64) -> Result<(), RecordError> {
        let path = self.path.join("tensorboard");
        self.events.scalar(tag, value, step).map_err(|source| RecordError::Write { path, source })
    }

    /// The folder of the newest weights.
    pub fn last_checkpoint(&self) -> PathBuf {
        self.path.join("checkpoints").join("last")
    }

    /// The folder of the best weights.
    pub fn best_checkpoint(&self) -> PathBuf {
        self.path.join("checkpoints").join("best")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_folder_is_refused_unless_told_and_a_foreign_one_always() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let create = |existing| RunFolder::create(&run, existing, "a = 1", &1).map(drop);
        create(Existing::Refuse).unwrap();
        assert!(matches!(create(Existing::Refuse), Err(RecordError::Exists { .. })));
        std::fs::write(run.join("metrics.jsonl"), "old").unwrap();
        create(Existing::Replace).unwrap();
        assert_eq!(std::fs::read_to_string(run.join("metrics.jsonl")).unwrap(), "");
        std::fs::remove_file(run.join("run.toml")).unwrap();
        assert!(matches!(create(Existing::Replace), Err(RecordError::NotARun { .. })));
        assert!(run.join("run.json").exists());
    }
}
