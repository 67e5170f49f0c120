//! A summary as a page: tables, curves of all arms, and quality against what it costs.

use std::collections::BTreeMap;

use super::spread::Spread;
use super::summary::{ArmSummary, ExperimentSummary, Summary};
use super::tables::{RULE, notes, tables};
use crate::plot::{Axis, Chart, Mark, Page, RunMetrics, Series, Smoothing};

/// Points of a run of an arm.
type CurvePoints<'a> = &'a dyn Fn(&RunMetrics, &ArmSummary) -> Vec<(f64, f64)>;
/// What quality is drawn against: a title, an axis, and the place of an arm on it.
type Cloud<'a> = (&'a str, Axis, &'a dyn Fn(&ArmSummary) -> Option<f64>);

/// Of the training loss.
const SMOOTHING: Smoothing = Smoothing(0.95);

impl Summary {
    /// The report as a page that needs nothing beside it. Curves are read from the run folders; those that are not there
    /// are left out.
    pub fn page(&self) -> Page {
        let several = self.experiments.len() > 1;
        let title = |experiment: &ExperimentSummary, title: String| match several {
            true => format!("{}: {title}", experiment.name),
            false => title,
        };
        let mut page = Page {
            title: self.experiments.iter().map(|experiment| experiment.name.as_str()).collect::<Vec<_>>().join(", "),
            ..Page::default()
        };
        for experiment in &self.experiments {
            page.notes.extend(notes(experiment).into_iter().map(|note| title(experiment, note)));
            for mut table in tables(experiment) {
                table.title = title(experiment, table.title);
                page.tables.push(table);
            }
        }
        page.notes.push(RULE.into());
        page.charts = self.charts();
        page
    }

    fn charts(&self) -> Vec<Chart> {
        let arms = self.arms();
        let mut runs: BTreeMap<usize, Vec<RunMetrics>> = BTreeMap::new();
        for (index, (_, experiment, arm)) in arms.iter().enumerate() {
            let read = arm.run_ids.iter().filter_map(|id| RunMetrics::read(&experiment.folder.join(id)).ok());
            runs.insert(index, read.collect());
        }
        let curves = |title: &str, y: &str, mark: Mark, points: CurvePoints| {
            let series = arms.iter().enumerate().flat_map(|(index, (name, _, arm))| {
                let seeds = runs[&index].iter();
                seeds.map(move |run| Series { name: name.clone(), color: index, mark, points: points(run, arm) })
            });
            Chart {
                title: title.into(),
                x: Axis::linear("training FLOPs"),
                y: Axis::linear(y),
                series: one_legend_each(series.collect()),
            }
        };
        let flops = |tokens: u64, arm: &ArmSummary| tokens as f64 * arm.training_flops / arm.tokens;
        let bits = "held-out bits per byte";
        let mut charts = vec![
            curves("Held-out text", bits, Mark::LineAndDots, &|run, arm| {
                let trained = run.evaluations.iter().filter(|at| at.step > 0);
                trained.map(|at| (flops(at.tokens, arm), at.bits_per_byte)).collect()
            }),
            curves("Training loss", "bits per byte", Mark::Line, &|run, arm| {
                SMOOTHING.smooth(run.steps.iter().map(|at| (flops(at.tokens, arm), at.bits_per_byte)))
            }),
        ];
        let speed = |spread: Option<&Spread>| spread.map(|spread| spread.mean);
        let of_arms = || arms.iter().map(|(_, _, arm)| arm.parameters as f64);
        // Nothing is to be seen where they are matched.
        let do_parameters_differ = of_arms().fold(0.0, f64::max) > 1.02 * of_arms().fold(f64::INFINITY, f64::min);
        let clouds: [Cloud; 4] = [
            ("Quality and memory", Axis::log("cache bytes per token"), &|arm| Some(arm.cache_bytes_per_token)),
            ("Quality and decoding speed", Axis::log("decoded tokens per second"), &|arm| {
                speed(arm.decode_tokens_per_sec())
            }),
            ("Quality and training speed", Axis::log("training tokens per second"), &|arm| {
                speed(arm.tokens_per_sec.as_ref())
            }),
            ("Quality and parameters", Axis::linear("parameters"), &|arm| {
                do_parameters_differ.then_some(arm.parameters as f64)
            }),
        ];
        for (title, x, of) in clouds {
            let series = arms.iter().enumerate().map(|(color, (name, _, arm))| {
                let values = arm.bits_per_byte.iter().flat_map(|bits| &bits.values);
                let points = of(arm).into_iter().flat_map(|x| values.clone().map(move |&bits| (x, bits)));
                Series { name: name.clone(), color, mark: Mark::Dots, points: points.collect() }
            });
            charts.push(Chart { title: title.into(), x, y: Axis::linear(bits), series: series.collect() });
        }
        charts.iter_mut().for_each(|chart| chart.series.retain(|series| !series.points.is_empty()));
        charts.retain(|chart| !chart.series.is_empty());
        charts
    }
}

/// Several seeds of an arm share a colour; only the first is named.
fn one_legend_each(mut series: Vec<Series>) -> Vec<Series> {
    let mut before = None;
    for one in &mut series {
        if before == Some(one.color) {
            one.name = String::new();
        }
        before = Some(one.color);
    }
    series
}
