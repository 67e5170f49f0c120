//! A summary as tables and words, for Markdown and for a page.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::spread::{Difference, Rule, Spread};
use super::summary::{ArmSummary, ExperimentSummary, Summary};
use crate::plot::{PageTable, short};

/// More columns than this of one measure could not be read.
const MAX_COLUMNS: usize = 12;

/// How differences are judged.
pub(super) const RULE: &str = "Numbers are means over seeds ± half of their range. A difference from the reference is \
    \"unresolved\" if it is not larger than the sum of both half ranges (two seeds), not outside Welch's 95 % t interval (three \
    or more), or if there is one seed.";

/// The tables of an experiment; those that nothing was measured for are left out.
pub(super) fn tables(experiment: &ExperimentSummary) -> Vec<PageTable> {
    let arms = &experiment.arms;
    let mut tables = vec![quality(experiment), costs(arms), caches(arms)];
    tables.extend(slots(arms));
    tables.extend(sources(arms));
    tables.extend(fidelity(arms));
    tables.extend(measures(arms));
    if !experiment.failed.is_empty() {
        let rows = experiment.failed.iter().map(|run| vec![run.arm.clone(), run.seed.to_string(), run.error.clone()]);
        tables.push(table("Failed runs", &["arm", "seed", "error"], rows.collect()));
    }
    tables
}

fn table(title: &str, header: &[&str], rows: Vec<Vec<String>>) -> PageTable {
    PageTable { title: title.into(), header: header.iter().map(|&name| name.into()).collect(), rows }
}

fn quality(experiment: &ExperimentSummary) -> PageTable {
    let title = format!("Quality, beside \"{}\"", experiment.reference);
    let row = |arm: &ArmSummary| {
        vec![
            arm.name.clone(),
            maybe(arm.bits_per_byte.as_ref(), 4),
            arm.difference.as_ref().map_or("reference".into(), difference),
            maybe(arm.best_bits_per_byte.as_ref(), 4),
            arm.run_ids.len().to_string(),
        ]
    };
    let mut rows: Vec<Vec<String>> = experiment.arms.iter().map(row).collect();
    for (row, arm) in rows.iter_mut().zip(&experiment.arms) {
        if arm.difference.is_none() && arm.name != experiment.reference {
            row[2] = "-".into();
        }
    }
    table(&title, &["arm", "held-out bits/byte", "difference", "best", "seeds"], rows)
}

fn costs(arms: &[ArmSummary]) -> PageTable {
    let row = |arm: &ArmSummary| {
        vec![
            arm.name.clone(),
            arm.parameters.to_string(),
            short(arm.training_flops_per_token),
            format!("{:.3e}", arm.training_flops),
            short(arm.tokens),
            arm.steps.to_string(),
            maybe(arm.tokens_per_sec.as_ref(), 0),
            maybe(arm.decode_tokens_per_sec(), 0),
            format!("{:.1}", arm.cache_bytes_per_token),
        ]
    };
    let header = [
        "arm",
        "parameters",
        "training FLOPs/token",
        "training FLOPs",
        "tokens",
        "steps",
        "training tokens/s",
        "decode tokens/s",
        "cache bytes/token",
    ];
    table("Costs", &header, arms.iter().map(row).collect())
}

/// Of each stage what it holds at the training length, and what every further token adds.
fn caches(arms: &[ArmSummary]) -> PageTable {
    let stages = columns(arms.iter().flat_map(|arm| arm.caches.iter().map(|cache| cache.stage.clone())));
    let row = |arm: &ArmSummary| {
        let of = |stage: &String| {
            let cache = arm.caches.iter().find(|cache| cache.stage == *stage);
            cache.map_or("-".into(), |cache| {
                format!("{:.1} ({:.1})", cache.bytes_per_token, cache.growth_bytes_per_token)
            })
        };
        std::iter::once(arm.name.clone()).chain(stages.iter().map(of)).collect()
    };
    let header: Vec<&str> = std::iter::once("arm").chain(stages.iter().map(String::as_str)).collect();
    let title = "Cache of each stage in f16: bytes/token at the training length (and what each further token adds)";
    table(title, &header, arms.iter().map(row).collect())
}

fn slots(arms: &[ArmSummary]) -> Option<PageTable> {
    let n_slots = arms.iter().map(|arm| arm.slot_nats.len()).max().filter(|&n| n > 1)?;
    let names: Vec<String> = (0..n_slots).map(|slot| format!("slot {slot}")).collect();
    let header: Vec<&str> = std::iter::once("arm").chain(names.iter().map(String::as_str)).collect();
    let row = |arm: &ArmSummary| {
        let of = |slot: usize| maybe(arm.slot_nats.get(slot), 3);
        std::iter::once(arm.name.clone()).chain((0..n_slots).map(of)).collect()
    };
    Some(table("Cross-entropy by slot of the level-1 chunk, nats/token", &header, arms.iter().map(row).collect()))
}

fn sources(arms: &[ArmSummary]) -> Option<PageTable> {
    let names = columns(arms.iter().flat_map(|arm| arm.sources.keys().cloned()));
    let header: Vec<&str> = std::iter::once("arm").chain(names.iter().map(String::as_str)).collect();
    let row = |arm: &ArmSummary| {
        std::iter::once(arm.name.clone()).chain(names.iter().map(|name| maybe(arm.sources.get(name), 4))).collect()
    };
    (!names.is_empty()).then(|| table("Held-out bits/byte by source", &header, arms.iter().map(row).collect()))
}

