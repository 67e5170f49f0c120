//! From text files to batches of token ids.
//!
//! ```text
//! corpus  paths, folders, patterns  -> documents
//! split   documents                 -> train and held-out documents
//! store   documents                 -> token ids in a memory-mapped file
//! batch   token ids                 -> rows of at most seq_len tokens, a pure function of the step
//! ```
//!
//! [`prepare`] does the first three, once: a second run finds the stores of the first. Nothing here
//! knows the model; moving a [`Batch`] to a device is the training loop's.

mod batch;
mod corpus;
mod error;
mod prepare;
mod split;
mod store;
mod train_tokenizer;

use serde::{Deserialize, Serialize};

pub use batch::{Batch, BatchSource, PAD_ID, eval_windows};
pub use corpus::{Corpus, Document, Skipped, read_corpus};
pub use error::DataError;
pub use prepare::{PrepareReport, Prepared, SideReport, StoreOrigin, prepare};
pub use split::{HeldOut, Split};
pub use store::{TokenStore, build_store};
pub use train_tokenizer::{TokenizerSummary, train_tokenizer};

/// Which texts to train on, and which to hold out.
///
/// # Examples
/// ```
/// let config: photon_train::data::DataConfig = toml::from_str(r#"
///     paths = ["books/", "notes.md", "logs/**/*.jsonl"]
///     held_out = { documents = { fraction = 0.1 } }
/// "#)?;
/// config.validate()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files, folders (with all below them) or patterns such as `texts/**/*.md`.
    pub paths: Vec<String>,
    /// Key of the text in each line of a `.jsonl` file.
    #[serde(default = "default_text_field")]
    pub text_field: String,
    /// How the held-out text is chosen.
    #[serde(default)]
    pub held_out: HeldOut,
}

fn default_text_field() -> String {
    "text".to_owned()
}

impl DataConfig {
    /// Checks what serde cannot.
    ///
    /// # Errors
    /// Names the key, its value and what it should be.
    pub fn validate(&self) -> Result<(), DataError> {
        if self.paths.is_empty() {
            return Err(DataError::config("paths", "[]", "at least one file, folder or pattern"));
        }
        if self.text_field.is_empty() {
            return Err(DataError::config("text_field", "\"\"", "the key of the text in a .jsonl line"));
        }
        self.held_out.validate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(toml: &str) -> Result<DataConfig, toml::de::Error> {
        toml::from_str(toml)
    }

    #[test]
    fn defaults_hold_out_a_twentieth_of_the_documents() {
        let config = parse("paths = [\"a.txt\"]").unwrap();
        assert_eq!(config.text_field, "text");
        assert_eq!(config.held_out, HeldOut::Documents { fraction: 0.05 });
        config.validate().unwrap();
    }

    #[test]
    fn every_way_to_hold_out_is_read_and_written() {
        for (toml, held_out) in [
            ("tail = { fraction = 0.1 }", HeldOut::Tail { fraction: 0.1 }),
            ("documents = { fraction = 0.2 }", HeldOut::Documents { fraction: 0.2 }),
            ("paths = { paths = [\"v.txt\"] }", HeldOut::Paths { paths: vec!["v.txt".to_owned()] }),
        ] {
            let config = parse(&format!("paths = [\"a.txt\"]\nheld_out = {{ {toml} }}")).unwrap();
            assert_eq!(config.held_out, held_out);
            config.validate().unwrap();
            assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
        }
    }

    #[test]
    fn unknown_keys_are_refused_at_every_depth() {
        for toml in [
            "path = [\"a\"]",
            "paths = [\"a\"]\nshuffle = true",
            "paths = [\"a\"]\nheld_out = { tail = { fraction = 0.1, lines = 3 } }",
            "paths = [\"a\"]\nheld_out = { lines = { fraction = 0.1 } }",
        ] {
            assert!(parse(toml).is_err(), "{toml}");
        }
    }

    #[test]
    fn validate_names_key_value_and_fix() {
        let message = |toml: &str| parse(toml).unwrap().validate().unwrap_err().to_string();
        assert!(message("paths = []").contains("`paths` is [], expected at least one"));
        let fraction = "paths = [\"a\"]\nheld_out = { tail = { fraction = 0.6 } }";
        assert!(message(fraction).contains("`held_out.tail.fraction` is 0.6, expected"));
        let nan = "paths = [\"a\"]\nheld_out = { documents = { fraction = nan } }";
        assert!(message(nan).contains("NaN"));
        assert!(message("paths = [\"a\"]\nheld_out = { paths = { paths = [] } }").contains("`held_out.paths.paths`"));
        assert!(message("paths = [\"a\"]\ntext_field = \"\"").contains("`text_field`"));
    }
}
