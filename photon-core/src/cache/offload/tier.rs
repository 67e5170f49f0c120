//! The tier of one layer: for each row its blocks in host memory, their means, and slots on the device.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use serde::{Deserialize, Serialize};

use super::host_block::{self, HostBlock};
use super::slots::{Arrival, Slots};
use super::{Offload, OffloadUse};
use crate::cache::config::CacheConfig;
use crate::cache::entries::Segment;
use crate::cache::kv_cache::{LayerShape, MASKED};
use crate::cache::pack::{repack, unpack};
use crate::cache::pair_store::PairStore;
use crate::cache::row_store::RowStore;
use crate::nn::block_pick::BlockPick;
use crate::snapshot::Tensors;

/// Means by which a tier grows at least.
const GROWTH_BLOCKS: usize = 16;

/// The blocks that queries take, best first: by row, by query.
pub(in crate::cache) type Picks = Vec<Vec<Vec<usize>>>;

/// Blocks of every row of a batch.
#[derive(Clone, Debug)]
pub(in crate::cache) struct Tier {
    config: Offload,
    pick: BlockPick,
    layer: LayerShape,
    /// The mean key of each block: `[B, H_kv, capacity, K]`, in f32.
    means: RowStore,
    /// Blocks on the device: those of the sinks, then the slots.
    store: PairStore,
    rows: Vec<TierRow>,
    /// Without the bytes, which are counted when asked for.
    counts: OffloadUse,
    device: Device,
}

#[derive(Clone, Debug)]
struct TierRow {
    blocks: Vec<Arc<HostBlock>>,
    slots: Slots,
    /// What each query of the newest run took, best first. All of it is on the device.
    taken: Vec<Vec<usize>>,
}

/// What of a tier is no tensor.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::cache) struct TierRecord {
    n_blocks: usize,
    rows: Vec<TierRowRecord>,
    counts: OffloadUse,
}

/// A row's blocks by their numbers among all that are recorded: rows may share them.
#[derive(Debug, Serialize, Deserialize)]
struct TierRowRecord {
    blocks: Vec<usize>,
    slots: Slots,
}

impl Tier {
    /// A tier without blocks.
    pub(in crate::cache) fn new(
        config: &CacheConfig,
        offload: Offload,
        pick: BlockPick,
        n_rows: usize,
        layer: LayerShape,
        device: &Device,
    ) -> Self {
        let n_places = n_sink_blocks(pick) + offload.resident_blocks;
        let row = TierRow { blocks: Vec::new(), slots: Slots::new(offload.resident_blocks), taken: Vec::new() };
        Self {
            config: offload,
            pick,
            layer,
            means: RowStore::new([n_rows, layer.n_kv_heads, GROWTH_BLOCKS, layer.head_dim], DType::F32, device),
            store: PairStore::new(config, n_rows, layer, n_places * pick.block, device),
            rows: vec![row; n_rows],
            counts: OffloadUse::default(),
            device: device.clone(),
        }
    }

    /// The rule of attention.
    pub(in crate::cache) fn pick(&self) -> BlockPick {
        self.pick
    }

    /// The most entries of a row that are outside the tier: those that no query picks, and a piece of new ones.
    pub(in crate::cache) fn max_entries_outside(&self) -> usize {
        self.pick.window + 2 * self.pick.block
    }

    /// Entries of `row`.
    pub(in crate::cache) fn n_entries(&self, row: usize) -> usize {
        self.n_blocks(row) * self.pick.block
    }

    /// Blocks of `row`.
    pub(in crate::cache) fn n_blocks(&self, row: usize) -> usize {
        self.rows[row].blocks.len()
    }

    /// Bytes of the tensors on the device.
    pub(in crate::cache) fn bytes(&self) -> usize {
        self.means.bytes() + self.store.bytes()
    }

    /// Bytes on the device of what is there, without free slots and room to grow.
    pub(in crate::cache) fn used_bytes(&self) -> usize {
        let block_bytes = self.pick.block * self.store.entry_bytes();
        let of_row =
            |row: usize| self.n_blocks(row) * self.means.entry_bytes() + self.residents(row).count() * block_bytes;
        (0..self.rows.len()).map(of_row).sum()
    }

    /// The most bytes that the tensors hold once no row has more than `n_blocks` blocks.
    pub(in crate::cache) fn bytes_with(&self, n_blocks: usize) -> usize {
        self.store.bytes() + self.capacity_for(n_blocks) * self.rows.len() * self.means.entry_bytes()
    }

