//! `photon-train probe`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use photon_core::checkpoint::{Checkpoint, trained_seq_len};
use photon_core::device::DeviceChoice;
use photon_train::probe::context::{ContextUse, context, default_depths};
use photon_train::probe::copy::{Copy, copy, default_distances, default_spans};
use photon_train::probe::length::{DEFAULT_FACTORS, LengthUse, default_factors, length};
use photon_train::probe::{Estimate, Setup};
use photon_train::replicas::{Replicas, default_replicas};
use serde::Serialize;

use super::progress::{CountProgress, tokenise_for_now};
use super::{Format, log, open_device, print, table};

/// Tokens of a row where the run of a checkpoint is not at hand; `eval` takes as many.
const DEFAULT_SEQ_LEN: usize = 512;

#[derive(Args)]
pub(super) struct ProbeArgs {
    /// Folder with model.safetensors, config.toml and tokenizer.json.
    checkpoint: PathBuf,
    /// Held-out text: files, folders or patterns.
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    text: Vec<String>,
    /// What to measure; several, parted by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Probe::Copy, Probe::Context, Probe::Length])]
    probe: Vec<Probe>,
    /// Tokens of a row in training. By default those of the run that the checkpoint lies in, or else 512.
    #[arg(long, value_name = "T")]
    seq_len: Option<usize>,
    /// Places of the text to look at, at most; for length, with its long rows, a quarter of that.
    #[arg(long, value_name = "N", default_value_t = 64)]
    windows: usize,
    /// Decides where those lie.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// copy: tokens of the span that stands twice. By default 16 and 64, where a row holds them.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    spans: Option<Vec<usize>>,
    /// copy: tokens from its first beginning to its second. By default the powers of two that fit into a row.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    distances: Option<Vec<usize>>,
    /// context: true tokens that are left. By default the powers of two that fit into a row.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    depths: Option<Vec<usize>>,
    /// length: multiples of the training length. By default those of 1, 2, 4, 8 and 16 that the text is long enough for.
    #[arg(long, value_name = "TIMES", value_delimiter = ',')]
    factors: Option<Vec<usize>>,
    /// Key of the text in a line of a .jsonl file, or column of a .parquet file.
    #[arg(long, default_value = "text")]
    text_field: String,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print: tables, or one JSON object.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Probe {
    /// Nats gained on a span that stood in the text before.
    Copy,
    /// Nats lost when what lies further back is other text.
    Context,
    /// Bits per byte in rows longer than those of training.
    Length,
}

/// What comes out; a probe that was not asked for is left out.
#[derive(Serialize)]
struct Report<'a> {
    checkpoint: String,
    text: &'a [String],
    seq_len: usize,
    seed: u64,
    device: &'a str,
    commit: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    copy: Option<Vec<Copy>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<ContextUse>,
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<LengthUse>,
}

