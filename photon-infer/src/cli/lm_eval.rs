//! `photon-infer lm-eval`.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;
use photon_core::checkpoint::trained_seq_len;
use photon_core::device::DeviceChoice;
use photon_core::nn::compute::Compute;
use photon_infer::lm_eval::{LmEvalConfig, serve};
use photon_infer::presets::DEFAULT_PRESET;

use super::{load, log, parse_positive, plan};

/// Tokens of a row where the run of a checkpoint is not at hand; `photon-train eval` takes as many.
const DEFAULT_MAX_LENGTH: usize = 512;

/// Time between lines of the log.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

const PROTOCOL: &str = "\
Requests are read from stdin, a JSON object a line; answers go to stdout in the same order. An empty line asks for the
answers so far. An `id` comes back; what is wrong with a request is its answer.
  {\"request\": \"loglikelihood\", \"context\": \"Call me\", \"continuation\": \" Ishmael\", \"id\": 7}
  {\"request\": \"loglikelihood_rolling\", \"text\": \"Call me Ishmael.\"}
  {\"request\": \"generate_until\", \"context\": \"Call me\", \"until\": [\"\\n\"], \"max_gen_toks\": 32, \"temperature\": 0.0}
integrations/lm_eval/photon_lm.py makes the lm-eval package speak it.";

#[derive(Args)]
#[command(after_help = PROTOCOL)]
pub(super) struct LmEvalArgs {
    /// Folder with model.safetensors, config.toml and tokenizer.json.
    #[arg(long)]
    model: PathBuf,
    /// Tokens of a row, context included; longer contexts lose their beginning. By default those of a row in the run
    /// that the checkpoint lies in, or else 512.
    #[arg(long, value_name = "T")]
    max_length: Option<usize>,
    /// Rows that generate side by side.
    #[arg(long, value_name = "B", default_value_t = 16, value_parser = parse_positive)]
    batch: usize,
    /// How caches store and keep entries while generating: a name that `photon-infer presets` lists, or a TOML file.
    /// Log-likelihoods are those of the training forward.
    #[arg(long, value_name = "NAME-OR-FILE", default_value = DEFAULT_PRESET)]
    preset: String,
    /// Change a key of the preset, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Decides the choices where a temperature is asked for, with the line of the request.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How the matrices are stored and multiplied: f32, bf16 or f16.
    #[arg(long, value_name = "FORMAT", default_value_t = Compute::F32)]
    weights: Compute,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
}

pub(super) fn run(args: &LmEvalArgs) -> Result<()> {
    let max_length = args.max_length.or_else(|| trained_seq_len(&args.model)).unwrap_or(DEFAULT_MAX_LENGTH);
    ensure!(max_length >= 2, "--max-length {max_length}: must be at least 2");
    let device = args.device.open()?;
    let checkpoint = load(&args.model, &device, args.weights)?;
    let plan = plan(&args.preset, &args.set, &checkpoint.model.config(), &device)?;
    let config = LmEvalConfig { max_length, batch_size: args.batch, seed: args.seed, plan };
    log(format!("device {device}, rows of {max_length} tokens; reading requests"));
    let last_line = Cell::new(Instant::now());
    let progress = |done: usize, all: usize| {
        if last_line.get().elapsed() >= BETWEEN_LINES {
            last_line.set(Instant::now());
            log(format!("{done}/{all} requests of the group"));
        }
    };
    Ok(serve(&checkpoint, &config, std::io::stdin().lock(), std::io::stdout().lock(), &progress)?)
}
