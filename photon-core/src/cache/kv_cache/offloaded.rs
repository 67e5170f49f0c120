//! A cache with a tier of host memory: what leaves the main store for it, and what comes back.
//!
//! All blocks that a query may pick are in the tier when it attends, and no others, so a call is cut where a block
//! leaves the window of any row, and again where what its queries pick does not fit on the device together.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{Columns, KvCache, NewEntries, in_parts};
use crate::cache::entries::Segment;
use crate::cache::offload::{Picks, Tier, TierRecord};
use crate::nn::block_pick::BlockPick;
use crate::snapshot::Tensors;

const KEYS: usize = 3;

impl KvCache {
    /// As [`KvCache::attend`].
    pub(super) fn attend_offloaded(&mut self, new: NewEntries<'_>, sinks: Option<Tensor<1>>) -> Tensor<4> {
        let (rows, pieces) = (new.rows, pieces(self.tier().pick(), new.positions));
        let out = in_parts(new, pieces, |_, piece| {
            let picks = self.tier().choose(rows, piece.queries.clone(), piece.positions);
            let runs = self.tier().runs(&picks);
            in_parts(piece, runs, |run, new| {
                let picks: Picks = picks.iter().map(|row| row[run.clone()].to_vec()).collect();
                self.tier_mut().fetch(rows, picks);
                self.attend_piece(new, sinks.clone())
            })
        });
        self.tier_mut().prefetch(rows);
        out
    }

    /// The mask over main store and tier: `[b, 1, N, E]`.
    pub(super) fn offloaded_mask(
        &self,
        tier: &Tier,
        rows: &[usize],
        queries: &[Vec<usize>],
        columns: &Columns,
    ) -> Tensor<4> {
        let pick = tier.pick();
        let main = self.mask_by(rows, queries, columns, |query, key| pick.always_sees(query, key));
        Tensor::cat([Some(main), tier.mask(rows, queries)].into_iter().flatten().collect(), KEYS)
    }

    /// Moves blocks that lie wholly before the window of the next query to the tier, if there is one.
    pub(super) fn offload(&mut self, rows: &[usize]) {
        let Some(tier) = &mut self.tier else { return };
        let pick = tier.pick();
        for &row in rows {
            let cached = &mut self.rows[row];
            while tier.n_blocks(row) < pick.n_candidates(cached.n_seen) {
                let block = self.main.read(&[row], cached.start, cached.start + pick.block);
                tier.push(row, block);
                cached.drop_oldest_main(pick.block);
            }
        }
    }

    /// Takes out of the tier, if there is one, what is not wholly before the window after `n_positions` positions.
    pub(super) fn take_back(&mut self, row: usize, n_positions: usize) {
        let Some(tier) = &mut self.tier else { return };
        let pick = tier.pick();
        let (n_blocks, n_kept) = (tier.n_blocks(row), pick.n_candidates(n_positions));
        if n_kept >= n_blocks {
            return;
        }
        let blocks = tier.pop(row, n_kept);
        self.rows[row].truncate(n_positions.max(n_blocks * pick.block));
        // Blocks of which nothing is left do not come back.
        let n_back = n_positions.div_ceil(pick.block).min(n_blocks) - n_kept;
        let (n_returning, n_main) = (n_back * pick.block, self.rows[row].n_main());
        let start = self.rows[row].start;
        let newest = (n_main > 0).then(|| self.main.read(&[row], start, start + n_main));
        let offsets = (0..n_back).map(|block| block * pick.block).chain([n_returning]);
        let returning: Vec<Segment> = blocks.into_iter().take(n_back).chain(newest).collect();
        if n_returning + n_main > self.main.capacity() {
            self.main.resize(self.main.capacity(), n_returning + n_main);
        }
        for (offset, segment) in offsets.zip(returning) {
            self.main.write_segment(&[row], &[offset], segment);
        }
        let first = n_kept * pick.block;
        self.rows[row].push_front(first..first + n_returning);
    }

    /// The bytes of the tier after `n_new` more positions of every row, at most.
    pub(super) fn tier_bytes_after(&self, tier: &Tier, n_new: usize) -> usize {
        let n_seen = self.rows.iter().map(|row| row.n_seen).max().unwrap_or(0);
        tier.bytes_with(tier.pick().n_candidates(n_seen + n_new))
    }

    /// Gives a restored cache its tier.
    pub(super) fn restore_tier(
        &mut self,
        record: Option<TierRecord>,
        name: &str,
        tensors: &mut Tensors,
    ) -> Result<(), String> {
        let (tier, record) = match (&mut self.tier, record) {
            (None, None) => return Ok(()),
            (Some(tier), Some(record)) => (tier, record),
            _ => return Err(format!("{name}: blocks in host memory contradict the config")),
        };
        tier.restore(record, &self.config, &format!("{name}.host"), tensors)?;
        let fits = |(row, cached): (usize, &super::CachedRow)| {
            let first = tier.n_entries(row);
            tier.n_blocks(row) == tier.pick().n_candidates(cached.n_seen)
                && (cached.n_shared, cached.n_tail) == (0, 0)
                && cached.positions().eq(first..cached.n_seen)
        };
        match self.rows.iter().enumerate().all(fits) {
            true => Ok(()),
            false => Err(format!("{name}: entries on the device and in host memory contradict each other")),
        }
    }

    fn tier(&self) -> &Tier {
        self.tier.as_ref().expect("a cache with a tier")
    }

    fn tier_mut(&mut self) -> &mut Tier {
        self.tier.as_mut().expect("a cache with a tier")
    }
}

/// Cuts a call where a block leaves the window of any row.
fn pieces(pick: BlockPick, positions: &[Vec<usize>]) -> Vec<Range<usize>> {
    let n_new = positions[0].len();
    let n_candidates = |row: &Vec<usize>, index: usize| pick.n_candidates(row[index]);
    let leaves = |index: usize| positions.iter().any(|row| n_candidates(row, index) > n_candidates(row, index - 1));
    let starts: Vec<usize> = (0..n_new).filter(|&index| index == 0 || leaves(index)).collect();
    let ends = starts.iter().skip(1).copied().chain([n_new]);
    starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect()
}
