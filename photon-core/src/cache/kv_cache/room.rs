//! The room that a cache takes: how it grows, and when it gives room back.

use super::{Budget, CachedRow, KvCache, Reach, Schedule, Tier};

/// Entries by which a cache grows at least.
pub(super) const GROWTH_ENTRIES: usize = 64;

impl KvCache {
    /// Gives back the room that no entry takes.
    pub(super) fn fit(&mut self) {
        self.move_to_front();
        let longest = self.longest_main();
        self.main.resize(longest, longest.max(1));
    }

    pub(super) fn longest_main(&self) -> usize {
        self.rows.iter().map(CachedRow::n_main).max().unwrap_or(0)
    }

    /// The capacity of the main store once `n_new` more entries of every row are in it.
    pub(super) fn capacity_after(&self, n_new: usize) -> usize {
        let most = self.tier.as_ref().map_or(usize::MAX, Tier::max_entries_outside);
        let n_entries = (self.longest_main() + n_new).min(most);
        match n_entries <= self.main.capacity() {
            true => self.main.capacity(),
            // Growing by a share keeps the copying in proportion to what is stored.
            false => {
                let grown = (n_entries + n_entries / 8).next_multiple_of(GROWTH_ENTRIES);
                grown.min(self.steady_capacity()).max(n_entries)
            }
        }
    }

    /// The capacity beyond which a bounded cache never grows by single positions.
    pub(super) fn steady_capacity(&self) -> usize {
        let budget = self.config.policy.ranking().filter(|ranking| ranking.schedule() == Schedule::EveryBlock);
        let of_budget = budget.map_or(usize::MAX, |ranking| match ranking.budget() {
            Budget::Share(_) => usize::MAX,
            budget => budget.entries(0, self.main.entry_bytes()),
        });
        rolling_capacity(max_main_entries(self.tier.as_ref(), &self.reach)).min(of_budget)
    }

    pub(super) fn make_room(&mut self, rows: &[usize], n_new: usize) {
        let fits = |cache: &Self| rows.iter().all(|&row| cache.rows[row].end() + n_new <= cache.main.capacity());
        if fits(self) {
            return;
        }
        self.move_to_front();
        if fits(self) {
            return;
        }
        let capacity = self.capacity_after(n_new);
        self.main.resize(self.longest_main(), capacity);
    }

    /// A long piece of a prompt leaves a bounded cache larger than it needs to be.
    pub(super) fn give_back_room(&mut self) {
        let capacity = self.steady_capacity();
        if self.main.capacity() > capacity && self.longest_main() <= capacity {
            self.move_to_front();
            self.main.resize(self.longest_main(), capacity);
        }
    }

    pub(super) fn move_to_front(&mut self) {
        for row in 0..self.rows.len() {
            let CachedRow { start, .. } = self.rows[row];
            if start > 0 {
                let slots: Vec<usize> = (start..self.rows[row].end()).collect();
                self.main.gather_to_front(row, &slots);
                self.rows[row].start = 0;
            }
        }
    }
}

/// The most entries of the main store; `None` where they grow with the sequence.
pub(super) fn max_main_entries(tier: Option<&Tier>, reach: &Reach) -> Option<usize> {
    tier.map(Tier::max_entries_outside).or(reach.max_entries())
}

/// A little more than what is seen, so that entries move to the front once in a while only.
pub(super) fn rolling_capacity(max_entries: Option<usize>) -> usize {
    max_entries.map_or(usize::MAX, |entries| entries.saturating_add((entries / 4).max(8)))
}
