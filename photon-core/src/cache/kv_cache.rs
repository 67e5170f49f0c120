//! The cache of one attention layer.
//!
//! An entry is the key and the value of one position. Entries lie by rising position in up to three parts:
//!
//! ```text
//!  shared   | main                         | tail
//!  (forks)  | in the config's storage      | the newest, in f32, where the config asks for a residual window
//! ```
//!
//! How many entries are stored and which positions they hold are different numbers: what attention can never see
//! again is dropped, and a policy may evict more. Masks are made from positions. Entries move from the tail to the
//! main store and out of the cache at the ends of blocks of positions, wherever a call ends, so the outcome does not
//! depend on how a sequence is cut into calls.
//!
//! With a tier of host memory, where attention picks blocks by their scores, the main store holds the newest entries
//! only; see [`offload`](super::offload).

mod columns;
mod offloaded;
#[cfg(test)]
mod offloaded_tests;
mod record;
mod room;
mod sharing;
#[cfg(test)]
mod tests;

use std::ops::Range;

use burn::tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};
use web_time::{Duration, Instant};

use super::attend::{attend, attend_with_weights};
use super::config::{Budget, CacheConfig, Storage};
use super::entries::{EntryFormat, Segment};
use super::error::CacheError;
use super::offload::{OffloadUse, Tier};
use super::pack::{repack, unpack};
use super::pair_store::PairStore;
use super::policy::{EntryStats, Evidence, Query, Schedule, kept};
use super::reach::Reach;
use super::rows::CachedRow;
use super::shared::Shared;
use columns::Columns;
pub(crate) use record::CacheRecord;
use room::{GROWTH_ENTRIES, max_main_entries, rolling_capacity};

use crate::nn::block_pick::BlockPick;
use crate::nn::span::Span;

/// Stands for minus infinity in masked scores; finite, because WebGPU shaders may assume finite numbers.
pub const MASKED: f32 = -1e30;

const SEQ: usize = 2;

/// Keys and values of one layer for every row of a batch.
#[derive(Clone, Debug)]
pub struct KvCache {
    config: CacheConfig,
    layer: LayerShape,
    reach: Reach,
    /// Entries that forks of one row share.
    shared: Option<Shared>,
    main: PairStore,
    tail: Option<PairStore>,
    /// Blocks that lie wholly before the window; their entries are in no other part.
    tier: Option<Tier>,
    rows: Vec<CachedRow>,
    counters: Counters,
    device: Device,
}

/// What has happened in a cache so far, over all rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Entries written.
    pub written: usize,
    /// Entries that a policy evicted.
    pub evicted: usize,
    /// Time spent storing entries, as the host sees it.
    pub storing: Duration,
}

/// What a layer looks like to its cache.
#[derive(Clone, Copy, Debug)]
pub struct LayerShape {
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// What attention can see.
    pub span: Span,
    /// What it looks at, where that depends on contents.
    pub pick: Option<BlockPick>,
    /// Newest entries that no policy evicts.
    pub n_newest: usize,
}

impl LayerShape {
    /// The formats of keys and of values that a config asks for.
    pub(super) fn formats(&self, config: &CacheConfig) -> [EntryFormat; 2] {
        [config.keys, config.values].map(|storage| storage.format(config.group, self.head_dim))
    }
}

/// New positions of some rows, as attention hands them over.
pub struct NewEntries<'a> {
    /// The rows of the cache.
    pub rows: &'a [usize],
    /// For each row, as many rising absolute positions, all above those stored.
    pub positions: &'a [Vec<usize>],
    /// Scaled queries, `[b, H, N, K]`.
    pub queries: Tensor<4>,
    /// `[b, H_kv, N, K]`.
    pub keys: Tensor<4>,
    /// `[b, H_kv, N, K]`.
    pub values: Tensor<4>,
}

