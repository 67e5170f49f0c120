//! Learning: text to batches, batches to gradients, gradients to weights, and a record of it all.
//!
//! ```text
//! data       files -> documents -> token stores -> batches, each a pure function of (seed, step)
//! replicas   batch -> gradients, on every core
//! ranks      the same in several processes at once
//! step       gradients -> weights, through the optimizer
//! parts      parts of a model by name, for parameter groups
//! schedule   learning rates
//! guard      which updates are skipped
//! average    a moving average of the weights
//! eval       weights -> bits per byte
//! probe      weights -> what they make of their context
//! record     the run folder: config, metrics, events, samples
//! events     curves, texts and histograms for TensorBoard
//! histogram  how the weights and gradients of each stage are spread
//! peak       what the machine could compute at most
//! plot       curves of runs as a page
//! checkpoint all that a run needs to go on
//! init_from  fresh weights, in part from another run
//! start      these weights, or the newest checkpoint
//! report     what a run tells of itself
//! trainer    the loop over all of it
//! ablate     several runs, compared
//! ```
//!
//! The model is `photon-core`'s; generation beyond the samples of a run is `photon-infer`'s.

pub mod ablate;
mod adamw;
pub mod average;
pub mod bench;
pub mod checkpoint;
pub mod clip;
pub mod config;
mod curves;
pub mod data;
pub mod eval;
pub mod events;
pub mod guard;
pub mod histogram;
pub mod init_from;
mod muon;
pub mod optimizer;
pub mod parameters;
pub mod parts;
pub mod peak;
pub mod plot;
pub mod probe;
pub mod ranks;
pub mod record;
pub mod replicas;
pub mod report;
pub mod sample;
pub mod schedule;
mod start;
pub mod step;
pub mod trainer;
