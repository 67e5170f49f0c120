//! How far an experiment is: lines as runs begin and end, and between them a bar or now and then a line.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar};
use photon_train::ablate::{Event, Plan, PlannedRun, Progress};

use super::super::{bar, log};

/// Time between lines where there is no terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(60);
/// What the bar counts to.
const PARTS: u64 = 1000;

/// Told of everything that a runner tells.
pub(super) struct ExperimentProgress<'a> {
    plan: &'a Plan,
    bar: ProgressBar,
    last_line: Instant,
}

impl<'a> ExperimentProgress<'a> {
    pub(super) fn new(plan: &'a Plan) -> Self {
        Self { plan, bar: bar(PARTS, "{bar:30} {percent} % {msg}"), last_line: Instant::now() }
    }

    pub(super) fn show(&mut self, event: &Event) {
        match event {
            Event::Started(run) => self.line(format!("training {}", self.name(run))),
            Event::InUse(run, holder) => self
                .line(format!("waiting for process {holder}, which still writes to the folder of {}", self.name(run))),
            Event::Measuring(run, measure) => self.line(format!("measuring {}: {measure}", self.name(run))),
            Event::Finished(run, outcome) => {
                let bits = outcome.last.held_out.bits_per_byte;
                self.line(format!("finished {}: {bits:.4} held-out bits per byte", self.name(run)));
            }
            Event::MeasureFailed(run, measure, error) => {
                self.line(format!("no measure {measure} of {}: {error}", self.name(run)));
            }
            Event::Failed(run, error) => self.line(format!("failed {}: {error}", self.name(run))),
            Event::Progress(progress) => self.progress(progress),
        }
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn name(&self, run: &PlannedRun) -> String {
        format!("{:?}, seed {} ({})", self.plan.arms[run.arm].name, run.seed, run.id)
    }

    fn line(&self, line: String) {
        self.bar.suspend(|| log(line));
    }

    fn progress(&mut self, progress: &Progress) {
        let Progress { ended, active, runs, share, remaining_secs } = *progress;
        let eta = remaining_secs.map_or("unknown".to_owned(), |secs| {
            HumanDuration(Duration::from_secs_f64(secs.clamp(0.0, 1e9))).to_string()
        });
        let line = format!("{ended} of {runs} runs ended, {active} at work, ETA {eta}");
        self.bar.set_position((share * PARTS as f64) as u64);
        self.bar.set_message(line.clone());
        if !std::io::stderr().is_terminal() && self.last_line.elapsed() >= BETWEEN_LINES {
            self.last_line = Instant::now();
            log(format!("{:.1} %: {line}", 100.0 * share));
        }
    }
}
