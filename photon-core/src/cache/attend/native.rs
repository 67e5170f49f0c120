//! Attention of few queries on the CPU backend: one pass over keys, a softmax, one pass over values, for each head.

use burn::tensor::{DType, Tensor, TensorData, bf16, f16};
use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::rows::{Dense, Int4, Int8, Place, Rows};
use crate::cache::entries::{Code, Entries, Packed, Packing, Segment};
use crate::cache::flex::{self, Lines};
use crate::cache::vectorized::vectorized;

/// Queries for which reading entries in place is faster than unpacking them for a matrix product.
const MAX_QUERIES: usize = 16;
/// Entries that all queries meet before the next ones are read, to find them in the processor's cache.
const BLOCK: usize = 64;
/// Multiplications that are worth waking a second thread.
const PARALLEL_WORK: usize = 1 << 19;

/// Whether [`attend`] is there for these tensors, and the better way.
pub(super) fn serves(q: &Tensor<4>, segments: &[Segment]) -> bool {
    let is_readable = |entries: &Entries| match entries {
        Entries::Dense(numbers) => matches!(numbers.dtype(), DType::F32 | DType::F16 | DType::BF16),
        Entries::Packed(Packed { params, packing, .. }) => {
            // A byte holds two codes of one group.
            let has_whole_bytes = packing.code == Code::Int8 || packing.group.is_multiple_of(2);
            params.dtype() == DType::F16 && has_whole_bytes
        }
    };
    let are_readable = |segment: &Segment| is_readable(&segment.keys) && is_readable(&segment.values);
    flex::serves(&q.device()) && q.dims()[2] <= MAX_QUERIES && segments.iter().all(are_readable)
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
        call.attend_head(row, head, &mut Queries { n_entries, head_dim, weights, out });
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

/// What the queries of one head get.
struct Queries<'a> {
    n_entries: usize,
    head_dim: usize,
    /// `[N, E]`: first scores, then their softmax.
    weights: &'a mut [f32],
    /// `[N, K]`
    out: &'a mut [f32],
}

impl Call {
    fn attend_head(&self, row: usize, head: usize, queries: &mut Queries) {
        let q: Vec<&[f32]> =
            (0..queries.out.len() / queries.head_dim).map(|query| self.q.line(row, head, query)).collect();
        let mut first = 0;
        for segment in &self.segments {
            segment.keys.visit(row, head, Scores { q: &q, queries, first, n: segment.n_entries });
            first += segment.n_entries;
        }
        for (query, weights) in queries.weights.chunks_exact_mut(queries.n_entries).enumerate() {
            let mask = self.mask.line(row, head, query);
            let sink = self.sinks.as_ref().map_or(f32::NEG_INFINITY, |sinks| sinks.line(row, head, query)[0]);
            vectorized(Softmax { weights, mask, sink });
        }
        let mut first = 0;
        for segment in &self.segments {
            segment.values.visit(row, head, WeightedSums { queries, first, n: segment.n_entries });
            first += segment.n_entries;
        }
    }
}

/// A segment whose storage can be read.
struct OpenSegment {
    keys: OpenEntries,
    values: OpenEntries,
    n_entries: usize,
}

enum OpenEntries {
    Dense { numbers: Lines, head_dim: usize },
    Packed { codes: Lines, params: Lines, packing: Packing },
}

/// What is done with the entries of one head.
trait Visitor {
    fn visit(self, rows: impl Rows);
}

impl OpenSegment {
    fn new(Segment { keys, values }: Segment) -> Self {
        let [_, _, n_entries, _] = keys.dims();
        assert_eq!(n_entries, values.dims()[2], "keys and values of a segment differ in number");
        Self { keys: OpenEntries::new(keys), values: OpenEntries::new(values), n_entries }
    }
}

impl OpenEntries {
    fn new(entries: Entries) -> Self {
        let [.., head_dim] = entries.dims();
        match entries {
            Entries::Dense(numbers) => Self::Dense { numbers: Lines::floats(numbers.inner()), head_dim },
            Entries::Packed(Packed { codes, params, packing }) => {
                Self::Packed { codes: Lines::words(codes), params: Lines::floats(params.inner()), packing }
            }
        }
    }

