//! One binary for every property that crosses a file or a crate.

mod causality;
mod equivalence;
mod gradients;
mod accounting;
mod support;
