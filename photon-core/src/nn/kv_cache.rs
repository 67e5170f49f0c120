//! The cache of one attention layer: dense, one absolute position per entry, one length per row.
//!
//! The number of entries stored and the position of the next one are different numbers: what the span of the
//! layer can never see again is dropped.

use burn::tensor::{Device, Tensor, TensorData};

use super::row_store::RowStore;
use super::span::Span;

/// Entries by which a cache grows until it has reached its bound, if there is one.
const GROWTH_ENTRIES: usize = 256;

/// Stands for minus infinity in masked scores; finite, because WebGPU shaders may assume finite numbers.
pub const MASKED: f32 = -1e30;

/// Keys and values of one layer for every row of a batch.
#[derive(Clone, Debug)]
pub struct KvCache {
    keys: RowStore,
    values: RowStore,
    span: Span,
    rows: Vec<CachedRow>,
}

/// Where a row's live entries lie, and which positions they hold.
#[derive(Clone, Debug, Default)]
struct CachedRow {
    /// Slot of the oldest live entry.
    start: usize,
    /// Absolute positions of the live entries, rising.
    positions: Vec<usize>,
}

impl CachedRow {
    /// The first free slot.
    fn end(&self) -> usize {
        self.start + self.positions.len()
    }

    /// Forgets the entries before `first_visible`.
    fn drop_before(&mut self, first_visible: usize) {
        let n_stale = self.positions.partition_point(|&position| position < first_visible);
        self.positions.drain(..n_stale);
        self.start = if self.positions.is_empty() { 0 } else { self.start + n_stale };
    }
}

/// What a call attends to: keys and values `[b, H, E, K]`, and who sees what.
pub struct Visible {
    /// Cached and new keys.
    pub keys: Tensor<4>,
    /// Cached and new values.
    pub values: Tensor<4>,
    /// What to add to scores: [`MASKED`] where a query must not look, zero elsewhere. `[b, 1, N, E]`, or
    /// `[1, 1, 1, 1]` where all queries see all entries.
    pub mask: Tensor<4>,
}

impl KvCache {
    /// An empty cache.
    pub fn new(n_rows: usize, n_kv_heads: usize, head_dim: usize, span: Span, device: &Device) -> Self {
        let capacity = match span.max_entries() {
            Some(entries) => rolling_capacity(entries).min(GROWTH_ENTRIES),
            None => GROWTH_ENTRIES,
        };
        let store = RowStore::new(n_rows, n_kv_heads, capacity, head_dim, device);
        Self { keys: store.clone(), values: store, span, rows: vec![CachedRow::default(); n_rows] }
    }

    /// Adds entries to `rows` and returns all that the new positions may attend to.
    ///
    /// # Shapes
    ///
    /// `keys`, `values`: `[b, H, N, K]` for `b` rows; `positions`: `b` lists of `N` rising absolute positions,
    /// all above those stored.
    pub fn append(&mut self, rows: &[usize], positions: &[Vec<usize>], keys: Tensor<4>, values: Tensor<4>) -> Visible {
        let n_new = positions[0].len();
        // A call may skip positions, such as the groups before the newest.
        for (&row, new) in rows.iter().zip(positions) {
            self.drop_dead(row, new[0]);
        }
        self.make_room(rows, n_new);
        let offsets: Vec<usize> = rows.iter().map(|&row| self.rows[row].end()).collect();
        self.keys.write(rows, &offsets, keys);
        self.values.write(rows, &offsets, values);
        for (&row, new) in rows.iter().zip(positions) {
            self.rows[row].positions.extend(new);
        }

        let start = rows.iter().map(|&row| self.rows[row].start).min().unwrap_or(0);
        let end = rows.iter().map(|&row| self.rows[row].end()).max().unwrap_or(0);
        let visible = Visible {
            keys: self.keys.read(rows, start, end),
            values: self.values.read(rows, start, end),
            mask: self.mask(rows, positions, start, end),
        };
        for (&row, new) in rows.iter().zip(positions) {
            self.drop_dead(row, new[n_new - 1] + 1);
        }
        self.give_back_room();
        visible
    }

