//! Runs as child processes, some side by side, until all have come to an end or somebody wants them to stop.
//!
//! A child's stdin is a pipe that nothing is written to. When it ends the child saves and stops: because this process was
//! asked to stop, or because it is no more. So a runner that is killed leaves nothing behind that works on for nobody, and
//! the next one waits until what is left has let go of its folder.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use photon_core::atomic_file;

use super::child::{Child, LogFile, last_step};
use super::experiment::MeasureConfig;
use super::measure::{self, MeasurePlaces};
use super::outcome::{Outcome, Timings, read_outcome};
use super::plan::{Plan, PlannedArm};
use super::results::{AllTimings, PlannedRun, Results, Status};
use super::{AblateError, io};
use crate::record::{Existing, RecordError, check_free};

/// Between two looks at the children.
const LOOK: Duration = Duration::from_millis(30);
/// Between two reports of progress, which read files.
const PROGRESS: Duration = Duration::from_secs(1);
/// What a child says whose folder another process holds, as [`RecordError::InUse`] has it.
const IN_USE: &str = "is in use by another process";

/// An experiment on its way.
pub struct Runner<'a> {
    /// What is to be done.
    pub plan: &'a Plan,
    /// Every arm with every seed.
    pub runs: &'a [PlannedRun],
    /// The experiment's folder, absolute.
    pub folder: &'a Path,
    /// `photon-train`.
    pub program: &'a Path,
    /// The held-out text of each arm as a file, where a measure needs it.
    pub held_out: &'a [PathBuf],
    /// As `--device` takes it.
    pub device: String,
    /// Runs side by side.
    pub jobs: usize,
    /// Threads of each.
    pub threads: usize,
    /// Set to stop all runs at their next checkpoint.
    pub stop: &'a AtomicBool,
}

/// What a runner tells of.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A run begins or goes on.
    Started(&'a PlannedRun),
    /// A process that nobody waits for still writes to the folder of a run; it is called as it calls itself.
    InUse(&'a PlannedRun, String),
    /// A program measures a run.
    Measuring(&'a PlannedRun, &'a str),
    /// A run came to its end, now or before.
    Finished(&'a PlannedRun, &'a Outcome),
    /// A program could not measure a run.
    MeasureFailed(&'a PlannedRun, &'a str, &'a str),
    /// A run ended with an error.
    Failed(&'a PlannedRun, &'a str),
    /// How far all of it is.
    Progress(Progress),
}

/// How far an experiment is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Runs that came to an end, errors included.
    pub ended: usize,
    /// Runs that work now.
    pub active: usize,
    /// All runs; equal ones are one.
    pub runs: usize,
    /// Of the arithmetic of all runs, the share that is done.
    pub share: f64,
    /// Time that the rest takes if it goes on as it did since this start.
    pub remaining_secs: Option<f64>,
}

/// A run that has a child process.
struct Active<'a> {
    run: &'a PlannedRun,
    child: Child,
    task: Task,
    log: LogFile,
}

impl Active<'_> {
    fn stop(&mut self) {
        match self.task {
            Task::Train => self.child.stop(),
            Task::Measure(..) => self.child.kill(),
        }
    }
}

/// What a child process does.
enum Task {
    Train,
    /// The measure of this index, and the file that takes what it prints.
    Measure(usize, tempfile::NamedTempFile),
}

/// What is known while the runner works.
struct Known<'a> {
    statuses: BTreeMap<String, Status>,
    timings: AllTimings,
    queue: VecDeque<&'a PlannedRun>,
    told_in_use: BTreeSet<String>,
    /// By the run's name and the measure's.
    failed_measures: BTreeMap<String, BTreeMap<String, String>>,
    started: Instant,
    flops_before: f64,
}

