//! What caches store, and the attention that reads it as it is stored.
//!
//! [`entries`] names the formats and holds tensors of entries, [`pack`] converts between numbers and entries, [`attend`]
//! weighs values by queries and keys. Each operation has two versions: `stock`, by Burn's own operations, runs on any
//! backend and is the oracle of the tests; `native` is a kernel for the CPU backend. Both write the same bits.
//! Gradients end here: results are constants.
//!
//! Which entries are kept, and at which positions, is for others to know.

pub mod attend;
pub mod entries;
mod flex;
mod half_float;
mod heads;
pub mod pack;
#[cfg(test)]
mod test_data;
mod vectorized;
