//! What of a run may change when it goes on, and what may not.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use toml::{Table, Value};

use super::MadeWith;
use crate::config::RunConfig;

/// Something that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The key of the config, or words.
    pub key: String,
    /// When the run was begun.
    pub was: String,
    /// Now.
    pub now: String,
}

const ABSENT: &str = "absent";

impl Difference {
    /// Whether a run may go on with it, if it is meant.
    ///
    /// What decides the batches may not change, for then nobody knows what was seen; nor what weights and the optimiser's
    /// memory are made for.
    pub fn may_be_meant(&self) -> bool {
        match self.key.as_str() {
            "optimizer.kind" => false,
            // An average begins with a run.
            "ema.decay" => self.was != ABSENT && self.now != ABSENT,
            "alpha" | "z_loss" | "gradient_checkpointing" | "replicas" | "micro_batch_size" | "init_from" => true,
            key => ["optimizer.", "eval.", "precision."].iter().any(|start| key.starts_with(start)),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, was, now } = self;
        write!(f, "{key}: was {was}, now {now}")?;
        match self.may_be_meant() {
            true => write!(f, " (if it is meant: --accept {key})"),
            false => Ok(()),
        }
    }
}

/// What keeps a run from going on with `config` and what it was read with.
///
/// `steps` may rise. What decides no number may change: which checkpoints and histograms are kept, where texts and
/// tokenizer lie (they themselves are told by their fingerprints), and the guards, which a run that they ended needs changed.
pub fn differences(was: &Table, was_with: &MadeWith, config: &RunConfig, now_with: &MadeWith) -> Vec<Difference> {
    let now: Table = config.to_toml().parse().expect("a config was just written");
    let (was_values, now_values) = (flat(was), flat(&now));
    let mut keys: Vec<&String> = was_values.iter().chain(&now_values).map(|(key, _)| key).collect();
    keys.sort();
    keys.dedup();
    let value = |values: &[(String, Value)], key: &String| {
        values.iter().find(|(found, _)| found == key).map(|(_, value)| value.clone())
    };
    let mut found = Vec::new();
    for key in keys.into_iter().filter(|key| !is_free(key)) {
        let (was, now) = (value(&was_values, key), value(&now_values, key));
        let is_raised =
            key == "steps" && was.as_ref().and_then(Value::as_integer) <= now.as_ref().and_then(Value::as_integer);
        if was != now && !is_raised {
            let say = |value: Option<Value>| value.map_or(ABSENT.to_owned(), |value| value.to_string());
            let now = say(now) + if key == "steps" { " (it may only rise)" } else { "" };
            found.push(Difference { key: key.clone(), was: say(was), now });
        }
    }
    // Where the config leaves them open the run keeps what it had.
    let train = &config.train;
    for (key, was, now) in [
        ("replicas", was_with.replicas, train.replicas.map(|_| now_with.replicas)),
        ("micro_batch_size", was_with.micro_batch_size, train.micro_batch_size.map(|_| now_with.micro_batch_size)),
    ] {
        if let Some(now) = now.filter(|&now| now != was) {
            found.push(Difference {
                key: key.into(),
                was: was.to_string(),
                now: format!("{now} (it changes sums by rounding)"),
            });
        }
    }
    if was_with.tokenizer != now_with.tokenizer {
        found.push(Difference {
            key: "tokenizer".into(),
            was: short(&was_with.tokenizer),
            now: format!("{} ({})", short(&now_with.tokenizer), name_of(&train.tokenizer)),
        });
    } else if was_with.data != now_with.data {
        // The fingerprint of the texts covers the tokenizer too.
        let now = format!("{} (other texts, or split in another way)", short(&now_with.data));
        found.push(Difference { key: "data".into(), was: short(&was_with.data), now });
    }
    found
}

/// Whether a key decides no number of the run, or is compared in another way.
pub(crate) fn is_free(key: &str) -> bool {
    let is_place = key == "tokenizer" || (key.starts_with("data.") && key.contains("path"));
    let is_kept = ["replicas", "micro_batch_size"].contains(&key);
    is_place
        || is_kept
        || ["checkpoint_every_steps", "eval.histograms"].contains(&key)
        || key.starts_with("checkpoints.")
        || key.starts_with("guards.")
}

/// All values of a table under keys such as `model.levels.0.d_model`.
pub(crate) fn flat(table: &Table) -> Vec<(String, Value)> {
    fn add(found: &mut Vec<(String, Value)>, key: String, value: &Value) {
        let join = |part: &str| if key.is_empty() { part.to_owned() } else { format!("{key}.{part}") };
        match value {
            Value::Table(table) if !table.is_empty() => {
                table.iter().for_each(|(part, value)| add(found, join(part), value));
            }
            Value::Array(values) if values.iter().any(Value::is_table) => {
                values.iter().enumerate().for_each(|(index, value)| add(found, join(&index.to_string()), value));
            }
            value => found.push((key, value.clone())),
        }
    }
    let mut found = Vec::new();
    add(&mut found, String::new(), &Value::Table(table.clone()));
    found
}

fn short(fingerprint: &str) -> String {
    fingerprint.chars().take(12).collect()
}

fn name_of(path: &str) -> String {
    Path::new(path).file_name().map_or(path.to_owned(), |name| name.to_string_lossy().into_owned())
}
