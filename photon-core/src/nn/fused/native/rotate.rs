//! Rotation of coordinate pairs.

use burn::backend::flex::FlexTensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{PIECE, contiguous, dims, numbers, numbers_mut};
use crate::cache::vectorized::vectorized;

/// In place, if nobody else holds `x`.
pub(super) fn rotate(x: FlexTensor, cos: FlexTensor, sin: FlexTensor) -> FlexTensor {
    let [_, _, n_heads, head_dim] = dims(&x);
    let (mut x, cos, sin) = (contiguous(x), contiguous(cos), contiguous(sin));
    let (cos, sin) = (numbers(&cos), numbers(&sin));
    let n_at_once = (PIECE / (n_heads * head_dim)).max(1);
    numbers_mut(&mut x).par_chunks_mut(n_at_once * n_heads * head_dim).enumerate().for_each(|(piece, positions)| {
        vectorized(Turn { first: piece * n_at_once, head_dim, n_heads, positions, cos, sin });
    });
    x
}

struct Turn<'a> {
    first: usize,
    head_dim: usize,
    n_heads: usize,
    /// `[n, H, K]`
    positions: &'a mut [f32],
    /// `[B or 1, N, K/2]`
    cos: &'a [f32],
    sin: &'a [f32],
}

impl WithSimd for Turn<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let half = self.head_dim / 2;
        let n_angles = self.cos.len() / half;
        for (index, heads) in self.positions.chunks_exact_mut(self.n_heads * self.head_dim).enumerate() {
            // One row of angles serves all rows.
            let start = (self.first + index) % n_angles * half;
            let (cos, sin) = (&self.cos[start..start + half], &self.sin[start..start + half]);
            for head in heads.chunks_exact_mut(self.head_dim) {
                let (first, second) = head.split_at_mut(half);
                for (((first, second), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                    (*first, *second) = (*first * cos - *second * sin, *second * cos + *first * sin);
                }
            }
        }
    }
}