impl KvCache {
    /// An empty cache.
    ///
    /// # Panics
    ///
    /// If there is to be an offload tier, and attention picks no blocks.
    pub fn new(config: &CacheConfig, layer: LayerShape, n_rows: usize, device: &Device) -> Self {
        let reach = Reach::new(layer.span, &config.policy);
        let tier = config.offload.map(|offload| {
            let pick = layer.pick.expect("a tier of host memory is for attention that picks blocks");
            Tier::new(config, offload, pick, n_rows, layer, device)
        });
        let capacity = GROWTH_ENTRIES.min(rolling_capacity(max_main_entries(tier.as_ref(), &reach)));
        let tail =
            (config.residual > 0).then(|| PairStore::exact(n_rows, layer, config.residual + 2 * config.block, device));
        Self {
            layer,
            reach,
            shared: None,
            main: PairStore::new(config, n_rows, layer, capacity, device),
            tail,
            tier,
            rows: vec![CachedRow::default(); n_rows],
            counters: Counters::default(),
            device: device.clone(),
            config: config.clone(),
        }
    }

    /// Takes up new positions and lets them attend to all that they see: `[b, H, N, K]`.
    ///
    /// `sinks` are the logits of the learned sinks, one for each head, if there are any.
    pub fn attend(&mut self, new: NewEntries<'_>, sinks: Option<Tensor<1>>) -> Tensor<4> {
        match self.tier {
            Some(_) => self.attend_offloaded(new, sinks),
            None => {
                let pieces = self.pieces(new.positions);
                in_parts(new, pieces, |_, piece| self.attend_piece(piece, sinks.clone()))
            }
        }
    }

    /// Keeps of the prompt what the policy wants to keep of it.
    pub fn end_prompt(&mut self) {
        self.evict(&self.all_rows(), Schedule::PromptEnd);
    }

    /// Entries stored for `row`.
    pub fn n_entries(&self, row: usize) -> usize {
        self.rows[row].len() + self.tier.as_ref().map_or(0, |tier| tier.n_entries(row))
    }

    /// Entries of the row that holds most.
    pub fn longest_row(&self) -> usize {
        (0..self.rows.len()).map(|row| self.n_entries(row)).max().unwrap_or(0)
    }

    /// Bytes on the device of the entries of all rows, without the room to grow. Shared entries count once.
    pub fn used_bytes(&self) -> usize {
        let n_main: usize = self.rows.iter().map(CachedRow::n_main).sum();
        let n_tail: usize = self.rows.iter().map(|row| row.n_tail).sum();
        let tail_entry_bytes = self.tail.as_ref().map_or(0, PairStore::entry_bytes);
        let tier_bytes = self.tier.as_ref().map_or(0, Tier::used_bytes);
        n_main * self.main.entry_bytes() + n_tail * tail_entry_bytes + self.shared_bytes() + tier_bytes
    }

    /// Bytes that the cache's tensors hold on the device.
    pub fn bytes(&self) -> usize {
        let tier_bytes = self.tier.as_ref().map_or(0, Tier::bytes);
        self.main.bytes() + self.tail.as_ref().map_or(0, PairStore::bytes) + self.shared_bytes() + tier_bytes
    }

    /// What is in host memory, where there is a tier for it, and how often it was needed.
    pub fn offload_use(&self) -> Option<OffloadUse> {
        self.tier.as_ref().map(Tier::usage)
    }

    /// Bytes of host memory for positions, and for what the policy has noted of entries.
    pub fn notes_bytes(&self) -> usize {
        self.rows.iter().map(CachedRow::bytes).sum()
    }

    /// Bytes of the entries that other forks hold as well.
    pub fn shared_bytes(&self) -> usize {
        self.shared.as_ref().map_or(0, Shared::bytes)
    }

    /// Bytes that the tensors would hold on the device after `n_new` more positions of every row; with a tier of host
    /// memory the most that it can be.
    pub fn bytes_after(&self, n_new: usize) -> usize {
        let main_bytes = self.capacity_after(n_new) * self.rows.len() * self.main.entry_bytes();
        let tier_bytes = self.tier.as_ref().map_or(0, |tier| self.tier_bytes_after(tier, n_new) - tier.bytes());
        self.bytes() - self.main.bytes() + main_bytes + tier_bytes
    }

