//! Attention of few queries on the CPU backend: one pass over keys, a softmax, one pass over values, for each head.

use burn::tensor::{Tensor, TensorData};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::codes::PackedStretch;
use super::kernels;
use crate::cache::entries::Segment;
use crate::cache::flex::{self, Lines};
use crate::cache::heads::{OpenEntries, are_readable};
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
    let call = Call {
        n_entries,
        head_dim,
        q: Lines::floats(q),
        segments,
        mask: Lines::floats(mask),
        sinks: sinks.map(Lines::floats),
    };

    let mut out = vec![0.0; batch * n_heads * n_queries * head_dim];
    let mut weights = vec![0.0; batch * n_heads * n_queries * n_entries];
    let n_together = heads_together(batch, n_heads);
    let parts = n_heads / n_together;
    let min_parts = PARALLEL_WORK.div_ceil(2 * n_together * n_queries * n_entries * head_dim);
    let outs = out.par_chunks_mut(n_together * n_queries * head_dim);
    let all_weights = weights.par_chunks_mut(n_together * n_queries * n_entries);
    outs.zip(all_weights).enumerate().with_min_len(min_parts).for_each(|(index, (out, weights))| {
        let (row, first_head) = (index / parts, index % parts * n_together);
        vectorized(AttendHeads { call: &call, row, first_head, n_together, weights, out });
    });
    (
        flex::from_floats(TensorData::new(out, [batch, n_heads, n_queries, head_dim])),
        flex::from_floats(TensorData::new(weights, [batch, n_heads, n_queries, n_entries])),
    )
}

/// Heads of a row that one thread works on: as many as leave a part for each thread, because the heads of a packed entry
/// lie side by side.
fn heads_together(batch: usize, n_heads: usize) -> usize {
    let leaves_enough = |&n: &usize| n_heads.is_multiple_of(n) && batch * n_heads / n >= rayon::current_num_threads();
    (1..=n_heads).rev().find(leaves_enough).unwrap_or(1)
}

struct Call {
    n_entries: usize,
    head_dim: usize,
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

/// Some heads in one row of the batch.
struct AttendHeads<'a> {
    call: &'a Call,
    row: usize,
    first_head: usize,
    n_together: usize,
    /// `[heads, N, E]`: first scores, then their softmax.
    weights: &'a mut [f32],
    /// `[heads, N, K]`: zeros, to which values are added.
    out: &'a mut [f32],
}

impl WithSimd for AttendHeads<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { call, row, first_head, n_together, weights, out } = self;
        let (n_entries, head_dim) = (call.n_entries, call.head_dim);
        let n_queries = out.len() / (n_together * head_dim);
        let mut scratch = vec![0.0; BLOCK * head_dim];
        // Only a lone query gains nothing from unpacking a whole block.
        let is_lone = n_queries == 1;
        for Stretch { segment, first, column, n } in stretches(&call.segments, is_lone, |segment| &segment.keys) {
            if let Some(heads) = segment.keys.packed_heads(row, first_head, n_together).filter(|_| is_lone) {
                let query = |index| call.q.line(row, first_head + index, 0);
                PackedStretch { heads, first, n }.scores(simd, query, &mut weights[column..], n_entries);
                continue;
            }
            for (index, weights) in weights.chunks_exact_mut(n_queries * n_entries).enumerate() {
                let head = first_head + index;
                let keys = segment.keys.head(row, head);
                let keys = keys.block(first, n, &mut scratch);
                for (query, scores) in weights.chunks_exact_mut(n_entries).enumerate() {
                    kernels::scores(simd, call.q.line(row, head, query), keys, &mut scores[column..column + n]);
                }
            }
        }
        for (line, weights) in weights.chunks_exact_mut(n_entries).enumerate() {
            let (head, query) = (first_head + line / n_queries, line % n_queries);
            add_mask(weights, call.mask.line(row, head, query));
            let sink = call.sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks.line(row, head, query)[0]);
            kernels::softmax(simd, weights, sink);
        }
        for Stretch { segment, first, column, n } in stretches(&call.segments, is_lone, |segment| &segment.values) {
            if let Some(heads) = segment.values.packed_heads(row, first_head, n_together).filter(|_| is_lone) {
                PackedStretch { heads, first, n }.add_weighted(simd, &weights[column..], n_entries, out);
                continue;
            }
            let heads = weights.chunks_exact(n_queries * n_entries).zip(out.chunks_exact_mut(n_queries * head_dim));
            for (index, (weights, out)) in heads.enumerate() {
                let values = segment.values.head(row, first_head + index);
                let values = values.block(first, n, &mut scratch);
                for (weights, out) in weights.chunks_exact(n_entries).zip(out.chunks_exact_mut(head_dim)) {
                    kernels::add_weighted(simd, &weights[column..column + n], values, out);
                }
            }
        }
    }
}

/// At most [`BLOCK`] entries of a segment; all of them where a lone query reads packed ones.
struct Stretch<'a> {
    segment: &'a OpenSegment,
    /// The first one's place in the segment.
    first: usize,
    /// The first one's place among the entries of all segments.
    column: usize,
    n: usize,
}

fn stretches<'a>(
    segments: &'a [OpenSegment],
    is_lone: bool,
    read: fn(&OpenSegment) -> &OpenEntries,
) -> impl Iterator<Item = Stretch<'a>> {
    let starts = segments.iter().scan(0, |end, segment| {
        let start = *end;
        *end += segment.n_entries;
        Some((start, segment))
    });
    starts.flat_map(move |(start, segment)| {
        let most = if is_lone && read(segment).is_packed() { segment.n_entries.max(1) } else { BLOCK };
        (0..segment.n_entries).step_by(most).map(move |first| {
            let n = most.min(segment.n_entries - first);
            Stretch { segment, first, column: start + first, n }
        })
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
