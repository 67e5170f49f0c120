//! Entries that copies of a row share, and when they no longer can.

use super::{CachedRow, GROWTH_ENTRIES, KvCache};
use crate::cache::shared::Shared;

impl KvCache {
    /// Makes ready for copies of a cache of one row, so that they share what it holds.
    ///
    /// A cache that drops entries, or holds several rows, is left as it is.
    pub fn share_for_fork(&mut self) {
        if self.rows.len() == 1 && self.never_drops() {
            self.share(0);
        }
    }

    /// Whether nothing ever leaves the main store.
    pub(super) fn never_drops(&self) -> bool {
        self.reach.is_full() && self.config.policy.ranking().is_none() && self.tier.is_none()
    }

    /// Moves the main entries of a row to the shared part, which all rows then hold.
    pub(super) fn share(&mut self, row: usize) {
        let cached = &mut self.rows[row];
        if cached.n_main() > 0 {
            let own = self.main.read(&[row], cached.start, cached.end());
            let earlier = self.shared.take().map(|shared| shared.read(1, cached.n_shared));
            self.shared = Some(Shared::new(earlier, own));
        }
        cached.n_shared += cached.n_main();
        cached.start = 0;
        self.main.resize(0, GROWTH_ENTRIES);
    }

    /// Gives every row entries of its own where attention picks blocks and rows share unequally much: the choice takes
    /// column `i` for position `i`.
    pub(super) fn even_out(&mut self) {
        let is_even = self.rows.iter().all(|row| row.n_shared == self.rows[0].n_shared);
        if self.layer.pick.is_none() || is_even {
            return;
        }
        let Some(shared) = self.shared.take() else { return };
        let longest = self.rows.iter().map(CachedRow::len).max().unwrap_or(0);
        self.main.resize(self.main.capacity(), longest.max(self.main.capacity()));
        for (row, cached) in self.rows.iter_mut().enumerate() {
            let own = (cached.n_main() > 0).then(|| self.main.read(&[row], cached.start, cached.end()));
            let earlier = (cached.n_shared > 0).then(|| shared.read(1, cached.n_shared));
            let parts = [(cached.n_shared, own), (0, earlier)];
            for (offset, part) in parts.into_iter().filter_map(|(offset, part)| Some((offset, part?))) {
                self.main.write_segment(&[row], &[offset], part);
            }
            (cached.n_shared, cached.start) = (0, 0);
        }
    }
}