    /// What has happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// How entries are stored and kept.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Keeps the given rows, in the given order; a row may be taken several times.
    ///
    /// Copies of one row of a cache that never drops anything share what the row holds.
    pub fn select_rows(&mut self, rows: &[usize]) {
        let is_fork = rows.len() > 1 && rows.iter().all(|&row| row == rows[0]);
        if is_fork && self.never_drops() {
            self.share(rows[0]);
        }
        self.shared = self.shared.take().filter(|_| rows.iter().any(|&row| self.rows[row].n_shared > 0));
        self.main.select_rows(rows);
        self.tail.iter_mut().for_each(|tail| tail.select_rows(rows));
        self.tier.iter_mut().for_each(|tier| tier.select_rows(rows));
        self.rows = rows.iter().map(|&row| self.rows[row].clone()).collect();
    }

    /// Goes back to what the rows held after `n_positions` positions each.
    ///
    /// # Errors
    ///
    /// If what the cache would hold then cannot be had any more; nothing is changed.
    pub fn truncate(&mut self, n_positions: &[usize]) -> Result<(), CacheError> {
        for (row, &n_positions) in self.rows.iter().zip(n_positions) {
            self.check_truncate(row, n_positions)?;
        }
        for (row, &n_positions) in n_positions.iter().enumerate() {
            self.take_back(row, n_positions);
            self.rows[row].truncate(n_positions);
        }
        self.even_out();
        Ok(())
    }

    fn check_truncate(&self, row: &CachedRow, n_positions: usize) -> Result<(), CacheError> {
        // What a tier of host memory holds can be had at any time.
        if row.n_seen <= n_positions || self.tier.is_some() {
            return Ok(());
        }
        if let Some(ranking) = self.config.policy.ranking() {
            let policy = self.config.policy.name();
            // Where attention drops entries as well, what is missing cannot be told from what was evicted.
            if row.evicted_at > n_positions || (row.evicted_at > 0 && !self.reach.is_full()) {
                return Err(CacheError::Evicted { n_positions, policy });
            }
            if ranking.evidence() == Evidence::Weights {
                return Err(CacheError::Observed { n_positions, policy });
            }
        }
        let n_needed = (0..n_positions).filter(|&position| self.reach.is_live(position, n_positions)).count();
        let n_there = row.positions().filter(|&p| p < n_positions && self.reach.is_live(p, n_positions)).count();
        if row.evicted_at == 0 && n_there < n_needed {
            return Err(CacheError::Dropped { n_positions });
        }
        let has_tail = self.tail.is_some();
        if has_tail && self.first_exact(n_positions) != self.first_exact(row.n_seen) {
            return Err(CacheError::Packed { n_positions });
        }
        Ok(())
    }

    /// Gives the policy another budget, which holds at once.
    ///
    /// # Panics
    ///
    /// If the policy has no budget.
    pub fn set_budget(&mut self, budget: Budget) {
        let ranking = self.config.policy.ranking().expect("a policy with a budget");
        let schedule = ranking.schedule();
        self.config.policy = ranking.with_budget(budget);
        self.evict(&self.all_rows(), schedule);
        self.fit();
    }

    /// Stores keys and values otherwise, those that are there included.
    pub fn set_storage(&mut self, keys: Storage, values: Storage) {
        (self.config.keys, self.config.values) = (keys, values);
        self.move_to_front();
        let (rows, longest) = (self.all_rows(), self.longest_main());
        let formats = self.layer.formats(&self.config);
        let mut main = PairStore::new(&self.config, rows.len(), self.layer, longest.max(1), &self.device);
        if longest > 0 {
            main.write_segment(&rows, &vec![0; rows.len()], repack(self.main.read(&rows, 0, longest), formats));
        }
        let shared = self.shared.take().map(|shared| shared.read(1, shared.n_entries()));
        let shared = shared.map(|entries| Shared::from_own(repack(entries, formats)));
        (self.main, self.shared) = (main, shared);
        self.tier.iter_mut().for_each(|tier| tier.set_storage(&self.config));
    }

