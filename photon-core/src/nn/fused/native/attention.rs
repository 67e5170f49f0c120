//! Attention of whole sequences, block by block of queries: no weights outlive their block, and keys that no query of
//! a block sees cost nothing; no block reaches over the end of a document. The backward pass makes the weights again from the logarithm of their sum.

use burn::backend::flex::FlexTensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::attention_blocks::{Queries, Reach, Sides, line_len, mask, powers};
use super::product::{Into, Product};
use super::{contiguous, dims, exp, numbers, tensor};
use crate::cache::attend::kernels::dots;
use crate::cache::vectorized::vectorized;
use crate::documents::Documents;
use crate::nn::span::Span;

/// What goes in.
#[derive(Clone, Debug)]
pub(crate) struct Inputs<T> {
    /// `[B, N, H, K]`
    pub(crate) q: T,
    /// `[B, N, H_kv, K]`
    pub(crate) k: T,
    /// `[B, N, H_kv, K]`
    pub(crate) v: T,
    /// `[H]`: logits, minus infinity for none.
    pub(crate) sinks: T,
    pub(crate) span: Span,
    /// As many rows as `q`.
    pub(crate) documents: Documents,
}

/// The result, `[B, N, H, K]`, and the logarithms of the sums of exponentials, `[B, H, N]`.
pub(crate) fn forward(inputs: &Inputs<FlexTensor>) -> (FlexTensor, FlexTensor) {
    let call = Call::new(inputs);
    let heads: Vec<(Vec<f32>, Vec<f32>)> =
        call.heads().map(|(row, kv_head)| vectorized(ForwardHeads { call: &call, row, kv_head })).collect();
    let out = call.gather(heads.iter().map(|(out, _)| &out[..]), call.n_heads);
    let log_sums = heads.into_iter().flat_map(|(_, log_sums)| log_sums).collect();
    (out, tensor(log_sums, [call.batch, call.n_heads, call.n_positions]))
}

/// The gradients of queries, keys, values and sinks.
pub(crate) fn backward(
    inputs: &Inputs<FlexTensor>,
    out: FlexTensor,
    log_sums: FlexTensor,
    d_out: FlexTensor,
) -> [FlexTensor; 4] {
    let call = Call::new(inputs);
    let (out, log_sums, d_out) = (contiguous(out), contiguous(log_sums), contiguous(d_out));
    let (out, log_sums, d_out) = (numbers(&out), numbers(&log_sums), numbers(&d_out));
    let heads: Vec<HeadGradients> = call
        .heads()
        .map(|(row, kv_head)| vectorized(BackwardHeads { call: &call, row, kv_head, out, log_sums, d_out }))
        .collect();
    let mut d_sinks = vec![0.0; call.n_heads];
    for (index, head) in heads.iter().enumerate() {
        let first = index % call.n_kv_heads * call.n_shared();
        d_sinks[first..].iter_mut().zip(&head.sinks).for_each(|(sum, part)| *sum += part);
    }
    [
        call.gather(heads.iter().map(|head| &head.q[..]), call.n_heads),
        call.gather(heads.iter().map(|head| &head.k[..]), call.n_kv_heads),
        call.gather(heads.iter().map(|head| &head.v[..]), call.n_kv_heads),
        tensor(d_sinks, [call.n_heads]),
    ]
}

struct Call {
    batch: usize,
    n_positions: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    /// One a row.
    reaches: Vec<Reach>,
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    sinks: FlexTensor,
}

impl Call {
    fn new(inputs: &Inputs<FlexTensor>) -> Self {
        let [batch, n_positions, n_heads, head_dim] = dims(&inputs.q);
        let [_, _, n_kv_heads, _] = dims(&inputs.k);
        let open = |x: &FlexTensor| contiguous(x.clone());
        Self {
            batch,
            n_positions,
            n_heads,
            n_kv_heads,
            head_dim,
            reaches: (0..batch).map(|row| Reach::new(inputs.span, inputs.documents.of_row(row, n_positions))).collect(),
            q: open(&inputs.q),
            k: open(&inputs.k),
            v: open(&inputs.v),
            sinks: open(&inputs.sinks),
        }
    }

