//! What there is to show of a run, kept up by what the run tells.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, HumanDuration};
use photon_train::report::{EvalReport, Observer, SkipReport, StepReport};

use super::RunFacts;

/// Notices that are kept.
const MAX_NOTICES: usize = 100;

/// What is shown.
pub(super) struct View {
    pub(super) facts: RunFacts,
    pub(super) began: Instant,
    /// Since when steps are counted, and how many had gone then.
    steps_began: Option<(Instant, u64)>,
    /// Steps gone.
    pub(super) step: u64,
    pub(super) last: Option<StepReport>,
    pub(super) loss_nats: Mean,
    pub(super) bits_per_byte: Mean,
    pub(super) gradient_norm: Mean,
    pub(super) tokens_per_sec: Mean,
    pub(super) share_of_peak: Mean,
    /// In the order of the model.
    pub(super) stage_norms: Vec<(String, Mean)>,
    /// Training bits per byte over steps.
    pub(super) train_curve: Curve,
    /// Held-out bits per byte over steps.
    pub(super) held_out: Vec<(f64, f64)>,
    pub(super) evaluation: Option<EvalReport>,
    pub(super) best_bits_per_byte: Option<f64>,
    pub(super) n_skipped: u64,
    /// The newest last.
    pub(super) notices: VecDeque<String>,
}

/// A running mean that follows the newest values; single batches differ.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    pub(super) fn take(&mut self, value: f64) {
        const DECAY: f64 = 0.95;
        self.sum = DECAY * self.sum + value;
        self.weight = DECAY * self.weight + 1.0;
    }

    /// The mean; no number before the first value.
    pub(super) fn value(&self) -> f64 {
        self.sum / self.weight
    }
}

/// A curve of few points, however many were added: each is a mean of as many.
#[derive(Debug)]
pub(super) struct Curve {
    pub(super) points: Vec<(f64, f64)>,
    per_point: usize,
    /// Sums of those that make no whole point yet.
    rest: (f64, f64),
    n_rest: usize,
}

impl Curve {
    const MAX_POINTS: usize = 512;

    fn new() -> Self {
        Self { points: Vec::new(), per_point: 1, rest: (0.0, 0.0), n_rest: 0 }
    }

    fn take(&mut self, x: f64, y: f64) {
        self.rest = (self.rest.0 + x, self.rest.1 + y);
        self.n_rest += 1;
        if self.n_rest < self.per_point {
            return;
        }
        let n = self.n_rest as f64;
        self.points.push((self.rest.0 / n, self.rest.1 / n));
        (self.rest, self.n_rest) = ((0.0, 0.0), 0);
        if self.points.len() == Self::MAX_POINTS {
            let mean = |pair: &[(f64, f64)]| ((pair[0].0 + pair[1].0) / 2.0, (pair[0].1 + pair[1].1) / 2.0);
            self.points = self.points.chunks_exact(2).map(mean).collect();
            self.per_point *= 2;
        }
    }
}

impl View {
    pub(super) fn new(facts: RunFacts) -> Self {
        Self {
            facts,
            began: Instant::now(),
            steps_began: None,
            step: 0,
            last: None,
            loss_nats: Mean::default(),
            bits_per_byte: Mean::default(),
            gradient_norm: Mean::default(),
            tokens_per_sec: Mean::default(),
            share_of_peak: Mean::default(),
            stage_norms: Vec::new(),
            train_curve: Curve::new(),
            held_out: Vec::new(),
            evaluation: None,
            best_bits_per_byte: None,
            n_skipped: 0,
            notices: VecDeque::new(),
        }
    }

    /// How long the rest takes if it goes on like this; none before the second step.
    pub(super) fn time_left(&self) -> Option<Duration> {
        let (since, before) = self.steps_began?;
        let n_steps = self.step.checked_sub(before).filter(|&n| n > 0)?;
        let secs_left =
            since.elapsed().as_secs_f64() / n_steps as f64 * self.facts.steps.saturating_sub(self.step) as f64;
        Duration::try_from_secs_f64(secs_left).ok()
    }

