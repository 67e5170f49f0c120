//! `photon-infer fidelity`.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use photon_core::device::DeviceChoice;
use photon_core::nn::compute::Compute;
use photon_core::unix_lines::UnixLines;
use photon_infer::feedback::Feedback;
use photon_infer::fidelity::{Fidelity, FidelityConfig, f16_bytes, fidelity, windows};
use photon_infer::presets::DEFAULT_PRESET;
use serde::Serialize;

use super::{Format, load, log, open_device, parse_positive, plan_to_measure, print, table};

#[derive(Args)]
pub(super) struct FidelityArgs {
    /// Folder with model.safetensors, config.toml and tokenizer.json.
    #[arg(long)]
    model: PathBuf,
    /// The text to measure on.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Names that `photon-infer presets` lists, or TOML files; several, parted by commas, are compared.
    #[arg(long, value_name = "NAME-OR-FILE", value_delimiter = ',', default_value = DEFAULT_PRESET)]
    preset: Vec<String>,
    /// Change a key of every preset, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Tokens of a window; every window starts without context.
    #[arg(long, value_name = "T", default_value_t = 512, value_parser = parse_positive)]
    context: usize,
    /// Tokens of a window that are its prompt; those after it are taken up one by one and compared.
    #[arg(long, value_name = "P", default_value_t = 128)]
    prompt: usize,
    /// Look at this many tokens at most, in windows evenly spread.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = parse_positive)]
    max_tokens: usize,
    /// Windows side by side.
    #[arg(long, value_name = "B", default_value_t = 4, value_parser = parse_positive)]
    batch: usize,
    /// How the matrices are stored and multiplied: f32, bf16 or f16.
    #[arg(long, value_name = "FORMAT", default_value_t = Compute::F32)]
    weights: Compute,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print: tables, or one JSON array with an object for each preset.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// One line of the outcome.
#[derive(Serialize)]
struct Line<'a> {
    model: String,
    preset: &'a str,
    device: &'a str,
    commit: &'a str,
    config: FidelityConfig,
    #[serde(flatten)]
    outcome: Fidelity,
}

pub(super) fn run(args: &FidelityArgs) -> Result<()> {
    let &FidelityArgs { context, prompt, max_tokens, batch, .. } = args;
    ensure!(prompt < context, "--prompt {prompt}: must be less than --context {context}, to leave tokens to compare");
    let config = FidelityConfig { context_tokens: context, prompt_tokens: prompt, max_tokens, batch_size: batch };
    let device = open_device(args.device)?;
    let checkpoint = load(&args.model, &device, args.weights)?;
    let model_config = checkpoint.model.config();
    let plans = args
        .preset
        .iter()
        .map(|preset| plan_to_measure(preset, &args.set, &model_config, &device))
        .collect::<Result<Vec<_>>>()?;
    let name = args.text.display().to_string();
    let text = std::fs::read(&args.text).with_context(|| format!("cannot read the text {name}"))?;
    let text = UnixLines::of(&text);
    let windows = windows(&checkpoint.tokenizer.encode(&text, &name)?, &config).context(name)?;
    let f16_bytes = f16_bytes(&checkpoint.model, &windows[0]);
    let mut lines = Vec::with_capacity(plans.len());
    for (preset, plan) in args.preset.iter().zip(&plans) {
        if plans.len() > 1 {
            log(format!("measuring {preset}"));
        }
        lines.push(Line {
            model: args.model.display().to_string(),
            preset,
            device: device.name,
            commit: photon_core::BUILD_COMMIT,
            config,
            outcome: fidelity(&checkpoint, &windows, &config, plan, f16_bytes),
        });
    }
    match args.format {
        Format::Json => print(serde_json::to_string(&lines)?),
        Format::Text => print(tables(&lines, &config, windows.len(), device.name)),
    }
}

fn tables(lines: &[Line], config: &FidelityConfig, n_windows: usize, device: &str) -> String {
    let mut quality = table(&[
        "preset",
        "KL mean, nats",
        "KL p99",
        "KL max",
        "top-1 agreement",
        "bits/byte",
        "change",
        "feedback",
        "cache bytes/token",
        "share of f16",
        "decode tokens/s",
    ]);
    let mut caches = table(&["preset", "cache", "entries", "bytes used", "bytes allocated"]);
    for Line { preset, outcome, .. } in lines {
        quality.add_row(vec![
            (*preset).to_owned(),
            format!("{:.2e}", outcome.kl_mean_nats),
            format!("{:.2e}", outcome.kl_p99_nats),
            format!("{:.2e}", outcome.kl_max_nats),
            format!("{:.2} %", 100.0 * outcome.top1_agreement),
            format!("{:.4}", outcome.cached_bits_per_byte),
            format!("{:+.5}", outcome.bits_per_byte_change),
            feedback_word(outcome.feedback).to_owned(),
            format!("{:.1}", outcome.bytes_per_token),
            format!("{:.3}", outcome.share_of_f16),
            format!("{:.0}", outcome.decode_tokens_per_sec),
        ]);
        for stage in &outcome.caches {
            let numbers = [stage.entries, stage.used_bytes, stage.allocated_bytes].map(|n| n.to_string());
            caches.add_row([(*preset).to_owned(), stage.stage.clone()].into_iter().chain(numbers));
        }
        let total = [outcome.used_bytes, outcome.allocated_bytes].map(|n| n.to_string());
        caches.add_row([(*preset).to_owned(), "total".to_owned(), String::new()].into_iter().chain(total));
    }
    let n_tokens = lines.first().map_or(0, |line| line.outcome.n_tokens);
    let FidelityConfig { context_tokens, prompt_tokens, batch_size, .. } = config;
    format!(
        "device {device}, {n_tokens} predictions in {n_windows} windows of {context_tokens} tokens, the first \
         {prompt_tokens} a prompt, batch {batch_size}; KL (training forward || cached)\n\n{quality}\n\ncaches of a row \
         at the end of a window\n\n{caches}"
    )
}

fn feedback_word(feedback: Feedback) -> &'static str {
    match feedback {
        Feedback::Yes => "yes",
        Feedback::No => "no",
        Feedback::WindowTooShort => "window too short",
    }
}
