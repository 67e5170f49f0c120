//! Named ways to generate, built into the program; `configs/infer` holds their text.

use std::path::Path;

use photon_core::config_file::{self, ConfigFileError};
use photon_core::infer_config::InferConfig;

/// A named way to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// Its name, which is its file's.
    pub name: &'static str,
    /// The TOML.
    pub text: &'static str,
}

/// Name and text of a file of `configs/infer`.
macro_rules! preset {
    ($name:literal) => {
        Preset { name: $name, text: include_str!(concat!("../../configs/infer/", $name, ".toml")) }
    };
}

/// All of them, the most faithful first.
pub const PRESETS: [Preset; 10] = [
    preset!("exact"),
    preset!("bounded"),
    preset!("f16"),
    preset!("exact-int8"),
    preset!("balanced"),
    preset!("int8-int4"),
    preset!("int4"),
    preset!("blog-recipe"),
    preset!("tiny-memory"),
    preset!("recursive"),
];

/// What generates where nothing else is asked for.
pub const DEFAULT_PRESET: &str = "exact";

/// Why a preset could not be had.
#[derive(Debug, thiserror::Error)]
pub enum PresetError {
    /// Neither a preset nor a file.
    #[error("preset {wanted}: there is no such preset or file; use one of {known}, or the path of a TOML file")]
    Unknown {
        /// What was asked for.
        wanted: String,
        /// The names that there are.
        known: String,
    },
    /// The file, or an override of it.
    #[error(transparent)]
    Config(#[from] ConfigFileError),
}

impl Preset {
    /// The first line of the comment at the head of its text.
    pub fn summary(&self) -> &'static str {
        self.text.lines().next().unwrap_or_default().trim_start_matches('#').trim()
    }
}

/// The config that `name_or_file` means, with overrides of the form `key.path=value`.
///
/// # Errors
///
/// A name that is none, a file that cannot be read or parsed, an override that fits nowhere.
pub fn load_preset(name_or_file: &str, overrides: &[String]) -> Result<InferConfig, PresetError> {
    if let Some(preset) = PRESETS.iter().find(|preset| preset.name == name_or_file) {
        let path = format!("preset {}", preset.name);
        return Ok(config_file::parse_infer(preset.text, path.as_ref(), overrides)?);
    }
    let path = Path::new(name_or_file);
    if !path.is_file() && path.extension().is_none_or(|extension| extension != "toml") {
        let known = PRESETS.map(|preset| preset.name).join(", ");
        return Err(PresetError::Unknown { wanted: name_or_file.to_owned(), known });
    }
    Ok(config_file::load_infer(path, overrides)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use photon_core::advance::AdvanceRule;
    use photon_core::config::ModelConfig;
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    fn files(folder: &str) -> Vec<PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(folder);
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn every_file_is_built_in_and_says_what_it_is() {
        let on_disk: BTreeSet<String> =
            files("infer").iter().map(|path| path.file_stem().unwrap().display().to_string()).collect();
        assert_eq!(on_disk, PRESETS.map(|preset| preset.name.to_owned()).into());
        for preset in PRESETS {
            let comment = preset.text.lines().take_while(|line| line.starts_with("# ")).count();
            assert!((1..=3).contains(&comment) && preset.summary().len() > 20, "{}", preset.name);
        }
    }

    #[test]
    fn every_preset_fits_every_model() {
        for path in files("model") {
            let model = config_file::load_model(&path, &[]).unwrap_or_else(|error| panic!("{error}"));
            for preset in PRESETS {
                let config = load_preset(preset.name, &[]).unwrap_or_else(|error| panic!("{error}"));
                let outcome = config.plan(&model);
                let has_levels = matches!(model, ModelConfig::Photon(_));
                let fits = has_levels || config.advance == AdvanceRule::Hierarchical;
                assert_eq!(outcome.is_ok(), fits, "{} for {}: {outcome:?}", preset.name, path.display());
            }
        }
    }

    #[test]
    fn a_preset_is_a_name_or_a_file_with_lines_that_differ() {
        let exact = load_preset("exact", &[]).unwrap();
        let changed = load_preset("exact", &["caches.0.values=int4".into()]).unwrap();
        assert_ne!(exact, changed);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/infer/exact.toml");
        assert_eq!(load_preset(path.to_str().unwrap(), &[]).unwrap(), exact);
        let error = load_preset("exat", &[]).unwrap_err().to_string();
        assert!(error.contains("preset exat") && error.contains("exact, bounded, f16"), "{error}");
        let error = load_preset("exact", &["caches.0.values=int5".into()]).unwrap_err().to_string();
        assert!(error.starts_with("preset exact: at `caches[0].values`"), "{error}");
        assert!(load_preset("no/such.toml", &[]).unwrap_err().to_string().contains("cannot read the config"));
    }
}
