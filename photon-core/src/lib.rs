//! The model: what it computes, the state it decodes with, and the files it lives in.
//!
//! Text never enters the model and tokens never leave it: [`tokenizer`] stands before, [`sampler`] behind. Learning is
//! `photon-train`'s. Nothing here prints, parses arguments or knows the time.
//!
//! # The way of the data
//!
//! ```text
//!  text  -> tokenizer -> token ids
//!                           |
//!            chunker 1      v       C_1 tokens -> one vector
//!            encoder 1      |  up   causal over the chunks so far
//!            chunker 2      |       C_2 level-1 latents -> one vector
//!            encoder 2      v       ... as many levels as the config lists
//!                  (shift by one: only the top level)
//!            converter 2    |       one latent -> R_2 prefix vectors
//!            decoder 2      | down  local to the chunk; emits a conditioning vector per level-1 unit
//!            converter 1    |
//!            decoder 1      v       reads real token embeddings
//!                        head -> logits
//! ```
//!
//! The modules follow that order: [`tokenizer`], [`chunker`], [`encoder`], [`converter`], [`decoder`],
//! [`photon`] (all stages together) and [`flat`] (the plain transformer built of the same blocks);
//! [`documents`] are what a row may keep apart, [`state`] is what generation carries along, [`advance`] what it may leave
//! out, [`loss`] what training minimises, [`score`] what evaluation asks, [`watch`] who looks on.
//!
//! # Words and symbols
//!
//! | here | paper | meaning |
//! |---|---|---|
//! | `levels[l-1]` | level l | one resolution; the token level is 0 and has no entry |
//! | `chunk_len` | C_l | level-(l-1) units in one level-l unit |
//! | `d_model` | D_l | width of the level; the top-level `d_model` of a config is D_0, the token decoder's |
//! | `prefix_len` | R_l | vectors that the converter makes of one conditioning vector |
//! | units | M_l | positions at a level |
//! | latents | X^l | encoder outputs |
//! | conditioning | H^l | what decoder l+1 emits for a unit before having seen it |
//! | meta-chunk | B = C_1...C_L | the tokens under one top-level unit |
//!
//! # Shapes
//!
//! B batch, T tokens, M units at this level, C chunk length, R prefix length, D width, H heads,
//! K head dimension, V vocabulary, N positions in a call, E keys that are looked at, F inner width of the
//! feed-forward, G groups (chunks with their prefix), S positions of a group; lower case for a part of it.

pub mod accounting;
pub mod advance;
pub mod allocator;
pub mod atomic_file;
pub mod cache;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub(crate) mod cards;
pub mod checkpoint;
pub mod chunker;
pub mod config;
pub mod config_file;
pub mod converter;
pub mod decoder;
pub mod device;
pub mod documents;
pub mod encoder;
pub mod error_text;
pub mod flat;
pub mod hex;
pub mod import_llama;
pub mod infer_config;
pub mod init;
pub mod launches;
pub mod loss;
pub mod memory;
pub mod model;
pub mod nn;
pub mod photon;
pub mod sampler;
pub mod score;
pub mod snapshot;
pub mod state;
pub mod tokenizer;
pub mod unix_lines;
pub mod watch;

/// The commit that this program was built from, or `unknown`.
pub const BUILD_COMMIT: &str = env!("PHOTON_COMMIT");