    /// Entries stored for `row`.
    pub fn n_entries(&self, row: usize) -> usize {
        self.rows[row].positions.len()
    }

    /// Entries of the row that holds most.
    pub fn longest_row(&self) -> usize {
        (0..self.rows.len()).map(|row| self.n_entries(row)).max().unwrap_or(0)
    }

    /// Bytes of the entries of all rows, without the room to grow.
    pub fn used_bytes(&self) -> usize {
        let n_entries: usize = (0..self.rows.len()).map(|row| self.n_entries(row)).sum();
        n_entries * self.bytes() / (self.rows.len() * self.keys.capacity())
    }

    /// Bytes that the cache's tensors hold.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// Keeps the given rows, in the given order.
    pub fn select_rows(&mut self, rows: &[usize]) {
        self.keys.select_rows(rows);
        self.values.select_rows(rows);
        self.rows = rows.iter().map(|&row| self.rows[row].clone()).collect();
    }

    /// Forgets the entries of `row` that no position from `next_query` on can see.
    fn drop_dead(&mut self, row: usize, next_query: usize) {
        let span = self.span;
        let cached = &mut self.rows[row];
        cached.drop_before(span.first_visible(next_query));
        // Only a strided span has holes; closing them costs about as much as looking at the entries.
        if matches!(span, Span::Strided { .. }) && !cached.positions.iter().all(|&key| span.is_live(key, next_query)) {
            let start = cached.start;
            let is_live = |&(_, &key): &(usize, &usize)| span.is_live(key, next_query);
            let (slots, positions): (Vec<_>, _) =
                cached.positions.iter().enumerate().filter(is_live).map(|(index, &key)| (start + index, key)).unzip();
            *cached = CachedRow { start: 0, positions };
            self.keys.gather_to_front(row, &slots);
            self.values.gather_to_front(row, &slots);
        }
    }

    fn make_room(&mut self, rows: &[usize], n_new: usize) {
        let fits = |cache: &Self| rows.iter().all(|&row| cache.rows[row].end() + n_new <= cache.keys.capacity());
        if fits(self) {
            return;
        }
        self.move_to_front();
        if fits(self) {
            return;
        }
        let longest = self.longest_row();
        let capacity = (longest + n_new).next_multiple_of(GROWTH_ENTRIES);
        self.keys.resize(longest, capacity);
        self.values.resize(longest, capacity);
    }

    /// A long piece of a prompt leaves a bounded cache larger than it needs to be.
    fn give_back_room(&mut self) {
        let Some(max_entries) = self.span.max_entries() else { return };
        let capacity = rolling_capacity(max_entries);
        if self.keys.capacity() > capacity && self.longest_row() <= capacity {
            self.move_to_front();
            let longest = self.longest_row();
            self.keys.resize(longest, capacity);
            self.values.resize(longest, capacity);
        }
    }

    fn move_to_front(&mut self) {
        for row in 0..self.rows.len() {
            let CachedRow { start, .. } = self.rows[row];
            if start > 0 {
                let end = self.rows[row].end();
                self.keys.move_to_front(row, start, end);
                self.values.move_to_front(row, start, end);
                self.rows[row].start = 0;
            }
        }
    }

