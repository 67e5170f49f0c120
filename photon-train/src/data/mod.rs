//! From text files to batches of token ids.
//!
//! ```text
//! files        paths, folders, patterns   -> files
//! format, text, json_lines, parquet
//!              files                      -> documents, in parts of bounded length
//! scan, split  documents                  -> counts and hashes; which are held out
//! build        documents                  -> token ids, in parallel
//! shard, manifest
//!              token ids                  -> memory-mapped files, and what they are made of
//! store        shards                     -> one sequence of tokens and document ends
//! overlap      held-out and training side -> how much they have in common
//! places, windows, permutation
//!              tokens                     -> rows of at most seq_len places, shuffled without a table
//! mixture, batches
//!              rows of all sources        -> batches, a pure function of seed and step
//! loader       batches                    -> the same, made ahead
//! ```
//!
//! [`prepare`] does all up to the stores, once: a second run finds the shards of the first. Text goes through in pieces,
//! so that a corpus may be larger than memory. Nothing here knows the model; moving a [`Batch`] to a device is the
//! training loop's.

mod batch;
mod batches;
mod build;
mod config;
mod documents;
mod error;
mod files;
mod format;
mod json_lines;
mod loader;
mod manifest;
mod mixture;
mod overlap;
mod parquet;
mod permutation;
mod places;
mod prepare;
mod progress;
mod scan;
mod shard;
mod source;
mod split;
mod store;
mod text;
mod train_tokenizer;
mod windows;

use files::TextFile;

pub use batch::{Batch, PAD_ID, eval_windows};
pub use batches::{BatchSource, RowShape, SourceProgress};
pub use config::{DataConfig, Packing, SourceConfig};
pub use error::DataError;
pub use files::Skipped;
pub use loader::BatchLoader;
pub use mixture::{Mixture, MixtureSource};
pub use overlap::OverlapReport;
pub use places::NO_DOCUMENT;
pub use prepare::{PrepareReport, Prepared, SideReport, SourceReport, prepare, tokenise_texts};
pub use progress::{Progress, Stage};
pub use source::StoreOrigin;
pub use split::HeldOut;
pub use store::TokenStore;
pub use train_tokenizer::{TokenizerSummary, train_tokenizer};
