//! TOML files that build on each other, read once and checked.
//!
//! Any table outside a list may name a `base = "other.toml"` (relative to the file it stands in): it is that file with the lines
//! that differ put over it. An entry of a list is addressed by its index, in a file (`[model.levels.0.encoder]`) as
//! on the command line (`--set model.levels.0.encoder.n_layers=3`), where `*` stands for all entries.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use crate::config::{ConfigError, ModelConfig};
use crate::infer_config::InferConfig;

/// Keys whose value is one of several variants: another variant replaces it, whatever fields it had.
const VARIANT_KEYS: [&str; 7] = ["attention", "pick", "positions", "held_out", "policy", "budget", "floor"];

/// What serde says of a variant's name where its fields should follow.
const BARE_VARIANT: &str = "invalid type: unit variant";

/// How deep `base` files may nest: a ring of files is an error, not a hang.
const MAX_BASES: usize = 16;

/// Why a config could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// The file cannot be read.
    #[error("cannot read the config {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{path} is not valid TOML: {source}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Line, column and reason.
        source: Box<toml::de::Error>,
    },
    /// A key is unknown, missing or of the wrong type.
    #[error("{path}: at `{key}`: {reason}")]
    Schema {
        /// The file.
        path: PathBuf,
        /// Path of the key.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A value breaks a rule.
    #[error("{path}: {source}")]
    Rule {
        /// The file.
        path: PathBuf,
        /// The rule.
        source: ConfigError,
    },
    /// `base` files nest too deep.
    #[error("{path}: `base` files nest deeper than {MAX_BASES}; do they name each other in a ring?")]
    BaseRing {
        /// The file where it was noticed.
        path: PathBuf,
    },
    /// An override that cannot be applied.
    #[error("--set {text}: {reason}")]
    Override {
        /// The override as given.
        text: String,
        /// Why not.
        reason: String,
    },
}

/// Reads a file, puts it over its bases, and applies overrides of the form `key.path=value`.
///
/// # Errors
///
/// A file that cannot be read or parsed, a ring of bases, an override that fits nowhere.
pub fn load_table(path: &Path, overrides: &[String]) -> Result<Table, ConfigFileError> {
    with_overrides(load_with_bases(path, 0)?, overrides)
}

fn with_overrides(mut table: Table, overrides: &[String]) -> Result<Table, ConfigFileError> {
    for text in overrides {
        apply_override(&mut table, text)?;
    }
    Ok(table)
}

/// Turns a table into its type; `path` is named in errors.
///
/// # Errors
///
/// [`ConfigFileError::Schema`] with the path of the key.
pub fn parse<T: DeserializeOwned>(table: Table, path: &Path) -> Result<T, ConfigFileError> {
    serde_path_to_error::deserialize(Value::Table(table)).map_err(|error| ConfigFileError::Schema {
        path: path.into(),
        key: error.path().to_string(),
        reason: match error.inner().message() {
            reason if reason.starts_with(BARE_VARIANT) => "needs settings: write `{ name = { ... } }`".to_owned(),
            reason => reason.to_owned(),
        },
    })
}

/// Turns the table of a model into a checked config.
///
/// # Errors
///
/// As [`parse`], and the first rule that the config breaks.
pub fn parse_model(mut table: Table, path: &Path) -> Result<ModelConfig, ConfigFileError> {
    let schema = |reason: String| ConfigFileError::Schema { path: path.into(), key: "architecture".into(), reason };
    let architecture = table.remove("architecture");
    let config = match architecture.as_ref().and_then(Value::as_str) {
        Some("photon") => ModelConfig::Photon(parse(table, path)?),
        Some("flat") => ModelConfig::Flat(parse(table, path)?),
        Some(other) => return Err(schema(format!("\"{other}\" is unknown; use \"photon\" or \"flat\""))),
        None => return Err(schema("is missing; set it to \"photon\" or \"flat\"".into())),
    };
    config.validate().map_err(|source| ConfigFileError::Rule { path: path.into(), source })?;
    Ok(config)
}

/// Reads and checks a model config.
///
/// # Errors
///
/// As [`load_table`] and [`parse_model`].
pub fn load_model(path: &Path, overrides: &[String]) -> Result<ModelConfig, ConfigFileError> {
    parse_model(load_table(path, overrides)?, path)
}

/// As [`load_model`], of a text that no file need hold; `path` is named in errors, and bases lie beside it.
///
/// # Errors
///
/// As [`load_model`].
pub fn parse_model_text(text: &str, path: &Path) -> Result<ModelConfig, ConfigFileError> {
    parse_model(table_of(text, path, 0)?, path)
}

