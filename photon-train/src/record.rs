//! The run folder: what was asked for, written before the first step, and what came of it, line by line.
//!
//! ```text
//! run.toml            the resolved config
//! run.json            seed, commit, device, parameters, data
//! resumes.jsonl       one line each time the run went on: from which step, with what
//! metrics.jsonl       one line a step, one an evaluation
//! samples.txt         the samples
//! tensorboard/        events, one file for each time the program was started
//! checkpoints/        see `checkpoint`
//! lock                held by the process that writes here
//! ```

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use photon_core::atomic_file::{self, UNFINISHED};
use serde::Serialize;

use crate::checkpoint::{CHECKPOINTS, Checkpoints};
use crate::events::EventFile;
use crate::histogram::Histogram;

const LOCK: &str = "lock";
const CONFIG: &str = "run.toml";
const METRICS: &str = "metrics.jsonl";
const SAMPLES: &str = "samples.txt";
const EVENTS: &str = "tensorboard";

/// Why something could not be recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The folder holds another run.
    #[error(
        "{path} exists and is not empty: add --resume to go on with the run in it, --overwrite to replace it, or choose \
         another --out"
    )]
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
    /// Another process writes to the folder.
    #[error("{path} is in use by another process (id {holder}): wait for it or stop it, or choose another --out")]
    InUse {
        /// The folder.
        path: PathBuf,
        /// What it says of itself.
        holder: String,
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
    /// The run in it goes on; where there is none, one begins.
    Resume,
}

/// Whether a run may go to `path`: a check to make before long work.
///
/// # Errors
///
/// A folder with something in it that is not to be, or never is, replaced; one that another process writes to.
pub fn check_free(path: &Path, existing: Existing) -> Result<(), RecordError> {
    if path.join(LOCK).exists() {
        lock(path)?;
    }
    check_contents(path, existing)
}

fn check_contents(path: &Path, existing: Existing) -> Result<(), RecordError> {
    let is_trace = |name: &OsStr| name == LOCK || name.as_encoded_bytes().starts_with(UNFINISHED.as_bytes());
    let is_empty =
        fs::read_dir(path).map_or(true, |entries| entries.flatten().all(|entry| is_trace(&entry.file_name())));
    match existing {
        _ if is_empty => Ok(()),
        Existing::Refuse => Err(RecordError::Exists { path: path.into() }),
        _ if path.join(CONFIG).is_file() => Ok(()),
        _ => Err(RecordError::NotARun { path: path.into() }),
    }
}

/// The right to write to a run folder, which one process has at a time.
///
/// The system takes the lock back when the process ends, however it ends.
pub struct Claim {
    path: PathBuf,
    _lock: File,
}

impl Claim {
    /// Claims a folder, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// If another process has it, or the system refuses.
    pub fn new(path: &Path) -> Result<Self, RecordError> {
        fs::create_dir_all(path).map_err(write(path))?;
        let mut lock = lock(path)?;
        lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())).map_err(write(&path.join(LOCK)))?;
        Ok(Self { path: path.into(), _lock: lock })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The checkpoints in it.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::of_run(&self.path)
    }

    /// Removes all but the lock: checkpoints first and the config last, so that a run that is half-removed is neither
    /// taken for one that goes on nor for something that no run has written.
    fn clear(&self) -> Result<(), RecordError> {
        let checkpoints = self.path.join(CHECKPOINTS);
        if checkpoints.exists() {
            fs::remove_dir_all(&checkpoints).map_err(write(&checkpoints))?;
        }
        self.remove(|name| name != LOCK && name != CONFIG)?;
        self.remove(|name| name == CONFIG)
    }

    fn remove(&self, is_doomed: impl Fn(&str) -> bool) -> Result<(), RecordError> {
        for entry in fs::read_dir(&self.path).map_err(write(&self.path))? {
            let entry = entry.map_err(write(&self.path))?;
            if !is_doomed(&entry.file_name().to_string_lossy()) {
                continue;
            }
            let path = entry.path();
            match entry.file_type().map_err(write(&path))?.is_dir() {
                true => fs::remove_dir_all(&path),
                false => fs::remove_file(&path),
            }
            .map_err(write(&path))?;
        }
        Ok(())
    }
}

/// The locked file of a run folder; it says who holds it.
fn lock(path: &Path) -> Result<File, RecordError> {
    let file = path.join(LOCK);
    let mut options = OpenOptions::new();
    let mut lock = options.read(true).write(true).create(true).truncate(false).open(&file).map_err(write(&file))?;
    match lock.try_lock() {
        // Some network file systems know no locks; a run there is better than none.
        Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => Err(write(&file)(error)),
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // Where a locked file cannot be read the message says less.
            let _ = lock.read_to_string(&mut holder);
            let holder = if holder.is_empty() { "unknown".to_owned() } else { holder };
            Err(RecordError::InUse { path: path.into(), holder })
        }
        _ => Ok(lock),
    }
}

