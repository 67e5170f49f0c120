//! Which keys a block of queries meets, and the scores of the block: what the two passes share.

use std::ops::Range;

use pulp::Simd;

use super::exp;
use super::product::{Into, LANES, Product};
use crate::cache::kv_cache::MASKED;
use crate::nn::span::Span;

/// Queries that are worked on together.
const QUERIES: usize = 32;

/// The queries `first..first + n` of one document, the keys near them and the earlier ones that last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Where the document starts.
    document: usize,
    pub(super) first: usize,
    pub(super) n: usize,
    /// The first of the keys up to the last query.
    pub(super) first_near: usize,
    /// How many lasting keys of the document come before these.
    pub(super) n_lasting: usize,
    /// How many lasting keys of the row come before those.
    pub(super) first_lasting: usize,
}

/// The reach of a row.
pub(super) struct Reach {
    span: Span,
    documents: Vec<Range<usize>>,
    /// Positions of the keys that all later queries of their document see, where a span leaves others out in between.
    pub(super) lasting: Vec<usize>,
}

impl Reach {
    /// The reach within documents that follow one another.
    pub(super) fn new(span: Span, documents: impl Iterator<Item = Range<usize>>) -> Self {
        let documents: Vec<Range<usize>> = documents.collect();
        let lasting = match span {
            Span::Full => Vec::new(),
            span => {
                let of = |document: &Range<usize>| {
                    let start = document.start;
                    span.lasting(document.len()).into_iter().map(move |key| start + key)
                };
                documents.iter().flat_map(of).collect()
            }
        };
        Self { span, documents, lasting }
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = Block> {
        self.documents.iter().flat_map(move |document| {
            let n_lasting_before = |key: usize| self.lasting.partition_point(|&lasting| lasting < key);
            let first_lasting = n_lasting_before(document.start);
            document.clone().step_by(QUERIES).map(move |first| {
                let first_near = self.first_near(document.start, first);
                Block {
                    document: document.start,
                    first,
                    n: QUERIES.min(document.end - first),
                    first_near,
                    n_lasting: n_lasting_before(first_near) - first_lasting,
                    first_lasting,
                }
            })
        })
    }

    /// The first key from which on `query` of a document sees all.
    fn first_near(&self, document: usize, query: usize) -> usize {
        let query = query - document;
        document
            + match self.span {
                Span::Strided { window, .. } => (query + 1).saturating_sub(window),
                span => span.first_visible(query),
            }
    }
}

impl Block {
    pub(super) fn n_near(&self) -> usize {
        self.first + self.n - self.first_near
    }

    /// The place of the first near key in a line of scores; lasting keys stand before.
    pub(super) fn near_column(&self) -> usize {
        self.n_lasting.next_multiple_of(LANES)
    }

    /// The sum of `depth` lines for each query, by weights that lie as scores do.
    pub(super) fn weigh<'a>(&self, weights: &'a [f32], lines: &'a [f32], stride: usize, depth: usize) -> Product<'a> {
        Product {
            left: weights,
            left_strides: [self.stride(), 1],
            right: lines,
            right_stride: stride,
            rows: self.n,
            columns: stride,
            depth,
        }
    }

    /// The length of a line of scores.
    pub(super) fn stride(&self) -> usize {
        self.near_column() + self.n_near().next_multiple_of(LANES)
    }
}

/// Keys or values of one head: as they are, and turned so that a vector holds one coordinate of neighbours.
pub(super) struct Side {
    /// `[N, K]`, lines as long as [`line_len`].
    pub(super) lines: Vec<f32>,
    /// `[K, N]`
    turned: Vec<f32>,
    turned_stride: usize,
}

impl Side {
    pub(super) fn new(lines: Vec<f32>, head_dim: usize) -> Self {
        let stride = line_len(head_dim);
        let n_lines = lines.len() / stride;
        // A block's last vector may reach past the last line. An odd multiple keeps lines from evicting each other from
        // the nearest cache.
        let turned_stride = ((n_lines / LANES + 2) | 1) * LANES;
        let mut turned = vec![0.0; head_dim * turned_stride];
        for (n, line) in lines.chunks_exact(stride).enumerate() {
            for (k, number) in line[..head_dim].iter().enumerate() {
                turned[k * turned_stride + n] = *number;
            }
        }
        Self { lines, turned, turned_stride }
    }

    /// `scores = left · lines first..first + n`, for a whole number of vectors.
    fn scores(&self, left: Queries, first: usize, n: usize, scores: &mut [f32], stride: usize) {
        let product = Product {
            left: left.lines,
            left_strides: [line_len(left.head_dim), 1],
            right: &self.turned[first..],
            right_stride: self.turned_stride,
            rows: left.n,
            columns: n.next_multiple_of(LANES),
            depth: left.head_dim,
        };
        product.run(scores, stride, Into::Replace);
    }
}

/// Lines of a block of queries, or of the gradients of what they gave.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    pub(super) lines: &'a [f32],
    pub(super) n: usize,
    pub(super) head_dim: usize,
}

/// All keys or values of a head, and copies of those that last.
pub(super) struct Sides {
    pub(super) all: Side,
    pub(super) lasting: Option<Side>,
}