    /// What is in host memory, and what has happened so far.
    pub(in crate::cache) fn usage(&self) -> OffloadUse {
        let host_bytes = self.unique_blocks().0.iter().map(|block| block.bytes()).sum();
        OffloadUse { host_bytes, ..self.counts }
    }

    /// The blocks that queries take of those that are in the tier.
    ///
    /// # Shapes
    ///
    /// `queries: [b, H, n, K]`, `positions`: `b` lists of `n`
    pub(in crate::cache) fn choose(&self, rows: &[usize], queries: Tensor<4>, positions: &[Vec<usize>]) -> Picks {
        let n_blocks = rows.iter().map(|&row| self.n_blocks(row)).max().unwrap_or(0);
        let n_queries = positions[0].len();
        if n_blocks == 0 {
            return vec![vec![Vec::new(); n_queries]; rows.len()];
        }
        let picked = self.pick.choose(queries.inner(), self.means.read(rows, 0, n_blocks), positions).indices;
        let [.., n_picks] = picked.dims();
        let picked: Vec<i64> = picked.try_into_vec_as().expect("indices are whole numbers");
        let of_query = |line: &[i64]| line.iter().map(|&block| block as usize).filter(|&b| b < n_blocks).collect();
        let lines: Vec<Vec<usize>> = picked.chunks(n_picks).map(of_query).collect();
        lines.chunks(n_queries).map(<[_]>::to_vec).collect()
    }

    /// Cuts queries into runs whose blocks fit on the device together.
    pub(in crate::cache) fn runs(&self, picks: &Picks) -> Vec<Range<usize>> {
        let fit = |run: Range<usize>| {
            picks.iter().all(|row| self.cold(&row[run.clone()]).len() <= self.config.resident_blocks)
        };
        let n_queries = picks[0].len();
        let mut runs = Vec::new();
        let mut start = 0;
        for end in 1..=n_queries {
            if end == n_queries || !fit(start..end + 1) {
                runs.push(start..end);
                start = end;
            }
        }
        runs
    }

    /// Brings in what the queries of a run take, and counts.
    pub(in crate::cache) fn fetch(&mut self, rows: &[usize], picks: Picks) {
        let n_sink_blocks = n_sink_blocks(self.pick);
        for (&row, picks) in rows.iter().zip(picks) {
            let staying = self.cold(&picks);
            for &block in picks.iter().flatten().filter(|&&block| block >= n_sink_blocks) {
                match self.rows[row].slots.take(block) {
                    Some(arrival) => {
                        self.counts.hits += 1;
                        self.counts.prefetches_used += usize::from(arrival == Arrival::Ahead);
                    }
                    None => {
                        self.counts.misses += 1;
                        let slot = self.rows[row].slots.admit(block, &staying, Arrival::Asked);
                        self.load(row, block, n_sink_blocks + slot.expect("the blocks of a run fit"));
                    }
                }
            }
            self.rows[row].taken = picks;
        }
    }

    /// Brings in the neighbours of the blocks that the last query of each row took, those of the best block first.
    pub(in crate::cache) fn prefetch(&mut self, rows: &[usize]) {
        if !self.config.prefetch {
            return;
        }
        let n_sink_blocks = n_sink_blocks(self.pick);
        for &row in rows {
            let taken = self.rows[row].taken.last().map_or(Vec::new(), |last| self.cold(std::slice::from_ref(last)));
            let mut staying = taken.clone();
            for block in taken {
                for neighbour in [Some(block + 1), block.checked_sub(1)].into_iter().flatten() {
                    let is_cold = (n_sink_blocks..self.n_blocks(row)).contains(&neighbour);
                    if !is_cold || self.rows[row].slots.holds(neighbour) {
                        continue;
                    }
                    // The next neighbour must not push this one out.
                    staying.push(neighbour);
                    if let Some(slot) = self.rows[row].slots.admit(neighbour, &staying, Arrival::Ahead) {
                        self.counts.prefetched += 1;
                        self.load(row, neighbour, n_sink_blocks + slot);
                    }
                }
            }
        }
    }

    fn n_columns(&self, rows: &[usize]) -> usize {
        let last = rows.iter().flat_map(|&row| self.residents(row)).map(|(place, _)| place).max();
        last.map_or(0, |last| (last + 1) * self.pick.block)
    }