    /// Shows the entries of one head in the type of their format.
    fn visit(&self, row: usize, head: usize, visitor: impl Visitor) {
        match self {
            Self::Dense { numbers, head_dim } => {
                let place = Place { start: numbers.start(row, head), stride: numbers.line_stride(), len: *head_dim };
                let tensor = numbers.tensor();
                match tensor.dtype() {
                    DType::F16 => visitor.visit(Dense { storage: tensor.storage::<f16>(), place }),
                    DType::BF16 => visitor.visit(Dense { storage: tensor.storage::<bf16>(), place }),
                    _ => visitor.visit(Dense { storage: tensor.storage::<f32>(), place }),
                }
            }
            Self::Packed { codes: words, params, packing } => {
                let Packing { code, group, .. } = *packing;
                let (codes, code_place) = (words.tensor().bytes(), packed_place(words, row, head, packing));
                let per_head = packing.params_per_head();
                let place = Place {
                    start: params.start(row, 0) + head * per_head,
                    stride: params.line_stride(),
                    len: per_head,
                };
                let params = params.tensor().storage::<f16>();
                match code {
                    Code::Int8 => {
                        visitor.visit(Int8 { codes, code_place, scales: params, scale_place: place, group });
                    }
                    Code::Int4 => visitor.visit(Int4 { codes, code_place, params, param_place: place, group }),
                }
            }
        }
    }
}

/// Where the bytes of a head's codes lie.
fn packed_place(words: &Lines, row: usize, head: usize, packing: &Packing) -> Place {
    const WORD_BYTES: usize = 4;
    Place {
        start: WORD_BYTES * (words.start(row, 0) + head * packing.words_per_head()),
        stride: WORD_BYTES * words.line_stride(),
        len: packing.head_dim * packing.code.bits() / 8,
    }
}

/// Writes the scores of all queries for one segment's `n` entries, from column `first` on.
struct Scores<'a, 'b> {
    q: &'a [&'a [f32]],
    queries: &'a mut Queries<'b>,
    first: usize,
    n: usize,
}

impl Visitor for Scores<'_, '_> {
    fn visit(self, rows: impl Rows) {
        vectorized(ScoresOf { call: self, rows });
    }
}

struct ScoresOf<'a, 'b, R> {
    call: Scores<'a, 'b>,
    rows: R,
}

impl<R: Rows> NullaryFnOnce for ScoresOf<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { call: Scores { q, queries, first, n }, rows } = self;
        let mut prepared = Vec::with_capacity(q.len());
        for numbers in q {
            prepared.push(rows.query(numbers));
        }
        for start in (0..n).step_by(BLOCK) {
            let len = BLOCK.min(n - start);
            for (query, scores) in prepared.iter().zip(queries.weights.chunks_exact_mut(queries.n_entries)) {
                for (entry, score) in scores[first + start..][..len].iter_mut().enumerate() {
                    *score = rows.dot(query, start + entry);
                }
            }
        }
    }
}

/// Adds the weighed values of one segment's `n` entries, whose weights stand from column `first` on.
struct WeightedSums<'a, 'b> {
    queries: &'a mut Queries<'b>,
    first: usize,
    n: usize,
}

impl Visitor for WeightedSums<'_, '_> {
    fn visit(self, rows: impl Rows) {
        vectorized(WeightedSumsOf { call: self, rows });
    }
}

struct WeightedSumsOf<'a, 'b, R> {
    call: WeightedSums<'a, 'b>,
    rows: R,
}

impl<R: Rows> NullaryFnOnce for WeightedSumsOf<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { call: WeightedSums { queries, first, n }, rows } = self;
        let Queries { n_entries, head_dim, weights, out } = queries;
        let mut sums = Vec::with_capacity(out.len() / *head_dim);
        for _ in 0..out.len() / *head_dim {
            sums.push(rows.sum());
        }
        for start in (0..n).step_by(BLOCK) {
            let len = BLOCK.min(n - start);
            let lines = weights.chunks_exact(*n_entries).zip(out.chunks_exact_mut(*head_dim));
            for (sum, (weights, out)) in sums.iter_mut().zip(lines) {
                for (entry, weight) in weights[first + start..][..len].iter().enumerate() {
                    rows.add(sum, start + entry, *weight);
                }
                // Short sums of their own lose fewer digits.
                rows.flush(sum, out);
            }
        }
    }
}

/// Turns scores into weights; `mask` has a number for each, or one for all.
struct Softmax<'a> {
    weights: &'a mut [f32],
    mask: &'a [f32],
    sink: f32,
}

impl NullaryFnOnce for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Self { weights, mask, sink } = self;
        match mask {
            [one] => weights.iter_mut().for_each(|score| *score += one),
            _ => weights.iter_mut().zip(mask).for_each(|(score, mask)| *score += mask),
        }
        let largest = weights.iter().fold(sink, |largest, score| largest.max(*score));
        let mut total = (sink - largest).exp();
        for score in weights.iter_mut() {
            *score = (*score - largest).exp();
            total += *score;
        }
        let share = 1.0 / total;
        weights.iter_mut().for_each(|weight| *weight *= share);
    }
}
