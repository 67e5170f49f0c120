//! Runs of a tiny model through the library.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::Device;
use photon_core::device::DeviceChoice;
use photon_core::tokenizer::Tokenizer;
use photon_train::config::RunConfig;
use photon_train::data::{Prepared, prepare};
use photon_train::ranks::{Ranks, Team, check_sums};
use photon_train::record::Existing;
use photon_train::report::{EvalReport, Observer, Outcome, StepReport};
use photon_train::trainer::{RunPlace, TrainError, train};
use serde_json::Value;
use tempfile::TempDir;

use crate::programs::{write_run_of_clauses, write_tiny_run};

/// A run in a folder of its own.
pub(crate) struct Run {
    pub(crate) folder: TempDir,
    pub(crate) config: RunConfig,
}

impl Run {
    pub(crate) fn new(overrides: &[&str]) -> Self {
        Self::written(write_tiny_run, overrides)
    }

    /// On short documents that are kept apart.
    pub(crate) fn of_clauses(overrides: &[&str]) -> Self {
        Self::written(write_run_of_clauses, overrides)
    }

    fn written(write: fn(&Path) -> PathBuf, overrides: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        let config = RunConfig::load(&write(folder.path()), &overrides).unwrap();
        Self { folder, config }
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    pub(crate) fn data(&self) -> Prepared {
        self.data_of(&self.config)
    }

    fn data_of(&self, config: &RunConfig) -> Prepared {
        let cache = self.folder.path().join("tokens");
        prepare(&config.train.data, &Tokenizer::bytes(), &cache, config.train.seq_len, &|_| {}).unwrap()
    }

    pub(crate) fn train_watched(&self, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<Outcome, TrainError> {
        self.train_as(&self.config, Existing::Refuse, &[], stop, observer)
    }

    fn train_as(
        &self,
        config: &RunConfig,
        existing: Existing,
        accept: &[String],
        stop: &AtomicBool,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, TrainError> {
        let device = DeviceChoice::Cpu.open().unwrap();
        let (folder, ranks) = (&self.out(), &Rc::new(Ranks::alone()));
        let place = RunPlace { folder, existing, accept, stop, observer, peak: None, ranks };
        train(config, &Tokenizer::bytes(), self.data_of(config), &device, place)
    }

    /// Trains on several threads, or goes on so, to the end or until after `stop_after`; sums go through the host.
    pub(crate) fn train_together(&self, n_threads: usize, stop_after: Option<u64>) -> Outcome {
        let stop = AtomicBool::new(false);
        // One thread tokenises; the others find the tokens.
        self.data();
        let work = |ranks: &Rc<Ranks>| {
            let device = DeviceChoice::Cpu.open().unwrap();
            check_sums(ranks, &device.device)?;
            let step = stop_after.filter(|_| ranks.is_first()).unwrap_or(u64::MAX);
            let observer = &mut StopsAfter { step, stop: &stop, notices: Vec::new() };
            let (folder, existing) = (&self.out(), Existing::Resume);
            let place = RunPlace { folder, existing, accept: &[], stop: &stop, observer, peak: None, ranks };
            train(&self.config, &Tokenizer::bytes(), self.data(), &device, place)
        };
        Team::new(vec![Device::flex(); n_threads], false).work(work, |rank, error| tell(rank, &error))
    }

    pub(crate) fn train(&self) -> Result<Outcome, TrainError> {
        self.train_watched(&AtomicBool::new(false), &mut Unwatched)
    }

    /// Goes on, to the end or until after `stop_after`; what it was told of.
    pub(crate) fn resume(&self, stop_after: Option<u64>) -> Result<(Outcome, Vec<String>), TrainError> {
        let stop = AtomicBool::new(false);
        let mut observer = StopsAfter { step: stop_after.unwrap_or(u64::MAX), stop: &stop, notices: Vec::new() };
        let outcome = self.train_as(&self.config, Existing::Resume, &[], &stop, &mut observer)?;
        Ok((outcome, observer.notices))
    }

    /// Goes on to the end, with another config.
    pub(crate) fn resume_as(&self, config: &RunConfig) -> Result<Outcome, TrainError> {
        self.resume_accepting(config, &[])
    }

    /// The same, with changes of these keys meant.
    pub(crate) fn resume_accepting(&self, config: &RunConfig, accept: &[&str]) -> Result<Outcome, TrainError> {
        let accept: Vec<String> = accept.iter().map(|key| (*key).to_owned()).collect();
        self.train_as(config, Existing::Resume, &accept, &AtomicBool::new(false), &mut Unwatched)
    }

    /// The lines of `metrics.jsonl` without how long they took and how much memory.
    pub(crate) fn metrics(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.out().join("metrics.jsonl")).unwrap();
        text.lines().map(without_machine).collect()
    }

    pub(crate) fn losses_nats(&self) -> Vec<f64> {
        self.metrics().iter().filter(|line| line["kind"] == "step").map(|line| number(line, "loss_nats")).collect()
    }
}

/// What a thread says that ends the program.
#[expect(clippy::print_stderr, reason = "nobody catches what a test says that ends its program")]
pub(crate) fn tell(rank: usize, error: &dyn Display) {
    eprintln!("rank {rank}: {error}");
}

/// A line of metrics without what the machine decides: how long it took and how much memory.
pub(crate) fn without_machine(line: &str) -> Value {
    let mut value: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    for name in ["tokens_per_sec", "share_of_peak", "memory"] {
        value.as_object_mut().unwrap().remove(name);
    }
    value
}

/// The same steps and evaluations, to within what another order of sums makes of them.
pub(crate) fn assert_same_curve(found: &[Value], expected: &[Value], who: &str) {
    assert_eq!(found.len(), expected.len(), "each step is written once");
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!((&found["kind"], &found["step"]), (&expected["kind"], &expected["step"]));
        let loss_nats = |line: &Value| match line["kind"] == "step" {
            true => number(line, "loss_nats"),
            false => number(&line["held_out"], "nats_per_token"),
        };
        let (found, expected) = (loss_nats(found), loss_nats(expected));
        assert!((found - expected).abs() <= 1e-5, "{who}: {found} nats, alone {expected}");
    }
}

pub(crate) fn number(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {line}"))
}

pub(crate) struct Unwatched;

impl Observer for Unwatched {
    fn step(&mut self, _: &StepReport) {}
    fn evaluation(&mut self, _: &EvalReport) {}
}

/// Sets the flag after a step, and keeps what it is told.
pub(crate) struct StopsAfter<'a> {
    pub(crate) step: u64,
    pub(crate) stop: &'a AtomicBool,
    pub(crate) notices: Vec<String>,
}

impl Observer for StopsAfter<'_> {
    fn step(&mut self, report: &StepReport) {
        if report.step == self.step {
            self.stop.store(true, Ordering::Relaxed);
        }
    }

    fn evaluation(&mut self, _: &EvalReport) {}

    fn notice(&mut self, text: &str) {
        self.notices.push(text.to_owned());
    }
}