impl Sides {
    pub(super) fn new(lines: Vec<f32>, head_dim: usize, lasting: &[usize]) -> Self {
        let stride = line_len(head_dim);
        let copies = (!lasting.is_empty()).then(|| {
            let copies = lasting.iter().flat_map(|&n| &lines[n * stride..][..stride]).copied().collect();
            Side::new(copies, head_dim)
        });
        Self { all: Side::new(lines, head_dim), lasting: copies }
    }

    /// `left · line` for each line that the block meets: `[n, block.stride()]`.
    pub(super) fn scores(&self, left: Queries, block: &Block, scores: &mut [f32]) {
        let stride = block.stride();
        if let Some(lasting) = self.lasting.as_ref().filter(|_| block.n_lasting > 0) {
            lasting.scores(left, block.first_lasting, block.n_lasting, scores, stride);
        }
        let near = &mut scores[block.near_column()..];
        self.all.scores(left, block.first_near, block.n_near(), near, stride);
    }
}

/// Lines of scratch, which vectors divide.
pub(super) fn line_len(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

/// Masks what the queries of a block must not see.
#[inline(always)]
pub(super) fn mask(reach: &Reach, block: &Block, scores: &mut [f32]) {
    let near_column = block.near_column();
    for (index, line) in scores.chunks_exact_mut(block.stride()).take(block.n).enumerate() {
        let query = block.first + index;
        line[block.n_lasting..near_column].fill(MASKED);
        let near = &mut line[near_column..];
        near[query + 1 - block.first_near..].fill(MASKED);
        let before = &mut near[..reach.first_near(block.document, query) - block.first_near];
        match reach.lasting.is_empty() {
            true => before.fill(MASKED),
            false => {
                let keys = block.first_near..;
                let hidden = before.iter_mut().zip(keys).filter(|(_, key)| reach.lasting.binary_search(key).is_err());
                hidden.for_each(|(score, _)| *score = MASKED);
            }
        }
    }
}

/// Turns a line of scores into `exp(score - largest)`, beside a sink; returns the largest and the sum of all powers.
#[inline(always)]
pub(super) fn powers<S: Simd>(simd: S, scores: &mut [f32], sink: f32) -> (f32, f32) {
    let (vectors, rest) = S::as_simd_f32s(scores);
    let largest = vectors.iter().fold(simd.splat_f32s(sink), |largest, vector| simd.max_f32s(largest, *vector));
    let largest = rest.iter().fold(simd.reduce_max_f32s(largest), |largest, score| largest.max(*score));
    for score in scores.iter_mut() {
        *score = exp(*score - largest);
    }
    let (vectors, rest) = S::as_simd_f32s(scores);
    let sum = vectors.iter().fold(simd.splat_f32s(0.0), |sum, vector| simd.add_f32s(sum, *vector));
    let sum = rest.iter().fold(simd.reduce_sum_f32s(sum), |sum, power| sum + power);
    (largest, sum + exp(sink - largest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(position: usize) -> Range<usize> {
        position..position + 1
    }

    /// Every key that a query sees is met once, and few others are: work grows with what is seen.
    #[test]
    fn blocks_meet_what_is_seen_and_little_more() {
        const N: usize = 5_000;
        let slack = QUERIES + 2 * LANES;
        for (span, most_besides) in [
            (Span::Full, slack),
            (Span::Window { len: 100 }, slack),
            (Span::Window { len: 1 }, slack),
            (Span::Blocks { len: 7, back: 0 }, slack + 7),
            (Span::Blocks { len: 50, back: 2 }, slack + 50),
            (Span::Strided { window: 64, sinks: 3, block: 8, every: 16 }, slack),
        ] {
            let met = |reach: &Reach| -> usize { reach.blocks().map(|block| block.n * block.stride()).sum() };
            let whole = Reach::new(span, std::iter::once(0..N));
            for documents in [
                std::iter::once(0..N).collect(),
                vec![0..1, 1..40, 40..3_000, 3_000..3_001, 3_001..N],
                (0..N).map(one).collect(),
            ] {
                let reach = Reach::new(span, documents.iter().cloned());
                let seen: usize = documents.iter().map(|document| span.visible_pairs(document.len()) as usize).sum();
                let met = (met(&reach), met(&whole));
                assert!(met.0 >= seen && met.0 <= seen + N * most_besides, "{span:?}: {met:?} for {seen}");
                assert!(met.0 <= met.1 + documents.len() * QUERIES * LANES, "{span:?}: {met:?}");
                let queries: Vec<usize> = reach.blocks().flat_map(|block| block.first..block.first + block.n).collect();
                assert!(queries.into_iter().eq(0..N));
                for block in reach.blocks() {
                    let document = documents.iter().rfind(|document| document.start <= block.first).unwrap();
                    assert!(block.first_near >= document.start && block.first + block.n <= document.end);
                    let lasting = &reach.lasting[block.first_lasting..][..block.n_lasting];
                    assert!(lasting.iter().all(|&key| document.start <= key && key < block.first_near));
                    for query in [block.first, block.first + block.n - 1] {
                        let is_met = |key: usize| key >= block.first_near || lasting.contains(&key);
                        let sees = |key: &usize| span.sees(query - document.start, key - document.start);
                        assert!((document.start..=query).filter(sees).all(is_met), "{span:?}");
                    }
                }
            }
        }
    }
}
