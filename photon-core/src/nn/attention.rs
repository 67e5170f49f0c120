//! Causal self-attention over a span, in training over whole sequences and in decoding over a cache.
//!
//! A bounded span never computes all pairs: positions are cut into blocks, and a block of queries meets the keys
//! of its own block and of the few before it. In a strided span it meets the keys that last besides. The CPU has a
//! kernel for that; other devices get it by masks (`mask`). The tests compute all pairs as the oracle of both shortcuts.
//! Picked blocks differ from query to query, so there all pairs are computed.

mod mask;

pub(crate) use self::mask::pairs_mask;
pub use self::mask::{BlocksMask, SequenceMask, sequence_mask};

use burn::module::{Module, Param};
use burn::nn::Linear;
use burn::tensor::Tensor;

use super::activations::Activations;
use super::block_pick::BlockPick;
use super::compute::{Compute, in_f32};
use super::fused;
use super::fused::span_attention::span_attention;
use super::rope::Rotation;
use super::span::Span;
use crate::cache::kv_cache::{KvCache, NewEntries};
use crate::cache::row_store::indices;
use crate::config::StackSpec;
use crate::init::Initializer;

const HEAD: usize = 1;
const SEQ: usize = 2;
const KEYS: usize = 3;

/// Multi-head or grouped-query attention without biases.
#[derive(Module, Debug)]
pub struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    sinks: Option<Param<Tensor<1>>>,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    #[module(skip)]
    span: Span,
    #[module(skip)]
    pick: Option<BlockPick>,
}

impl Attention {
    /// Fresh weights; `n_adds` is the number of branches that add to the residual stream of the stack.
    pub fn new(spec: &StackSpec, n_adds: usize, init: &mut Initializer) -> Self {
        let (d_model, d_kv) = (spec.d_model, spec.n_kv_heads * spec.head_dim());
        Self {
            q_proj: init.linear(d_model, d_model),
            k_proj: init.linear(d_model, d_kv),
            v_proj: init.linear(d_model, d_kv),
            o_proj: init.residual_linear(d_model, d_model, n_adds),
            sinks: spec.sink.then(|| init.sinks(spec.n_heads)),
            n_heads: spec.n_heads,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim(),
            span: spec.span,
            pick: spec.pick,
        }
    }

    /// Attention within whole sequences, or within the documents that they hold.
    ///
    /// # Shapes
    ///
    /// `x: [B, N, D] -> [B, N, D]`; `mask` is [`sequence_mask`] of the same stack, documents and length.
    pub fn forward(
        &self,
        x: Tensor<3>,
        rotation: Option<&Rotation>,
        mask: &SequenceMask,
        compute: Compute,
    ) -> Tensor<3> {
        let [batch, n_positions, d_model] = x.dims();
        let (q, k, v) = self.project(x, rotation, compute); // [B, N, H, K]
        let out = match mask {
            SequenceMask::Kernel(documents) => {
                let sinks = match &self.sinks {
                    Some(sinks) => sinks.val(),
                    None => Tensor::full([self.n_heads], f32::NEG_INFINITY, &q.device()),
                };
                span_attention(q, k, v, sinks, self.span, documents).reshape([batch, n_positions, d_model])
            }
            SequenceMask::AllPairs(mask) => {
                let (q, k, v) = (heads_first(self.scaled(q)), heads_first(k), heads_first(v));
                let positions = || [(0..q.dims()[SEQ]).collect()];
                let mask = match self.pick {
                    Some(pick) => pick.mask(mask.clone(), q.clone(), k.clone(), &positions()),
                    None => mask.clone(),
                };
                self.weigh(q, k, v, mask)
            }
            SequenceMask::Picked(blocks) => {
                let (q, k, v) = (heads_first(self.scaled(q)), heads_first(k), heads_first(v));
                let mask = blocks.mask(q.clone(), k.clone());
                self.weigh(q, k, v, mask)
            }
            SequenceMask::Blocks(blocks) => self.weigh_blocks(self.scaled(q), k, v, blocks),
        };
        in_f32(compute.linear(&self.o_proj, out)) // [B, N, D]
    }