    /// Numbers of the newest step in a line; none before the first.
    pub(super) fn step_line(&self) -> Option<String> {
        let last = self.last.as_ref()?;
        let mut line = format!(
            "step {}/{}: loss {:.3} nats, {:.3} bits/byte, lr {:.2e}, gradient norm {:.3}, {:.0} tokens/s",
            self.step,
            self.facts.steps,
            self.loss_nats.value(),
            self.bits_per_byte.value(),
            last.learning_rate,
            self.gradient_norm.value(),
            self.tokens_per_sec.value(),
        );
        if last.share_of_peak.is_some() {
            line += &format!(" ({:.1} % of peak)", 100.0 * self.share_of_peak.value());
        }
        line.extend(self.memory().into_iter().map(|(name, bytes)| format!(", {name} {bytes}")));
        line.extend(self.time_left().map(|left| format!(", ETA {}", HumanDuration(left))));
        Some(line)
    }

    /// What the process holds, by name, as far as it is known.
    pub(super) fn memory(&self) -> Vec<(&'static str, String)> {
        let memory = self.last.as_ref().map(|last| last.memory).unwrap_or_default();
        let host = |bytes: Option<usize>| bytes.map(|bytes| bytes as u64);
        let known = [
            ("memory", host(memory.resident_bytes)),
            ("peak memory", host(memory.peak_bytes)),
            ("device memory", memory.device_bytes),
        ];
        known.into_iter().filter_map(|(name, bytes)| Some((name, BinaryBytes(bytes?).to_string()))).collect()
    }

    /// The newest evaluation in a line; none before the first.
    pub(super) fn evaluation_line(&self) -> Option<String> {
        let EvalReport { step, held_out, sources, is_best, .. } = self.evaluation.as_ref()?;
        let best = if *is_best { " (best)" } else { "" };
        let mut line = format!("step {step}: held-out {:.4} bits/byte{best}", held_out.bits_per_byte);
        for (index, (name, of_source)) in sources.iter().enumerate() {
            line += &format!("{} {name} {:.4}", if index == 0 { ";" } else { "," }, of_source.bits_per_byte);
        }
        Some(line)
    }

    /// The newest sample, fit to be shown: control characters could do anything to a terminal.
    pub(super) fn sample(&self) -> Option<String> {
        let sample = self.evaluation.as_ref()?.sample.as_ref()?;
        Some(sample.chars().map(|c| if c.is_control() && c != '\n' { '·' } else { c }).collect())
    }

    /// Counts steps from here on: those of an earlier start say nothing of how long those to come take.
    fn begin_steps(&mut self, next_step: u64) {
        if self.steps_began.is_some() {
            return;
        }
        self.steps_began = Some((Instant::now(), next_step));
        if let Some(before) = self.facts.before.take() {
            for at in before.steps.iter().take_while(|at| at.step < next_step) {
                self.train_curve.take(at.step as f64, at.bits_per_byte);
            }
            let held_out = before.evaluations.iter().filter(|at| at.step < next_step);
            let held_out: Vec<(f64, f64)> = held_out.map(|at| (at.step as f64, at.bits_per_byte)).collect();
            let trained = held_out.iter().filter(|at| at.0 > 0.0).map(|at| at.1);
            self.best_bits_per_byte = trained.min_by(f64::total_cmp);
            self.held_out.splice(0..0, held_out);
        }
    }
}

impl Observer for View {
    fn step(&mut self, report: &StepReport) {
        self.begin_steps(report.step);
        self.step = report.step;
        self.loss_nats.take(report.loss_nats);
        self.bits_per_byte.take(report.bits_per_byte);
        self.gradient_norm.take(report.gradient_norm);
        self.tokens_per_sec.take(report.tokens_per_sec);
        self.share_of_peak.take(report.share_of_peak.unwrap_or_default());
        if self.stage_norms.is_empty() {
            let names = report.stage_gradient_norms.iter().map(|(name, _)| (name.clone(), Mean::default()));
            self.stage_norms = names.collect();
        }
        for ((_, mean), (_, norm)) in self.stage_norms.iter_mut().zip(&report.stage_gradient_norms) {
            mean.take(*norm);
        }
        self.train_curve.take(report.step as f64, report.bits_per_byte);
        self.last = Some(report.clone());
    }

    fn evaluation(&mut self, report: &EvalReport) {
        let bits_per_byte = report.held_out.bits_per_byte;
        if report.is_best {
            self.best_bits_per_byte = Some(bits_per_byte);
        }
        self.held_out.push((report.step as f64, bits_per_byte));
        self.evaluation = Some(report.clone());
    }

    fn skip(&mut self, report: &SkipReport) {
        self.begin_steps(report.step);
        self.step = report.step;
        self.n_skipped += 1;
        let SkipReport { step, reason, loss_nats, gradient_norm, .. } = report;
        self.notice(&format!(
            "warning: step {step} is skipped, {reason}: loss {loss_nats:.4} nats, gradient norm {gradient_norm:.4}"
        ));
    }

