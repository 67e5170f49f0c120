//! Which blocks of a row are on the device, and which gives way to the next.

use serde::{Deserialize, Serialize};

/// Blocks that nobody has taken yet displace others in one of so many slots only: a wrong guess costs no more.
const SLOTS_PER_GUESS: usize = 4;

/// The slots of one row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Slots {
    slots: Vec<Option<Resident>>,
    /// Rises with every use, so that no two are equally recent.
    clock: usize,
}

/// A block on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Resident {
    block: usize,
    last_used: usize,
    arrival: Arrival,
}

/// How a block came to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Arrival {
    /// A query had taken it, or has since.
    Asked,
    /// Nobody has taken it yet.
    Ahead,
}

impl Slots {
    /// Empty slots.
    pub(super) fn new(n_slots: usize) -> Self {
        Self { slots: vec![None; n_slots], clock: 0 }
    }

    /// Slots, filled or not.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Filled slots and their blocks.
    pub(super) fn filled(&self) -> impl Iterator<Item = (usize, usize)> {
        self.slots.iter().enumerate().filter_map(|(slot, resident)| Some((slot, resident.as_ref()?.block)))
    }

    pub(super) fn holds(&self, block: usize) -> bool {
        self.filled().any(|(_, held)| held == block)
    }

    /// Whether every block is held once, and numbered from `first` to below `end`.
    pub(super) fn is_consistent(&self, first: usize, end: usize) -> bool {
        let mut blocks: Vec<usize> = self.filled().map(|(_, block)| block).collect();
        blocks.sort_unstable();
        blocks.is_sorted_by(|a, b| a < b) && blocks.iter().all(|block| (first..end).contains(block))
    }

    /// Takes note that a query takes `block`; how it had come, if it is there.
    pub(super) fn take(&mut self, block: usize) -> Option<Arrival> {
        let found = self.slots.iter_mut().flatten().find(|resident| resident.block == block)?;
        self.clock += 1;
        found.last_used = self.clock;
        Some(std::mem::replace(&mut found.arrival, Arrival::Asked))
    }

    /// Gives `block` a free slot, or that of a block that is not among `staying`: one that nobody has taken yet, or else
    /// the least recently used. `None` where no block may give way: what comes ahead displaces only others that did
    /// once there are enough of them.
    pub(super) fn admit(&mut self, block: usize, staying: &[usize], arrival: Arrival) -> Option<usize> {
        let n_ahead = self.slots.iter().flatten().filter(|held| held.arrival == Arrival::Ahead).count();
        let displaces_taken = arrival == Arrival::Asked || n_ahead < (self.slots.len() / SLOTS_PER_GUESS).max(1);
        let gives_way =
            |held: Resident| !staying.contains(&held.block) && (displaces_taken || held.arrival == Arrival::Ahead);
        let candidates = self.slots.iter().enumerate().filter(|(_, resident)| resident.is_none_or(gives_way));
        let (slot, _) = candidates
            .min_by_key(|(_, resident)| resident.map(|held| (held.arrival == Arrival::Asked, held.last_used)))?;
        self.clock += 1;
        self.slots[slot] = Some(Resident { block, last_used: self.clock, arrival });
        Some(slot)
    }

    /// Frees the slots of the blocks from `end` on.
    pub(super) fn truncate(&mut self, end: usize) {
        for slot in &mut self.slots {
            *slot = slot.filter(|resident| resident.block < end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_block_gives_way() {
        let mut slots = Slots::new(2);
        assert_eq!(slots.take(5), None);
        assert_eq!(slots.admit(5, &[5], Arrival::Asked), Some(0));
        assert_eq!(slots.admit(7, &[5], Arrival::Asked), Some(1));
        assert_eq!(slots.take(5), Some(Arrival::Asked));
        assert_eq!(slots.admit(9, &[5, 7], Arrival::Asked), None, "both stay");
        assert_eq!(slots.admit(9, &[], Arrival::Asked), Some(1), "7 is older than the last use of 5");
        assert!(slots.holds(9) && !slots.holds(7));
        slots.truncate(9);
        assert_eq!(slots.filled().collect::<Vec<_>>(), [(0, 5)]);
        assert!(slots.is_consistent(5, 6) && !slots.is_consistent(6, 9) && !slots.is_consistent(0, 5));
    }

    #[test]
    fn what_came_ahead_gives_way_first_and_displaces_few() {
        let mut slots = Slots::new(4);
        for block in 0..4 {
            slots.admit(block, &[], Arrival::Asked);
        }
        assert_eq!(slots.admit(10, &[], Arrival::Ahead), Some(0));
        assert_eq!(slots.admit(11, &[10], Arrival::Ahead), None, "one of four");
        assert_eq!(slots.admit(11, &[], Arrival::Ahead), Some(0), "in the place of the other guess");
        assert_eq!(slots.admit(12, &[], Arrival::Asked), Some(0), "though 1 is older");
        assert_eq!(slots.admit(13, &[], Arrival::Asked), Some(1));
    }

    #[test]
    fn what_came_ahead_is_used_once() {
        let mut slots = Slots::new(1);
        slots.admit(3, &[], Arrival::Ahead);
        assert_eq!([slots.take(3), slots.take(3)], [Some(Arrival::Ahead), Some(Arrival::Asked)]);
    }
}