/// Reads how to generate. Values are checked against a model by [`InferConfig::plan`].
///
/// # Errors
///
/// As [`load_table`] and [`parse`].
pub fn load_infer(path: &Path, overrides: &[String]) -> Result<InferConfig, ConfigFileError> {
    parse(load_table(path, overrides)?, path)
}

/// As [`load_infer`], of a text that no file need hold; `path` is named in errors, and bases lie beside it.
///
/// # Errors
///
/// As [`load_infer`].
pub fn parse_infer(text: &str, path: &Path, overrides: &[String]) -> Result<InferConfig, ConfigFileError> {
    parse(with_overrides(table_of(text, path, 0)?, overrides)?, path)
}

fn load_with_bases(path: &Path, depth: usize) -> Result<Table, ConfigFileError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigFileError::Read { path: path.into(), source })?;
    table_of(&text, path, depth)
}

fn table_of(text: &str, path: &Path, depth: usize) -> Result<Table, ConfigFileError> {
    let mut table: Table =
        text.parse().map_err(|source| ConfigFileError::Syntax { path: path.into(), source: Box::new(source) })?;
    resolve_bases(&mut table, path, depth)?;
    Ok(table)
}

fn resolve_bases(table: &mut Table, path: &Path, depth: usize) -> Result<(), ConfigFileError> {
    if depth > MAX_BASES {
        return Err(ConfigFileError::BaseRing { path: path.into() });
    }
    for (_, value) in table.iter_mut() {
        if let Value::Table(table) = value {
            resolve_bases(table, path, depth)?;
        }
    }
    if let Some(base) = table.remove("base") {
        let Value::String(base) = base else {
            let reason = "must be the path of a TOML file".into();
            return Err(ConfigFileError::Schema { path: path.into(), key: "base".into(), reason });
        };
        let base_path = path.parent().unwrap_or(Path::new("")).join(base);
        let mut merged = Value::Table(load_with_bases(&base_path, depth + 1)?);
        merge(&mut merged, Value::Table(std::mem::take(table))).map_err(|(key, reason)| ConfigFileError::Schema {
            path: path.into(),
            key,
            reason,
        })?;
        if let Value::Table(merged) = merged {
            *table = merged;
        }
    }
    Ok(())
}

/// Puts `over` on `base`: tables key by key, lists by index where `over` is a table of indices, all else replaced.
fn merge(base: &mut Value, over: Value) -> Result<(), (String, String)> {
    match (base, over) {
        (Value::Table(base), Value::Table(over)) => {
            for (key, value) in over {
                match base.get_mut(&key) {
                    Some(slot) if VARIANT_KEYS.contains(&key.as_str()) => *slot = value,
                    Some(slot) if slot.is_table() || slot.is_array() => {
                        merge(slot, value).map_err(|(path, reason)| (format!("{key}.{path}"), reason))?;
                    }
                    _ => drop(base.insert(key, value)),
                }
            }
        }
        (Value::Array(base), Value::Table(over)) => {
            let len = base.len();
            for (key, value) in over {
                let slot = key.parse::<usize>().ok().and_then(|index| base.get_mut(index));
                let Some(slot) = slot else {
                    return Err((key, format!("the list in the base has {len} entries, counted from 0")));
                };
                merge(slot, value).map_err(|(path, reason)| (format!("{key}.{path}"), reason))?;
            }
        }
        (base, over) => *base = over,
    }
    Ok(())
}

fn apply_override(table: &mut Table, text: &str) -> Result<(), ConfigFileError> {
    let failed = |reason: String| ConfigFileError::Override { text: text.into(), reason };
    let (path, value) = text.split_once('=').ok_or_else(|| failed("write key.path=value".into()))?;
    let value = parse_value(value.trim());
    set_value(table, path.trim(), &value).map_err(|error| failed(error.to_string()))
}

/// Why no value can stand at a key path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct KeyPathError(String);

/// Sets the value at a key path such as `model.levels.0.encoder.n_layers`, as `--set` does; `*` stands for every entry
/// of a list.
///
/// # Errors
///
/// A path that leads into a plain value or past the end of a list.
pub fn set_value(table: &mut Table, path: &str, value: &Value) -> Result<(), KeyPathError> {
    key_paths(table, path)?.iter().try_for_each(|path| set_one(table, path, value.clone()))
}

/// The key path with each `*` replaced by the indices of the list that it stands in.
///
/// # Errors
///
/// A `*` where there is no list with entries.
pub fn key_paths(table: &Table, path: &str) -> Result<Vec<String>, KeyPathError> {
    let Some((before, after)) = path.split_once(".*") else { return Ok(vec![path.to_owned()]) };
    if !(after.is_empty() || after.starts_with('.')) {
        return Ok(vec![path.to_owned()]);
    }
    match value_at(table, before) {
        Some(Value::Array(list)) if !list.is_empty() => {
            let one = |index| key_paths(table, &format!("{before}.{index}{after}"));
            Ok((0..list.len()).map(one).collect::<Result<Vec<_>, _>>()?.concat())
        }
        _ => Err(KeyPathError(format!("`{before}` is no list with entries for `*` to stand for"))),
    }
}