    fn all_rows(&self) -> Vec<usize> {
        (0..self.rows.len()).collect()
    }

    fn settles_by_block(&self) -> bool {
        let ranking = self.config.policy.ranking();
        self.tail.is_some() || ranking.is_some_and(|ranking| ranking.schedule() == Schedule::EveryBlock)
    }

    fn observes_weights(&self) -> bool {
        self.config.policy.ranking().is_some_and(|ranking| ranking.evidence() == Evidence::Weights)
    }

    /// How a call is cut: nowhere, or wherever a block of a row ends.
    fn pieces(&self, positions: &[Vec<usize>]) -> Vec<Range<usize>> {
        let n_new = positions[0].len();
        if n_new == 1 || !(self.settles_by_block() || self.observes_weights()) {
            return std::iter::once(0..n_new).collect();
        }
        let ends_block = |index: usize| positions.iter().any(|row| (row[index] + 1).is_multiple_of(self.config.block));
        let mut pieces = Vec::new();
        let mut start = 0;
        for end in (1..=n_new).filter(|&end| end == n_new || ends_block(end - 1)) {
            pieces.push(start..end);
            start = end;
        }
        pieces
    }

    fn attend_piece(&mut self, new: NewEntries<'_>, sinks: Option<Tensor<1>>) -> Tensor<4> {
        let NewEntries { rows, positions, queries, keys, values } = new;
        // A call may skip positions, such as the groups before the newest.
        for (&row, new) in rows.iter().zip(positions) {
            self.drop_dead(row, new[0]);
        }
        self.store(rows, positions, keys, values);

        let columns = self.columns(rows);
        let [batch, n_heads, n_queries, head_dim] = queries.dims();
        let n_groups = n_heads / self.layer.n_kv_heads;
        // Query heads that share keys and values go through one product as if they were more queries.
        let grouped = [batch, self.layer.n_kv_heads, n_groups * n_queries, head_dim];
        let segments = self.segments(rows, &columns);
        let mask = match (self.layer.pick, &self.tier) {
            (None, _) => self.mask(rows, positions, &columns),
            (Some(_), Some(tier)) => self.offloaded_mask(tier, rows, positions, &columns),
            (Some(pick), None) => {
                // Nothing leaves such a cache, so column `i` holds position `i`.
                let keys = segments.iter().map(|segment| unpack(segment.keys.clone())).collect();
                let fixed = pick.fixed_mask(positions, columns.len(), &self.device);
                pick.mask(fixed, queries.clone(), Tensor::cat(keys, SEQ), positions)
            }
        };
        let mask = if n_groups > 1 { mask.repeat_dim(SEQ, n_groups) } else { mask };
        let sinks = sinks.map(|sinks| {
            let sinks = sinks.reshape([1, n_heads, 1, 1]).expand([1, n_heads, n_queries, 1]);
            sinks.reshape([1, self.layer.n_kv_heads, n_groups * n_queries, 1])
        });
        let queries = queries.reshape(grouped);
        let out = match self.observes_weights() {
            true => {
                let (out, weights) = attend_with_weights(queries, &segments, mask, sinks);
                let weights = weights.reshape([batch, n_heads, n_queries, columns.len()]).mean_dim(1);
                self.observe(rows, positions, &columns, weights);
                out
            }
            false => attend(queries, &segments, mask, sinks),
        };
        drop(segments);

        for (&row, new) in rows.iter().zip(positions) {
            self.drop_dead(row, new[n_queries - 1] + 1);
        }
        let at_block_end = |new: &Vec<usize>| (new[n_queries - 1] + 1).is_multiple_of(self.config.block);
        let settling: Vec<usize> =
            rows.iter().zip(positions).filter(|(_, new)| at_block_end(new)).map(|(&row, _)| row).collect();
        if !settling.is_empty() && self.settles_by_block() {
            self.pack_tail(&settling);
            self.evict(&settling, Schedule::EveryBlock);
        }
        self.offload(rows);
        self.give_back_room();
        out.reshape([batch, n_heads, n_queries, head_dim])
    }