fn fidelity(arms: &[ArmSummary]) -> Option<PageTable> {
    let rows = arms.iter().flat_map(|arm| {
        arm.fidelity.iter().map(|way| {
            vec![
                arm.name.clone(),
                way.preset.clone(),
                way.kl_mean_nats.as_ref().map_or("-".into(), |kl| format!("{:.1e}", kl.mean)),
                way.top1_agreement.as_ref().map_or("-".into(), |top1| format!("{:.2} %", 100.0 * top1.mean)),
                maybe(way.bits_per_byte_change.as_ref(), 4),
                maybe(way.bytes_per_token.as_ref(), 1),
                maybe(way.decode_tokens_per_sec.as_ref(), 0),
            ]
        })
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let header = [
        "arm",
        "preset",
        "KL from the training forward, nats",
        "equal likeliest tokens",
        "change of bits/byte",
        "cache bytes/token",
        "decode tokens/s",
    ];
    (!rows.is_empty()).then(|| table("Ways to generate", &header, rows))
}

/// Bits per byte of all measures that have them side by side, other measures one by one.
fn measures(arms: &[ArmSummary]) -> Vec<PageTable> {
    const BITS: &str = "bits_per_byte";
    let names = columns(arms.iter().flat_map(|arm| arm.measures.keys().cloned()));
    let has_bits =
        |name: &&String| arms.iter().any(|arm| arm.measures.get(*name).is_some_and(|of| of.contains_key(BITS)));
    let (with_bits, others): (Vec<&String>, Vec<&String>) = names.iter().partition(has_bits);
    let mut tables = Vec::new();
    if !with_bits.is_empty() {
        let header: Vec<&str> = std::iter::once("arm").chain(with_bits.iter().map(|name| name.as_str())).collect();
        let row = |arm: &ArmSummary| {
            let of = |name: &&String| maybe(arm.measures.get(*name).and_then(|of| of.get(BITS)), 4);
            std::iter::once(arm.name.clone()).chain(with_bits.iter().map(of)).collect()
        };
        tables.push(table("Measured bits/byte", &header, arms.iter().map(row).collect()));
    }
    for name in others {
        let of_arm = |arm: &ArmSummary| arm.measures.get(name).cloned().unwrap_or_default();
        let paths = columns(arms.iter().flat_map(|arm| of_arm(arm).into_keys()));
        let paths = &paths[..paths.len().min(MAX_COLUMNS)];
        let header: Vec<&str> = std::iter::once("arm").chain(paths.iter().map(String::as_str)).collect();
        let row = |arm: &ArmSummary| {
            let values = of_arm(arm);
            std::iter::once(arm.name.clone()).chain(paths.iter().map(|path| maybe(values.get(path), 4))).collect()
        };
        tables.push(table(&format!("Measure: {name}"), &header, arms.iter().map(row).collect()));
    }
    tables
}

/// Names in the order of their first appearance.
fn columns(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.filter(|name| seen.insert(name.clone())).collect()
}

fn maybe(spread: Option<&Spread>, digits: usize) -> String {
    match spread {
        None => "-".into(),
        Some(Spread { mean, half_range: None, .. }) => format!("{mean:.digits$}"),
        Some(Spread { mean, half_range: Some(half_range), .. }) => format!("{mean:.digits$} ± {half_range:.digits$}"),
    }
}

fn difference(found: &Difference) -> String {
    let Difference { difference, margin, is_resolved, rule } = found;
    let words = match (is_resolved, rule) {
        (true, _) => "",
        (false, Rule::OneSeed) => " unresolved (one seed)",
        (false, _) => " unresolved",
    };
    let margin = margin.map_or(String::new(), |margin| format!(" (margin {margin:.4})"));
    format!("{difference:+.4}{margin}{words}")
}

impl Summary {
    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        for experiment in &self.experiments {
            let _ = writeln!(text, "# {}\n", experiment.name);
            for note in notes(experiment) {
                let _ = writeln!(text, "{note}\n");
            }
            for PageTable { title, header, rows } in tables(experiment) {
                let _ = writeln!(text, "## {title}\n");
                let _ = writeln!(
                    text,
                    "| {} |",
                    header.iter().map(|cell| markdown_cell(cell)).collect::<Vec<_>>().join(" | ")
                );
                let _ = writeln!(text, "|---|{}", "---:|".repeat(header.len() - 1));
                for row in rows {
                    let cells: Vec<String> = row.iter().map(|cell| markdown_cell(cell)).collect();
                    let _ = writeln!(text, "| {} |", cells.join(" | "));
                }
                text += "\n";
            }
        }
        let _ = writeln!(text, "{RULE}");
        text
    }
}

/// Lines that stand above the tables.
pub(super) fn notes(experiment: &ExperimentSummary) -> Vec<String> {
    let ExperimentSummary { question, reference, budget, commits, waiting, .. } = experiment;
    let mut notes = Vec::new();
    if !question.is_empty() {
        notes.push(question.clone());
    }
    let budget: Vec<String> = budget.iter().map(|(unit, amount)| format!("{amount:e} {unit}")).collect();
    notes.push(format!("Reference: {reference}. Budget: {}. Commit: {}.", budget.join(", "), commits.join(", ")));
    if *waiting > 0 {
        notes.push(format!("Not finished: {waiting} runs are still to be made."));
    }
    notes
}

fn markdown_cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}
