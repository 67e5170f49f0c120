//! What can go wrong between text files and batches.

use std::{
    io,
    path::{Path, PathBuf},
};

use photon_core::tokenizer::TokenizerError;

use super::{Skipped, TextFile, format::Packed};

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
    #[error("{}: the file is empty, or nothing in it has text; take it out of the paths", path.display())]
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
        offset: u64,
    },
    /// A file or folder that cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A packed file that is damaged or cut short.
    #[error(
        "{}: the {packed} data is damaged or cut short, after {n_bytes} bytes of text ({source}); fetch or pack the \
         file again",
        path.display()
    )]
    Packed {
        /// The file.
        path: PathBuf,
        /// `gzip` or `zstd`.
        packed: &'static str,
        /// Bytes that could be unpacked.
        n_bytes: u64,
        /// What is wrong.
        source: io::Error,
    },
    /// A `.parquet` file that is damaged, or a row of it that is no text.
    #[error("{} at row {row}: {reason}; fetch or write it again", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The row, or a row shortly before, counted from 0.
        row: u64,
        /// What is wrong.
        reason: String,
    },
    /// A `.parquet` file without the column.
    #[error("{}: expected a column `{text_field}` of texts, found {found}; set `text_field`", path.display())]
    Column {
        /// The file.
        path: PathBuf,
        /// The column.
        text_field: String,
        /// What there is instead.
        found: String,
    },
    /// A file that changed while it was read.
    #[error("{}: the file changed while it was read; start again when nothing writes to it", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// A line of a `.jsonl` file that holds no document.
    #[error("{} line {line}: expected a JSON object with a string `{text_field}`, found {found}", path.display())]
    JsonLine {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: u64,
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
        offset: u64,
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
    #[error("the {side} has {found} tokens, expected at least {expected}; {fix}")]
    TooFewTokens {
        /// `training text` or `held-out text`, with its source where there are several.
        side: String,
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
    /// A shard of tokens, or its manifest, that is not as it was written.
    #[error("{}: {what} is {found}, expected {expected}; delete the file, it is made again", path.display())]
    Shard {
        /// The file.
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

    pub(super) fn read(path: &Path, source: io::Error) -> Self {
        Self::Read { path: path.to_owned(), source }
    }

    /// A file that could not be read on after `n_bytes` unpacked bytes.
    pub(super) fn unpack(file: &TextFile, n_bytes: u64, source: io::Error) -> Self {
        let packed = match file.format.packed {
            // The system's own errors have a number; those of the data have none.
            _ if source.raw_os_error().is_some() => return Self::read(&file.path, source),
            Packed::Plain => return Self::read(&file.path, source),
            Packed::Gzip => "gzip",
            Packed::Zstd => "zstd",
        };
        Self::Packed { path: file.path.clone(), packed, n_bytes, source }
    }
}
