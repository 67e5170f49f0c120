//! What generation remembers of attention: keys and values of earlier positions, stored as asked, kept as asked.
//!
//! ```text
//!  config      how a stack's caches store and keep entries
//!  kv_cache    one layer: takes up new positions, lets them attend, lets entries go
//!    rows        which positions each row holds, and where
//!    reach       which of them a query sees
//!    policy      which of them stay, where not all may
//!    row_store, entry_store, pair_store, shared   the tensors
//!    offload     host memory for blocks that attention may pick, and the few of them that are on the device
//!  entries     the formats of entries
//!    pack        numbers to entries and back
//!    attend      attention that reads entries as they are stored
//! ```
//!
//! Packing and attention have two versions: `stock`, by Burn's own operations, runs on any backend and is the oracle
//! of the tests; `native` is a kernel for the CPU backend. Gradients end here: results are constants.

pub mod attend;
pub mod config;
pub mod entries;
mod entry_store;
pub mod error;
mod flex;
mod half_float;
mod heads;
pub mod kv_cache;
pub mod offload;
pub mod pack;
mod pair_store;
pub mod policy;
mod reach;
pub mod row_store;
mod rows;
mod shared;
#[cfg(test)]
mod test_data;
pub(crate) mod vectorized;
