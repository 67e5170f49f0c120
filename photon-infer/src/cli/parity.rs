//! `photon-infer parity`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use photon_core::device::DeviceChoice;
use photon_core::nn::compute::Compute;
use photon_core::unix_lines::UnixLines;
use photon_infer::fidelity::{FidelityConfig, windows};
use photon_infer::parity::{Parity, ParityConfig, parity};
use photon_infer::presets::DEFAULT_PRESET;
use serde::Serialize;

use super::{Format, load, log, parse_positive, plan_to_measure, print, table};

const EXAMPLES: &str = "\
Examples:
  photon-infer parity --model runs/quickstart/checkpoints/best --text configs/data/moby-dick.txt --devices cpu,wgpu
  photon-infer parity --model MODEL --text book.txt --devices cpu,cuda,wgpu --preset exact,int4 --format json";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ParityArgs {
    /// Folder with model.safetensors, config.toml and tokenizer.json.
    #[arg(long)]
    model: PathBuf,
    /// The text to compare on.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// The reference device, then those that are compared with it.
    #[arg(long, value_name = "DEVICE", value_delimiter = ',', required = true)]
    devices: Vec<DeviceChoice>,
    /// How the compared devices store and multiply matrices: f32, bf16 or f16. The reference has f32.
    #[arg(long, value_name = "FORMAT", default_value_t = Compute::F32)]
    weights: Compute,
    /// Presets of the caches: names that `photon-infer presets` lists, or TOML files.
    #[arg(long, value_name = "NAME-OR-FILE", value_delimiter = ',', default_value = DEFAULT_PRESET)]
    preset: Vec<String>,
    /// Tokens of a window; every window starts without context.
    #[arg(long, value_name = "T", default_value_t = 128, value_parser = parse_positive)]
    context: usize,
    /// Tokens of a window that are its prompt; those after it go through the caches one by one.
    #[arg(long, value_name = "P", default_value_t = 64)]
    prompt: usize,
    /// Windows side by side, evenly spread over the text.
    #[arg(long, value_name = "B", default_value_t = 2, value_parser = parse_positive)]
    windows: usize,
    /// Tokens to continue the first prompt with, always the likeliest.
    #[arg(long, value_name = "N", default_value_t = 32)]
    greedy_tokens: usize,
    /// What a part of the training forward may differ by, as a share of its largest value; more is a failure.
    #[arg(long, value_name = "SHARE", default_value_t = 1e-4)]
    tolerance: f64,
    /// How to print: tables, or one JSON array with an object for each device.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// A device and how it compares.
#[derive(Serialize)]
struct Line<'a> {
    model: String,
    reference: &'a str,
    device: &'a str,
    commit: &'a str,
    config: ParityConfig,
    tolerance: f64,
    #[serde(flatten)]
    outcome: Parity,
}

pub(super) fn run(args: &ParityArgs) -> Result<()> {
    let &ParityArgs { context, prompt, greedy_tokens, tolerance, .. } = args;
    ensure!(prompt < context, "--prompt {prompt}: must be less than --context {context}, to leave tokens to compare");
    ensure!(tolerance >= 0.0, "--tolerance {tolerance}: must be 0 or more");
    ensure!(args.devices.len() > 1, "--devices names one device: name the reference and another, such as cpu,wgpu");
    let devices = args.devices.iter().map(|choice| choice.open()).collect::<Result<Vec<_>, _>>()?;
    let reference = load(&args.model, &devices[0], Compute::F32)?;
    let model_config = reference.model.config();
    let plan = |preset: &String| {
        let plan = plan_to_measure(preset, &[], &model_config, &devices[0])?;
        devices[1..].iter().try_for_each(|device| plan.check_formats(device))?;
        Ok((preset.clone(), plan))
    };
    let plans = args.preset.iter().map(plan).collect::<Result<Vec<_>>>()?;
    let name = args.text.display().to_string();
    let text = std::fs::read(&args.text).with_context(|| format!("cannot read the text {name}"))?;
    let token_ids = reference.tokenizer.encode(&UnixLines::of(&text), &name)?;
    let max_tokens = args.windows.saturating_mul(context);
    let spread =
        FidelityConfig { context_tokens: context, prompt_tokens: prompt, max_tokens, batch_size: args.windows };
    let windows = windows(&token_ids, &spread).context(name)?;

    let config = ParityConfig { prompt_tokens: prompt, greedy_tokens };
    let mut lines = Vec::with_capacity(devices.len() - 1);
    for device in &devices[1..] {
        log(format!("comparing {device} with {}", devices[0]));
        let other = load(&args.model, device, args.weights)?;
        lines.push(Line {
            model: args.model.display().to_string(),
            reference: devices[0].name,
            device: device.name,
            commit: photon_core::BUILD_COMMIT,
            config,
            tolerance,
            outcome: parity(&reference.model, &other.model, &windows, &config, &plans),
        });
    }
    match args.format {
        Format::Json => print(serde_json::to_string(&lines)?)?,
        Format::Text => print(tables(&lines))?,
    }
    for Line { device, reference, outcome, .. } in &lines {
        if let Some(part) = outcome.begins_to_differ(tolerance) {
            bail!("{device} differs from {reference} by more than {tolerance} of the largest value, from {part} on");
        }
    }
    Ok(())
}

fn tables(lines: &[Line]) -> String {
    let mut parts = table(&["device", "part", "largest value", "difference alone", "difference along"]);
    let mut predictions = table(&[
        "device",
        "path",
        "largest difference of logits",
        "KL mean, nats",
        "KL max",
        "top-1 agreement",
        "same greedy tokens",
    ]);
    for Line { device, outcome, config, .. } in lines {
        for part in &outcome.parts {
            let numbers = [part.largest, part.alone, part.along].map(|number| format!("{number:.2e}"));
            parts.add_row([(*device).to_owned(), part.part.clone()].into_iter().chain(numbers));
        }
        for path in &outcome.predictions {
            let numbers = [path.logit_difference, path.kl_mean_nats, path.kl_max_nats].map(|n| format!("{n:.2e}"));
            let agreement = format!("{:.2} %", 100.0 * path.top1_agreement);
            let greedy = path.greedy_tokens.map_or(String::new(), |n| format!("{n} of {}", config.greedy_tokens));
            let words = [(*device).to_owned(), path.path.clone()];
            predictions.add_row(words.into_iter().chain(numbers).chain([agreement, greedy]));
        }
    }
    let reference = lines.first().map_or("", |line| line.reference);
    format!(
        "differences from {reference}: of a part alone, given the reference's input, and along the whole forward\n\n\
         {parts}\n\npredictions; KL (reference || device)\n\n{predictions}"
    )
}
