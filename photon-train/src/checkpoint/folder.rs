//! The checkpoints of a run: written whole, found, linked to, and removed when they are not needed.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use photon_core::atomic_file::{self, UNFINISHED, sync_folder};
use photon_core::checkpoint as weights;
use photon_core::config::ModelConfig;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use toml::Table;

use super::manifest::{self, DamageError};
use super::state::FORMAT_VERSION;
use super::{MODEL, MODEL_FILES, OPTIMIZER, RUN, STATE, TRAINED, TrainState, TrainingCheckpointError, optimizer_file};
use crate::config::RetentionConfig;
use crate::optimizer::OptimizerMemory;

/// What a folder is called while it is removed; whoever starts removes what a killed process has left.
const REMOVED: &str = ".removed-";
const STEP: &str = "step-";
/// In a run folder.
pub(crate) const CHECKPOINTS: &str = "checkpoints";
const DAMAGED: &str = "damaged-";

/// The folder of a run's checkpoints.
pub struct Checkpoints {
    path: PathBuf,
}

/// What goes into a checkpoint.
pub struct Contents<'a> {
    /// The weights that are evaluated.
    pub evaluated: &'a Model,
    /// The weights that learn, where others are evaluated.
    pub trained: Option<&'a Model>,
    /// Text to tokens and back.
    pub tokenizer: &'a Tokenizer,
    /// The optimiser's.
    pub memory: &'a OptimizerMemory,
    /// The resolved config of the run.
    pub run_config: &'a str,
    /// The rest.
    pub state: &'a TrainState,
}

/// A checkpoint that is whole.
#[derive(Debug)]
pub struct Found {
    /// Its folder.
    pub path: PathBuf,
    /// Where the run stood.
    pub state: TrainState,
    /// The resolved config of the run.
    pub run_config: Table,
}

/// A checkpoint that is not.
#[derive(Debug)]
pub struct Damaged {
    /// Its folder.
    pub path: PathBuf,
    /// What is wrong.
    pub reason: DamageError,
}

impl std::fmt::Display for Damaged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.reason)
    }
}

impl Checkpoints {
    /// Those of the run in `folder`, which need not be there.
    pub fn of_run(folder: &Path) -> Self {
        Self { path: folder.join(CHECKPOINTS) }
    }

    /// Writes a checkpoint and makes it `last`, and `best` if it is. Earlier ones stay as they are.
    ///
    /// # Errors
    ///
    /// When the system refuses; what is half-written is removed.
    pub fn save(&self, contents: &Contents) -> Result<(), TrainingCheckpointError> {
        let state = contents.state;
        fs::create_dir_all(&self.path).map_err(write(&self.path))?;
        let unfinished = atomic_file::folder_in(&self.path).map_err(write(&self.path))?;
        write_contents(unfinished.path(), contents)?;
        let place = self.place(state.step);
        // There is one if the run fell back on an earlier checkpoint and came here again.
        self.remove(&place)?;
        fs::rename(unfinished.path(), &place).map_err(write(&place))?;
        let _ = unfinished.keep();
        sync_folder(&self.path).map_err(write(&self.path))?;
        self.publish(state)
    }

