//! Shows how far work has come: a bar on a terminal, a line now and then elsewhere.

use std::{
    io::IsTerminal,
    path::Path,
    sync::Mutex,
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, HumanDuration, ProgressBar};
use photon_core::tokenizer::Tokenizer;
use photon_train::config::TrainConfig;
use photon_train::data::{DataError, Prepared, Progress, Stage, TokenStore, prepare, tokenise_texts};

use super::{bar, log};

/// Time between lines where there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Told from any thread how far data is prepared.
struct DataProgress {
    bar: ProgressBar,
    lines: Option<Mutex<Lines>>,
}

/// What was said, where there is no terminal.
struct Lines {
    stage: Option<Stage>,
    began: Instant,
    last: Instant,
}

impl DataProgress {
    fn new() -> Self {
        let now = Instant::now();
        let style = "{msg} [{bar:30}] {bytes}/{total_bytes}, {bytes_per_sec}, ETA {eta}";
        let lines = Lines { stage: None, began: now, last: now };
        Self { bar: bar(0, style), lines: (!std::io::stderr().is_terminal()).then(|| Mutex::new(lines)) }
    }

    fn show(&self, now: Progress) {
        match &self.lines {
            Some(lines) => lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).show(now),
            None => {
                if self.bar.message() != now.stage.to_string() {
                    self.bar.reset();
                    self.bar.set_message(now.stage.to_string());
                }
                self.bar.set_length(now.total_bytes);
                self.bar.set_position(now.done_bytes);
            }
        }
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// What a run trains on, tokenised into `folder` where it is not there yet; shows how far it is.
pub(super) fn prepare_shown(config: &TrainConfig, tokenizer: &Tokenizer, folder: &Path) -> Result<Prepared, DataError> {
    let progress = DataProgress::new();
    let data = prepare(&config.data, tokenizer, folder, config.seq_len, &|now| progress.show(now));
    progress.end();
    data
}

/// Tokens of texts, in a folder that lives as long as they are looked at; shows how far it is.
pub(super) fn tokenise_for_now(
    texts: &[String],
    text_field: &str,
    tokenizer: &Tokenizer,
    folder: &Path,
) -> Result<TokenStore, DataError> {
    let progress = DataProgress::new();
    let tokenised = tokenise_texts(texts, text_field, tokenizer, folder, &|now| progress.show(now));
    progress.end();
    let (store, skipped) = tokenised?;
    log(skipped);
    Ok(store)
}

impl Lines {
    fn show(&mut self, Progress { stage, done_bytes, total_bytes }: Progress) {
        let now = Instant::now();
        if self.stage != Some(stage) {
            *self = Self { stage: Some(stage), began: now, last: now };
        }
        if now - self.last < BETWEEN_LINES {
            return;
        }
        self.last = now;
        let secs = (now - self.began).as_secs_f64();
        let per_sec = done_bytes as f64 / secs;
        let left = Duration::from_secs_f64(total_bytes.saturating_sub(done_bytes) as f64 / per_sec.max(1.0));
        let (done, total, speed) = (HumanBytes(done_bytes), HumanBytes(total_bytes), HumanBytes(per_sec as u64));
        log(format!("{stage} {done}/{total}, {speed}/s, ETA {}", HumanDuration(left)));
    }
}

/// Told from any thread how many pieces of some work are done, one work after the other.
pub(super) struct CountProgress {
    unit: &'static str,
    bar: ProgressBar,
    /// When a line was written, or might have been.
    last_line: Mutex<Instant>,
}

impl CountProgress {
    pub(super) fn new(unit: &'static str) -> Self {
        let bar = bar(0, "{msg} [{bar:30}] {pos}/{len}, ETA {eta}");
        Self { unit, bar, last_line: Mutex::new(Instant::now()) }
    }

    pub(super) fn begin(&self, work: &'static str) {
        self.bar.reset();
        self.bar.set_message(work);
    }

    pub(super) fn show(&self, done: usize, all: usize) {
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
        let mut last_line = self.last_line.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if self.bar.is_hidden() && last_line.elapsed() >= BETWEEN_LINES {
            *last_line = Instant::now();
            log(format!("{} {done}/{all} {}, ETA {}", self.bar.message(), self.unit, HumanDuration(self.bar.eta())));
        }
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
