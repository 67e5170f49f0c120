//! `photon-infer presets`.

use anyhow::{Context, Result};
use clap::Args;
use photon_infer::presets::{PRESETS, Preset};

use super::print;

#[derive(Args)]
pub(super) struct PresetsArgs {
    /// Print the TOML of this one, to build on.
    name: Option<String>,
}

pub(super) fn run(args: &PresetsArgs) -> Result<()> {
    let Some(name) = &args.name else {
        let width = PRESETS.iter().map(|preset| preset.name.len()).max().unwrap_or(0);
        return PRESETS.iter().try_for_each(|preset| print(format!("{:width$}  {}", preset.name, preset.summary())));
    };
    let found = PRESETS.iter().find(|preset| preset.name == name);
    let Preset { text, .. } = found.with_context(|| {
        format!("preset {name}: there is no such preset; use one of {}", PRESETS.map(|preset| preset.name).join(", "))
    })?;
    print(text.trim_end())
}
