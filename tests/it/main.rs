//! One binary for every property that crosses a file or a crate.

#![expect(
    clippy::unwrap_used,
    reason = "clippy takes only the functions marked as tests for tests, not what they share"
)]

mod ablate;
mod accounting;
mod advance;
mod bad_input;
mod caches;
mod causality;
mod commands;
mod data;
mod devices;
mod documents;
mod equivalence;
mod faults;
mod fidelity;
mod gradients;
mod import;
mod lm_eval;
mod memory;
mod offload;
mod parity;
mod probe;
mod programs;
mod ranks;
mod readme;
mod recipes;
mod resume;
mod runs;
mod score;
mod sessions;
mod support;
mod training;
mod watching;
mod web;
mod weights;
