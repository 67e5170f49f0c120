//! `photon-train report`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use photon_core::atomic_file;
use photon_train::ablate::Summary;

use super::{Format, print};

const EXAMPLES: &str = "\
Examples:
  photon-train report runs/ablations/levels
  # Several experiments joined, elsewhere.
  photon-train report runs/ablations/levels runs/ablations/positions --out reports";

#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ReportArgs {
    /// Folders of experiments, or files like their results.json.
    #[arg(required = true)]
    experiments: Vec<PathBuf>,
    /// Where report.md and report.html go. Without it the first experiment's folder.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write files, or print all numbers as JSON.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

pub(super) fn run(args: &ReportArgs) -> Result<()> {
    let summary = Summary::read(&args.experiments)?;
    if args.format == Format::Json {
        return print(serde_json::to_string(&summary)?);
    }
    let out = args.out.clone().unwrap_or_else(|| summary.experiments[0].folder.clone());
    std::fs::create_dir_all(&out).with_context(|| format!("cannot write {}", out.display()))?;
    for (name, text) in [("report.md", summary.markdown()), ("report.html", summary.page().html())] {
        let path = out.join(name);
        atomic_file::write(&path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
        print(path.display())?;
    }
    Ok(())
}