impl<'a> Runner<'a> {
    /// Does what is left to do. Results are written after every run.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or written, a program that cannot be started. What becomes of runs is in the results.
    pub fn run(&self, watch: &mut dyn FnMut(Event)) -> Result<Results, AblateError> {
        self.write_configs()?;
        let mut known = Known {
            statuses: BTreeMap::new(),
            timings: AllTimings { jobs: self.jobs, ..AllTimings::read(self.folder) },
            queue: VecDeque::new(),
            told_in_use: BTreeSet::new(),
            failed_measures: BTreeMap::new(),
            started: Instant::now(),
            flops_before: 0.0,
        };
        for run in self.unique_runs() {
            match self.outcome(&known, run)? {
                Some(done) => self.finish(&mut known, run, done, watch),
                None => known.queue.push_back(run),
            }
        }
        known.flops_before = self.flops_done(&known);
        self.write(&known)?;
        let mut active: Vec<Active> = Vec::new();
        let mut told = Instant::now();
        loop {
            let is_stopping = self.stop.load(Ordering::Relaxed);
            if is_stopping {
                active.iter_mut().for_each(Active::stop);
            } else {
                self.start_some(&mut known, &mut active, watch)?;
            }
            if active.is_empty() && (is_stopping || known.queue.is_empty()) {
                break;
            }
            std::thread::sleep(LOOK);
            let mut still = Vec::with_capacity(active.len());
            for mut one in active {
                match one.child.ended().map_err(io("wait for", self.program))? {
                    false => still.push(one),
                    true => still.extend(self.ended(&mut known, one, is_stopping, watch)?),
                }
            }
            active = still;
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                watch(Event::Progress(self.progress(&known, &active)));
            }
        }
        self.write(&known)?;
        Ok(Results::new(self.plan, self.runs, &known.statuses))
    }

    fn unique_runs(&self) -> Vec<&'a PlannedRun> {
        let mut seen = BTreeSet::new();
        self.runs.iter().filter(|run| seen.insert(&run.id)).collect()
    }

    fn arm(&self, run: &PlannedRun) -> &'a PlannedArm {
        &self.plan.arms[run.arm]
    }

    fn place(&self, run: &PlannedRun) -> PathBuf {
        self.folder.join(&run.id)
    }

    fn config_file(&self, run: &PlannedRun) -> PathBuf {
        self.folder.join("configs").join(format!("{}.toml", run.id))
    }

    fn measures(&self) -> Vec<(&'a String, &'a MeasureConfig)> {
        self.plan.experiment.file.measures.iter().collect()
    }

    fn write_configs(&self) -> Result<(), AblateError> {
        for folder in ["configs", "logs"].map(|name| self.folder.join(name)) {
            std::fs::create_dir_all(&folder).map_err(io("write", &folder))?;
        }
        for run in self.unique_runs() {
            let (path, config) = (self.config_file(run), self.arm(run).run(run.seed).to_toml());
            atomic_file::write(&path, config.as_bytes()).map_err(io("write", &path))?;
        }
        Ok(())
    }

    /// What came of a run, if it has come to its end and every program has measured it or has failed to.
    fn outcome(&self, known: &Known, run: &PlannedRun) -> Result<Option<(Outcome, Timings)>, AblateError> {
        let failed = known.failed_measures.get(&run.id).cloned().unwrap_or_default();
        let names = self.measures().into_iter().map(|(name, _)| name).filter(|name| !failed.contains_key(*name));
        let names: Vec<&String> = names.collect();
        let done = self.trained(run)?.and_then(|done| measure::add_kept(&self.place(run), &names, done));
        Ok(done.map(|(outcome, timings)| (Outcome { failed_measures: failed, ..outcome }, timings)))
    }

    fn trained(&self, run: &PlannedRun) -> Result<Option<(Outcome, Timings)>, AblateError> {
        let place = self.place(run);
        read_outcome(&place, self.arm(run).config.train.steps).map_err(io("read", &place))
    }

    /// Starts runs while there is room. One whose folder is in use waits for another look.
    fn start_some(
        &self,
        known: &mut Known<'a>,
        active: &mut Vec<Active<'a>>,
        watch: &mut dyn FnMut(Event),
    ) -> Result<(), AblateError> {
        for _ in 0..known.queue.len() {
            if active.len() == self.jobs {
                break;
            }
            let Some(run) = known.queue.pop_front() else { break };
            if let Err(RecordError::InUse { holder, .. }) = check_free(&self.place(run), Existing::Resume) {
                if known.told_in_use.insert(run.id.clone()) {
                    watch(Event::InUse(run, holder));
                }
                known.queue.push_back(run);
                continue;
            }
            if let Some(next) = self.next(known, run, watch)? {
                active.push(next);
            }
        }
        Ok(())
    }

    /// The next thing that is to be done for a run, begun; `None` when all is done.
    fn next(
        &self,
        known: &mut Known<'a>,
        run: &'a PlannedRun,
        watch: &mut dyn FnMut(Event),
    ) -> Result<Option<Active<'a>>, AblateError> {
        if self.trained(run)?.is_none() {
            watch(Event::Started(run));
            return self.train(run).map(Some);
        }
        let is_missing = |name: &String| {
            let has_failed = known.failed_measures.get(&run.id).is_some_and(|failed| failed.contains_key(name));
            !has_failed && !measure::file(&self.place(run), name).exists()
        };
        let next = self.measures().into_iter().enumerate().find(|(_, (name, _))| is_missing(name));
        if let Some((index, (name, config))) = next {
            watch(Event::Measuring(run, name));
            return self.measure(run, index, name, config).map(Some);
        }
        match self.outcome(known, run)? {
            Some(done) => self.finish(known, run, done, watch),
            None => self.fail(known, run, "what was measured of it cannot be read".into(), watch),
        }
        self.write(known)?;
        Ok(None)
    }

    fn train(&self, run: &'a PlannedRun) -> Result<Active<'a>, AblateError> {
        let mut command = self.command(self.program);
        command.arg("run").arg(self.config_file(run)).arg("--out").arg(self.place(run));
        command.args(["--resume", "--stop-with-stdin", "--display", "plain", "--device", &self.device]);
        let log = LogFile::open(&self.log(run))?;
        let child = Child::start(command, &log, None)?;
        Ok(Active { run, child, task: Task::Train, log })
    }

    fn measure(
        &self,
        run: &'a PlannedRun,
        index: usize,
        name: &str,
        config: &MeasureConfig,
    ) -> Result<Active<'a>, AblateError> {
        let place = measure::file(&self.place(run), name);
        let folder = place.parent().unwrap_or(&place);
        std::fs::create_dir_all(folder).map_err(io("write", folder))?;
        let printed = atomic_file::beside(&place).map_err(io("write", &place))?;
        let places = MeasurePlaces {
            run: self.place(run),
            held_out: self.held_out.get(run.arm).cloned().unwrap_or_default(),
            experiment: self.plan.experiment.path.parent().unwrap_or(Path::new("")).into(),
        };
        let mut command = self.command(&config.program(self.program)?);
        command.args(config.args(&places));
        let log = LogFile::open(&self.log(run))?;
        let child = Child::start(command, &log, Some(printed.as_file()))?;
        Ok(Active { run, child, task: Task::Measure(index, printed), log })
    }

    fn command(&self, program: &Path) -> std::process::Command {
        let mut command = std::process::Command::new(program);
        if std::env::var_os("RAYON_NUM_THREADS").is_none() {
            command.env("RAYON_NUM_THREADS", self.threads.to_string());
        }
        command
    }

    fn log(&self, run: &PlannedRun) -> PathBuf {
        self.folder.join("logs").join(format!("{}.log", run.id))
    }

    /// Takes note of a child that has ended, and goes on with its run.
    fn ended(
        &self,
        known: &mut Known<'a>,
        one: Active<'a>,
        is_stopping: bool,
        watch: &mut dyn FnMut(Event),
    ) -> Result<Option<Active<'a>>, AblateError> {
        let Active { run, child, task, log } = one;
        let error = match (child.error(), &task) {
            (None, Task::Train) if self.trained(run)?.is_none() && !is_stopping => {
                Some("the run ended without an error and before its last step".to_owned())
            }
            (None, Task::Train) => None,
            (None, Task::Measure(index, printed)) => {
                let (name, _) = self.measures()[*index];
                let printed = std::fs::read(printed.path()).map_err(io("read", printed.path()))?;
                measure::keep(&self.place(run), name, &printed).err().map(|error| error.to_string())
            }
            (Some(status), _) => Some(log.error().unwrap_or(status)),
        };
        // Where the folder lies must not decide a byte of the results.
        let error = error.map(|error| error.replace(&self.folder.display().to_string(), "."));
        match (error, task) {
            // It did what it was asked to.
            _ if is_stopping => return Ok(None),
            (None, _) => {}
            (Some(error), Task::Measure(index, _)) => {
                let (name, _) = self.measures()[index];
                watch(Event::MeasureFailed(run, name, &error));
                known.failed_measures.entry(run.id.clone()).or_default().insert(name.clone(), error);
            }
            // A child that a killed runner had only just started claimed the folder after it was found free.
            (Some(error), Task::Train) if error.contains(IN_USE) => {
                known.queue.push_back(run);
                return Ok(None);
            }
            (Some(error), Task::Train) => {
                self.fail(known, run, error, watch);
                self.write(known)?;
                return Ok(None);
            }
        }
        self.next(known, run, watch)
    }

    fn finish(
        &self,
        known: &mut Known<'a>,
        run: &'a PlannedRun,
        (outcome, timings): (Outcome, Timings),
        watch: &mut dyn FnMut(Event),
    ) {
        watch(Event::Finished(run, &outcome));
        known.statuses.insert(run.id.clone(), Status::Finished(Box::new(outcome)));
        known.timings.runs.insert(run.id.clone(), timings);
    }

    fn fail(&self, known: &mut Known<'a>, run: &'a PlannedRun, error: String, watch: &mut dyn FnMut(Event)) {
        watch(Event::Failed(run, &error));
        known.statuses.insert(run.id.clone(), Status::Failed { error });
    }

    fn write(&self, known: &Known) -> Result<(), AblateError> {
        Results::new(self.plan, self.runs, &known.statuses).write(self.folder)?;
        known.timings.write(self.folder)
    }

    /// FLOPs of all runs that are done, those under way included.
    fn flops_done(&self, known: &Known) -> f64 {
        let done = |run: &&PlannedRun| {
            let arm = self.arm(run);
            match known.statuses.get(&run.id) {
                Some(_) => arm.training_flops,
                None => {
                    let step = last_step(&self.place(run)).min(arm.config.train.steps);
                    arm.training_flops * step as f64 / arm.config.train.steps as f64
                }
            }
        };
        self.unique_runs().iter().map(done).sum()
    }

    fn progress(&self, known: &Known, active: &[Active]) -> Progress {
        let runs = self.unique_runs();
        let total: f64 = runs.iter().map(|run| self.arm(run).training_flops).sum();
        let done = self.flops_done(known);
        let rate = (done - known.flops_before) / known.started.elapsed().as_secs_f64();
        Progress {
            ended: known.statuses.len(),
            active: active.len(),
            runs: runs.len(),
            share: done / total,
            remaining_secs: (rate > 0.0).then(|| (total - done) / rate),
        }
    }
}
