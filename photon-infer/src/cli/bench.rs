//! `photon-infer bench`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use photon_core::checkpoint;
use photon_core::config::ModelConfig;
use photon_core::config_file;
use photon_core::device::{DeviceChoice, check_tensors};
use photon_core::model::Model;
use photon_core::nn::compute::Compute;
use photon_infer::bench::{BenchConfig, BenchReport, GIB, bench, bench_in_memory};
use photon_infer::presets::DEFAULT_PRESET;
use serde::{Deserialize, Serialize};

use super::{Format, check_weights, load, log, open_device, parse_positive, plan_to_measure, print, table};

/// Bytes of a MiB.
const MIB: f64 = (1u64 << 20) as f64;

/// Tokens of prompts, and tokens to generate, where nothing is said.
const DEFAULT_TOKENS: (usize, usize) = (128, 128);

#[derive(Args)]
pub(super) struct BenchArgs {
    /// Folder of a checkpoint; several are compared.
    #[arg(long, conflicts_with = "config", required_unless_present = "config")]
    model: Vec<PathBuf>,
    /// A model config, several are compared; the weights are random.
    #[arg(long)]
    config: Vec<PathBuf>,
    /// Change a key of the model configs, as key.path=value.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    set: Vec<String>,
    /// Names that `photon-infer presets` lists, or TOML files; several, parted by commas, are compared.
    #[arg(long, value_name = "NAME-OR-FILE", value_delimiter = ',', default_value = DEFAULT_PRESET)]
    preset: Vec<String>,
    /// Tokens of prompt and generation at once.
    #[arg(long, value_enum)]
    regime: Option<Regime>,
    /// Tokens of each prompt. Default: the regime's, or 128.
    #[arg(long, value_parser = parse_positive)]
    prompt_tokens: Option<usize>,
    /// Tokens to generate for each prompt. Default: the regime's, or 128.
    #[arg(long, value_parser = parse_positive)]
    decode_tokens: Option<usize>,
    /// Prompts side by side.
    #[arg(long, default_value_t = 1, value_parser = parse_positive)]
    batch_size: usize,
    /// As many prompts side by side as have room for their caches in this many GiB.
    #[arg(long, value_name = "X", conflicts_with = "batch_size", value_parser = parse_gib)]
    memory_gib: Option<f64>,
    /// Runs that count; the medians are reported.
    #[arg(long, default_value_t = 3, value_parser = parse_positive)]
    repeats: usize,
    /// How the matrices are stored and multiplied: f32, bf16 or f16.
    #[arg(long, value_name = "FORMAT", default_value_t = Compute::F32)]
    weights: Compute,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print: tables, or one JSON array with an object for each model and preset.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Measure only this pair of model and preset, in this process, and print its JSON object.
    #[arg(long, hide = true)]
    only: Option<usize>,
}

/// Named lengths of prompt and generation.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Regime {
    /// 2048 in, 128 out
    PrefillHeavy,
    /// 128 in, 2048 out
    DecodeHeavy,
    /// 8192 in, 128 out
    #[value(name = "8k")]
    Long8k,
    /// 32768 in, 64 out
    #[value(name = "32k")]
    Long32k,
}

impl Regime {
    fn tokens(self) -> (usize, usize) {
        match self {
            Self::PrefillHeavy => (2048, 128),
            Self::DecodeHeavy => (128, 2048),
            Self::Long8k => (8192, 128),
            Self::Long32k => (32_768, 64),
        }
    }
}

/// A model with one of the presets.
#[derive(Clone, Copy)]
struct Pair<'a> {
    model: &'a Path,
    preset: &'a str,
}

/// What was measured of a pair.
#[derive(Serialize, Deserialize)]
struct Measurement {
    model: String,
    preset: String,
    device: String,
    weights: Compute,
    commit: String,
    #[serde(flatten)]
    report: BenchReport,
}

pub(super) fn run(args: &BenchArgs) -> Result<()> {
    let config = bench_config(args)?;
    let models = if args.model.is_empty() { &args.config } else { &args.model };
    let pairs: Vec<Pair> =
        models.iter().flat_map(|model| args.preset.iter().map(|preset| Pair { model, preset })).collect();
    if let Some(index) = args.only {
        let pair = pairs.get(index).with_context(|| format!("--only {index}: there are {} pairs", pairs.len()))?;
        return print(serde_json::to_string(&measure(args, *pair, config)?)?);
    }
    let measurements = match pairs[..] {
        [pair] => vec![measure(args, pair, config)?],
        _ => measure_each_alone(args, &pairs)?,
    };
    match args.format {
        Format::Json => print(serde_json::to_string(&measurements)?),
        Format::Text => print(tables(&measurements)),
    }
}

fn bench_config(args: &BenchArgs) -> Result<BenchConfig> {
    let (prompt_tokens, decode_tokens) = args.regime.map_or(DEFAULT_TOKENS, Regime::tokens);
    let prompt_tokens = args.prompt_tokens.unwrap_or(prompt_tokens);
    let decode_tokens = args.decode_tokens.unwrap_or(decode_tokens);
    ensure!(
        decode_tokens > 1,
        "--decode-tokens {decode_tokens}: at least 2, because the first token belongs to the prompt"
    );
    Ok(BenchConfig { prompt_tokens, decode_tokens, batch_size: args.batch_size, repeats: args.repeats })
}

