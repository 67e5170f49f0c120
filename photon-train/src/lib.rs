//! Learning: text to batches, batches to gradients, gradients to weights, and a record of it all.
//!
//! ```text
//! data       files -> documents -> token stores -> batches, each a pure function of (seed, step)
//! replicas   batch -> gradients, on every core
//! step       gradients -> weights, through the optimizer
//! eval       weights -> bits per byte
//! record     the run folder: config, metrics, events, samples
//! events     curves for TensorBoard
//! trainer    the loop over all of it
//! ```
//!
//! The model is `photon-core`'s; generation beyond the samples of a run is `photon-infer`'s.

pub mod bench;
pub mod config;
pub mod data;
pub mod eval;
pub mod events;
pub mod optimizer;
pub mod record;
pub mod replicas;
pub mod sample;
pub mod schedule;
pub mod step;
pub mod trainer;
