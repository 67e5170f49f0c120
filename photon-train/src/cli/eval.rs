//! `photon-train eval`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use photon_core::checkpoint::Checkpoint;
use photon_core::device::DeviceChoice;
use photon_train::eval::evaluate;
use photon_train::replicas::{Replicas, default_replicas};

use super::{Format, open_device, print, progress::tokenise_for_now};

#[derive(Args)]
pub(super) struct EvalArgs {
    /// Folder with model.safetensors, config.toml and tokenizer.json.
    checkpoint: PathBuf,
    /// Files, folders or patterns.
    #[arg(required = true)]
    text: Vec<String>,
    /// Tokens of a row; every row starts without context.
    #[arg(long, default_value_t = 512)]
    seq_len: usize,
    /// Look at this many tokens at most, evenly spread.
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true)]
    max_tokens: usize,
    /// Key of the text in a line of a .jsonl file, or column of a .parquet file.
    #[arg(long, default_value = "text")]
    text_field: String,
    /// Compute each document as if it were alone, begun with a chunk of its own: as runs with `data.document_mask` do.
    #[arg(long)]
    document_mask: bool,
    /// auto, cpu, cuda or wgpu.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn run(args: &EvalArgs) -> Result<()> {
    anyhow::ensure!(args.seq_len >= 2, "--seq-len {}: must be at least 2", args.seq_len);
    let device = open_device(args.device)?;
    let checkpoint = Checkpoint::load(&args.checkpoint, &device.device)?;
    let folder = tempfile::tempdir()?;
    let store = tokenise_for_now(&args.text, &args.text_field, &checkpoint.tokenizer, folder.path())?;
    anyhow::ensure!(store.len() >= 2, "the text has {} tokens, at least 2 are needed", store.len());
    let store = match args.document_mask {
        true => {
            let chunk_tokens = checkpoint.model.config().meta_chunk_tokens();
            let is_whole = args.seq_len.is_multiple_of(chunk_tokens);
            anyhow::ensure!(
                is_whole,
                "--seq-len {}: must be a multiple of {chunk_tokens}, the tokens under one unit of the top level, beside --document-mask",
                args.seq_len
            );
            store.aligned(chunk_tokens).with_document_mask()
        }
        false => store,
    };
    let replicas = Replicas::new(default_replicas(device.name))?;
    let result = evaluate(&checkpoint.model, &checkpoint.tokenizer, &store, args.seq_len, args.max_tokens, &replicas);
    match args.format {
        Format::Json => print(serde_json::to_string(&result)?),
        Format::Text => {
            print(format!("tokens          {}", result.n_tokens))?;
            print(format!("cross-entropy   {:.4} nats/token", result.nats_per_token))?;
            print(format!("perplexity      {:.3} per token", result.perplexity))?;
            print(format!("bits per byte   {:.4}", result.bits_per_byte))?;
            if result.slot_nats.len() > 1 {
                print("cross-entropy by slot of the level-1 chunk, nats/token")?;
                for (slot, nats) in result.slot_nats.iter().enumerate() {
                    print(format!("  slot {slot}        {nats:.4}"))?;
                }
            }
            Ok(())
        }
    }
}
