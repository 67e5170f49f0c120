//! Where documents start in the rows of a batch, for models that keep them apart.
//!
//! A row of several documents is computed as each would be alone: attention stays within a document; positions, sinks,
//! strides and borders of blocks count from its start; and what stands before its first unit is the learned start vector.
//!
//! ```text
//! tokens of a row   a a a a a a b b c c c c      starts 0, 6, 8
//! units of 2        A   A   A   B   C   C        starts 0, 3, 4
//! ```
//!
//! How documents come to lie in rows is the data pipeline's.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Bool, Tensor, TensorData};

/// The starts of documents in each row of a batch; the last document of a row reaches to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documents {
    /// Rising positions, the first of them 0, for each row.
    starts: Arc<[Vec<usize>]>,
}

impl Documents {
    /// Documents that start at these positions, one list a row.
    ///
    /// # Panics
    ///
    /// If a list does not begin with 0 or does not rise.
    pub fn new(starts: Vec<Vec<usize>>) -> Self {
        for row in &starts {
            assert!(row.first() == Some(&0) && row.is_sorted_by(|a, b| a < b), "documents of a row start at {row:?}");
        }
        Self { starts: starts.into() }
    }

    /// Rows of one document each: nothing is kept apart.
    pub fn whole_rows(n_rows: usize) -> Self {
        Self::new(vec![vec![0]; n_rows])
    }

    /// Whether every row is one document.
    pub fn are_whole_rows(&self) -> bool {
        self.starts.iter().all(|row| row.len() == 1)
    }

    /// Number of rows.
    pub fn n_rows(&self) -> usize {
        self.starts.len()
    }

    /// Some of the rows.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Self {
        Self { starts: self.starts[rows].into() }
    }

    /// The documents of a row of `n_positions`, in order.
    pub fn of_row(&self, row: usize, n_positions: usize) -> impl Iterator<Item = Range<usize>> {
        let starts = &self.starts[row];
        let ends = starts[1..].iter().copied().chain([n_positions]);
        let within = move |(&start, end): (&usize, usize)| start.min(n_positions)..end.min(n_positions);
        starts.iter().zip(ends).map(within).filter(|document| !document.is_empty())
    }

    /// Where the document of a position starts.
    pub fn start_of(&self, row: usize, position: usize) -> usize {
        let starts = &self.starts[row];
        starts[starts.partition_point(|&start| start <= position) - 1]
    }

    /// The same rows in units of `unit_len` positions.
    ///
    /// # Panics
    ///
    /// If a document starts within a unit.
    #[must_use]
    pub(crate) fn in_units(&self, unit_len: usize) -> Self {
        assert!(
            self.start_at_multiples_of(unit_len),
            "documents that are kept apart start at multiples of {unit_len} positions, the length of a unit"
        );
        self.map(|start| start / unit_len)
    }

    /// The same rows with each position unfolded into `group_len`.
    #[must_use]
    pub(crate) fn in_groups(&self, group_len: usize) -> Self {
        self.map(|start| start * group_len)
    }

    fn map(&self, change: impl Fn(usize) -> usize) -> Self {
        Self { starts: self.starts.iter().map(|row| row.iter().map(|&start| change(start)).collect()).collect() }
    }

    /// Whether no block of `len` positions, counted from the start of the row, holds two documents.
    pub(crate) fn start_at_multiples_of(&self, len: usize) -> bool {
        self.starts.iter().flatten().all(|start| start.is_multiple_of(len))
    }

    /// The places in their documents of the first `n_positions` of each row.
    pub(crate) fn positions(&self, n_positions: usize) -> Vec<Vec<usize>> {
        let of_row = |row| self.of_row(row, n_positions).flat_map(|document| 0..document.len()).collect();
        (0..self.n_rows()).map(of_row).collect()
    }

    /// `x`, in which `start` stands first in every row, with `start` first in every document.
    ///
    /// # Shapes
    ///
    /// `x: [B, N, D]`, `start: [D] -> [B, N, D]`
    pub(crate) fn begin_with(&self, start: Tensor<1>, x: Tensor<3>) -> Tensor<3> {
        if self.are_whole_rows() {
            return x;
        }
        let [batch, n_positions, d_model] = x.dims();
        let is_first: Vec<bool> = self.positions(n_positions).into_iter().flatten().map(|place| place == 0).collect();
        let is_first = TensorData::new(is_first, [batch, n_positions, 1]);
        let is_first = Tensor::<3, Bool>::from_data(is_first, &x.device()).expand([batch, n_positions, d_model]);
        x.mask_where(is_first, start.reshape([1, 1, d_model]).expand([batch, n_positions, d_model]))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Int;

    use super::*;

    fn example() -> Documents {
        Documents::new(vec![vec![0, 6, 8], vec![0]])
    }

    #[test]
    fn the_example_in_tokens_units_and_groups() {
        let tokens = example();
        let ranges = |documents: &Documents, row, n| documents.of_row(row, n).collect::<Vec<_>>();
        assert_eq!(ranges(&tokens, 0, 12), [0..6, 6..8, 8..12]);
        assert_eq!(ranges(&tokens, 0, 7), [0..6, 6..7], "a row that ends before its last document");
        assert!(tokens.of_row(1, 12).eq(std::iter::once(0..12)));
        let units = tokens.in_units(2);
        assert_eq!(ranges(&units, 0, 6), [0..3, 3..4, 4..6]);
        assert_eq!(ranges(&units.in_groups(3), 0, 18), [0..9, 9..12, 12..18]);
        assert_eq!(units.positions(6), [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]);
        assert_eq!([5, 6, 7, 8, 20].map(|position| tokens.start_of(0, position)), [0, 6, 6, 8, 8]);
        assert!(tokens.start_at_multiples_of(2) && !tokens.start_at_multiples_of(4));
        assert!(tokens.rows(1..2).are_whole_rows() && !tokens.rows(0..1).are_whole_rows());
        assert_eq!(tokens.rows(1..2), Documents::whole_rows(1));
    }

    #[test]
    #[should_panic(expected = "start at multiples of 4 positions")]
    fn a_unit_holds_no_two_documents() {
        let _ = example().in_units(4);
    }

    #[test]
    #[should_panic(expected = "start at [2, 4]")]
    fn a_row_begins_with_a_document() {
        let _ = Documents::new(vec![vec![2, 4]]);
    }

    #[test]
    fn the_start_vector_stands_first_in_every_document() {
        let device = burn::tensor::Device::flex();
        let x = Tensor::<1, Int>::arange(0..16, &device).float().reshape([2, 4, 2]);
        let begun = Documents::new(vec![vec![0, 3], vec![0]]).begin_with(Tensor::from_floats([-1.0, -2.0], &device), x);
        let values: Vec<f32> = begun.try_into_vec_as().unwrap();
        let row = [-1.0, -2.0, 2.0, 3.0, 4.0, 5.0, -1.0, -2.0];
        assert_eq!(values[..8], row);
        assert_eq!(values[8..], [-1.0, -2.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]);
    }
}
