//! The offload tier: blocks that attention picks by their scores, kept in host memory and brought back when needed.
//!
//! ```text
//!  device | sinks' blocks | blocks brought in            | main store: what lies in or after the window
//!  host   | all blocks that lie wholly before the window |
//! ```
//!
//! A query looks at its window, the sinks and the `top` blocks that fit it best. Which fit is told by the mean key of
//! each block, and means stay on the device, so the choice, and with it the result, is that of a cache without a
//! tier. A block leaves the main store as soon as it lies wholly before the window of the next query. It then stays in
//! host memory for good; a fixed number of slots on the device hold copies, and the one least recently used gives way.
//! Blocks of sinks have places of their own.
//!
//! With `prefetch`, after a call the blocks next to those that its last query took are brought in before anybody asks
//! (those taken are on the device already). They are guesses: until they are taken they give way first, and few of them
//! displace a block that was taken. On the CPU backend device and host are one memory: the tiers are counted apart.
//!
//! ```text
//!  tier         means, slots and host blocks of all rows
//!    slots        which blocks of a row are on the device, and which gives way
//!    host_block   entries in host memory
//! ```

mod host_block;
mod slots;
mod tier;

use serde::{Deserialize, Serialize};

pub(in crate::cache) use tier::{Picks, Tier, TierRecord};

/// Blocks outside the window live in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Offload {
    /// Blocks of each row and layer that fit on the device beside the window and the sinks: at least as many as a
    /// position picks.
    pub resident_blocks: usize,
    /// Whether blocks are brought in before they are asked for. Off by default: on a trained model it lowered the share of
    /// hits (`experiments/offload`).
    #[serde(default)]
    pub prefetch: bool,
}

/// What a tier holds in host memory, and what has happened in it so far, over all rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OffloadUse {
    /// Bytes in host memory. Blocks that rows share count once.
    pub host_bytes: usize,
    /// Times that a query took a block that was on the device. Blocks of sinks always are, and do not count.
    pub hits: usize,
    /// Times that a query took a block that had to be brought in.
    pub misses: usize,
    /// Blocks brought in before they were asked for.
    pub prefetched: usize,
    /// Those of them that were taken before they gave way.
    pub prefetches_used: usize,
}

impl OffloadUse {
    /// Hits among all that was taken; `None` before anything was.
    pub fn hit_rate(&self) -> Option<f64> {
        let taken = self.hits + self.misses;
        (taken > 0).then(|| self.hits as f64 / taken as f64)
    }
}

impl std::ops::Add for OffloadUse {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            host_bytes: self.host_bytes + other.host_bytes,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            prefetched: self.prefetched + other.prefetched,
            prefetches_used: self.prefetches_used + other.prefetches_used,
        }
    }
}
