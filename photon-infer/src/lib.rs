//! Generation: from a checkpoint and prompts to text, and how fast.
//!
//! ```text
//! generate     prompts -> tokens, row by row, with the exact `hierarchical` advance rule
//! text_stream  token bytes -> text that is safe to print
//! bench        how fast, and how large the caches
//! ```
//!
//! The model, its decode state and the sampler are `photon-core`'s.

pub mod bench;
pub mod generate;
pub mod session;
pub mod text_stream;