    /// Query heads that share keys and values.
    fn n_shared(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// Every key and value head of every row.
    fn heads(&self) -> impl IndexedParallelIterator<Item = (usize, usize)> {
        let n_kv_heads = self.n_kv_heads;
        (0..self.batch * n_kv_heads).into_par_iter().map(move |index| (index / n_kv_heads, index % n_kv_heads))
    }

    /// The lines of one head out of `[B, N, H, K]`, times `scale`: `[N, line_len(K)]`.
    #[inline(always)]
    fn lines(&self, numbers: &[f32], n_heads: usize, row: usize, head: usize, scale: f32) -> Vec<f32> {
        let stride = line_len(self.head_dim);
        let mut lines = vec![0.0; self.n_positions * stride];
        let per_row = self.n_positions * n_heads * self.head_dim;
        let positions = numbers[row * per_row..][..per_row].chunks_exact(n_heads * self.head_dim);
        for (line, heads) in lines.chunks_exact_mut(stride).zip(positions) {
            let head = &heads[head * self.head_dim..][..self.head_dim];
            line.iter_mut().zip(head).for_each(|(place, number)| *place = number * scale);
        }
        lines
    }

    fn sides(&self, numbers: &[f32], row: usize, kv_head: usize) -> Sides {
        Sides::new(self.lines(numbers, self.n_kv_heads, row, kv_head, 1.0), self.head_dim, &self.reaches[row].lasting)
    }

    /// The lines of all heads as `[B, N, H, K]`; a part holds those of one key and value head.
    fn gather<'a>(&self, parts: impl Iterator<Item = &'a [f32]>, n_heads: usize) -> FlexTensor {
        let (head_dim, stride) = (self.head_dim, line_len(self.head_dim));
        let mut gathered = vec![0.0; self.batch * self.n_positions * n_heads * head_dim];
        let heads = parts.flat_map(|part| part.chunks_exact(self.n_positions * stride));
        for (index, lines) in heads.enumerate() {
            let (row, head) = (index / n_heads, index % n_heads);
            let per_row = self.n_positions * n_heads * head_dim;
            let positions = gathered[row * per_row..][..per_row].chunks_exact_mut(n_heads * head_dim);
            for (heads, line) in positions.zip(lines.chunks_exact(stride)) {
                heads[head * head_dim..][..head_dim].copy_from_slice(&line[..head_dim]);
            }
        }
        tensor(gathered, [self.batch, self.n_positions, n_heads, head_dim])
    }
}

/// Room for the scores of a block.
fn room(scores: &mut Vec<f32>, n: usize) -> &mut [f32] {
    if scores.len() < n {
        scores.resize(n, 0.0);
    }
    &mut scores[..n]
}

/// The query heads of one key and value head of one row.
struct ForwardHeads<'a> {
    call: &'a Call,
    row: usize,
    kv_head: usize,
}

impl WithSimd for ForwardHeads<'_> {
    type Output = (Vec<f32>, Vec<f32>);

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> (Vec<f32>, Vec<f32>) {
        let Self { call, row, kv_head } = self;
        let (head_dim, stride, reach) = (call.head_dim, line_len(call.head_dim), &call.reaches[row]);
        let keys = call.sides(numbers(&call.k), row, kv_head);
        let values = call.lines(numbers(&call.v), call.n_kv_heads, row, kv_head, 1.0);
        let lasting_values: Vec<f32> =
            reach.lasting.iter().flat_map(|&key| &values[key * stride..][..stride]).copied().collect();
        let mut out = vec![0.0; call.n_shared() * call.n_positions * stride];
        let mut log_sums = vec![0.0; call.n_shared() * call.n_positions];
        let mut scores = Vec::new();
        let outs = out.chunks_exact_mut(call.n_positions * stride).zip(log_sums.chunks_exact_mut(call.n_positions));
        for (shared, (out, log_sums)) in outs.enumerate() {
            let head = kv_head * call.n_shared() + shared;
            let sink = numbers(&call.sinks)[head];
            let queries = call.lines(numbers(&call.q), call.n_heads, row, head, call.scale());
            for block in reach.blocks() {
                let n_scores = block.stride();
                let scores = room(&mut scores, block.n * n_scores);
                let lines = block.first * stride..(block.first + block.n) * stride;
                let queries = Queries { lines: &queries[lines.clone()], n: block.n, head_dim };
                keys.scores(queries, &block, scores);
                mask(reach, &block, scores);
                let block_sums = &mut log_sums[block.first..][..block.n];
                for (line, log_sum) in scores.chunks_exact_mut(n_scores).zip(block_sums) {
                    let (largest, sum) = powers(simd, line, sink);
                    let share = 1.0 / sum;
                    line.iter_mut().for_each(|power| *power *= share);
                    *log_sum = largest + sum.ln();
                }
                let weigh = |weights, lines, depth| block.weigh(weights, lines, stride, depth);
                let out = &mut out[lines];
                let near = &values[block.first_near * stride..];
                weigh(&scores[block.near_column()..], near, block.n_near()).run(out, stride, Into::Replace);
                let lasting = &lasting_values[block.first_lasting * stride..];
                weigh(scores, lasting, block.n_lasting).run(out, stride, Into::Add);
            }
        }
        (out, log_sums)
    }
}

/// Gradients of one key and value head of one row.
struct HeadGradients {
    /// Of its query heads, one after another.
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// One for each query head.
    sinks: Vec<f32>,
}

