//! One binary for every property that crosses a file or a crate.

mod accounting;
mod causality;
mod equivalence;
mod gradients;
mod support;