    /// What is on the device, as far as any of `rows` has blocks there.
    pub(in crate::cache) fn read(&self, rows: &[usize]) -> Option<Segment> {
        let n_columns = self.n_columns(rows);
        (n_columns > 0).then(|| self.store.read(rows, 0, n_columns))
    }

    /// The mask of the newest run, whose queries are `positions`, over what [`Tier::read`] returns: zero where a query
    /// sees an entry, [`MASKED`] elsewhere, `[b, 1, n, E]`.
    pub(in crate::cache) fn mask(&self, rows: &[usize], positions: &[Vec<usize>]) -> Option<Tensor<4>> {
        let (n_queries, n_columns, block_len) = (positions[0].len(), self.n_columns(rows), self.pick.block);
        if n_columns == 0 {
            return None;
        }
        let mut mask = vec![MASKED; rows.len() * n_queries * n_columns];
        let mut lines = mask.chunks_mut(n_columns);
        for (&row, positions) in rows.iter().zip(positions) {
            let taken = &self.rows[row].taken;
            for ((&query, taken), line) in positions.iter().zip(taken).zip(lines.by_ref().take(n_queries)) {
                for (place, block) in self.residents(row) {
                    let is_taken = taken.contains(&block);
                    for (index, seen) in line[place * block_len..][..block_len].iter_mut().enumerate() {
                        if is_taken || self.pick.always_sees(query, block * block_len + index) {
                            *seen = 0.0;
                        }
                    }
                }
            }
        }
        Some(Tensor::from_data(TensorData::new(mask, [rows.len(), 1, n_queries, n_columns]), &self.device))
    }

    /// Takes over the next block of a row.
    pub(in crate::cache) fn push(&mut self, row: usize, block: Segment) {
        let number = self.n_blocks(row);
        self.rows[row].blocks.push(Arc::new(HostBlock::from_device(block.clone())));
        self.write_mean(row, number, &block);
        if number < n_sink_blocks(self.pick) {
            self.load(row, number, number);
        }
    }

    /// Gives back the blocks of a row from `n_blocks` on.
    pub(in crate::cache) fn pop(&mut self, row: usize, n_blocks: usize) -> Vec<Segment> {
        let TierRow { blocks, slots, .. } = &mut self.rows[row];
        slots.truncate(n_blocks);
        blocks.drain(n_blocks..).map(|block| block.to_device(&self.device)).collect()
    }

    /// Keeps the given rows, in the given order. Copies of a row share its blocks in host memory.
    pub(in crate::cache) fn select_rows(&mut self, rows: &[usize]) {
        self.means.select_rows(rows);
        self.store.select_rows(rows);
        self.rows = rows.iter().map(|&row| self.rows[row].clone()).collect();
    }

    /// Stores blocks otherwise, those that are there included.
    pub(in crate::cache) fn set_storage(&mut self, config: &CacheConfig) {
        let (blocks, numbers) = self.unique_blocks();
        let formats = self.layer.formats(config);
        let repacked =
            |block: Arc<HostBlock>| Arc::new(HostBlock::from_device(repack(block.to_device(&self.device), formats)));
        let blocks: Vec<Arc<HostBlock>> = blocks.into_iter().map(repacked).collect();
        self.store = PairStore::new(config, self.rows.len(), self.layer, self.store.capacity(), &self.device);
        self.set_blocks(&blocks, numbers);
    }

    /// The tier as data; its tensors are added to `tensors` under `name`.
    pub(in crate::cache) fn record(&self, name: &str, tensors: &mut Tensors) -> TierRecord {
        let (blocks, numbers) = self.unique_blocks();
        host_block::record(&blocks, name, tensors);
        let slots = self.rows.iter().map(|row| row.slots.clone());
        let rows = numbers.into_iter().zip(slots).map(|(blocks, slots)| TierRowRecord { blocks, slots }).collect();
        TierRecord { n_blocks: blocks.len(), rows, counts: self.counts }
    }

