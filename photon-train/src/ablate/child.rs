//! A child process, what it says, and how far its run is.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};

use super::{AblateError, io};

/// Of a file that is read from its end: some lines of metrics.
const TAIL_BYTES: u64 = 1 << 15;
/// Of an error that is kept.
const MAX_ERROR_CHARS: usize = 2000;

/// A child process.
pub(super) struct Child {
    process: std::process::Child,
    /// Open as long as the child is to work.
    stdin: Option<ChildStdin>,
    status: Option<ExitStatus>,
}

/// Where a child writes what it has to say.
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    /// What stood there before.
    len_before: u64,
}

impl Child {
    /// Starts a command; what it prints goes to the log, or to a file of its own.
    pub(super) fn start(mut command: Command, log: &LogFile, stdout: Option<&File>) -> Result<Self, AblateError> {
        let program = PathBuf::from(command.get_program());
        let copy = |file: &File| file.try_clone().map(Stdio::from).map_err(io("write", &log.path));
        command.stdin(Stdio::piped()).stdout(copy(stdout.unwrap_or(&log.file))?).stderr(copy(&log.file)?);
        // Ctrl-C on a terminal goes to this process alone, which tells its children in its own way.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut process = command.spawn().map_err(io("start", &program))?;
        Ok(Self { stdin: process.stdin.take(), process, status: None })
    }

    /// Asks it to save and end.
    pub(super) fn stop(&mut self) {
        self.stdin = None;
    }

    /// Ends it at once: it has nothing to save.
    pub(super) fn kill(&mut self) {
        // One that has ended already is no less ended.
        let _ = self.process.kill();
    }

    /// Whether it has ended.
    pub(super) fn ended(&mut self) -> std::io::Result<bool> {
        self.status = self.process.try_wait()?;
        Ok(self.status.is_some())
    }

    /// How it ended, if not well.
    pub(super) fn error(&self) -> Option<String> {
        self.status.filter(|status| !status.success()).map(|status| format!("the process ended with {status}"))
    }
}

impl LogFile {
    pub(super) fn open(path: &Path) -> Result<Self, AblateError> {
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(io("write", path))?;
        let len_before = file.metadata().map_err(io("read", path))?.len();
        Ok(Self { path: path.into(), file, len_before })
    }

    /// The last error in what was added, from its first line on.
    pub(super) fn error(&self) -> Option<String> {
        let mut file = File::open(&self.path).ok()?;
        file.seek(SeekFrom::Start(self.len_before)).ok()?;
        let mut said = Vec::new();
        file.read_to_end(&mut said).ok()?;
        let said = String::from_utf8_lossy(&said);
        let is_start = |at: &usize| *at == 0 || said[..*at].ends_with('\n');
        let starts = said.match_indices("error: ").map(|(at, _)| at).filter(is_start);
        let error = &said[starts.last()? + "error: ".len()..];
        Some(error.trim_end().chars().take(MAX_ERROR_CHARS).collect())
    }
}

/// The last step that a run folder tells of.
pub(super) fn last_step(run: &Path) -> u64 {
    let read = || {
        let mut file = File::open(run.join("metrics.jsonl")).ok()?;
        let len = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES))).ok()?;
        let mut tail = Vec::new();
        file.read_to_end(&mut tail).ok()?;
        let tail = String::from_utf8_lossy(&tail);
        let step = |line: &str| serde_json::from_str::<serde_json::Value>(line).ok()?["step"].as_u64();
        tail.lines().rev().find_map(step)
    };
    read().unwrap_or(0)
}