pub(super) fn run(args: &ProbeArgs) -> Result<()> {
    let seq_len = args.seq_len.or_else(|| trained_seq_len(&args.checkpoint)).unwrap_or(DEFAULT_SEQ_LEN);
    anyhow::ensure!(seq_len >= 2, "--seq-len {seq_len}: must be at least 2");
    anyhow::ensure!(args.windows >= 1, "--windows 0: must be at least 1");
    let device = open_device(args.device)?;
    let checkpoint = Checkpoint::load(&args.checkpoint, &device.device)?;
    let folder = tempfile::tempdir()?;
    let store = tokenise_for_now(&args.text, &args.text_field, &checkpoint.tokenizer, folder.path())?;
    let replicas = Replicas::new(default_replicas(device.name))?;
    let progress = CountProgress::new("windows");
    let setup = Setup {
        model: &checkpoint.model,
        tokenizer: &checkpoint.tokenizer,
        store: &store,
        seq_len,
        n_windows: args.windows,
        seed: args.seed,
        replicas: &replicas,
        progress: &|done, all| progress.show(done, all),
    };
    let is_wanted = |probe: Probe| args.probe.contains(&probe).then(|| progress.begin(name(probe)));
    let copy = is_wanted(Probe::Copy).map(|()| {
        let spans = args.spans.clone().unwrap_or_else(|| default_spans(&setup));
        let distances = args.distances.clone().unwrap_or_else(|| default_distances(&setup, &spans));
        copy(&setup, &spans, &distances)
    });
    let copy = copy.transpose()?;
    let context = is_wanted(Probe::Context).map(|()| {
        let depths = args.depths.clone().map_or_else(|| default_depths(&setup), Ok)?;
        context(&setup, &depths)
    });
    let context = context.transpose()?;
    let length = is_wanted(Probe::Length).map(|()| {
        let factors = args.factors.clone().unwrap_or_else(|| default_factors(&setup));
        if args.factors.is_none() && factors.len() < DEFAULT_FACTORS.len() {
            let left_out = &DEFAULT_FACTORS[factors.len()..];
            log(format!("length: {} tokens of text are too few for rows of {left_out:?} times {seq_len}", store.len()));
        }
        length(&Setup { n_windows: args.windows.div_ceil(4), ..setup }, &factors)
    });
    let length = length.transpose()?;
    progress.end();
    let report = Report {
        checkpoint: args.checkpoint.display().to_string(),
        text: &args.text,
        seq_len,
        seed: args.seed,
        device: device.name,
        commit: photon_core::BUILD_COMMIT,
        copy,
        context,
        length,
    };
    match args.format {
        Format::Json => print(serde_json::to_string(&report)?),
        Format::Text => print_tables(&report),
    }
}

fn name(probe: Probe) -> &'static str {
    match probe {
        Probe::Copy => "copy",
        Probe::Context => "context",
        Probe::Length => "length",
    }
}

fn print_tables(report: &Report) -> Result<()> {
    print(format!("device {}, rows of {} tokens in training, seed {}", report.device, report.seq_len, report.seed))?;
    if let Some(lines) = &report.copy {
        let n_windows = lines.first().map_or(0, |line| line.n_windows);
        print(format!("\ncopy: a span that stood in the text so many tokens before, {n_windows} windows; nats/byte"))?;
        let mut table = table(&["span, tokens", "distance, tokens", "plain", "planted", "gained"]);
        for line in lines {
            let numbers = [line.plain_nats_per_byte, line.planted_nats_per_byte, line.gained_nats_per_byte].map(shown);
            table.add_row([line.span_tokens, line.distance_tokens].map(|n| n.to_string()).into_iter().chain(numbers));
        }
        print(table)?;
    }
    if let Some(ContextUse { n_windows, scored_tokens, context_tokens, nats_per_byte, depths }) = &report.context {
        print(format!(
            "\ncontext: other text before so many tokens, {n_windows} windows, the last {scored_tokens} tokens scored; \
             nats/byte"
        ))?;
        let mut table = table(&["true context, tokens", "loss", "lost"]);
        for depth in depths {
            let numbers = [depth.nats_per_byte, depth.lost_nats_per_byte].map(shown);
            table.add_row([depth.depth_tokens.to_string()].into_iter().chain(numbers));
        }
        table.add_row([format!("{context_tokens} (all)"), shown(*nats_per_byte), String::new()]);
        print(table)?;
    }
    if let Some(LengthUse { n_windows, scored_tokens, lengths }) = &report.length {
        print(format!(
            "\nlength: the same {scored_tokens} tokens at the end of longer rows, {n_windows} windows; bits/byte"
        ))?;
        let mut table = table(&["times", "row, tokens", "bits/byte", "change"]);
        for line in lengths {
            let numbers = [line.bits_per_byte, line.change_bits_per_byte].map(shown);
            table.add_row([line.factor, line.row_tokens].map(|n| n.to_string()).into_iter().chain(numbers));
        }
        print(table)?;
    }
    Ok(())
}

/// A mean and its standard error.
fn shown(estimate: Estimate) -> String {
    match estimate.standard_error {
        Some(error) => format!("{:.4} ± {error:.4}", estimate.mean),
        None => format!("{:.4}", estimate.mean),
    }
}
