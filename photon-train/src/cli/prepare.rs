//! `photon-train prepare`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use comfy_table::Table;
use photon_train::config::RunConfig;
use photon_train::data::{BatchSource, PrepareReport, SideReport, SourceProgress};

use super::{Format, grouped, log, print, progress::prepare_shown, table};

const EXAMPLES: &str = "\
Examples:
  photon-train prepare configs/train/quickstart.toml
  photon-train prepare run.toml --set data.paths='[\"books/\", \"web/*.jsonl.zst\"]'
  photon-train prepare run.toml --tokens /data/tokens --verify --format json";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PrepareArgs {
    /// The run as a TOML file.
    config: PathBuf,
    /// Change a key of the config, as key.path=value; may be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Folder of the tokens; `run` looks in .tokens beside its run folder.
    #[arg(long, default_value = "runs/.tokens")]
    tokens: PathBuf,
    /// Read all shards and compare their hashes, also of large ones made earlier.
    #[arg(long)]
    verify: bool,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn run(args: &PrepareArgs) -> Result<()> {
    let RunConfig { model, train: config } = RunConfig::load(&args.config, &args.set)?;
    let tokenizer = config.load_tokenizer()?;
    let data = prepare_shown(&config, &tokenizer, &args.tokens)?;
    if args.verify {
        data.verify()?;
        log("all shards are as they were written");
    }
    if args.format == Format::Json {
        return print(serde_json::to_string(&data.report)?);
    }
    let report = data.report.clone();
    let data = data.packed_for(model.meta_chunk_tokens());
    print(sides(&report))?;
    print(format!("a run of {} steps:", config.steps))?;
    let source = BatchSource::staged(Arc::new(data.train.clone()), &config.row_shapes(), config.seed);
    for (progress, source) in source.progress(config.steps).iter().zip(data.train.sources()) {
        let padding = 100.0 * (1.0 - source.store.len() as f64 / source.store.n_places() as f64);
        let SourceProgress { name, rows, epochs } = progress;
        print(format!("  {name}: {rows} rows, {epochs:.2} epochs, {padding:.1} % padding"))?;
    }
    for source in &report.sources {
        print(format!("{}: {}; in {}", source.name, source.skipped, source.folder))?;
        if source.n_equal > 0 {
            print(format!("{}: left out {} training documents that are also held out", source.name, source.n_equal))?;
        }
    }
    print(&report.overlap)?;
    print(format!("content hash {}", report.content_hash))
}

/// A line for each side of each source.
fn sides(report: &PrepareReport) -> Table {
    let mut table = table(&["source", "side", "share", "documents", "tokens", "bytes", "tokens/byte", "shards"]);
    for source in &report.sources {
        let share = format!("{:.1} %", 100.0 * source.share);
        for (side, share, report) in [("train", share.as_str(), &source.train), ("held out", "", &source.valid)] {
            let SideReport { n_documents, text_bytes, n_tokens, n_shards } = report;
            let per_byte = match text_bytes {
                0 => "-".to_owned(),
                _ => format!("{:.3}", *n_tokens as f64 / *text_bytes as f64),
            };
            let names = [source.name.clone(), side.to_owned(), share.to_owned()];
            let counts = [grouped(*n_documents), grouped(*n_tokens), grouped(*text_bytes as usize), per_byte];
            table.add_row(names.into_iter().chain(counts).chain([n_shards.to_string()]));
        }
    }
    table
}