    /// Becomes what was recorded.
    ///
    /// # Errors
    ///
    /// What of the record cannot be, or what tensor is missing or of another shape.
    pub(in crate::cache) fn restore(
        &mut self,
        record: TierRecord,
        config: &CacheConfig,
        name: &str,
        tensors: &mut Tensors,
    ) -> Result<(), String> {
        let TierRecord { n_blocks, rows, counts } = record;
        let fits = |row: &TierRowRecord| {
            row.slots.len() == self.config.resident_blocks
                && row.slots.is_consistent(n_sink_blocks(self.pick), row.blocks.len())
                && row.blocks.iter().all(|&number| number < n_blocks)
        };
        if rows.len() != self.rows.len() || !rows.iter().all(fits) {
            return Err(format!("{name}: the blocks in host memory contradict each other"));
        }
        let LayerShape { n_kv_heads, head_dim, .. } = self.layer;
        let blocks = match n_blocks {
            0 => Vec::new(),
            _ => {
                let dims = [n_kv_heads, self.pick.block, head_dim];
                host_block::take(n_blocks, self.layer.formats(config), dims, name, tensors)?
            }
        };
        self.counts = counts;
        let (numbers, slots): (Vec<_>, Vec<_>) = rows.into_iter().map(|row| (row.blocks, row.slots)).unzip();
        self.rows.iter_mut().zip(slots).for_each(|(row, slots)| row.slots = slots);
        self.set_blocks(&blocks, numbers);
        Ok(())
    }

    /// Gives rows blocks by their numbers, and fills means and slots accordingly.
    fn set_blocks(&mut self, blocks: &[Arc<HostBlock>], numbers: Vec<Vec<usize>>) {
        for (row, numbers) in numbers.into_iter().enumerate() {
            self.rows[row].blocks = numbers.iter().map(|&number| blocks[number].clone()).collect();
            for number in 0..numbers.len() {
                let block = self.rows[row].blocks[number].to_device(&self.device);
                self.write_mean(row, number, &block);
            }
            for (place, block) in self.residents(row).collect::<Vec<_>>() {
                self.load(row, block, place);
            }
        }
    }

    /// Every block once, and the blocks of each row by their numbers among them.
    fn unique_blocks(&self) -> (Vec<Arc<HostBlock>>, Vec<Vec<usize>>) {
        let mut blocks = Vec::new();
        let mut found = HashMap::new();
        let mut number = |block: &Arc<HostBlock>| {
            *found.entry(Arc::as_ptr(block)).or_insert_with(|| {
                blocks.push(block.clone());
                blocks.len() - 1
            })
        };
        let numbers = self.rows.iter().map(|row| row.blocks.iter().map(&mut number).collect()).collect();
        (blocks, numbers)
    }

    /// Blocks of a row that are on the device, each with its place in the store.
    fn residents(&self, row: usize) -> impl Iterator<Item = (usize, usize)> {
        let n_sink_blocks = n_sink_blocks(self.pick);
        let TierRow { blocks, slots, .. } = &self.rows[row];
        let of_sinks = (0..n_sink_blocks.min(blocks.len())).map(|block| (block, block));
        of_sinks.chain(slots.filled().map(move |(slot, block)| (n_sink_blocks + slot, block)))
    }

    /// Blocks that queries take, each once, without those of the sinks.
    fn cold(&self, picks: &[Vec<usize>]) -> Vec<usize> {
        let mut cold = Vec::new();
        for &block in picks.iter().flatten() {
            if block >= n_sink_blocks(self.pick) && !cold.contains(&block) {
                cold.push(block);
            }
        }
        cold
    }

    fn load(&mut self, row: usize, block: usize, place: usize) {
        let segment = self.rows[row].blocks[block].to_device(&self.device);
        self.store.write_segment(&[row], &[place * self.pick.block], segment);
    }

    /// Keys as attention reads them make the mean, so that the choice is the same as without a tier.
    fn write_mean(&mut self, row: usize, number: usize, block: &Segment) {
        let mean = self.pick.block_means(unpack(block.keys.clone()), 1); // [1, H_kv, 1, K]
        let capacity = self.capacity_for(number + 1);
        if capacity > self.means.capacity() {
            self.means.resize(number, capacity);
        }
        self.means.write(&[row], &[number], mean);
    }

    /// Growing by a share keeps the copying in proportion to what is stored.
    fn capacity_for(&self, n_blocks: usize) -> usize {
        match n_blocks <= self.means.capacity() {
            true => self.means.capacity(),
            false => (n_blocks + n_blocks / 8).next_multiple_of(GROWTH_BLOCKS),
        }
    }
}

/// Blocks that hold a sink.
fn n_sink_blocks(pick: BlockPick) -> usize {
    pick.sinks.div_ceil(pick.block)
}