/// Each pair in a process of its own, because the peak of a process never falls.
fn measure_each_alone(args: &BenchArgs, pairs: &[Pair]) -> Result<Vec<Measurement>> {
    let mut possible = Vec::new();
    let device = args.device.open()?;
    for (index, pair) in pairs.iter().enumerate() {
        let config = model_config(args, pair.model)?;
        photon_infer::presets::load_preset(pair.preset, &[])?;
        match plan_to_measure(pair.preset, &[], &config, &device) {
            Ok(_) => possible.push((index, pair)),
            Err(error) => log(format!("{} is left out: {error:#}", pair.model.display())),
        }
    }
    ensure!(!possible.is_empty(), "no preset fits a model");
    let program = std::env::current_exe().context("cannot find this program to run it again")?;
    let mut measurements = Vec::with_capacity(possible.len());
    for (index, Pair { model, preset }) in possible {
        let name = format!("{} with preset {preset}", model.display());
        log(format!("measuring {name}"));
        let output = Command::new(&program)
            .args(std::env::args_os().skip(1))
            .args(["--only", &index.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot run {}", program.display()))?;
        if !output.status.success() {
            bail!("the measurement of {name} failed: {}", output.status);
        }
        let measurement = serde_json::from_slice(&output.stdout);
        measurements.push(measurement.with_context(|| format!("the measurement of {name} says something else"))?);
    }
    Ok(measurements)
}

fn model_config(args: &BenchArgs, path: &Path) -> Result<ModelConfig> {
    match args.model.is_empty() {
        true => Ok(config_file::load_model(path, &args.set)?),
        false => Ok(checkpoint::load_config(path)?),
    }
}

fn measure(args: &BenchArgs, pair: Pair, config: BenchConfig) -> Result<Measurement> {
    let model_config = model_config(args, pair.model)?;
    let device = open_device(args.device)?;
    let plan = plan_to_measure(pair.preset, &[], &model_config, &device)?;
    let model = match args.model.is_empty() {
        true => {
            check_weights(&device, args.weights)?;
            check_tensors(&device.device, &model_config)?;
            Model::new(&model_config, 0, &device.device).with_weights(args.weights)
        }
        false => load(pair.model, &device, args.weights)?.model,
    };
    let report = match args.memory_gib {
        Some(gib) => bench_in_memory(&model, &plan, config, (gib * GIB) as usize)
            .with_context(|| format!("--memory-gib {gib}, {}, preset {}", pair.model.display(), pair.preset))?,
        None => bench(&model, &plan, config),
    };
    Ok(Measurement {
        model: pair.model.display().to_string(),
        preset: pair.preset.to_owned(),
        device: device.to_string(),
        weights: args.weights,
        commit: photon_core::BUILD_COMMIT.to_owned(),
        report,
    })
}

fn tables(measurements: &[Measurement]) -> String {
    let mut speed = table(&[
        "model",
        "preset",
        "batch",
        "prefill tokens/s",
        "decode tokens/s",
        "first token, ms",
        "cache bytes used",
        "allocated",
        "peak memory, MiB",
        "of the device",
        "launches/step",
        "weights read, GB/s",
        "decode tokens/s/GiB of caches",
        "of everything",
    ]);
    let mut caches = table(&["model", "preset", "cache", "entries/row", "bytes used", "bytes allocated"]);
    for Measurement { model, preset, report, .. } in measurements {
        let unknown = || "unknown".to_owned();
        speed.add_row(vec![
            model.clone(),
            preset.clone(),
            report.config.batch_size.to_string(),
            format!("{:.0}", report.prefill_tokens_per_sec),
            format!("{:.1}", report.decode_tokens_per_sec),
            format!("{:.2}", report.time_to_first_token_secs * 1e3),
            report.cache_used_bytes.to_string(),
            report.cache_allocated_bytes.to_string(),
            report.peak_memory_bytes.map_or_else(unknown, |bytes| format!("{:.1}", bytes as f64 / MIB)),
            report.device_memory_bytes.map_or_else(String::new, |bytes| format!("{:.1}", bytes as f64 / MIB)),
            format!("{:.1}", report.launches_per_step),
            format!("{:.2}", report.weights_read_gb_per_sec),
            format!("{:.0}", report.decode_tokens_per_sec_per_cache_gib),
            report.decode_tokens_per_sec_per_gib.map_or_else(unknown, |speed| format!("{speed:.0}")),
        ]);
        for cache in &report.caches {
            let numbers = [cache.entries, cache.used_bytes, cache.allocated_bytes].map(|n| n.to_string());
            caches.add_row([model, preset, &cache.stage].into_iter().cloned().chain(numbers));
        }
        let total = [report.cache_used_bytes, report.cache_allocated_bytes].map(|n| n.to_string());
        caches.add_row([model, preset, "total", ""].into_iter().map(str::to_owned).chain(total));
    }
    let Some(Measurement { device, weights, report, .. }) = measurements.first() else { return String::new() };
    let BenchConfig { prompt_tokens, decode_tokens, repeats, .. } = report.config;
    format!(
        "device {device}, weights {weights}, prompt {prompt_tokens}, decode {decode_tokens}, median of {repeats} runs\n\n{speed}\n\n{caches}"
    )
}

fn parse_gib(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(gib) if gib > 0.0 && gib.is_finite() => Ok(gib),
        _ => Err("must be a number above 0".into()),
    }
}
