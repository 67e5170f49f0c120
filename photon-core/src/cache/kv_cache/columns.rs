//! What a call looks at: columns of the stores, the entries in them, and the mask that follows from positions.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};

use super::{CachedRow, KvCache, MASKED};
use crate::cache::entries::Segment;

/// The part of every store that a call looks at, in columns: shared entries, a range of main slots, tail slots. Those of
/// the offload tier, which counts its own, come last.
pub(super) struct Columns {
    pub(super) n_shared: usize,
    pub(super) main: Range<usize>,
    pub(super) n_tail: usize,
}

impl Columns {
    pub(super) fn len(&self) -> usize {
        self.n_shared + self.main.len() + self.n_tail
    }

    /// Column of each entry of a row, in order.
    pub(super) fn of<'a>(&'a self, row: &'a CachedRow) -> impl Iterator<Item = usize> + 'a {
        let first_main = self.n_shared + row.start - self.main.start.min(row.start);
        let first_tail = self.n_shared + self.main.len();
        (0..row.n_shared).chain(first_main..first_main + row.n_main()).chain(first_tail..first_tail + row.n_tail)
    }
}

impl KvCache {
    pub(super) fn columns(&self, rows: &[usize]) -> Columns {
        let cached = || rows.iter().map(|&row| &self.rows[row]);
        let filled = || cached().filter(|row| row.n_main() > 0);
        let start = filled().map(|row| row.start).min().unwrap_or(0);
        let end = filled().map(CachedRow::end).max().unwrap_or(start);
        Columns {
            n_shared: cached().map(|row| row.n_shared).max().unwrap_or(0),
            main: start..end,
            n_tail: cached().map(|row| row.n_tail).max().unwrap_or(0),
        }
    }

    pub(super) fn segments(&self, rows: &[usize], columns: &Columns) -> Vec<Segment> {
        let shared = self.shared.as_ref().map(|shared| shared.read(rows.len(), columns.n_shared));
        let main = (!columns.main.is_empty()).then(|| self.main.read(rows, columns.main.start, columns.main.end));
        let tail = self.tail.as_ref().filter(|_| columns.n_tail > 0).map(|tail| tail.read(rows, 0, columns.n_tail));
        let tier = self.tier.as_ref().and_then(|tier| tier.read(rows));
        [shared, main, tail, tier].into_iter().flatten().collect()
    }

    pub(super) fn mask(&self, rows: &[usize], queries: &[Vec<usize>], columns: &Columns) -> Tensor<4> {
        let (n_queries, n_columns) = (queries[0].len(), columns.len());
        let is_seen = |row: usize, query: usize| {
            let cached = &self.rows[row];
            cached.len() == n_columns
                && (self.reach.is_full() || cached.positions().all(|key| self.reach.sees(query, key)))
        };
        if n_queries == 1 && rows.iter().zip(queries).all(|(&row, query)| is_seen(row, query[0])) {
            return Tensor::zeros([1, 1, 1, 1], &self.device);
        }
        self.mask_by(rows, queries, columns, |query, key| self.reach.sees(query, key))
    }

    /// The mask of a rule on positions: `[b, 1, N, E]`.
    pub(super) fn mask_by(
        &self,
        rows: &[usize],
        queries: &[Vec<usize>],
        columns: &Columns,
        sees: impl Fn(usize, usize) -> bool,
    ) -> Tensor<4> {
        let (n_queries, n_columns) = (queries[0].len(), columns.len());
        let mut mask = vec![MASKED; rows.len() * n_queries * n_columns];
        let mut lines = mask.chunks_mut(n_columns);
        for (&row, queries) in rows.iter().zip(queries) {
            let cached = &self.rows[row];
            for (&query, line) in queries.iter().zip(lines.by_ref().take(n_queries)) {
                for (column, key) in columns.of(cached).zip(cached.positions()) {
                    if sees(query, key) {
                        line[column] = 0.0;
                    }
                }
            }
        }
        Tensor::from_data(TensorData::new(mask, [rows.len(), 1, n_queries, n_columns]), &self.device)
    }
}
