//! Arguments to calls, results to stdout, logs to stderr.

mod ablate;
mod bench;
mod display;
mod eval;
mod import;
mod info;
mod plot;
mod prepare;
mod probe;
mod progress;
mod report;
mod run;
mod tokenizer;

use std::io::{IsTerminal, Write};

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use photon_core::device::{DeviceChoice, DeviceError, OpenDevice};

const EXAMPLES: &str = "\
Examples:
  photon-train run configs/train/quickstart.toml
  photon-train run configs/train/quickstart.toml --set optimizer.learning_rate=3e-4 --out runs/slower
  photon-train run configs/train/quickstart.toml --resume
  photon-train prepare configs/train/quickstart.toml
  photon-train eval runs/quickstart/checkpoints/best book.txt
  photon-train probe runs/quickstart/checkpoints/best --text book.txt
  photon-train plot runs/quickstart runs/slower --out curves.html
  photon-train info configs/model/photon-600m.toml
  photon-train bench configs/model/flat-small.toml
  photon-train tokenizer texts/ --vocab-size 4096 --out tokenizer.json
  photon-train ablate experiments/levels/experiment.toml --dry-run
  photon-train import-llama SmolLM2-135M --out models/smollm2";

/// Trains and evaluates hierarchical language models.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model, from fresh weights or on from a checkpoint.
    Run(run::RunArgs),
    /// Tokenise the text of a run without training, and show what it holds.
    Prepare(prepare::PrepareArgs),
    /// Measure how well a checkpoint predicts a text.
    Eval(eval::EvalArgs),
    /// Measure what a checkpoint makes of its context: copying, depth, rows longer than those of training.
    Probe(probe::ProbeArgs),
    /// Measure how fast a model trains here.
    Bench(bench::BenchArgs),
    /// Write the curves of one or more runs as a page.
    Plot(plot::PlotArgs),
    /// Print what a model costs: parameters, FLOPs, cache bytes.
    Info(info::InfoArgs),
    /// Train a byte-level BPE tokenizer on text files.
    Tokenizer(tokenizer::TokenizerArgs),
    /// Run an experiment: several arms with several seeds, compared.
    Ablate(ablate::AblateArgs),
    /// Write what came of one or more experiments as a report.
    Report(report::ReportArgs),
    /// Turn a Llama-architecture model of the transformers package into a checkpoint.
    ImportLlama(import::ImportArgs),
}

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// Runs the command that the arguments name.
pub(crate) fn run() -> Result<()> {
    match Cli::parse().command {
        Command::Run(args) => run::run(args),
        Command::Prepare(args) => prepare::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Probe(args) => probe::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Plot(args) => plot::run(&args),
        Command::Info(args) => info::run(&args),
        Command::Tokenizer(args) => tokenizer::run(&args),
        Command::Ablate(args) => ablate::run(&args),
        Command::Report(args) => report::run(&args),
        Command::ImportLlama(args) => import::run(&args),
    }
}

/// A line for the log.
fn log(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Opens a device, and says which where the choice was left to the program.
fn open_device(choice: DeviceChoice) -> Result<OpenDevice, DeviceError> {
    let device = choice.open()?;
    if choice == DeviceChoice::Auto {
        log(format!("device: {device}"));
    }
    Ok(device)
}

/// A line of results.
fn print(line: impl std::fmt::Display) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

fn bar(len: u64, style: &str) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr_with_hz(4),
        false => ProgressDrawTarget::hidden(),
    };
    let style = ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(len), target).with_style(style.progress_chars("=> "))
}

/// A table whose first column is names and whose others are numbers.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN);
    table.set_header(header.to_vec());
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

/// `1234567` as `1 234 567`.
fn grouped(n: usize) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap_or_default()).collect();
    groups.join(" ")
}