    fn store(&mut self, rows: &[usize], positions: &[Vec<usize>], keys: Tensor<4>, values: Tensor<4>) {
        let started = Instant::now();
        let n_new = positions[0].len();
        if let Some(ranking) = self.config.policy.ranking() {
            let norms = match ranking.evidence() {
                Evidence::KeyNorms => key_norms(&keys),
                _ => vec![vec![0.0; n_new]; rows.len()],
            };
            for ((&row, new), norms) in rows.iter().zip(positions).zip(norms) {
                self.rows[row].push_stats(new.iter().zip(norms).map(|(&position, key_norm)| EntryStats {
                    position,
                    key_norm,
                    last_used: position,
                    ..EntryStats::default()
                }));
            }
        }
        match &mut self.tail {
            Some(tail) => {
                let offsets: Vec<usize> = rows.iter().map(|&row| self.rows[row].n_tail).collect();
                tail.write(rows, &offsets, keys, values);
            }
            None => {
                self.make_room(rows, n_new);
                let offsets: Vec<usize> = rows.iter().map(|&row| self.rows[row].end()).collect();
                self.main.write(rows, &offsets, keys, values);
            }
        }
        for (&row, new) in rows.iter().zip(positions) {
            self.rows[row].push(new, self.tail.is_some());
        }
        self.counters.written += rows.len() * n_new;
        self.counters.storing += started.elapsed();
    }

    /// Forgets what no query from `next` on can see. Where that is not the oldest of the main store, entries would
    /// have to move: then it waits until a block's worth has gathered.
    fn drop_dead(&mut self, row: usize, next: usize) {
        let cached = &self.rows[row];
        if self.reach.is_full() || cached.is_empty() {
            return;
        }
        let is_live: Vec<bool> = cached.positions().map(|position| self.reach.is_live(position, next)).collect();
        let n_dead = is_live.iter().filter(|&&live| !live).count();
        let n_oldest = is_live.iter().take_while(|&&live| !live).count();
        if n_dead == 0 {
            return;
        }
        // What is dead must not be ranked.
        let can_wait = self.config.policy.ranking().is_none() && n_dead < cached.len();
        if n_dead == n_oldest && n_dead <= cached.n_main() && cached.n_shared == 0 {
            self.rows[row].drop_oldest_main(n_dead);
        } else if n_dead >= self.config.block || !can_wait {
            let live: Vec<usize> = (0..is_live.len()).filter(|&place| is_live[place]).collect();
            self.keep(row, &live);
        }
    }

    /// Forgets all entries of a row but those of the given places.
    fn keep(&mut self, row: usize, places: &[usize]) {
        let (main, tail) = self.rows[row].keep(places);
        self.main.gather_to_front(row, &main);
        if let Some(store) = &mut self.tail {
            store.gather_to_front(row, &tail);
        }
    }

    /// The first position that is exact after `n_positions` positions.
    fn first_exact(&self, n_positions: usize) -> usize {
        let block = self.config.block;
        let settled = n_positions / block * block;
        settled.saturating_sub(self.config.residual) / block * block
    }

    /// Moves entries that have left the residual window of the given rows to the main store.
    fn pack_tail(&mut self, rows: &[usize]) {
        if self.tail.is_none() {
            return;
        }
        let started = Instant::now();
        for &row in rows {
            let cached = &self.rows[row];
            let first_exact = self.first_exact(cached.n_seen);
            let n_tail = cached.n_tail;
            let n_leaving = cached.positions().rev().take(n_tail).filter(|&position| position < first_exact).count();
            if n_leaving == 0 {
                continue;
            }
            self.make_room(&[row], n_leaving);
            let (end, rest) = (self.rows[row].end(), (n_leaving..n_tail).collect::<Vec<_>>());
            if let Some(tail) = &mut self.tail {
                let Segment { keys, values } = tail.read(&[row], 0, n_leaving);
                self.main.write(&[row], &[end], unpack(keys), unpack(values));
                tail.gather_to_front(row, &rest);
            }
            self.rows[row].n_tail -= n_leaving;
        }
        self.counters.storing += started.elapsed();
    }