    /// Attention of new positions to a cache that takes them up.
    ///
    /// # Shapes
    ///
    /// `x: [b, N, D] -> [b, N, D]` for `b` rows of the cache; `positions`: `b` lists of `N`.
    pub fn step(
        &self,
        x: Tensor<3>,
        rotation: Option<&Rotation>,
        cache: &mut KvCache,
        rows: &[usize],
        positions: &[Vec<usize>],
        activations: Activations,
    ) -> Tensor<3> {
        let [batch, n_positions, d_model] = x.dims();
        let (q, k, v) = self.project(activations.round(x), rotation, Compute::F32); // [b, N, H, K]
        let queries = heads_first(self.scaled(q));
        let new = NewEntries { rows, positions, queries, keys: heads_first(k), values: heads_first(v) };
        let out = cache.attend(new, self.sinks.as_ref().map(Param::val)); // [b, H, N, K]
        let out = out.swap_dims(HEAD, SEQ).reshape([batch, n_positions, d_model]);
        in_f32(Compute::F32.linear(&self.o_proj, activations.round(out))) // [b, N, D]
    }

    /// `[B, N, D]` to queries, keys and values `[B, N, H, K]`, turned by their positions.
    fn project(
        &self,
        x: Tensor<3>,
        rotation: Option<&Rotation>,
        compute: Compute,
    ) -> (Tensor<4>, Tensor<4>, Tensor<4>) {
        let [batch, n_positions, _] = x.dims();
        let compute = compute.or_stored(&self.q_proj);
        let x = compute.round(x);
        let heads = |proj: &Linear, n_heads: usize| {
            let heads = in_f32(compute.linear(proj, x.clone()));
            heads.reshape([batch, n_positions, n_heads, self.head_dim])
        };
        let q = heads(&self.q_proj, self.n_heads);
        let k = heads(&self.k_proj, self.n_kv_heads);
        let v = heads(&self.v_proj, self.n_kv_heads);
        match rotation {
            Some(rotation) => (rotation.apply(q), rotation.apply(k), v),
            None => (q, k, v),
        }
    }

    /// Queries whose products with keys are scores.
    fn scaled(&self, q: Tensor<4>) -> Tensor<4> {
        q / (self.head_dim as f64).sqrt()
    }

    /// Attention, with the sink where there is one, of `q [B, H, N, K]` to `k, v [B, H_kv, E, K]`: `[B, N, D]`.
    ///
    /// `mask` is added to the scores; it broadcasts to `[B, 1, N, E]`.
    fn weigh(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: Tensor<4>) -> Tensor<3> {
        let [batch, n_heads, n_queries, head_dim] = q.dims();
        let (q, k, v, mask) = match &self.sinks {
            Some(sinks) => with_sink(sinks.val(), q, k, v, mask),
            None => (q, k, v, mask),
        };
        // Query heads that share keys and values go through one product as if they were more queries.
        let n_shared = n_heads / self.n_kv_heads;
        let [_, _, _, d_query] = q.dims();
        let q = q.reshape([batch, self.n_kv_heads, n_shared * n_queries, d_query]);
        let mask = if n_shared > 1 { mask.repeat_dim(SEQ, n_shared) } else { mask };
        let out = fused::attention(q, k, v, mask).reshape([batch, n_heads, n_queries, head_dim]);
        out.swap_dims(HEAD, SEQ).reshape([batch, n_queries, n_heads * head_dim]) // [B, N, D]
    }

