//! `photon-train bench`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use photon_core::config_file;
use photon_core::device::{DeviceChoice, check_tensors};
use photon_train::bench::{TrainBenchConfig, bench_training};

use super::{Format, open_device, print};

#[derive(Args)]
pub(super) struct BenchArgs {
    /// A model config.
    config: PathBuf,
    /// Change a key of the config, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Rows of an update.
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// Tokens of a row.
    #[arg(long, default_value_t = 512)]
    seq_len: usize,
    /// Updates that count.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Updates before that do not.
    #[arg(long, default_value_t = 2)]
    warmup_steps: usize,
    /// Models side by side; without it as in a run.
    #[arg(long)]
    replicas: Option<usize>,
    /// Rows that go through a model at once; without it as in a run.
    #[arg(long)]
    micro_batch_size: Option<usize>,
    /// Keep only the inputs of blocks for the backward pass.
    #[arg(long)]
    gradient_checkpointing: bool,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn run(args: &BenchArgs) -> Result<()> {
    let &BenchArgs {
        batch_size, seq_len, steps, warmup_steps, replicas, micro_batch_size, gradient_checkpointing, ..
    } = args;
    for (name, value) in [
        ("--batch-size", batch_size),
        ("--seq-len", seq_len),
        ("--steps", steps),
        ("--replicas", replicas.unwrap_or(1)),
        ("--micro-batch-size", micro_batch_size.unwrap_or(1)),
    ] {
        anyhow::ensure!(value > 0, "{name} 0: must be at least 1");
    }
    let model = config_file::load_model(&args.config, &args.set)?;
    let device = open_device(args.device)?;
    check_tensors(&device.device, &model)?;
    let config = TrainBenchConfig {
        batch_size,
        seq_len,
        steps,
        warmup_steps,
        replicas,
        micro_batch_size,
        gradient_checkpointing,
    };
    let report = bench_training(&model, config, &device)?;
    if args.format == Format::Json {
        let mut value = serde_json::to_value(&report)?;
        value["bench"] = serde_json::to_value(config)?;
        value["device"] = device.name.into();
        value["commit"] = photon_core::BUILD_COMMIT.into();
        return print(value);
    }
    print(format!("training        {:.0} tokens/s", report.training_tokens_per_sec))?;
    print(format!("arithmetic      {:.2} MFLOPs/token", report.training_flops_per_token / 1e6))?;
    print(format!("matrix product  {:.1} GFLOPs/s (2048 x 2048, all cores)", report.matmul_gflops))?;
    print(format!("share of it     {:.1} %", 100.0 * report.training_mfu))?;
    print(format!("replicas        {} with {} rows at once", report.replicas, report.micro_batch_size))?;
    print(format!("parameters      {}", report.parameters))
}
