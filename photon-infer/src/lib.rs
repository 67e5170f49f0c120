//! Generation: from a checkpoint and prompts to text, how fast, and how faithfully.
//!
//! ```text
//! presets      named ways to store and keep caches, and to advance
//! generate     prompts -> tokens, row by row
//!   cache_log    what the caches came to
//! session      generation that keeps to a memory budget, goes back, forks, and lasts
//! text_stream  token bytes -> text that is safe to print
//! fidelity     what a way to generate costs against the training forward
//!   divergence   how far two predictions of one token lie apart
//!   feedback     whether generated tokens reach what comes after
//! lm_eval      log-likelihoods and continuations, as lm-evaluation-harness asks for them
//! parity       whether two devices compute the same
//! bench        how fast, and how large the caches
//! ```
//!
//! The model, its decode state and the sampler are `photon-core`'s.

pub mod bench;
mod cache_log;
pub mod divergence;
pub mod feedback;
pub mod fidelity;
pub mod generate;
pub mod lm_eval;
pub mod parity;
pub mod presets;
pub mod session;
pub mod text_stream;
