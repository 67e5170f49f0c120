//! Keys and values of a layer side by side: whatever happens to one happens to the other.

use burn::tensor::{Device, Tensor};

use super::config::CacheConfig;
use super::entries::{EntryFormat, Segment};
use super::entry_store::EntryStore;
use super::kv_cache::LayerShape;

/// The entries of every row.
#[derive(Clone, Debug)]
pub(super) struct PairStore {
    keys: EntryStore,
    values: EntryStore,
}

impl PairStore {
    /// Keys and values as the config stores them.
    pub(super) fn new(
        config: &CacheConfig,
        n_rows: usize,
        layer: LayerShape,
        capacity: usize,
        device: &Device,
    ) -> Self {
        let store = |format| EntryStore::new(format, n_rows, layer.n_kv_heads, capacity, layer.head_dim, device);
        let [keys, values] = layer.formats(config);
        Self { keys: store(keys), values: store(values) }
    }

    /// Keys and values in f32.
    pub(super) fn exact(n_rows: usize, layer: LayerShape, capacity: usize, device: &Device) -> Self {
        let store = EntryStore::new(EntryFormat::F32, n_rows, layer.n_kv_heads, capacity, layer.head_dim, device);
        Self { keys: store.clone(), values: store }
    }

    pub(super) fn capacity(&self) -> usize {
        self.keys.capacity()
    }

    pub(super) fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }

    /// Bytes of one entry of one row.
    pub(super) fn entry_bytes(&self) -> usize {
        self.keys.entry_bytes() + self.values.entry_bytes()
    }

    /// `keys`, `values`: `[b, H, n, K]`; see [`EntryStore::write`].
    pub(super) fn write(&mut self, rows: &[usize], offsets: &[usize], keys: Tensor<4>, values: Tensor<4>) {
        self.keys.write(rows, offsets, keys);
        self.values.write(rows, offsets, values);
    }

    /// Writes entries that are in the store's formats already.
    pub(super) fn write_segment(&mut self, rows: &[usize], offsets: &[usize], segment: Segment) {
        self.keys.write_entries(rows, offsets, segment.keys);
        self.values.write_entries(rows, offsets, segment.values);
    }

    pub(super) fn read(&self, rows: &[usize], start: usize, end: usize) -> Segment {
        Segment { keys: self.keys.read(rows, start, end), values: self.values.read(rows, start, end) }
    }

    pub(super) fn resize(&mut self, keep: usize, capacity: usize) {
        self.keys.resize(keep, capacity);
        self.values.resize(keep, capacity);
    }

    pub(super) fn gather_to_front(&mut self, row: usize, slots: &[usize]) {
        self.keys.gather_to_front(row, slots);
        self.values.gather_to_front(row, slots);
    }

    pub(super) fn select_rows(&mut self, rows: &[usize]) {
        self.keys.select_rows(rows);
        self.values.select_rows(rows);
    }
}
