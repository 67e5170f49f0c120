//! `photon-train import-llama`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use photon_core::accounting::model_cost;
use photon_core::import_llama::import_llama;

use super::print;

#[derive(Args)]
pub(super) struct ImportArgs {
    /// Folder with config.json, model.safetensors and tokenizer.json.
    from: PathBuf,
    /// The checkpoint folder to make.
    #[arg(long)]
    out: PathBuf,
}

pub(super) fn run(args: &ImportArgs) -> Result<()> {
    let config = import_llama(&args.from, &args.out)?;
    let cost = model_cost(&config, 1);
    print(format!("{} parameters: {}", cost.parameters() + cost.start_parameters, args.out.display()))
}