/// What stands at a key path.
pub fn value_at<'a>(table: &'a Table, path: &str) -> Option<&'a Value> {
    let (first, rest) = path.split_once('.').map_or((path, None), |(first, rest)| (first, Some(rest)));
    let mut here = table.get(first)?;
    for key in rest.into_iter().flat_map(|rest| rest.split('.')) {
        here = match here {
            Value::Table(table) => table.get(key)?,
            Value::Array(list) => list.get(key.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    Some(here)
}

fn set_one(table: &mut Table, path: &str, value: Value) -> Result<(), KeyPathError> {
    let failed = |reason: &str| KeyPathError(reason.into());
    let mut slot = Value::Table(std::mem::take(table));
    let outcome = (|| {
        let mut here = &mut slot;
        let mut parent = "";
        for key in path.split('.') {
            if key.is_empty() {
                return Err(failed("the key has an empty part"));
            }
            if VARIANT_KEYS.contains(&parent) && here.get(key).is_none() {
                *here = Value::Table(Table::new());
            }
            parent = key;
            here = match here {
                Value::Table(table) => table.entry(key).or_insert_with(|| Value::Table(Table::new())),
                Value::Array(list) => {
                    let len = list.len();
                    let entry = key.parse::<usize>().ok().and_then(|index| list.get_mut(index));
                    entry.ok_or_else(|| failed(&format!("`{key}` is no index of a list of {len} entries")))?
                }
                _ => return Err(failed(&format!("`{key}` cannot be set inside a plain value"))),
            };
        }
        *here = value;
        Ok(())
    })();
    if let Value::Table(changed) = slot {
        *table = changed;
    }
    outcome
}

/// A TOML value, or else the text itself, so that strings need no quotes on a command line.
fn parse_value(text: &str) -> Value {
    format!("value = {text}")
        .parse::<Table>()
        .ok()
        .and_then(|mut table| table.remove("value"))
        .unwrap_or_else(|| Value::String(text.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_is_a_base_and_the_lines_that_differ() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("base.toml"), "a = 1\n[[levels]]\nx = 1\ny = 2\n[[levels]]\nx = 3\n").unwrap();
        let variant = dir.path().join("variant.toml");
        std::fs::write(&variant, "[model]\nbase = \"base.toml\"\n[model.levels.1]\nx = 5\n").unwrap();
        let table = load_table(&variant, &["model.levels.0.y=7".into(), "name=plain words".into()]).unwrap();
        let expected =
            "name = 'plain words'\n[model]\na = 1\n[[model.levels]]\nx = 1\ny = 7\n[[model.levels]]\nx = 5\n";
        assert_eq!(table, expected.parse::<Table>().unwrap());
    }

    #[test]
    fn one_variant_replaces_another_and_tables_join() {
        let dir = tempfile::tempdir().unwrap();
        let base = "attention = { window = { units = 3 } }\n[optimizer]\nlearning_rate = 1.0\n";
        std::fs::write(dir.path().join("base.toml"), base).unwrap();
        let variant = dir.path().join("variant.toml");
        std::fs::write(&variant, "base = \"base.toml\"\nattention = { block = {} }\n[optimizer]\nwarmup = 2\n")
            .unwrap();
        let expected = "attention = { block = {} }\n[optimizer]\nlearning_rate = 1.0\nwarmup = 2\n";
        assert_eq!(load_table(&variant, &[]).unwrap(), expected.parse::<Table>().unwrap());
        let table = load_table(&variant, &["attention.stream.window=4".into()]).unwrap();
        assert_eq!(table["attention"].to_string(), "{ stream = { window = 4 } }");
        let table = load_table(&variant, &["attention=full".into(), "attention.window.units=5".into()]).unwrap();
        assert_eq!(table["attention"].to_string(), "{ window = { units = 5 } }");
        let sparse = "attention.sparse={ window = 2, pick = { every = 2 } }".into();
        let table = load_table(&variant, &[sparse, "attention.sparse.pick.top=3".into()]).unwrap();
        assert_eq!(table["attention"]["sparse"].to_string(), "{ pick = { top = 3 }, window = 2 }");
        assert!(load_table(&variant, &["optimizer.learning_rate.x=1".into()]).is_err());
    }

    #[test]
    fn a_star_stands_for_every_entry() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.toml");
        std::fs::write(&path, "[[m.levels]]\nx = 1\n[[m.levels]]\nx = 2\n").unwrap();
        let table = load_table(&path, &["m.levels.*.x=5".into()]).unwrap();
        assert_eq!(table, "[[m.levels]]\nx = 5\n[[m.levels]]\nx = 5\n".parse().unwrap());
        assert_eq!(key_paths(&table, "m.levels.*.y").unwrap(), ["m.levels.0.y", "m.levels.1.y"]);
        assert_eq!(value_at(&table, "m.levels.1.x"), Some(&Value::Integer(5)));
        assert_eq!(value_at(&table, "m.levels.2.x"), None);
        let error = load_table(&path, &["m.*.x=5".into()]).unwrap_err().to_string();
        assert!(error.contains("--set m.*.x=5: `m` is no list with entries"), "{error}");
    }

    #[test]
    fn rings_and_wrong_indices_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let ring = dir.path().join("ring.toml");
        std::fs::write(&ring, "base = \"ring.toml\"").unwrap();
        assert!(matches!(load_table(&ring, &[]), Err(ConfigFileError::BaseRing { .. })));
        let list = dir.path().join("list.toml");
        std::fs::write(&list, "[[levels]]\nx = 1").unwrap();
        let error = load_table(&list, &["levels.4.x=2".into()]).unwrap_err().to_string();
        assert!(error.contains("`4` is no index of a list of 1 entries"), "{error}");
    }

    #[test]
    fn caches_are_set_by_file_and_by_override() {
        use crate::cache::config::{Budget, Storage};
        use crate::cache::policy::{PolicyConfig, Window};

        let file = "advance = \"chunk\"\nmemory_budget_bytes = 1000\n[[caches]]\nstages = \"top encoder\"\n\
                    values = \"int4\"\npolicy = { tova = { budget = { entries = 64 } } }\n";
        let load = |overrides: &[&str]| {
            let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
            parse_infer(file, "a.toml".as_ref(), &overrides).unwrap_or_else(|error| panic!("{error}"))
        };
        let config = load(&[]);
        assert_eq!(config.memory_budget_bytes, Some(1000));
        assert_eq!((config.caches[0].keys, config.caches[0].values), (None, Some(Storage::Int4)));

        let config = load(&["caches.0.policy.window.recent=8", "caches.0.keys=int8", "advance=recursive"]);
        assert_eq!(config.caches[0].policy, Some(PolicyConfig::Window(Window { recent: 8, sinks: 0 })));
        assert_eq!(config.caches[0].keys, Some(Storage::Int8));
        let config = load(&["caches.0.policy.tova.budget.share=0.5", "caches.0.floor.bytes=100"]);
        let Some(PolicyConfig::Tova(tova)) = &config.caches[0].policy else { panic!("{config:?}") };
        assert_eq!((tova.budget, config.caches[0].floor), (Budget::Share(0.5), Some(Budget::Bytes(100))));
    }

    #[test]
    fn a_wrong_line_about_caches_is_named() {
        for (line, key, said) in [
            ("activation = \"int8\"", "activation", "unknown field `activation`"),
            ("advance = \"recursiv\"", "advance", "expected one of `hierarchical`, `chunk`, `recursive`"),
            ("memory_budget_bytes = -1", "memory_budget_bytes", "invalid value: integer `-1`"),
            ("caches = [{ keys = \"int8\" }]", "caches[0]", "missing field `stages`"),
            ("caches = [{ stages = \"middle\" }]", "caches[0].stages", "unknown stages \"middle\"; use \"all\""),
            ("caches = [{ stages = \"all\", kyes = \"int8\" }]", "caches[0].kyes", "unknown field `kyes`"),
            ("caches = [{ stages = \"all\", keys = \"int3\" }]", "caches[0].keys", "unknown variant `int3`"),
            ("caches = [{ stages = \"all\", policy = \"lru\" }]", "caches[0].policy.lru", "needs settings"),
            (
                "caches = [{ stages = \"all\", policy = { windw = { recent = 1 } } }]",
                "caches[0].policy",
                "unknown variant `windw`",
            ),
            (
                "caches = [{ stages = \"all\", policy = { random = { budget = { kilos = 1 } } } }]",
                "caches[0].policy.random.budget",
                "expected one of `entries`, `bytes`, `share`",
            ),
        ] {
            let error = parse_infer(line, "a.toml".as_ref(), &[]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("a.toml: at `{key}`: ")) && error.contains(said), "{line}: {error}");
        }
        let error = load_infer("no/such.toml".as_ref(), &[]).unwrap_err().to_string();
        assert!(error.contains("cannot read the config no/such.toml"), "{error}");
    }
}
