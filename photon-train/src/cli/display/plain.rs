//! A run as lines for a log.

use std::time::{Duration, Instant};

use photon_train::report::{EvalReport, Observer, SkipReport, StepReport};

use super::super::log;
use super::view::View;

/// Time between lines where no number of steps is asked for.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Lines on stderr.
pub(super) struct Plain {
    view: View,
    every_steps: Option<u64>,
    last_line: Option<Instant>,
}

impl Plain {
    pub(super) fn new(view: View, every_steps: Option<u64>) -> Self {
        Self { view, every_steps, last_line: None }
    }

    fn is_due(&self, step: u64) -> bool {
        match (self.every_steps, self.last_line) {
            (Some(every), _) => step.is_multiple_of(every),
            (None, Some(last)) => last.elapsed() >= BETWEEN_LINES,
            (None, None) => true,
        }
    }
}

impl Observer for Plain {
    fn step(&mut self, report: &StepReport) {
        self.view.step(report);
        if self.is_due(report.step) {
            self.last_line = Some(Instant::now());
            self.view.step_line().into_iter().for_each(log);
        }
    }

    fn evaluation(&mut self, report: &EvalReport) {
        self.view.evaluation(report);
        self.view.evaluation_line().into_iter().for_each(log);
        if let Some(sample) = self.view.sample() {
            log(format!("    {}\n", sample.trim_end().replace('\n', "\n    ")));
        }
    }

    fn skip(&mut self, report: &SkipReport) {
        self.view.skip(report);
        self.view.notices.drain(..).for_each(log);
    }

    fn notice(&mut self, text: &str) {
        log(text);
    }
}
