//! `photon-train plot`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use photon_core::atomic_file;
use photon_train::plot::{Along, Page, RunMetrics, Smoothing, curves};

use super::print;

const EXAMPLES: &str = "\
Examples:
  photon-train plot runs/quickstart
  photon-train plot runs/a runs/b --x tokens --out compared.html";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PlotArgs {
    /// Run folders, or files like their metrics.jsonl. They may still be running.
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The page to write: HTML that needs nothing beside it.
    #[arg(long, default_value = "curves.html")]
    out: PathBuf,
    /// What runs along the bottom; hours are those spent on updates.
    #[arg(long, value_enum, default_value_t = X::Steps)]
    x: X,
    /// How much of a running mean stays at each step, from 0 to below 1; for losses, norms and speed.
    #[arg(long, default_value_t = 0.95)]
    smoothing: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum X {
    Steps,
    Tokens,
    Hours,
}

pub(super) fn run(args: &PlotArgs) -> Result<()> {
    let smoothing = args.smoothing;
    ensure!((0.0..1.0).contains(&smoothing), "--smoothing {smoothing}: must be at least 0 and below 1");
    let is_html = args.out.extension().is_some_and(|extension| extension == "html" || extension == "htm");
    ensure!(is_html, "--out {}: only HTML is written; choose a name that ends in .html", args.out.display());
    let mut runs = args.runs.iter().map(|path| RunMetrics::read(path)).collect::<Result<Vec<_>, _>>()?;
    let names: BTreeSet<&String> = runs.iter().map(|run| &run.name).collect();
    if names.len() < runs.len() {
        // Folders of one name in different places are told apart by those.
        runs.iter_mut().zip(&args.runs).for_each(|(run, path)| run.name = path.display().to_string());
    }
    let along = match args.x {
        X::Steps => Along::Steps,
        X::Tokens => Along::Tokens,
        X::Hours => Along::Hours,
    };
    let page = Page {
        title: runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", "),
        notes: runs.iter().map(note).collect(),
        tables: Vec::new(),
        charts: curves(&runs, along, Smoothing(smoothing)),
    };
    write(&args.out, &page.html())?;
    print(args.out.display())
}

/// A run in a line.
fn note(run: &RunMetrics) -> String {
    let steps = run.steps.last().map_or(0, |last| last.step);
    let best = run.evaluations.iter().map(|at| at.bits_per_byte).fold(f64::INFINITY, f64::min);
    let held_out = if best.is_finite() { format!(", best held-out {best:.4} bits per byte") } else { String::new() };
    format!("{}: {steps} steps{held_out}", run.name)
}

fn write(path: &Path, html: &str) -> Result<()> {
    atomic_file::write(path, html.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}
