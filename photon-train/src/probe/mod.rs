//! What a model makes of its context, measured on held-out text; for any checkpoint.
//!
//! ```text
//! windows   where in a text it is looked at: apart from each other, evenly spread, jittered by the seed
//! copy      a span stands in the text twice: nats gained on the second occurrence
//! context   what lies further back is other text: nats lost
//! length    contexts longer than those trained on: bits per byte of the same tokens
//! estimate  a mean over windows and its standard error
//! ```
//!
//! All three compare rows that end in the same tokens, window by window, so that differences are not those between texts.
//! A row starts without context, as in training.

pub mod context;
pub mod copy;
mod estimate;
pub mod length;
mod windows;

use std::sync::atomic::{AtomicUsize, Ordering};

use photon_core::model::Model;
use photon_core::score::{ScoreRow, batches, score};
use photon_core::tokenizer::Tokenizer;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::data::TokenStore;
use crate::replicas::Replicas;

pub use estimate::Estimate;

/// What is probed, on which text, and how closely.
pub struct Setup<'a> {
    /// The weights.
    pub model: &'a Model,
    /// Says how many bytes of text a token stands for.
    pub tokenizer: &'a Tokenizer,
    /// The text, not seen in training.
    pub store: &'a TokenStore,
    /// Tokens of a row in training.
    pub seq_len: usize,
    /// Windows to look at; fewer where the text holds fewer.
    pub n_windows: usize,
    /// Decides where they lie, and what is put in place of what.
    pub seed: u64,
    /// The workers.
    pub replicas: &'a Replicas,
    /// Told of windows done, out of all.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
}

/// Why nothing can be measured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// Too little text.
    #[error("{probe}: the text has {found} tokens, at least {needed} are needed: {fix}")]
    TextTooShort {
        /// Which.
        probe: &'static str,
        /// Tokens that there are.
        found: usize,
        /// Tokens that there must be.
        needed: usize,
        /// What to do.
        fix: &'static str,
    },
    /// A row of training holds too little.
    #[error("{probe}: rows of {seq_len} tokens are too short: at least {needed} are needed ({what})")]
    RowTooShort {
        /// Which.
        probe: &'static str,
        /// Tokens of a row.
        seq_len: usize,
        /// Tokens that it must have.
        needed: usize,
        /// What must fit.
        what: &'static str,
    },
    /// A number that cannot be had.
    #[error("{probe}: {name} {value}: {reason}")]
    Value {
        /// Which.
        probe: &'static str,
        /// What the number says.
        name: &'static str,
        /// The number.
        value: usize,
        /// Why not, and what can.
        reason: String,
    },
}

/// The scored tokens of a row.
#[derive(Clone, Debug, PartialEq)]
struct Scored {
    /// Of each token.
    nats: Vec<f64>,
    /// Bytes of text of each.
    bytes: Vec<usize>,
}

impl Scored {
    /// Nats and bytes of the last `n` tokens.
    fn last(&self, n: usize) -> [f64; 2] {
        let first = self.nats.len() - n;
        [self.nats[first..].iter().sum(), self.bytes[first..].iter().sum::<usize>() as f64]
    }

    /// Nats and bytes of all.
    fn all(&self) -> [f64; 2] {
        self.last(self.nats.len())
    }
}

impl Setup<'_> {
    /// Tokens under one top-level unit; 1 for a flat model.
    fn meta_chunk(&self) -> usize {
        self.model.config().meta_chunk_tokens()
    }

    /// Random numbers of one probe, whichever others are asked for.
    fn rng(&self, stream: u64) -> ChaCha8Rng {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(stream);
        rng
    }

    /// Scores the rows that `rows` makes of each window; in memory are those of one window for each replica.
    fn score<W: Sync>(&self, windows: &[W], rows: impl Fn(&W) -> Vec<ScoreRow> + Sync) -> Vec<Vec<Scored>> {
        let Self { tokenizer, progress, .. } = *self;
        let n_done = AtomicUsize::new(0);
        let of_window = |model: &Model, window: &W| {
            let rows = rows(window);
            let nats = batches(&rows).into_iter().flat_map(|batch| score(model, batch));
            let scored = rows.iter().zip(nats).map(|(row, scores)| Scored {
                nats: scores.iter().map(|token| f64::from(token.nats)).collect(),
                bytes: row.token_ids[row.first..].iter().map(|&id| tokenizer.text_len(id)).collect(),
            });
            let scored = scored.collect();
            progress(n_done.fetch_add(1, Ordering::Relaxed) + 1, windows.len());
            scored
        };
        let shares = self.replicas.map(self.model, windows, |model, share| {
            share.iter().map(|window| of_window(model, window)).collect::<Vec<_>>()
        });
        shares.into_iter().flatten().collect()
    }
}
