//! Small matrix products, kept in registers: those of a block of queries are too small to be worth a packing.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use crate::cache::vectorized::vectorized;

/// Lines of scratch are as long as a multiple of this, which any processor's vectors divide.
pub(super) const LANES: usize = 16;
/// Lines and vectors of the result that are worked on at once.
const ROWS: usize = 4;
const VECTORS: usize = 4;
/// Lines of the right matrix that serve all rows of the left one before the next are read: the nearest cache holds them.
const DEPTH: usize = 128;

/// `left [rows, depth] x right [depth, columns]`; `columns` is a multiple of [`LANES`].
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) left: &'a [f32],
    /// Distances in `left` from line to line and from column to column.
    pub(super) left_strides: [usize; 2],
    pub(super) right: &'a [f32],
    /// Distance in `right` from line to line.
    pub(super) right_stride: usize,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) depth: usize,
}

/// What becomes of what stands in the place of the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    Replace,
    Add,
}

impl Product<'_> {
    /// Into lines of `out` that are `stride` apart.
    pub(super) fn run(self, out: &mut [f32], stride: usize, into: Into) {
        vectorized(Run { product: self, out, stride, into });
    }

    #[inline(always)]
    fn strip<S: Simd, const V: usize>(&self, simd: S, part: &Part, out: &mut [f32], stride: usize) {
        let mut row = 0;
        while row + ROWS <= self.rows {
            self.tile::<S, ROWS, V>(simd, part, row, &mut out[row * stride..], stride);
            row += ROWS;
        }
        while row < self.rows {
            self.tile::<S, 1, V>(simd, part, row, &mut out[row * stride..], stride);
            row += 1;
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize>(
        &self,
        simd: S,
        part: &Part,
        row: usize,
        out: &mut [f32],
        stride: usize,
    ) {
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        for k in part.depth.clone() {
            let line = vectors::<S, V>(&self.right[k * self.right_stride + part.column..]);
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = self.left[(row + r) * self.left_strides[0] + k * self.left_strides[1]];
                let factor = simd.splat_f32s(factor);
                for v in 0..V {
                    sums[v] = simd.mul_add_f32s(factor, line[v], sums[v]);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            let line = &mut out[r * stride + part.column..][..V * S::F32_LANES];
            let (line, _) = S::as_mut_simd_f32s(line);
            for (place, sum) in line.iter_mut().zip(sums) {
                *place = if part.into == Into::Add { simd.add_f32s(*place, *sum) } else { *sum };
            }
        }
    }
}

/// A function of its own: in its callers the tiles would be compiled many times over.
struct Run<'a> {
    product: Product<'a>,
    out: &'a mut [f32],
    stride: usize,
    into: Into,
}

impl WithSimd for Run<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { product, out, stride, into } = self;
        let mut part = Part { depth: 0..0, column: 0, into };
        while part.depth.end < product.depth {
            part.depth = part.depth.end..(part.depth.end + DEPTH).min(product.depth);
            part.column = 0;
            while part.column < product.columns {
                let n_vectors = ((product.columns - part.column) / S::F32_LANES).min(VECTORS);
                match n_vectors {
                    1 => product.strip::<S, 1>(simd, &part, out, stride),
                    2 => product.strip::<S, 2>(simd, &part, out, stride),
                    3 => product.strip::<S, 3>(simd, &part, out, stride),
                    _ => product.strip::<S, VECTORS>(simd, &part, out, stride),
                }
                part.column += n_vectors * S::F32_LANES;
            }
            part.into = Into::Add;
        }
    }
}

/// Some columns of the result, and a stretch of the sums that make them.
struct Part {
    depth: Range<usize>,
    column: usize,
    into: Into,
}

/// The first `V` vectors.
#[inline(always)]
fn vectors<S: Simd, const V: usize>(line: &[f32]) -> &[S::f32s; V] {
    let (vectors, _) = S::as_simd_f32s(&line[..V * S::F32_LANES]);
    vectors.first_chunk().expect("a line was cut to this length")
}