    /// Makes `last` and `best` what they were at this state.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    pub fn publish(&self, state: &TrainState) -> Result<(), TrainingCheckpointError> {
        self.link(state.step, "last")?;
        state.best.map_or(Ok(()), |best| self.link(best.step, "best"))
    }

    /// Removes the checkpoints that the config does not keep. The best ones of those kept stay too.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    pub fn retain(&self, retention: &RetentionConfig) -> Result<(), TrainingCheckpointError> {
        let steps = self.steps().map_err(read(&self.path))?;
        let newest = &steps[steps.len().saturating_sub(retention.keep_last)..];
        let mut kept: BTreeSet<u64> = newest.iter().copied().collect();
        kept.extend(newest.iter().filter_map(|&step| read_state(&self.place(step)).ok()?.best).map(|best| best.step));
        if let Some(n) = retention.keep_every_steps {
            kept.extend(steps.iter().filter(|step| step.is_multiple_of(n)));
        }
        steps.iter().filter(|step| !kept.contains(step)).try_for_each(|&step| self.remove(&self.place(step)))
    }

    /// Removes what a process that was killed has left half-written or half-removed.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    pub fn clean(&self) -> Result<(), TrainingCheckpointError> {
        for name in self.names().map_err(read(&self.path))? {
            if name.starts_with(UNFINISHED) || name.starts_with(REMOVED) {
                let path = self.path.join(name);
                fs::remove_dir_all(&path).map_err(io_error("remove", &path))?;
            }
        }
        Ok(())
    }

    /// The newest checkpoint that is whole, and the newer ones that are not.
    ///
    /// # Errors
    ///
    /// If there are checkpoints and none is whole, or the system refuses.
    pub fn newest_whole(&self) -> Result<(Option<Found>, Vec<Damaged>), TrainingCheckpointError> {
        let mut damaged = Vec::new();
        for step in self.steps().map_err(read(&self.path))?.into_iter().rev() {
            let path = self.place(step);
            match open(&path) {
                Ok(found) => return Ok((Some(found), damaged)),
                Err(reason) => damaged.push(Damaged { path, reason }),
            }
        }
        match damaged.is_empty() {
            true => Ok((None, damaged)),
            false => Err(TrainingCheckpointError::NoneWhole { path: self.path.clone(), damaged }),
        }
    }

    /// The folder of the newest checkpoint.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    pub fn newest(&self) -> Result<Option<PathBuf>, TrainingCheckpointError> {
        Ok(self.steps().map_err(read(&self.path))?.last().map(|&step| self.place(step)))
    }

    /// Takes a damaged checkpoint out of the way, and says where to.
    ///
    /// # Errors
    ///
    /// When the system refuses.
    pub fn set_aside(&self, damaged: &Damaged) -> Result<PathBuf, TrainingCheckpointError> {
        let name = damaged.path.file_name().expect("a checkpoint has a name").to_string_lossy();
        let aside = self.path.join(format!("{DAMAGED}{name}"));
        self.remove(&aside)?;
        fs::rename(&damaged.path, &aside).map_err(io_error("rename", &damaged.path))?;
        Ok(aside)
    }

    fn place(&self, step: u64) -> PathBuf {
        self.path.join(format!("{STEP}{step:08}"))
    }

    /// Removes a folder if it is there; one that is half-removed is not taken for a checkpoint.
    fn remove(&self, path: &Path) -> Result<(), TrainingCheckpointError> {
        if !path.exists() {
            return Ok(());
        }
        let name = path.file_name().expect("a checkpoint has a name").to_string_lossy();
        let removed = self.path.join(format!("{REMOVED}{name}"));
        fs::rename(path, &removed).map_err(io_error("rename", path))?;
        fs::remove_dir_all(&removed).map_err(io_error("remove", &removed))
    }

    /// Gives a folder the model of a checkpoint, without copying it where the file system can.
    fn link(&self, step: u64, name: &str) -> Result<(), TrainingCheckpointError> {
        let (from, to) = (self.place(step), self.path.join(name));
        if !from.exists() {
            // Of a best one that was kept no longer, what is there already stays.
            return Ok(());
        }
        fs::create_dir_all(&to).map_err(write(&to))?;
        for file in MODEL_FILES {
            let (source, place) = (from.join(file), to.join(file));
            let beside = to.join(format!("{UNFINISHED}{file}"));
            let put = || {
                remove_file_if_there(&beside)?;
                if fs::hard_link(&source, &beside).is_err() {
                    fs::copy(&source, &beside)?;
                    fs::OpenOptions::new().write(true).open(&beside)?.sync_all()?;
                }
                fs::rename(&beside, &place)?;
                // Renaming a link onto another of the same file does nothing at all.
                remove_file_if_there(&beside)
            };
            put().map_err(write(&place))?;
        }
        sync_folder(&to).map_err(write(&to))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        match fs::read_dir(&self.path) {
            Ok(entries) => entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// The steps of the checkpoints that are there, whole or not, oldest first.
    fn steps(&self) -> io::Result<Vec<u64>> {
        let names = self.names()?;
        let mut steps: Vec<u64> = names.iter().filter_map(|name| name.strip_prefix(STEP)?.parse().ok()).collect();
        steps.sort_unstable();
        Ok(steps)
    }
}

impl Found {
    /// The weights that learn, and the average where one is kept.
    ///
    /// # Errors
    ///
    /// Weights that do not fit the config.
    pub fn load_models(
        &self,
        config: &ModelConfig,
        device: &burn::tensor::Device,
    ) -> Result<(Model, Option<Model>), TrainingCheckpointError> {
        let load = |file| weights::load_weights(&self.path.join(file), config, device);
        match self.path.join(TRAINED).exists() {
            true => Ok((load(TRAINED)?, Some(load(MODEL)?))),
            false => Ok((load(MODEL)?, None)),
        }
    }

    /// What the optimiser remembered.
    ///
    /// # Errors
    ///
    /// A file that is no such memory.
    pub fn load_memory(&self) -> Result<OptimizerMemory, TrainingCheckpointError> {
        optimizer_file::load(&self.path.join(OPTIMIZER))
    }

    /// The memory does not fit the model.
    pub(crate) fn misfit(&self, problems: Vec<String>) -> TrainingCheckpointError {
        TrainingCheckpointError::Optimizer { path: self.path.join(OPTIMIZER), problems }
    }
}

fn write_contents(folder: &Path, contents: &Contents) -> Result<(), TrainingCheckpointError> {
    weights::save(folder, contents.evaluated, contents.tokenizer)?;
    if let Some(trained) = contents.trained {
        weights::save_weights(&folder.join(TRAINED), trained)?;
    }
    optimizer_file::save(&folder.join(OPTIMIZER), contents.memory)?;
    let state = toml::to_string(contents.state).expect("a state is plain data");
    for (file, text) in [(RUN, contents.run_config), (STATE, &state)] {
        let path = folder.join(file);
        atomic_file::write(&path, text.as_bytes()).map_err(write(&path))?;
    }
    manifest::write(folder).map_err(write(folder))
}

/// Opens a checkpoint that is whole.
fn open(path: &Path) -> Result<Found, DamageError> {
    manifest::verify(path, &[&MODEL_FILES[..], &[OPTIMIZER, RUN, STATE]].concat())?;
    let state = read_state(path)?;
    let run_config = read_text(path, RUN)?
        .parse()
        .map_err(|error: toml::de::Error| DamageError::Content { file: RUN, reason: error.message().to_owned() })?;
    Ok(Found { path: path.into(), state, run_config })
}

fn read_state(folder: &Path) -> Result<TrainState, DamageError> {
    let content = |reason: String| DamageError::Content { file: STATE, reason };
    let table: Table =
        read_text(folder, STATE)?.parse().map_err(|error: toml::de::Error| content(error.message().to_owned()))?;
    match table.get("format_version").and_then(toml::Value::as_integer) {
        Some(version) if version == i64::from(FORMAT_VERSION) => {}
        found => {
            let found = found.map_or("none".to_owned(), |version| version.to_string());
            return Err(content(format!("format version {found}, expected {FORMAT_VERSION}")));
        }
    }
    table.try_into().map_err(|error: toml::de::Error| content(error.message().to_owned()))
}

fn read_text(folder: &Path, file: &str) -> Result<String, DamageError> {
    let path = folder.join(file);
    fs::read_to_string(&path).map_err(|source| DamageError::Read { path, source })
}

fn remove_file_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TrainingCheckpointError {
    let path = path.to_owned();
    move |error| TrainingCheckpointError::Io { action, path, reason: error.to_string() }
}

fn read(path: &Path) -> impl FnOnce(io::Error) -> TrainingCheckpointError {
    io_error("read", path)
}

fn write(path: &Path) -> impl FnOnce(io::Error) -> TrainingCheckpointError {
    let path = path.to_owned();
    move |error| TrainingCheckpointError::Write { path, reason: error.to_string() }
}
