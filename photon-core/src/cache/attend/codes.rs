//! Attention of a single query to packed entries, with heads that lie side by side read together.
//!
//! A group's scale is common to its numbers, so it multiplies their sum instead of each of them, and the minimum of
//! four-bit codes goes with the sum of the query's numbers. Codes are widened for a few entries at a time, which stay in
//! the processor's nearest cache; with more queries, unpacking a whole block is the better way.

use pulp::Simd;

use super::kernels::{AT_ONCE, add_lines, dots};
use crate::cache::heads::{Block, PackedHeads};

/// A stretch of entries of some heads in one row.
pub(super) struct PackedStretch<'a> {
    pub(super) heads: PackedHeads<'a>,
    /// The first entry.
    pub(super) first: usize,
    /// Entries.
    pub(super) n: usize,
}

impl PackedStretch<'_> {
    /// `scores[h][i] += query(h) · entry first + i of head h`, with a line of `scores` every `stride`.
    #[inline(always)]
    pub(super) fn scores<'q, S: Simd>(
        &self,
        simd: S,
        query: impl Fn(usize) -> &'q [f32],
        scores: &mut [f32],
        stride: usize,
    ) {
        let Self { heads, first, n } = *self;
        let group_len = heads.group();
        let queries: Vec<&[f32]> = (0..heads.n_heads).map(query).collect();
        let groups = queries.iter().flat_map(|query| query.chunks_exact(group_len));
        let totals: Vec<f32> = groups.map(|query| query.iter().sum()).collect();
        let mut codes = vec![0.0; AT_ONCE * heads.width()];
        for start in (0..n).step_by(AT_ONCE) {
            let n_lines = AT_ONCE.min(n - start);
            heads.widen(first + start, &mut codes[..n_lines * heads.width()]);
            let mut totals = totals.iter();
            for (head, query) in queries.iter().enumerate() {
                let scores = &mut scores[head * stride + start..][..n_lines];
                for ((group, query), total) in query.chunks_exact(group_len).enumerate().zip(totals.by_ref()) {
                    let lines = Block::new(&codes[heads.first_code(head, group)..], heads.width(), group_len).lines(0);
                    // Those past the end are left over from before, and go nowhere.
                    let products = dots(simd, query, lines);
                    for (i, score) in scores.iter_mut().enumerate() {
                        let (scale, minimum) = heads.params(first + start + i, head, group);
                        *score += scale * products[i] + minimum * total;
                    }
                }
            }
        }
    }

    /// `sums[h] += Σ weights[h][i] * entry first + i of head h`, with a line of `weights` every `stride`.
    #[inline(always)]
    pub(super) fn add_weighted<S: Simd>(&self, simd: S, weights: &[f32], stride: usize, sums: &mut [f32]) {
        let Self { heads, first, n } = *self;
        let group_len = heads.group();
        let mut codes = vec![0.0; AT_ONCE * heads.width()];
        let mut minimums = vec![0.0; sums.len() / group_len];
        for start in (0..n).step_by(AT_ONCE) {
            let n_lines = AT_ONCE.min(n - start);
            heads.widen(first + start, &mut codes[..n_lines * heads.width()]);
            let parts = sums.chunks_exact_mut(group_len).zip(&mut minimums).enumerate();
            for (part, (sum, minimum_sum)) in parts {
                let (head, group) = (part / heads.groups_per_head(), part % heads.groups_per_head());
                let weights = &weights[head * stride + start..][..n_lines];
                let mut scaled = [0.0; AT_ONCE];
                for (i, weight) in weights.iter().enumerate() {
                    let (scale, minimum) = heads.params(first + start + i, head, group);
                    scaled[i] = weight * scale;
                    *minimum_sum += weight * minimum;
                }
                let lines = Block::new(&codes[heads.first_code(head, group)..], heads.width(), group_len).lines(0);
                // Those past the end are left over from before, and weigh nothing.
                add_lines(simd, scaled, lines, sum);
            }
        }
        for (sum, minimum) in sums.chunks_exact_mut(group_len).zip(minimums) {
            sum.iter_mut().for_each(|sum| *sum += minimum);
        }
    }
}
