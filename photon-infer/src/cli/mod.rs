//! Arguments to calls, results to stdout, notes to stderr.

mod bench;
mod devices;
mod fidelity;
mod generate;
mod lm_eval;
mod parity;
mod presets;

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand, ValueEnum};
use comfy_table::Table;
use photon_core::checkpoint::Checkpoint;
use photon_core::config::ModelConfig;
use photon_core::device::{DeviceChoice, DeviceError, OpenDevice};
use photon_core::infer_config::InferPlan;
use photon_core::nn::compute::Compute;
use photon_infer::presets::load_preset;

const EXAMPLES: &str = "\
Examples:
  photon-infer generate --model runs/quickstart/checkpoints/best --prompt \"The whale\" --max-tokens 200
  photon-infer generate --model MODEL --prompt One --prompt Two --temperature 0 --format json
  photon-infer generate --model MODEL --prompt Once --samples 4 --preset exact-int8 --stats
  photon-infer presets
  photon-infer devices
  photon-infer fidelity --model MODEL --text book.txt --preset exact,exact-int8,int4
  photon-infer lm-eval --model MODEL < requests.jsonl
  photon-infer parity --model MODEL --text book.txt --devices cpu,wgpu
  photon-infer bench --model runs/quickstart/checkpoints/best
  photon-infer bench --config photon.toml --config flat.toml --preset exact,int4 --regime decode-heavy --memory-gib 2";

/// Generates text from photon checkpoints; measures how fast, and how faithfully.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Continue prompts.
    Generate(generate::GenerateArgs),
    /// List the named ways to store and keep caches.
    Presets(presets::PresetsArgs),
    /// List the devices that this program and this machine have.
    Devices(devices::DevicesArgs),
    /// Measure what presets cost in quality, against the training forward on a text.
    Fidelity(fidelity::FidelityArgs),
    /// Answer the requests of lm-evaluation-harness on stdin: log-likelihoods and continuations.
    LmEval(lm_eval::LmEvalArgs),
    /// Compare devices, part by part: where does one begin to differ?
    Parity(parity::ParityArgs),
    /// Measure prefill and decode speed, time to first token, cache bytes and memory.
    Bench(bench::BenchArgs),
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
        Command::Generate(args) => generate::run(args),
        Command::Presets(args) => presets::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Fidelity(args) => fidelity::run(&args),
        Command::LmEval(args) => lm_eval::run(&args),
        Command::Parity(args) => parity::run(&args),
        Command::Bench(args) => bench::run(&args),
    }
}

/// A note for the person at the terminal.
fn log(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A line of results.
fn print(line: impl std::fmt::Display) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Opens a device, and says which where the choice was left to the program.
fn open_device(choice: DeviceChoice) -> Result<OpenDevice, DeviceError> {
    let device = choice.open()?;
    if choice == DeviceChoice::Auto {
        log(format!("device: {device}"));
    }
    Ok(device)
}

/// Loads a checkpoint onto a device, its matrices in a format.
fn load(folder: &Path, device: &OpenDevice, weights: Compute) -> Result<Checkpoint> {
    check_weights(device, weights)?;
    let Checkpoint { model, tokenizer } = Checkpoint::load(folder, &device.device)?;
    Ok(Checkpoint { model: model.with_weights(weights), tokenizer })
}

/// Whether the device can compute in a format.
fn check_weights(device: &OpenDevice, weights: Compute) -> Result<()> {
    let is_there = device.device.supports_dtype(weights.dtype());
    ensure!(is_there, "--weights {weights}: {device} has no {weights}; use f32, or another --device");
    Ok(())
}

/// The plan of a preset for a model on a device.
fn plan(preset: &str, overrides: &[String], model: &ModelConfig, device: &OpenDevice) -> Result<InferPlan> {
    let name = || format!("preset {preset}");
    let plan = load_preset(preset, overrides)?.plan(model).with_context(name)?;
    plan.check_formats(device).with_context(name)?;
    Ok(plan)
}

/// The plan of a preset for a model whose caches are to be measured.
fn plan_to_measure(preset: &str, overrides: &[String], model: &ModelConfig, device: &OpenDevice) -> Result<InferPlan> {
    let plan = plan(preset, overrides, model, device)?;
    if let Some(budget) = plan.memory_budget_bytes {
        bail!(
            "preset {preset}: memory_budget_bytes = {budget} changes the caches as they fill, so there is no one thing \
             to measure; leave it out here"
        );
    }
    Ok(plan)
}

/// A table that Markdown reads too.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(header.to_vec());
    table
}

fn parse_positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("must be a whole number of at least 1".into()),
        Ok(n) => Ok(n),
    }
}