struct BackwardHeads<'a> {
    call: &'a Call,
    row: usize,
    kv_head: usize,
    out: &'a [f32],
    log_sums: &'a [f32],
    d_out: &'a [f32],
}

impl WithSimd for BackwardHeads<'_> {
    type Output = HeadGradients;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> HeadGradients {
        let Self { call, row, kv_head, out, log_sums, d_out } = self;
        let (head_dim, stride, n_positions) = (call.head_dim, line_len(call.head_dim), call.n_positions);
        let (keys, values) = (call.sides(numbers(&call.k), row, kv_head), call.sides(numbers(&call.v), row, kv_head));
        let (reach, lasting) = (&call.reaches[row], &call.reaches[row].lasting);
        let zeros = |n_lines: usize| vec![0.0; n_lines * stride];
        let (mut d_k, mut d_v) = (zeros(n_positions), zeros(n_positions));
        let (mut d_lasting_k, mut d_lasting_v) = (zeros(lasting.len()), zeros(lasting.len()));
        let mut d_q = zeros(call.n_shared() * n_positions);
        let mut d_sinks = vec![0.0; call.n_shared()];
        let (mut scores, mut d_scores) = (Vec::new(), Vec::new());
        for (shared, d_q) in d_q.chunks_exact_mut(n_positions * stride).enumerate() {
            let head = kv_head * call.n_shared() + shared;
            let sink = numbers(&call.sinks)[head];
            let log_sums = &log_sums[(row * call.n_heads + head) * n_positions..][..n_positions];
            let queries = call.lines(numbers(&call.q), call.n_heads, row, head, call.scale());
            let out = call.lines(out, call.n_heads, row, head, 1.0);
            let d_out = call.lines(d_out, call.n_heads, row, head, 1.0);
            for block in reach.blocks() {
                let n_scores = block.stride();
                let lines = block.first * stride..(block.first + block.n) * stride;
                let block_of = |lines| Queries { lines, n: block.n, head_dim };
                let (queries, d_out) = (block_of(&queries[lines.clone()]), block_of(&d_out[lines.clone()]));

                let scores = room(&mut scores, block.n * n_scores);
                let d_scores = room(&mut d_scores, block.n * n_scores);
                keys.scores(queries, &block, scores);
                mask(reach, &block, scores);
                values.scores(d_out, &block, d_scores);
                for index in 0..block.n {
                    let log_sum = log_sums[block.first + index];
                    let line = index * stride..(index + 1) * stride;
                    let along = dots(simd, &d_out.lines[line.clone()], [&out[lines.clone()][line]])[0];
                    d_sinks[shared] -= exp(sink - log_sum) * along;
                    let line = index * n_scores..(index + 1) * n_scores;
                    for (score, d_score) in scores[line.clone()].iter_mut().zip(&mut d_scores[line]) {
                        *score = exp(*score - log_sum);
                        *d_score = *score * (*d_score - along);
                    }
                }

                let to_queries = |weights, lines, depth| block.weigh(weights, lines, stride, depth);
                let to_keys = |left, right, rows| Product {
                    left,
                    left_strides: [1, n_scores],
                    right,
                    right_stride: stride,
                    rows,
                    columns: stride,
                    depth: block.n,
                };
                let (near, n_near, n_lasting) = (block.near_column(), block.n_near(), block.n_lasting);
                let first = block.first_near * stride;
                let d_q = &mut d_q[lines];
                to_queries(&d_scores[near..], &keys.all.lines[first..], n_near).run(d_q, stride, Into::Replace);
                to_keys(&d_scores[near..], queries.lines, n_near).run(&mut d_k[first..], stride, Into::Add);
                to_keys(&scores[near..], d_out.lines, n_near).run(&mut d_v[first..], stride, Into::Add);
                if let Some(lasting) = keys.lasting.as_ref().filter(|_| n_lasting > 0) {
                    let first = block.first_lasting * stride;
                    to_queries(d_scores, &lasting.lines[first..], n_lasting).run(d_q, stride, Into::Add);
                    to_keys(d_scores, queries.lines, n_lasting).run(&mut d_lasting_k[first..], stride, Into::Add);
                    to_keys(scores, d_out.lines, n_lasting).run(&mut d_lasting_v[first..], stride, Into::Add);
                }
                d_q.iter_mut().for_each(|d| *d *= call.scale());
            }
        }
        for (sums, parts) in [(&mut d_k, d_lasting_k), (&mut d_v, d_lasting_v)] {
            for (&key, part) in lasting.iter().zip(parts.chunks_exact(stride)) {
                sums[key * stride..][..stride].iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
        HeadGradients { q: d_q, k: d_k, v: d_v, sinks: d_sinks }
    }
}