    /// Lets the policy have its way with the given rows.
    fn evict(&mut self, rows: &[usize], schedule: Schedule) {
        let entry_bytes = self.main.entry_bytes();
        for &row in rows {
            let Some(ranking) = self.config.policy.ranking().filter(|ranking| ranking.schedule() == schedule) else {
                return;
            };
            let cached = &self.rows[row];
            let n_seen = cached.n_seen;
            let n_budget = ranking.budget().entries(n_seen, entry_bytes);
            // A budget in entries or bytes is never passed, so the next block must find room.
            let n_keep = match (ranking.budget(), schedule) {
                (Budget::Share(_), _) | (_, Schedule::PromptEnd) => n_budget,
                _ => n_budget - self.config.block,
            };
            let places = kept(ranking, &cached.stats, self.layer.n_newest, n_keep);
            let n_evicted = cached.len() - places.len();
            if n_evicted > 0 {
                self.keep(row, &places);
                self.rows[row].evicted_at = n_seen;
                self.counters.evicted += n_evicted;
            }
        }
    }

    /// `weights`: mean over heads, `[b, 1, N, E]`.
    fn observe(&mut self, rows: &[usize], positions: &[Vec<usize>], columns: &Columns, weights: Tensor<4>) {
        let Some(ranking) = self.config.policy.ranking() else { return };
        let weights: Vec<f32> = weights.try_into_vec_as().expect("weights are f32");
        let n_queries = positions[0].len();
        let mut lines = weights.chunks(columns.len());
        for (&row, queries) in rows.iter().zip(positions) {
            let cached = &mut self.rows[row];
            let of_row: Vec<usize> = columns.of(cached).collect();
            for (&query, line) in queries.iter().zip(lines.by_ref().take(n_queries)) {
                let weights: Vec<f32> = of_row.iter().map(|&column| line[column]).collect();
                // Entries after the query have no weight, and nothing to be noted.
                let n_known = cached.stats.partition_point(|entry| entry.position <= query);
                let n_seen = cached.positions().filter(|&key| self.reach.sees(query, key)).count();
                let told = Query { position: query, n_seen };
                ranking.observe(&mut cached.stats[..n_known], &weights[..n_known], told);
            }
        }
    }
}

/// Attention of new positions part by part: `[b, H, N, K]`.
fn in_parts(
    new: NewEntries<'_>,
    parts: Vec<Range<usize>>,
    mut attend: impl FnMut(Range<usize>, NewEntries<'_>) -> Tensor<4>,
) -> Tensor<4> {
    if let [all] = &parts[..] {
        return attend(all.clone(), new);
    }
    let NewEntries { rows, positions, queries, keys, values } = new;
    let attend_part = |range: Range<usize>| {
        let part = |x: &Tensor<4>| x.clone().narrow(SEQ, range.start, range.len());
        let positions: Vec<Vec<usize>> = positions.iter().map(|row| row[range.clone()].to_vec()).collect();
        let (queries, keys, values) = (part(&queries), part(&keys), part(&values));
        attend(range, NewEntries { rows, positions: &positions, queries, keys, values })
    };
    Tensor::cat(parts.into_iter().map(attend_part).collect(), SEQ)
}

/// Norms over all heads, by row and position.
fn key_norms(keys: &Tensor<4>) -> Vec<Vec<f32>> {
    let n_new = keys.dims()[SEQ];
    let squares = keys.clone().powf_scalar(2.0).sum_dim(3).sum_dim(1); // [b, 1, N, 1]
    let norms: Vec<f32> = squares.sqrt().try_into_vec_as().expect("norms are f32");
    norms.chunks(n_new).map(<[f32]>::to_vec).collect()
}
