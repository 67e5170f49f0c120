//! The name of a run: a hash of all that decides its numbers, and of nothing else.

use std::fs::File;
use std::io;
use std::path::Path;

use photon_core::hex;
use sha2::{Digest, Sha256};
use toml::{Table, Value};

use crate::checkpoint::{flat, is_free};
use crate::config::RunConfig;

/// Changes with what the hash covers.
const VERSION: &str = "photon run 1";
const N_DIGITS: usize = 12;

/// The name of a run on data with this [content hash](crate::data::PrepareReport::content_hash), which covers the
/// tokenizer too.
///
/// Where texts, tokenizer and checkpoints lie does not matter, what they hold does. Keys that change no number do not
/// matter either, as when a run goes on.
///
/// # Errors
///
/// Weights of `init_from` that cannot be read.
pub fn run_id(config: &RunConfig, data_hash: &str) -> io::Result<String> {
    let mut hash = Sha256::new();
    hash.update(format!("{VERSION}\ndata {data_hash}\n"));
    if let Some(folder) = &config.train.init_from {
        let mut weights = Sha256::new();
        io::copy(&mut File::open(Path::new(folder).join("model.safetensors"))?, &mut HashWriter(&mut weights))?;
        hash.update(format!("init_from {}\n", hex::encode(&weights.finalize())));
    }
    let decides = |key: &str| ["replicas", "micro_batch_size"].contains(&key) || !is_free(key);
    for (key, value) in flat(&portable(config)).into_iter().filter(|(key, _)| decides(key)) {
        hash.update(format!("{key} = {value}\n"));
    }
    Ok(hex::encode(&hash.finalize())[..N_DIGITS].to_owned())
}

/// The config without the places of files.
pub(super) fn portable(config: &RunConfig) -> Table {
    let mut config = config.clone();
    let train = &mut config.train;
    train.data.for_each_path(|path| *path = String::new());
    if train.tokenizer != "bytes" {
        train.tokenizer = "file".into();
    }
    if let Some(init_from) = &mut train.init_from {
        *init_from = "checkpoint".into();
    }
    let mut table: Table = config.to_toml().parse().expect("a config was just written");
    if let Some(Value::Table(data)) = table.get_mut("data") {
        data.remove("paths");
    }
    table
}

/// A hash takes bytes as a file does.
struct HashWriter<'a>(&'a mut Sha256);

impl io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_data::run;
    use super::*;

    #[test]
    fn a_name_says_what_decides_numbers_and_not_where_things_lie() {
        let id = |more: &str, data: &str| run_id(&run(more), data).unwrap();
        let name = id("", "d");
        assert_eq!(name.len(), N_DIGITS);
        for same in ["data.paths = [\"/elsewhere/b.txt\"]", "checkpoint_every_steps = 7", "guards.spike_factor = 9.0"] {
            assert_eq!(id(same, "d"), name, "{same}");
        }
        let others = ["seed = 3", "replicas = 2", "alpha = 0.1", "steps = 99", "model.levels.0.encoder.d_ff = 64"];
        let mut names: Vec<String> =
            others.map(|other| id(other, "d")).into_iter().chain([name, id("", "e")]).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), others.len() + 2);
    }

    #[test]
    fn weights_that_a_run_begins_with_decide_by_what_they_are() {
        let folders = [b"one", b"two", b"one"].map(|weights| {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
            folder
        });
        let [one, two, again] = folders.each_ref().map(|folder| {
            run_id(&run(&format!("init_from = {:?}", folder.path().display().to_string())), "d").unwrap()
        });
        assert!(one == again && one != two);
    }
}
