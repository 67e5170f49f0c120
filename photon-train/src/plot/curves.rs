//! Which charts are drawn of runs.

use std::collections::BTreeSet;

use super::metrics::{EvalPoint, RunMetrics, StepPoint};
use super::{Axis, Chart, Mark, Series};

/// What runs along the bottom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    /// Steps gone.
    Steps,
    /// Tokens seen.
    Tokens,
    /// Hours spent on updates.
    Hours,
}

/// How much of a running mean stays at each step, from 0 (none) up to, but not including, 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Smoothing(pub f64);

impl Smoothing {
    /// Running means; what is no number stays out of them.
    pub(crate) fn smooth(self, points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
        let (mut sum, mut weight) = (0.0, 0.0);
        let finite = points.filter(|(_, y)| y.is_finite());
        let mean = |(x, y)| {
            sum = self.0 * sum + y;
            weight = self.0 * weight + 1.0;
            (x, sum / weight)
        };
        finite.map(mean).collect()
    }
}

impl Along {
    fn axis(self) -> Axis {
        Axis::linear(match self {
            Self::Steps => "steps",
            Self::Tokens => "tokens",
            Self::Hours => "hours spent on updates",
        })
    }

    fn of(self, step: u64, tokens: u64, secs: f64) -> f64 {
        match self {
            Self::Steps => step as f64,
            Self::Tokens => tokens as f64,
            Self::Hours => secs / 3600.0,
        }
    }
}

/// Charts that compare runs: loss, held-out text, learning rate, gradients, speed. What no run has is left out.
pub fn curves(runs: &[RunMetrics], along: Along, smoothing: Smoothing) -> Vec<Chart> {
    let of_steps = |title: &str, y: Axis, smoothing: Smoothing, value: &dyn Fn(&StepPoint) -> f64| {
        let points = |run: &RunMetrics| {
            smoothing.smooth(run.steps.iter().map(|at| (along.of(at.step, at.tokens, at.secs), value(at))))
        };
        chart(title, along, y, Mark::Line, runs, points)
    };
    let of_evaluations = |title: &str, value: &dyn Fn(&EvalPoint) -> f64| {
        let points = |run: &RunMetrics| -> Vec<(f64, f64)> {
            run.evaluations.iter().map(|at| (along.of(at.step, at.tokens, at.secs), value(at))).collect()
        };
        chart(title, along, Axis::linear("bits per byte"), Mark::LineAndDots, runs, points)
    };
    let raw = Smoothing(0.0);
    let mut charts = vec![
        of_steps("Training loss", Axis::linear("nats per token"), smoothing, &|at| at.loss_nats),
        of_steps("Training bits per byte", Axis::linear("bits per byte"), smoothing, &|at| at.bits_per_byte),
        of_evaluations("Held-out bits per byte", &|at| at.bits_per_byte),
    ];
    let evaluations = runs.iter().flat_map(|run| &run.evaluations);
    let sources: BTreeSet<&String> = evaluations.flat_map(|at| at.sources.keys()).collect();
    for source in sources {
        let of_source = |at: &EvalPoint| at.sources.get(source).copied().unwrap_or(f64::NAN);
        charts.push(of_evaluations(&format!("Held-out bits per byte of {source}"), &of_source));
    }
    charts.extend([
        of_steps("Learning rate", Axis::linear("learning rate"), raw, &|at| at.learning_rate),
        of_steps("Gradient norm", Axis::log("norm before clipping"), smoothing, &|at| at.gradient_norm),
        of_steps("Speed", Axis::linear("tokens per second"), smoothing, &|at| at.tokens_per_sec),
        of_steps("Share of the machine's peak", Axis::linear("percent"), smoothing, &|at| {
            at.share_of_peak.map_or(f64::NAN, |share| 100.0 * share)
        }),
    ]);
    if let [run] = runs {
        charts.push(stages(run, along, smoothing));
    }
    charts.retain(|chart| !chart.series.is_empty());
    charts
}

/// One series a run, those without points left out.
fn chart(
    title: &str,
    along: Along,
    y: Axis,
    mark: Mark,
    runs: &[RunMetrics],
    points: impl Fn(&RunMetrics) -> Vec<(f64, f64)>,
) -> Chart {
    let series =
        |(color, run): (usize, &RunMetrics)| Series { name: run.name.clone(), color, mark, points: points(run) };
    let series = runs.iter().enumerate().map(series).filter(has_points).collect();
    Chart { title: title.into(), x: along.axis(), y, series }
}

/// The gradient norm of each stage of one run.
fn stages(run: &RunMetrics, along: Along, smoothing: Smoothing) -> Chart {
    let stages: BTreeSet<&String> = run.steps.iter().flat_map(|at| at.stage_gradient_norms.keys()).collect();
    let series = |(color, stage): (usize, &String)| {
        let norm = |at: &StepPoint| at.stage_gradient_norms.get(stage).copied().unwrap_or(f64::NAN);
        let points = run.steps.iter().map(|at| (along.of(at.step, at.tokens, at.secs), norm(at)));
        Series { name: stage.clone(), color, mark: Mark::Line, points: smoothing.smooth(points) }
    };
    let series = stages.into_iter().enumerate().map(series).filter(has_points).collect();
    Chart { title: "Gradient norm of each stage".into(), x: along.axis(), y: Axis::log("norm before clipping"), series }
}

fn has_points(series: &Series) -> bool {
    series.points.iter().any(|(x, y)| x.is_finite() && y.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str) -> RunMetrics {
        let step = |step: u64| StepPoint {
            step,
            tokens: 10 * step,
            secs: 36.0 * step as f64,
            loss_nats: step as f64,
            gradient_norm: f64::NAN,
            ..Default::default()
        };
        let held_out =
            EvalPoint { step: 2, tokens: 20, secs: 72.0, bits_per_byte: 1.5, sources: [("a".into(), 1.25)].into() };
        RunMetrics { name: name.into(), steps: vec![step(1), step(3)], evaluations: vec![held_out] }
    }

    fn points(charts: &[Chart], title: &str) -> Option<Vec<(f64, f64)>> {
        charts.iter().find(|chart| chart.title == title).map(|chart| chart.series[0].points.clone())
    }

    #[test]
    fn each_run_is_a_series_along_what_was_asked_for() {
        let runs = [run("one"), run("two")];
        for (along, at) in [(Along::Steps, [1.0, 3.0]), (Along::Tokens, [10.0, 30.0]), (Along::Hours, [0.01, 0.03])] {
            let charts = curves(&runs, along, Smoothing(0.5));
            assert!(charts.iter().all(|chart| chart.series.len() == 2 && chart.series[1].name == "two"));
            let loss = points(&charts, "Training loss").unwrap();
            // Means with weights 1 and 1/2.
            assert_eq!(loss, [(at[0], 1.0), (at[1], (0.5 * 1.0 + 3.0) / 1.5)]);
            assert_eq!(points(&charts, "Held-out bits per byte").unwrap()[0].1, 1.5);
            assert_eq!(points(&charts, "Held-out bits per byte of a").unwrap()[0].1, 1.25);
        }
    }

    #[test]
    fn what_no_run_has_is_left_out() {
        let charts = curves(&[run("one")], Along::Steps, Smoothing(0.0));
        assert!(points(&charts, "Training loss").is_some());
        assert!(points(&charts, "Gradient norm").is_none() && points(&charts, "Gradient norm of each stage").is_none());
        assert!(points(&charts, "Share of the machine's peak").is_none());
    }
}