fn write(path: &Path) -> impl FnOnce(io::Error) -> RecordError {
    let path = path.to_owned();
    move |source| RecordError::Write { path, source }
}

/// Somewhere that numbers over steps are drawn as curves.
///
/// # Errors
///
/// Each call fails if the system refuses.
pub trait EventWriter {
    /// One point of each of some curves.
    fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> io::Result<()>;

    /// A text, shown as it is.
    fn text(&mut self, step: u64, tag: &str, text: &str) -> io::Result<()>;

    /// How some numbers are spread.
    fn histogram(&mut self, step: u64, tag: &str, histogram: &Histogram) -> io::Result<()>;
}

/// An open run folder.
pub struct RunFolder {
    claim: Claim,
    metrics: File,
    samples: File,
    events: Box<dyn EventWriter>,
}

impl RunFolder {
    /// Begins a run: writes what was asked for.
    ///
    /// # Errors
    ///
    /// A folder that is taken, a system that refuses.
    pub fn create(
        claim: Claim,
        existing: Existing,
        resolved_config: &str,
        facts: &impl Serialize,
    ) -> Result<Self, RecordError> {
        check_contents(&claim.path, existing)?;
        claim.clear()?;
        let facts = serde_json::to_string_pretty(facts).expect("run facts are plain data");
        for (name, text) in [(CONFIG, resolved_config), ("run.json", &facts)] {
            let file = claim.path.join(name);
            atomic_file::write(&file, text.as_bytes()).map_err(write(&file))?;
        }
        Self::open(claim)
    }

    /// Goes on with a run: cuts its metrics back to the `lengths` that they had, and notes it. Also tells what was
    /// lost of them.
    ///
    /// # Errors
    ///
    /// A system that refuses.
    pub fn resume(
        claim: Claim,
        lengths: &BTreeMap<String, u64>,
        resolved_config: &str,
        note: &impl Serialize,
    ) -> Result<(Self, Vec<String>), RecordError> {
        claim.remove(|name| name.starts_with(UNFINISHED))?;
        let mut lost = Vec::new();
        for name in [METRICS.to_owned(), SAMPLES.to_owned()].into_iter().chain(event_files(&claim.path)?) {
            let path = claim.path.join(&name);
            match lengths.get(&name) {
                None if !name.starts_with(EVENTS) => {}
                None => fs::remove_file(&path).map_err(write(&path))?,
                Some(&length) => match fs::metadata(&path).map_or(0, |metadata| metadata.len()) {
                    found if found < length => lost.push(format!("{name} has {found} bytes, it had {length}")),
                    _ => {
                        let file = OpenOptions::new().write(true).open(&path).map_err(write(&path))?;
                        file.set_len(length).map_err(write(&path))?;
                    }
                },
            }
        }
        let config = claim.path.join(CONFIG);
        atomic_file::write(&config, resolved_config.as_bytes()).map_err(write(&config))?;
        let resumes = claim.path.join("resumes.jsonl");
        let note = serde_json::to_string(note).expect("a note is plain data");
        append(&resumes).and_then(|mut file| writeln!(file, "{note}").map_err(write(&resumes)))?;
        Ok((Self::open(claim)?, lost))
    }

    fn open(claim: Claim) -> Result<Self, RecordError> {
        let events = claim.path.join(EVENTS);
        Ok(Self {
            metrics: append(&claim.path.join(METRICS))?,
            samples: append(&claim.path.join(SAMPLES))?,
            events: Box::new(EventFile::create(&events).map_err(write(&events))?),
            claim,
        })
    }

