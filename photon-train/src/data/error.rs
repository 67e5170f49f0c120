//! What can go wrong between text files and batches.

use std::{io, path::PathBuf};

use photon_core::tokenizer::TokenizerError;

use super::Skipped;

/// Why texts could not be read, split, tokenised or stored.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A value of the config cannot be used.
    #[error("`{key}` is {found}, expected {expected}")]
    Config {
        /// The key within the data config.
        key: &'static str,
        /// Its value.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A path that does not exist, and is no pattern.
    #[error(
        "{}: no such file or folder; paths in a run config are relative to that file, others to the folder the \
         program runs in",
        path.display()
    )]
    Missing {
        /// The path given.
        path: PathBuf,
    },
    /// A pattern that is malformed.
    #[error("the pattern {pattern} is malformed: {source}; write `[[]` for a bracket that belongs to a name")]
    Pattern {
        /// The pattern given.
        pattern: String,
        /// Where it is malformed.
        source: glob::PatternError,
    },
    /// A pattern without a match.
    #[error("no file matches the pattern {pattern}; use `**` to reach the folders below")]
    NoMatch {
        /// The pattern given.
        pattern: String,
    },
    /// A folder or pattern all of whose files were passed over.
    #[error("{path} holds no text ({skipped}); name a file by its own path to read it whatever its extension")]
    NoText {
        /// The folder or pattern given.
        path: String,
        /// What was passed over.
        skipped: Skipped,
    },
    /// A file named by its path that holds nothing.
    #[error("{}: the file is empty; take it out of the paths", path.display())]
    EmptyFile {
        /// The path given.
        path: PathBuf,
    },
    /// A file named by its path that is not text.
    #[error("{}: expected text, found a NUL byte at byte offset {offset}; unpack or convert the file first", path.display())]
    Binary {
        /// The path given.
        path: PathBuf,
        /// Offset of the first NUL byte.
        offset: usize,
    },
    /// A file or folder that cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A line of a `.jsonl` file that holds no document.
    #[error("{} line {line}: expected a JSON object with a string `{text_field}`, found {found}", path.display())]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The key of the text.
        text_field: String,
        /// What stands there instead.
        found: String,
    },
    /// Text that is not UTF-8, for a tokenizer that needs it.
    #[error(
        "{name}: expected UTF-8, found another byte at byte offset {offset} of the file; convert the file to \
         UTF-8, or use the byte tokenizer, which takes any bytes"
    )]
    NotUtf8 {
        /// The document.
        name: String,
        /// Offset in the file of the first byte that is not UTF-8.
        offset: usize,
    },
    /// The documents cannot be divided as the config asks.
    #[error("nothing can be held out: {found}; {fix}")]
    Split {
        /// What the corpus is.
        found: String,
        /// What to do.
        fix: &'static str,
    },
    /// A side of the split that does not fill one row.
    #[error("the {side} text has {found} tokens, expected at least {expected}; {fix}")]
    TooFewTokens {
        /// `training` or `held-out`.
        side: &'static str,
        /// Tokens it has.
        found: usize,
        /// Tokens it needs.
        expected: usize,
        /// What to do.
        fix: &'static str,
    },
    /// A file that cannot be written.
    #[error("cannot write {}: {source}; free space on that disk or choose another folder", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A token store whose header says something else than expected.
    #[error("{}: {what} is {found}, expected {expected}; delete the file, it is made again", path.display())]
    Store {
        /// The store.
        path: PathBuf,
        /// Which property.
        what: &'static str,
        /// Its value.
        found: String,
        /// The value it should have.
        expected: String,
    },
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl DataError {
    pub(super) fn config(key: &'static str, found: impl ToString, expected: &'static str) -> Self {
        Self::Config { key, found: found.to_string(), expected }
    }
}
