//! Attention of few queries on the CPU backend: one pass over keys, a softmax, one pass over values, for each head.

use burn::tensor::{Tensor, TensorData};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::kernels;
use crate::cache::entries::Segment;
use crate::cache::flex::{self, Lines};
use crate::cache::heads::{Head, OpenEntries, are_readable};
use crate::cache::vectorized::vectorized;

/// Queries for which reading entries in place is faster than unpacking them for a matrix product.
const MAX_QUERIES: usize = 16;
/// Entries that all queries meet before the next ones are read: their numbers fit in the processor's nearest cache.
const BLOCK: usize = 64;
/// Multiplications that are worth a thread of their own.
const PARALLEL_WORK: usize = 1 << 18;

/// Whether [`attend`] is there for these tensors, and the better way.
pub(super) fn serves(q: &Tensor<4>, segments: &[Segment]) -> bool {
    let is_readable = |segment: &Segment| are_readable(&segment.keys) && are_readable(&segment.values);
    flex::serves(&q.device()) && q.dims()[2] <= MAX_QUERIES && segments.iter().all(is_readable)
}

/// See [`super::attend_with_weights`]; tensors other than entries are in f32.
pub(super) fn attend(
    q: Tensor<4>,
    segments: &[Segment],
    mask: Tensor<4>,
    sinks: Option<Tensor<4>>,
) -> (Tensor<4>, Tensor<4>) {
    let [batch, n_heads, n_queries, head_dim] = q.dims();
    let segments: Vec<_> = segments.iter().cloned().map(OpenSegment::new).collect();
    let n_entries: usize = segments.iter().map(|segment| segment.n_entries).sum();
    assert!(n_entries > 0, "no entries to attend to");
    let call = Call { q: Lines::floats(q), segments, mask: Lines::floats(mask), sinks: sinks.map(Lines::floats) };

    let mut out = vec![0.0; batch * n_heads * n_queries * head_dim];
    let mut weights = vec![0.0; batch * n_heads * n_queries * n_entries];
    let min_heads = PARALLEL_WORK.div_ceil(2 * n_queries * n_entries * head_dim);
    let heads = out.par_chunks_mut(n_queries * head_dim).zip(weights.par_chunks_mut(n_queries * n_entries));
    heads.enumerate().with_min_len(min_heads).for_each(|(index, (out, weights))| {
        let (row, head) = (index / n_heads, index % n_heads);
        vectorized(AttendHead { call: &call, row, head, n_entries, head_dim, weights, out });
    });
    (
        flex::from_floats(TensorData::new(out, [batch, n_heads, n_queries, head_dim])),
        flex::from_floats(TensorData::new(weights, [batch, n_heads, n_queries, n_entries])),
    )
}

struct Call {
    q: Lines,
    segments: Vec<OpenSegment>,
    mask: Lines,
    sinks: Option<Lines>,
}

struct OpenSegment {
    keys: OpenEntries,
    values: OpenEntries,
    n_entries: usize,
}

impl OpenSegment {
    fn new(Segment { keys, values }: Segment) -> Self {
        let [_, _, n_entries, _] = keys.dims();
        assert_eq!(n_entries, values.dims()[2], "keys and values of a segment differ in number");
        Self { keys: OpenEntries::new(keys), values: OpenEntries::new(values), n_entries }
    }
}

/// One head in one row of the batch.
struct AttendHead<'a> {
    call: &'a Call,
    row: usize,
    head: usize,
    n_entries: usize,
    head_dim: usize,
    /// `[N, E]`: first scores, then their softmax.
    weights: &'a mut [f32],
    /// `[N, K]`: zeros, to which values are added.
    out: &'a mut [f32],
}

impl WithSimd for AttendHead<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { call, row, head, n_entries, head_dim, weights, out } = self;
        let mut scratch = vec![0.0; BLOCK * head_dim];
        for (stored, first, column, n) in blocks(call, |segment| segment.keys.head(row, head)) {
            let keys = stored.block(first, n, &mut scratch);
            for (query, scores) in weights.chunks_exact_mut(n_entries).enumerate() {
                kernels::scores(simd, call.q.line(row, head, query), keys, &mut scores[column..column + n]);
            }
        }
        for (query, weights) in weights.chunks_exact_mut(n_entries).enumerate() {
            add_mask(weights, call.mask.line(row, head, query));
            let sink = call.sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks.line(row, head, query)[0]);
            kernels::softmax(simd, weights, sink);
        }
        for (stored, first, column, n) in blocks(call, |segment| segment.values.head(row, head)) {
            let values = stored.block(first, n, &mut scratch);
            for (weights, out) in weights.chunks_exact(n_entries).zip(out.chunks_exact_mut(head_dim)) {
                kernels::add_weighted(simd, &weights[column..column + n], values, out);
            }
        }
    }
}

/// The blocks of all segments: a head's storage, a first entry in it, its column among all entries, and a length.
fn blocks<'a>(
    call: &'a Call,
    head: impl Fn(&'a OpenSegment) -> Head<'a>,
) -> impl Iterator<Item = (Head<'a>, usize, usize, usize)> {
    let starts = call.segments.iter().scan(0, |end, segment| {
        let start = *end;
        *end += segment.n_entries;
        Some((start, segment))
    });
    starts.flat_map(move |(start, segment)| {
        let stored = head(segment);
        let firsts = (0..segment.n_entries).step_by(BLOCK);
        firsts.map(move |first| (stored, first, start + first, BLOCK.min(segment.n_entries - first)))
    })
}

/// Adds a number for each score, or one for all.
#[inline(always)]
fn add_mask(scores: &mut [f32], mask: &[f32]) {
    match mask {
        [one] => scores.iter_mut().for_each(|score| *score += one),
        _ => scores.iter_mut().zip(mask).for_each(|(score, mask)| *score += mask),
    }
}
