//! `photon-train tokenizer`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use photon_train::data::train_tokenizer;

use super::{log, print};

#[derive(Args)]
pub(super) struct TokenizerArgs {
    /// Files, folders or patterns; .jsonl, .parquet, .gz and .zst are unpacked.
    #[arg(required = true)]
    text: Vec<String>,
    /// Entries of the vocabulary, the 256 bytes and the end-of-document token included.
    #[arg(long, default_value_t = 4096)]
    vocab_size: usize,
    /// The file to write.
    #[arg(long, default_value = "tokenizer.json")]
    out: PathBuf,
    /// Key of the text in a line of a .jsonl file, or column of a .parquet file.
    #[arg(long, default_value = "text")]
    text_field: String,
}

pub(super) fn run(args: &TokenizerArgs) -> Result<()> {
    let summary = train_tokenizer(&args.text, args.vocab_size, &args.out, &args.text_field)?;
    log(summary.skipped);
    print(format!(
        "{} entries from {} bytes in {} documents: {}",
        summary.tokenizer.vocab_size(),
        summary.text_bytes,
        summary.n_documents,
        args.out.display()
    ))
}
