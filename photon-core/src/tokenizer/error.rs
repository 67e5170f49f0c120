//! What tokenizers report when they fail.

use std::{io, path::PathBuf};

use super::EOS;

/// What can go wrong between a text, its token ids and a `tokenizer.json`.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is missing or cannot be read.
    #[error(
        "cannot read the tokenizer {}: {source}; give the path of a `tokenizer.json` \
         (`photon-train tokenizer` makes one)", path.display()
    )]
    Read {
        /// The file asked for.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error(
        "cannot write the tokenizer {}: {source}; choose a folder that exists, can be written \
         and has free space", path.display()
    )]
    Write {
        /// The file to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The JSON is malformed or describes no tokenizer we know.
    #[error("{origin} is no tokenizer: expected {expected}, found {found}")]
    Format {
        /// Where the bytes came from.
        origin: String,
        /// The forms that can be loaded.
        expected: &'static str,
        /// What stands there instead.
        found: String,
    },
    /// This tokenizer works on characters, and the text is not UTF-8.
    #[error(
        "{origin}: expected UTF-8, found byte {byte:#04x} at byte offset {offset}; convert the \
         text to UTF-8, or use the byte tokenizer, which takes any bytes"
    )]
    NotUtf8 {
        /// The text's name.
        origin: String,
        /// Offset of the first byte that is not UTF-8.
        offset: usize,
        /// That byte.
        byte: u8,
    },
    /// The Hugging Face library refused the text.
    #[error("{origin} cannot be tokenised: {reason}; check that the tokenizer has an unknown token")]
    Encode {
        /// The text's name.
        origin: String,
        /// What the library said.
        reason: String,
    },
    /// The vocabulary asked for cannot hold the byte alphabet and the end-of-document token.
    #[error("vocab_size is {found}, expected at least {expected} (256 bytes and `{EOS}`)")]
    VocabSize {
        /// The size asked for.
        found: usize,
        /// The smallest that works.
        expected: usize,
    },
    /// More text than the BPE trainer can count without overflow.
    #[error("the BPE trainer takes at most {limit} bytes of text, found {found}; give it a sample")]
    TooMuchText {
        /// Bytes of text given.
        found: u64,
        /// Bytes it takes.
        limit: u64,
    },
    /// BPE training failed.
    #[error("BPE training failed: {reason}")]
    Train {
        /// What the library said.
        reason: String,
    },
}
