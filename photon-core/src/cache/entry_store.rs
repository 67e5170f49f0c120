//! Where the keys or the values of a layer lie: preallocated, in one storage format, rows at places of their own.

use burn::tensor::{DType, Device, Int, Tensor};

use super::entries::{Entries, EntryFormat, Layout, Packed, Packing, params_dtype};
use super::pack::pack;
use super::row_store::RowStore;

/// Keys or values of every row.
#[derive(Clone, Debug)]
pub(super) struct EntryStore {
    format: EntryFormat,
    stored: Stored,
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a layer has two of these")]
enum Stored {
    /// `[B, H, capacity, K]`.
    Dense(RowStore),
    /// `[B, 1, capacity, W]` and `[B, 1, capacity, P]`.
    Packed { codes: RowStore<Int>, params: RowStore, packing: Packing },
}

impl EntryStore {
    /// Room for `capacity` entries a row.
    pub(super) fn new(
        format: EntryFormat,
        n_rows: usize,
        n_heads: usize,
        capacity: usize,
        head_dim: usize,
        device: &Device,
    ) -> Self {
        let stored = match format.layout(n_heads, head_dim) {
            Layout::Dense(dtype) => Stored::Dense(RowStore::new([n_rows, n_heads, capacity, head_dim], dtype, device)),
            Layout::Packed(packing) => Stored::Packed {
                codes: RowStore::new([n_rows, 1, capacity, packing.n_words()], DType::I32, device),
                params: RowStore::new([n_rows, 1, capacity, packing.n_params()], params_dtype(device), device),
                packing,
            },
        };
        Self { format, stored }
    }

    /// Entries that fit in a row.
    pub(super) fn capacity(&self) -> usize {
        match &self.stored {
            Stored::Dense(store) => store.capacity(),
            Stored::Packed { codes, .. } => codes.capacity(),
        }
    }

    /// Bytes that the tensors hold.
    pub(super) fn bytes(&self) -> usize {
        match &self.stored {
            Stored::Dense(store) => store.bytes(),
            Stored::Packed { codes, params, .. } => codes.bytes() + params.bytes(),
        }
    }

    /// Bytes of one entry of one row.
    pub(super) fn entry_bytes(&self) -> usize {
        match &self.stored {
            Stored::Dense(store) => store.entry_bytes(),
            Stored::Packed { codes, params, .. } => codes.entry_bytes() + params.entry_bytes(),
        }
    }

    /// Writes `x [b, H, n, K]` (f32) into `rows`, row `i` from `offsets[i]` on.
    pub(super) fn write(&mut self, rows: &[usize], offsets: &[usize], x: Tensor<4>) {
        self.write_entries(rows, offsets, pack(x, self.format));
    }

    /// Writes entries that are in the store's format already.
    pub(super) fn write_entries(&mut self, rows: &[usize], offsets: &[usize], entries: Entries) {
        match (&mut self.stored, entries) {
            (Stored::Dense(store), Entries::Dense(values)) => store.write(rows, offsets, values),
            (Stored::Packed { codes, params, .. }, Entries::Packed(packed)) => {
                codes.write(rows, offsets, packed.codes);
                params.write(rows, offsets, packed.params);
            }
            _ => panic!("entries of another format than {:?}", self.format),
        }
    }

    /// Entries `start..end` of `rows`.
    pub(super) fn read(&self, rows: &[usize], start: usize, end: usize) -> Entries {
        match &self.stored {
            Stored::Dense(store) => Entries::Dense(store.read(rows, start, end)),
            Stored::Packed { codes, params, packing } => Entries::Packed(Packed {
                codes: codes.read(rows, start, end),
                params: params.read(rows, start, end),
                packing: *packing,
            }),
        }
    }

    /// Makes room for `capacity` entries, keeping the first `keep` of every row.
    pub(super) fn resize(&mut self, keep: usize, capacity: usize) {
        match &mut self.stored {
            Stored::Dense(store) => store.resize(keep, capacity),
            Stored::Packed { codes, params, .. } => {
                codes.resize(keep, capacity);
                params.resize(keep, capacity);
            }
        }
    }

    /// Moves the given entries of one row to its beginning, in the given order.
    pub(super) fn gather_to_front(&mut self, row: usize, slots: &[usize]) {
        match &mut self.stored {
            Stored::Dense(store) => store.gather_to_front(row, slots),
            Stored::Packed { codes, params, .. } => {
                codes.gather_to_front(row, slots);
                params.gather_to_front(row, slots);
            }
        }
    }

    /// Keeps the given rows, in the given order.
    pub(super) fn select_rows(&mut self, rows: &[usize]) {
        match &mut self.stored {
            Stored::Dense(store) => store.select_rows(rows),
            Stored::Packed { codes, params, .. } => {
                codes.select_rows(rows);
                params.select_rows(rows);
            }
        }
    }
}
