//! The command `photon-infer`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use comfy_table::{Table, presets};
use photon_core::checkpoint::Checkpoint;
use photon_core::config_file;
use photon_core::device::DeviceChoice;
use photon_core::error_text::error_text;
use photon_core::model::Model;
use photon_core::sampler::SamplingConfig;
use photon_infer::bench::{BenchConfig, BenchReport, bench};
use photon_infer::generate::{Completion, GenerateConfig, generate};

const EXAMPLES: &str = "\
Examples:
  photon-infer generate --model runs/quickstart/checkpoints/best --prompt \"The whale\" --max-tokens 200
  photon-infer generate --model MODEL --prompt One --prompt Two --temperature 0 --format json
  photon-infer bench --model runs/quickstart/checkpoints/best
  photon-infer bench --config configs/model/flat-small.toml --prompt-tokens 512 --decode-tokens 128";

/// Generates text from photon checkpoints, and measures how fast.
#[derive(Parser)]
#[command(version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Continue prompts.
    Generate(GenerateArgs),
    /// Measure prefill and decode speed, time to first token and cache bytes.
    Bench(BenchArgs),
}

#[derive(Args)]
struct GenerateArgs {
    /// Folder with model.safetensors, config.toml and tokenizer.json.
    #[arg(long)]
    model: PathBuf,
    /// What to continue; several make a batch. Without one the model begins by itself.
    #[arg(long)]
    prompt: Vec<String>,
    /// Tokens to generate for each prompt.
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 takes the likeliest token; higher is more varied.
    #[arg(long, default_value_t = 0.8)]
    temperature: f64,
    /// Choose among this many likeliest tokens only.
    #[arg(long)]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that hold this share of the probability only.
    #[arg(long)]
    top_p: Option<f64>,
    /// Decides the choices.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End a text before this one; may be given several times.
    #[arg(long)]
    stop: Vec<String>,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print: text as it comes, or one JSON object a prompt.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Args)]
struct BenchArgs {
    /// Folder of a checkpoint.
    #[arg(long, conflicts_with = "config", required_unless_present = "config")]
    model: Option<PathBuf>,
    /// A model config; the weights are then random.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Change a key of the config, as key.path=value.
    #[arg(long = "set", value_name = "KEY=VALUE", requires = "config")]
    set: Vec<String>,
    /// Tokens of each prompt.
    #[arg(long, default_value_t = 128, value_parser = parse_positive)]
    prompt_tokens: usize,
    /// Tokens to generate for each prompt.
    #[arg(long, default_value_t = 128, value_parser = parse_positive)]
    decode_tokens: usize,
    /// Prompts side by side.
    #[arg(long, default_value_t = 1, value_parser = parse_positive)]
    batch_size: usize,
    /// Runs that count; the medians are reported.
    #[arg(long, default_value_t = 3, value_parser = parse_positive)]
    repeats: usize,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

fn main() -> ExitCode {
    photon_core::allocator::keep_freed_memory();
    let outcome = match Cli::parse().command {
        Command::Generate(args) => run_generate(args),
        Command::Bench(args) => run_bench(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}", error_text(&*error));
            ExitCode::FAILURE
        }
    }
}

fn run_generate(args: GenerateArgs) -> Result<()> {
    let GenerateArgs { temperature, top_k, top_p, seed, .. } = args;
    let sampling = SamplingConfig { temperature, top_k, top_p, seed };
    sampling.validate()?;
    let device = args.device.open()?;
    let checkpoint = Checkpoint::load(&args.model, &device.device)?;
    let prompts = if args.prompt.is_empty() { vec![String::new()] } else { args.prompt };
    let config = GenerateConfig { max_tokens: args.max_tokens, sampling, stops: args.stop };
    let mut out = std::io::stdout().lock();
    let is_stream = args.format == Format::Text && prompts.len() == 1;
    if is_stream {
        write!(out, "{}", prompts[0])?;
    }
    let completions = generate(&checkpoint, &prompts, &config, &mut |_, text| match is_stream {
        true => write!(out, "{text}").and_then(|()| out.flush()),
        false => Ok(()),
    })?;
    match args.format {
        Format::Text if is_stream => writeln!(out)?,
        Format::Text => {
            for (index, (prompt, completion)) in prompts.iter().zip(&completions).enumerate() {
                writeln!(out, "--- {index}\n{prompt}{}\n", completion.text)?;
            }
        }
        Format::Json => {
            for (prompt, completion) in prompts.iter().zip(&completions) {
                writeln!(out, "{}", completion_json(prompt, completion))?;
            }
        }
    }
    Ok(())
}

fn completion_json(prompt: &str, completion: &Completion) -> serde_json::Value {
    serde_json::json!({
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.token_ids.len(),
        "token_ids": completion.token_ids,
    })
}

fn run_bench(args: BenchArgs) -> Result<()> {
    if args.decode_tokens < 2 {
        bail!("--decode-tokens {}: at least 2, because the first token belongs to the prompt", args.decode_tokens);
    }
    let device = args.device.open()?;
    let model = match (&args.model, &args.config) {
        (Some(folder), _) => Checkpoint::load(folder, &device.device)?.model,
        (None, Some(path)) => Model::new(&config_file::load_model(path, &args.set)?, 0, &device.device),
        (None, None) => bail!("give --model or --config"),
    };
    let BenchArgs { prompt_tokens, decode_tokens, batch_size, repeats, .. } = args;
    let report = bench(&model, BenchConfig { prompt_tokens, decode_tokens, batch_size, repeats });
    let mut out = std::io::stdout().lock();
    match args.format {
        Format::Json => {
            let mut value = serde_json::to_value(&report).context("while writing the report")?;
            value["device"] = device.name.into();
            value["commit"] = photon_core::BUILD_COMMIT.into();
            writeln!(out, "{value}")?;
        }
        Format::Text => writeln!(out, "{}", bench_tables(&report, device.name))?,
    }
    Ok(())
}

fn bench_tables(report: &BenchReport, device_name: &str) -> String {
    let BenchConfig { prompt_tokens, decode_tokens, batch_size, repeats } = report.config;
    let mut speed = Table::new();
    speed.load_style(presets::ASCII_MARKDOWN);
    speed.set_header(vec!["prefill tokens/s", "decode tokens/s", "first token, ms"]);
    speed.add_row(vec![
        format!("{:.0}", report.prefill_tokens_per_sec),
        format!("{:.1}", report.decode_tokens_per_sec),
        format!("{:.2}", report.time_to_first_token_secs * 1e3),
    ]);
    let mut caches = Table::new();
    caches.load_style(presets::ASCII_MARKDOWN);
    caches.set_header(vec!["cache", "entries/row", "bytes used", "bytes allocated"]);
    let (mut used, mut allocated) = (0, 0);
    for cache in &report.caches {
        let numbers = [cache.entries, cache.used_bytes, cache.allocated_bytes].map(|n| n.to_string());
        caches.add_row([cache.stage.clone()].into_iter().chain(numbers));
        used += cache.used_bytes;
        allocated += cache.allocated_bytes;
    }
    caches.add_row(vec!["total".to_owned(), String::new(), used.to_string(), allocated.to_string()]);
    format!(
        "device {device_name}, batch {batch_size}, prompt {prompt_tokens}, decode {decode_tokens}, median of \
         {repeats} runs\n\n{speed}\n\n{caches}"
    )
}

fn parse_positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("must be a whole number of at least 1".into()),
        Ok(n) => Ok(n),
    }
}