    /// Attention of each block of queries to its own keys, those of the blocks before, and those that last: `[B, N, D]`.
    ///
    /// Blocks become batch rows, so one call serves all of them.
    fn weigh_blocks(&self, q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, blocks: &BlocksMask) -> Tensor<3> {
        let &BlocksMask { len, back, ref lasting, n_lasting, ref mask } = blocks;
        let [batch, n_positions, n_heads, head_dim] = q.dims();
        let n_blocks = n_positions.div_ceil(len);
        let rows = batch * n_blocks;
        let q = pad_positions(q, 0, n_blocks * len).reshape([rows, len, n_heads, head_dim]);
        let device = q.device();
        let gathered = |x: Tensor<4>| {
            let n_heads = x.dims()[2];
            let width = n_heads * head_dim;
            let copies = (n_lasting > 0).then(|| {
                let entries = x.clone().reshape([batch * n_positions, width]).select(0, indices(lasting, &device));
                entries.reshape([batch, 1, n_lasting, width]).expand([batch, n_blocks, n_lasting, width])
            });
            let padded = pad_positions(x, back * len, n_blocks * len); // [B, (back + n_blocks) * len, H, K]
            let near = padded.reshape([batch, back + n_blocks, len, width]);
            let shifted = (0..=back).map(|shift| near.clone().narrow(1, shift, n_blocks));
            let keys = Tensor::cat(shifted.chain(copies).collect(), 2); // [B, n, E, H*K]
            keys.reshape([rows, (back + 1) * len + n_lasting, n_heads, head_dim])
        };
        let (k, v) = (gathered(k), gathered(v)); // [B*n, E, H, K]
        let out = self.weigh(heads_first(q), heads_first(k), heads_first(v), mask.clone());
        let out = out.reshape([batch, n_blocks * len, n_heads * head_dim]);
        out.narrow(1, 0, n_positions) // [B, N, D]
    }
}

/// The sink as one more key that no position holds: its score is the learned logit of each query head, its value zero.
///
/// Queries grow by a coordinate that holds the logit, which only the sink's key looks at.
fn with_sink(
    sinks: Tensor<1>,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Tensor<4>,
) -> (Tensor<4>, Tensor<4>, Tensor<4>, Tensor<4>) {
    let ([batch, n_heads, n_queries, head_dim], [_, n_kv_heads, n_keys, _]) = (q.dims(), k.dims());
    let device = q.device();
    let zeros = |shape: [usize; 4]| Tensor::zeros(shape, &device);
    let logits = sinks.reshape([1, n_heads, 1, 1]).expand([batch, n_heads, n_queries, 1]);
    let q = Tensor::cat(vec![q, logits], KEYS); // [B, H, N, K+1]
    let k = Tensor::cat(vec![k, zeros([batch, n_kv_heads, n_keys, 1])], KEYS);
    let sink_key = Tensor::cat(vec![zeros([1, 1, 1, head_dim]), Tensor::ones([1, 1, 1, 1], &device)], KEYS);
    let k = Tensor::cat(vec![k, sink_key.expand([batch, n_kv_heads, 1, head_dim + 1])], SEQ); // [B, H_kv, E+1, K+1]
    let v = Tensor::cat(vec![v, zeros([batch, n_kv_heads, 1, head_dim])], SEQ); // [B, H_kv, E+1, K]
    let [mask_rows, _, mask_queries, mask_keys] = mask.dims();
    let mask = match mask_keys == n_keys {
        true => Tensor::cat(vec![mask, zeros([mask_rows, 1, mask_queries, 1])], KEYS),
        // Nothing is masked.
        false => mask,
    };
    (q, k, v, mask)
}

/// `[B, N, H, K] -> [B, H, N, K]`
fn heads_first(x: Tensor<4>) -> Tensor<4> {
    x.swap_dims(HEAD, SEQ)
}

/// Zeros before and after the positions: `[B, N, H, K] -> [B, n_before + n_positions, H, K]`.
fn pad_positions(x: Tensor<4>, n_before: usize, n_positions: usize) -> Tensor<4> {
    let [batch, n_given, n_heads, head_dim] = x.dims();
    let zeros = |n: usize| Tensor::zeros([batch, n, n_heads, head_dim], &x.device());
    let mut parts = Vec::with_capacity(3);
    if n_before > 0 {
        parts.push(zeros(n_before));
    }
    let after = (n_positions > n_given).then(|| zeros(n_positions - n_given));
    parts.push(x);
    parts.extend(after);
    Tensor::cat(parts, 1)
}

#[cfg(test)]
mod tests;