    fn mask(&self, rows: &[usize], queries: &[Vec<usize>], start: usize, end: usize) -> Tensor<4> {
        let (n_queries, n_keys) = (queries[0].len(), end - start);
        // What a single query cannot see has been dropped.
        let is_aligned = |&row: &usize| self.rows[row].start == start && self.rows[row].end() == end;
        if n_queries == 1 && rows.iter().all(is_aligned) {
            return Tensor::zeros([1, 1, 1, 1], &self.keys.device());
        }
        let mut mask = vec![MASKED; rows.len() * n_queries * n_keys];
        for (index, (&row, queries)) in rows.iter().zip(queries).enumerate() {
            let cached = &self.rows[row];
            for (q, &query) in queries.iter().enumerate() {
                let line = (index * n_queries + q) * n_keys + cached.start - start;
                for (slot, &key) in cached.positions.iter().enumerate() {
                    if self.span.sees(query, key) {
                        mask[line + slot] = 0.0;
                    }
                }
            }
        }
        Tensor::from_data(TensorData::new(mask, [rows.len(), 1, n_queries, n_keys]), &self.keys.device())
    }
}

/// Twice what is seen, so that moving entries to the front happens once in that many steps.
fn rolling_capacity(max_entries: usize) -> usize {
    max_entries.saturating_mul(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(value: f32, device: &Device) -> Tensor<4> {
        Tensor::full([1, 1, 1, 2], value, device)
    }

    #[test]
    fn a_window_keeps_its_newest_entries_and_their_positions() {
        let device = Device::flex();
        let mut cache = KvCache::new(1, 1, 2, Span::Window { len: 3 }, &device);
        let bytes = cache.bytes();
        for position in 0..50 {
            let new = entry(position as f32, &device);
            let visible = cache.append(&[0], &[vec![position]], new.clone(), new);
            let keys: Vec<f32> = visible.keys.try_to_vec_as().unwrap();
            let expected: Vec<f32> = (position.saturating_sub(2)..=position).flat_map(|p| [p as f32; 2]).collect();
            assert_eq!(keys, expected);
            assert_eq!(visible.mask.dims(), [1, 1, 1, 1]);
        }
        assert_eq!(cache.n_entries(0), 2, "what the next position sees beside itself");
        assert_eq!(cache.bytes(), bytes, "a bounded cache must not grow");
        let piece = Tensor::zeros([1, 1, 40, 2], &device);
        cache.append(&[0], &[(50..90).collect()], piece.clone(), piece);
        assert_eq!(cache.bytes(), bytes, "nor stay large after a long piece");
    }

    #[test]
    fn a_new_block_starts_empty() {
        let device = Device::flex();
        let mut cache = KvCache::new(1, 1, 2, Span::Blocks { len: 3, back: 0 }, &device);
        for position in 0..10 {
            cache.append(&[0], &[vec![position]], entry(0.0, &device), entry(0.0, &device));
            assert_eq!(cache.n_entries(0), (position + 1) % 3);
        }
    }

    #[test]
    fn a_stride_keeps_the_entries_that_are_seen_again() {
        let device = Device::flex();
        let span = Span::Strided { window: 3, sinks: 1, block: 2, every: 3 };
        let mut cache = KvCache::new(1, 1, 2, span, &device);
        for position in 0..30 {
            let new = entry(position as f32, &device);
            let visible = cache.append(&[0], &[vec![position]], new.clone(), new);
            let seen = (0..=position).filter(|&key| span.sees(position, key));
            let keys: Vec<f32> = visible.keys.try_to_vec_as().unwrap();
            assert_eq!(keys, seen.flat_map(|p| [p as f32; 2]).collect::<Vec<_>>());
            assert_eq!(cache.n_entries(0), span.live_entries(position + 1));
        }
    }

    #[test]
    fn a_full_cache_grows_and_hides_the_future_within_a_call() {
        let device = Device::flex();
        let mut cache = KvCache::new(1, 1, 2, Span::Full, &device);
        let n = GROWTH_ENTRIES + 5;
        let new = Tensor::zeros([1, 1, n, 2], &device);
        let visible = cache.append(&[0], &[(0..n).collect()], new.clone(), new);
        let n_hidden: i64 = visible.mask.equal_scalar(MASKED).int().sum().into_scalar();
        assert_eq!(n_hidden as usize, n * (n - 1) / 2, "earlier queries must not see later keys");
    }
}
