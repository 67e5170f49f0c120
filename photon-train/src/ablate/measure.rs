//! What other programs measure of a finished run: a name and a command line that prints JSON.
//!
//! Of what is printed, what a clock or the machine's memory decides is kept apart, so that results are the same whenever they
//! are made again; names of files are cut down to what lies in the experiment's folder.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use photon_core::atomic_file;
use serde_json::Value;

use super::experiment::MeasureConfig;
use super::outcome::{Outcome, Timings};
use super::{AblateError, io};

/// Ends of keys that say that a clock or the machine's memory decides the value.
const TIMED: [&str; 5] = ["_per_sec", "_secs", "_ms", "peak_bytes", "resident_bytes"];

/// Programs that lie beside this one.
const SIBLINGS: [&str; 2] = ["photon-train", "photon-infer"];

/// Where things of a run lie.
#[derive(Clone, Debug)]
pub struct MeasurePlaces {
    /// The run.
    pub run: PathBuf,
    /// A file of its held-out text.
    pub held_out: PathBuf,
    /// The folder of the experiment's file.
    pub experiment: PathBuf,
}

impl MeasureConfig {
    /// Whether the command line asks for held-out text as a file.
    pub fn needs_held_out(&self) -> bool {
        self.command.iter().any(|word| word.contains("{held_out}"))
    }

    /// The program, if it is there.
    ///
    /// # Errors
    ///
    /// A program of ours that is not beside this one.
    pub fn program(&self, this: &Path) -> Result<PathBuf, AblateError> {
        let name = &self.command[0];
        if !SIBLINGS.contains(&name.as_str()) {
            return Ok(name.into());
        }
        let path = this.with_file_name(format!("{name}{}", std::env::consts::EXE_SUFFIX));
        match path.is_file() {
            true => Ok(path),
            false => Err(AblateError::Asked(format!(
                "a measure runs {name}, which is not beside this program: {} is no file; build the whole workspace \
                 (cargo build --release --workspace)",
                path.display()
            ))),
        }
    }

    /// The arguments, with what stands in braces filled in.
    pub fn args(&self, places: &MeasurePlaces) -> Vec<OsString> {
        let checkpoint = |name: &str| places.run.join("checkpoints").join(name);
        let fill = |word: &String| {
            let mut word = word.clone();
            for (name, path) in [
                ("{model}", checkpoint("last")),
                ("{best}", checkpoint("best")),
                ("{run}", places.run.clone()),
                ("{held_out}", places.held_out.clone()),
                ("{experiment}", places.experiment.clone()),
            ] {
                word = word.replace(name, &path.display().to_string());
            }
            word.into()
        };
        self.command[1..].iter().map(fill).collect()
    }
}

/// The file of a measure in a run folder.
pub(super) fn file(run: &Path, name: &str) -> PathBuf {
    run.join("measures").join(format!("{name}.json"))
}

/// Keeps what a measure has printed.
pub(super) fn keep(run: &Path, name: &str, printed: &[u8]) -> Result<(), AblateError> {
    let value =
        parse(printed).map_err(|error| AblateError::Asked(format!("measure {name} printed no JSON: {error}")))?;
    let path = file(run, name);
    let folder = path.parent().unwrap_or(run);
    std::fs::create_dir_all(folder).map_err(io("write", folder))?;
    atomic_file::write(&path, format!("{value}\n").as_bytes()).map_err(io("write", &path))
}

/// One value; of several, one a line, their list.
fn parse(printed: &[u8]) -> Result<Value, serde_json::Error> {
    let values: Vec<Value> = serde_json::Deserializer::from_slice(printed).into_iter().collect::<Result<_, _>>()?;
    match <[Value; 1]>::try_from(values) {
        Ok([value]) => Ok(value),
        Err(values) if values.is_empty() => serde_json::from_str(""),
        Err(values) => Ok(Value::Array(values)),
    }
}

/// Adds what was kept of measures to what came of a run; `None` if one is missing.
pub(super) fn add_kept(
    run: &Path,
    names: &[&String],
    (mut outcome, mut timings): (Outcome, Timings),
) -> Option<(Outcome, Timings)> {
    let root = run.parent().unwrap_or(run).display().to_string();
    for name in names {
        let mut value: Value = serde_json::from_slice(&std::fs::read(file(run, name)).ok()?).ok()?;
        let mut timed = BTreeMap::new();
        part(&mut value, "", &root, &mut timed);
        outcome.measures.insert((*name).clone(), value);
        timings.measures.insert((*name).clone(), timed);
    }
    Some((outcome, timings))
}

/// Moves what is timed out of a value, under its key path.
fn part(value: &mut Value, path: &str, root: &str, timed: &mut BTreeMap<String, Value>) {
    let below = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        Value::Object(fields) => {
            let is_timed = |key: &String| TIMED.iter().any(|end| key.ends_with(end));
            let names: Vec<String> = fields.keys().filter(|key| is_timed(key)).cloned().collect();
            for name in names {
                timed.extend(fields.remove(&name).map(|value| (below(&name), value)));
            }
            fields.iter_mut().for_each(|(key, value)| part(value, &below(key), root, timed));
        }
        Value::Array(values) => {
            values
                .iter_mut()
                .enumerate()
                .for_each(|(index, value)| part(value, &below(&index.to_string()), root, timed));
        }
        Value::String(text) if text.starts_with(root) => *text = text[root.len()..].trim_start_matches('/').to_owned(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_clock_decides_is_kept_apart_and_places_are_cut() {
        let mut value = serde_json::json!([{ "preset": "exact", "decode_tokens_per_sec": 5.5, "kl": 0.1,
            "model": "/a/b/0123/checkpoints/last", "deep": { "wait_secs": 2 } }]);
        let mut timed = BTreeMap::new();
        part(&mut value, "", "/a/b", &mut timed);
        let left = serde_json::json!([{ "preset": "exact", "kl": 0.1, "model": "0123/checkpoints/last", "deep": {} }]);
        assert_eq!(value, left);
        let timed: Vec<(&str, f64)> =
            timed.iter().map(|(key, value)| (key.as_str(), value.as_f64().unwrap())).collect();
        assert_eq!(timed, [("0.decode_tokens_per_sec", 5.5), ("0.deep.wait_secs", 2.0)]);
    }

    #[test]
    fn lines_of_json_are_a_list_and_words_are_none() {
        assert_eq!(parse(b"{\"a\":1}\n").unwrap(), serde_json::json!({ "a": 1 }));
        assert_eq!(parse(b"1\n2\n").unwrap(), serde_json::json!([1, 2]));
        assert!(parse(b"").is_err() && parse(b"some words").is_err());
    }
}