    /// Appends one line to `metrics.jsonl`.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn metrics(&mut self, line: &impl Serialize) -> Result<(), RecordError> {
        let line = serde_json::to_string(line).expect("metrics are plain data");
        writeln!(self.metrics, "{line}").map_err(write(&self.claim.path.join(METRICS)))
    }

    /// Appends a sample.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn sample(&mut self, step: u64, text: &str) -> Result<(), RecordError> {
        writeln!(self.samples, "--- step {step}\n{text}\n").map_err(write(&self.claim.path.join(SAMPLES)))?;
        self.events.text(step, "sample", text).map_err(write(&self.claim.path.join(EVENTS)))
    }

    /// One point of each of some curves.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> Result<(), RecordError> {
        self.events.scalars(step, values).map_err(write(&self.claim.path.join(EVENTS)))
    }

    /// Histograms of stages, named `kind/stage`.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn histograms(&mut self, step: u64, kind: &str, histograms: &[(String, Histogram)]) -> Result<(), RecordError> {
        let mut one = |(stage, histogram): &(String, Histogram)| {
            self.events.histogram(step, &format!("{kind}/{stage}"), histogram)
        };
        histograms.iter().try_for_each(&mut one).map_err(write(&self.claim.path.join(EVENTS)))
    }

    /// Bytes of each file that grows, all of them on disk.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn lengths(&self) -> Result<BTreeMap<String, u64>, RecordError> {
        let mut lengths = BTreeMap::new();
        for name in [METRICS.to_owned(), SAMPLES.to_owned()].into_iter().chain(event_files(&self.claim.path)?) {
            let path = self.claim.path.join(&name);
            let file = OpenOptions::new().write(true).open(&path).map_err(write(&path))?;
            file.sync_all().map_err(write(&path))?;
            lengths.insert(name, file.metadata().map_err(write(&path))?.len());
        }
        Ok(lengths)
    }

    /// The checkpoints in it.
    pub fn checkpoints(&self) -> Checkpoints {
        self.claim.checkpoints()
    }
}

fn append(path: &Path) -> Result<File, RecordError> {
    OpenOptions::new().create(true).append(true).open(path).map_err(write(path))
}

/// The files of events by their paths in the run folder.
fn event_files(run: &Path) -> Result<Vec<String>, RecordError> {
    let folder = run.join(EVENTS);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(write(&folder)(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry.map_err(write(&folder))?.file_name().to_string_lossy().into_owned();
        if name.starts_with("events.out.tfevents.") {
            names.push(format!("{EVENTS}/{name}"));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_folder_is_refused_unless_told_and_a_foreign_one_always() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        let create = |existing| RunFolder::create(Claim::new(&run)?, existing, "a = 1", &1).map(drop);
        create(Existing::Refuse).unwrap();
        assert!(matches!(create(Existing::Refuse), Err(RecordError::Exists { .. })));
        fs::write(run.join("metrics.jsonl"), "old").unwrap();
        create(Existing::Replace).unwrap();
        assert_eq!(fs::read_to_string(run.join("metrics.jsonl")).unwrap(), "");
        fs::remove_file(run.join("run.toml")).unwrap();
        assert!(matches!(create(Existing::Replace), Err(RecordError::NotARun { .. })));
        assert!(matches!(check_free(&run, Existing::Resume), Err(RecordError::NotARun { .. })));
        assert!(run.join("run.json").exists());
    }

    #[test]
    fn a_folder_has_one_writer_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let claim = Claim::new(dir.path()).unwrap();
        let holder = |result: Result<Claim, RecordError>| match result {
            Err(RecordError::InUse { holder, .. }) => holder,
            other => panic!("{:?}", other.err()),
        };
        assert_eq!(holder(Claim::new(dir.path())), std::process::id().to_string());
        assert!(matches!(check_free(dir.path(), Existing::Refuse), Err(RecordError::InUse { .. })));
        drop(claim);
        check_free(dir.path(), Existing::Refuse).unwrap();
        Claim::new(dir.path()).unwrap();
    }

    #[test]
    fn metrics_are_cut_back_to_what_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let begin = || Claim::new(dir.path());
        let mut folder = RunFolder::create(begin().unwrap(), Existing::Refuse, "a = 1", &1).unwrap();
        folder.metrics(&1).unwrap();
        folder.sample(1, "one").unwrap();
        folder.scalars(1, &[("x".into(), 1.0)]).unwrap();
        let lengths = folder.lengths().unwrap();
        let read = |name: &str| fs::read(dir.path().join(name)).unwrap();
        let before: Vec<Vec<u8>> = lengths.keys().map(|name| read(name)).collect();
        folder.metrics(&2).unwrap();
        folder.sample(2, "two").unwrap();
        folder.scalars(2, &[("x".into(), 2.0)]).unwrap();
        drop(folder);
        // Events of a start that has come to no checkpoint.
        fs::write(dir.path().join("tensorboard/events.out.tfevents.0"), "").unwrap();

        let (folder, lost) = RunFolder::resume(begin().unwrap(), &lengths, "a = 2", &1).unwrap();
        assert_eq!(lost, [] as [String; 0]);
        assert_eq!(lengths.keys().map(|name| read(name)).collect::<Vec<_>>(), before);
        assert!(!dir.path().join("tensorboard/events.out.tfevents.0").exists());
        assert_eq!(read("run.toml"), b"a = 2");
        drop(folder);
        fs::write(dir.path().join("metrics.jsonl"), "").unwrap();
        let (_, lost) = RunFolder::resume(begin().unwrap(), &lengths, "a = 2", &1).unwrap();
        assert_eq!(lost, ["metrics.jsonl has 0 bytes, it had 2"]);
    }
}
