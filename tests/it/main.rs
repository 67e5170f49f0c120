//! One binary for every property that crosses a file or a crate.

#![expect(
    clippy::unwrap_used,
    reason = "clippy takes only the functions marked as tests for tests, not what they share"
)]

mod accounting;
mod advance;
mod bad_input;
mod caches;
mod causality;
mod commands;
mod data;
mod equivalence;
mod fidelity;
mod gradients;
mod import;
mod programs;
mod readme;
mod sessions;
mod support;
mod training;
mod weights;