    fn notice(&mut self, text: &str) {
        if self.notices.len() == MAX_NOTICES {
            self.notices.pop_front();
        }
        self.notices.push_back(text.to_owned());
    }
}

#[cfg(test)]
pub(super) mod tests {
    use photon_train::eval::Evaluation;
    use photon_train::plot::{EvalPoint, RunMetrics, StepPoint};
    use photon_train::report::Memory;

    use super::*;

    pub(in super::super) fn facts(steps: u64) -> RunFacts {
        RunFacts { folder: "runs/x".into(), device: "cpu".into(), parameters: 1_500_000, steps, before: None }
    }

    pub(in super::super) fn step(step: u64, bits_per_byte: f64) -> StepReport {
        StepReport {
            step,
            tokens: 100 * step,
            loss_nats: bits_per_byte / 2.0,
            bits_per_byte,
            reconstruction: 0.0,
            z: 0.0,
            seq_len: 64,
            gradient_norm: 3.0,
            stage_gradient_norms: vec![("encoder 1".into(), 3.0), ("head".into(), 0.0)],
            learning_rate: 1e-3,
            tokens_per_sec: 1000.0,
            share_of_peak: Some(0.25),
            memory: Memory { resident_bytes: Some(1 << 20), peak_bytes: Some(3 << 20), device_bytes: Some(2 << 20) },
        }
    }

    pub(in super::super) fn evaluation(step: u64, bits_per_byte: f64) -> EvalReport {
        let held_out =
            Evaluation { n_tokens: 1, nats_per_token: 1.0, perplexity: 1.0, bits_per_byte, slot_nats: vec![1.0] };
        EvalReport {
            step,
            sources: vec![("prose".into(), held_out.clone()), ("code".into(), held_out.clone())],
            held_out,
            sample: Some("The \u{1b}[2J whale".into()),
            is_best: step > 0,
        }
    }

    #[test]
    fn lines_hold_what_a_log_needs() {
        let mut view = View::new(facts(40));
        assert_eq!((view.step_line(), view.evaluation_line(), view.time_left()), (None, None, None));
        view.step(&step(7, 4.0));
        let first = "step 7/40: loss 2.000 nats, 4.000 bits/byte, lr 1.00e-3, gradient norm 3.000, 1000 tokens/s \
                     (25.0 % of peak), memory 1.00 MiB, peak memory 3.00 MiB, device memory 2.00 MiB";
        assert_eq!(view.step_line().unwrap(), first, "one step says nothing of how long the next take");
        view.step(&step(8, 4.0));
        assert!(view.step_line().unwrap().contains(" 2.00 MiB, ETA "));
        view.evaluation(&evaluation(8, 3.25));
        assert_eq!(
            view.evaluation_line().unwrap(),
            "step 8: held-out 3.2500 bits/byte (best); prose 3.2500, code 3.2500"
        );
    }

    #[test]
    fn a_curve_has_few_points_with_the_mean_of_all() {
        let mut curve = Curve::new();
        (0..5000).for_each(|n| curve.take(f64::from(n), f64::from(n % 2)));
        assert!((256..512).contains(&curve.points.len()), "{}", curve.points.len());
        assert!(curve.points.iter().all(|point| point.1 == 0.5));
        assert!(curve.points.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn a_run_that_goes_on_has_the_curve_up_to_there() {
        let at = |step| StepPoint { step, bits_per_byte: step as f64, ..Default::default() };
        let held_out = |step, bits_per_byte| EvalPoint { step, bits_per_byte, ..Default::default() };
        let before = RunMetrics {
            name: "x".into(),
            steps: (1..=9).map(at).collect(),
            evaluations: vec![held_out(0, 1.0), held_out(4, 3.0), held_out(8, 2.0)],
        };
        let mut view = View::new(RunFacts { before: Some(before), ..facts(40) });
        // The newest checkpoint was of step 6: what came after it is done anew.
        view.step(&step(7, 70.0));
        let steps: Vec<f64> = view.train_curve.points.iter().map(|point| point.1).collect();
        assert_eq!(steps, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 70.0]);
        assert_eq!(view.held_out, [(0.0, 1.0), (4.0, 3.0)]);
        assert_eq!(view.best_bits_per_byte, Some(3.0), "fresh weights are no result");
    }
}
