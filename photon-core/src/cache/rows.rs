//! What a cache knows of one row: which positions it holds, where they lie, and what a policy has noted of them.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::policy::EntryStats;

/// Makes room as caches do: by an eighth at a time, for notes can take as much room as packed entries.
fn make_room<T>(notes: &mut Vec<T>, n_new: usize) {
    if notes.capacity() - notes.len() < n_new {
        notes.reserve_exact(n_new.max(notes.len() / 8));
    }
}

/// The entries of a row, by rising position: first those shared with other rows, then those in the main store, then
/// the newest, in the tail.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CachedRow {
    /// Absolute positions of all entries.
    positions: Vec<u32>,
    /// Positions seen so far: the next one's number.
    pub(super) n_seen: usize,
    /// Entries that other rows share.
    pub(super) n_shared: usize,
    /// Entries in the tail.
    pub(super) n_tail: usize,
    /// Slot of the oldest entry in the main store.
    pub(super) start: usize,
    /// What the policy has noted; empty where it ranks nothing.
    pub(super) stats: Vec<EntryStats>,
    /// Positions seen when a policy last evicted an entry.
    pub(super) evicted_at: usize,
}

impl CachedRow {
    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    pub(super) fn positions(&self) -> impl DoubleEndedIterator<Item = usize> + ExactSizeIterator {
        self.positions.iter().map(|&position| position as usize)
    }

    /// Entries in the main store.
    pub(super) fn n_main(&self) -> usize {
        self.len() - self.n_shared - self.n_tail
    }

    /// The first free slot of the main store.
    pub(super) fn end(&self) -> usize {
        self.start + self.n_main()
    }

    /// Whether its numbers fit together.
    pub(super) fn is_consistent(&self, is_ranked: bool) -> bool {
        self.positions.is_sorted_by(|a, b| a < b)
            && self.n_shared.checked_add(self.n_tail).is_some_and(|n| n <= self.len())
            && self.start.checked_add(self.len()).is_some()
            && self.stats.len() == if is_ranked { self.len() } else { 0 }
    }

    /// Bytes of host memory that all of this takes.
    pub(super) fn bytes(&self) -> usize {
        let votes: usize = self.stats.iter().map(|entry| entry.votes.capacity() * size_of::<f32>()).sum();
        self.positions.capacity() * size_of::<u32>() + self.stats.capacity() * size_of::<EntryStats>() + votes
    }

    /// Takes note of what a policy wants to know of new entries at the end of the row, before they are pushed.
    pub(super) fn push_stats(&mut self, stats: impl ExactSizeIterator<Item = EntryStats>) {
        make_room(&mut self.stats, stats.len());
        self.stats.extend(stats);
    }

    /// Takes note of new entries at the end of the row.
    pub(super) fn push(&mut self, positions: &[usize], is_tail: bool) {
        make_room(&mut self.positions, positions.len());
        self.positions.extend(positions.iter().map(|&position| u32::try_from(position).expect("fewer than 2^32")));
        self.n_tail += if is_tail { positions.len() } else { 0 };
        self.n_seen = positions[positions.len() - 1] + 1;
    }

    /// Forgets the oldest `n` entries of the main store, which stay where they lie.
    pub(super) fn drop_oldest_main(&mut self, n: usize) {
        self.positions.drain(self.n_shared..self.n_shared + n);
        if !self.stats.is_empty() {
            self.stats.drain(self.n_shared..self.n_shared + n);
        }
        self.start = if self.n_main() == 0 { 0 } else { self.start + n };
    }

    /// Forgets all entries but those of the given places, rising; returns the slots to gather in the main store and
    /// in the tail.
    pub(super) fn keep(&mut self, places: &[usize]) -> (Vec<usize>, Vec<usize>) {
        let first_tail = self.len() - self.n_tail;
        let (n_shared, start) = (self.n_shared, self.start);
        let main = places.iter().filter(|&&place| (n_shared..first_tail).contains(&place));
        let main: Vec<usize> = main.map(|place| start + place - n_shared).collect();
        let tail: Vec<usize> =
            places.iter().filter(|&&place| place >= first_tail).map(|place| place - first_tail).collect();
        self.positions = places.iter().map(|&place| self.positions[place]).collect();
        if !self.stats.is_empty() {
            self.stats = places.iter().map(|&place| std::mem::take(&mut self.stats[place])).collect();
        }
        self.n_tail = tail.len();
        self.start = 0;
        (main, tail)
    }

    /// Puts positions before all others, for entries that lie at the beginning of the main store.
    pub(super) fn push_front(&mut self, positions: Range<usize>) {
        let positions = positions.map(|position| u32::try_from(position).expect("fewer than 2^32"));
        self.positions.splice(0..0, positions);
        self.start = 0;
    }

    /// Forgets the entries from `n_positions` on.
    pub(super) fn truncate(&mut self, n_positions: usize) {
        let n_kept = self.positions.partition_point(|&position| (position as usize) < n_positions);
        let n_dropped = self.len() - n_kept;
        self.n_seen = self.n_seen.min(n_positions);
        self.positions.truncate(n_kept);
        self.stats.truncate(n_kept);
        self.n_tail = self.n_tail.saturating_sub(n_dropped);
        self.n_shared = self.n_shared.min(n_kept);
        if self.n_main() == 0 {
            self.start = 0;
        }
    }
}
