//! A causal transformer: pre-norm blocks of attention and feed-forward, and a final norm.
//!
//! Encoders, decoders and the flat model are all this, with spans of their own.

use burn::module::Module;
use burn::nn::RmsNorm;
use burn::tensor::{Device, Tensor};

use super::attention::{Attention, SequenceMask, sequence_mask};
use super::feed_forward::FeedForward;
use super::fused::norm;
use super::kv_cache::KvCache;
use super::rope::Rotation;
use super::span::Span;
use crate::config::{Positions, StackSpec};
use crate::init::Initializer;

/// One block: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    feed_forward_norm: RmsNorm,
    feed_forward: FeedForward,
}

impl Block {
    fn new(spec: &StackSpec, init: &mut Initializer) -> Self {
        let n_adds = 2 * spec.n_layers;
        Self {
            attention_norm: init.norm(spec.d_model, spec.norm_eps),
            attention: Attention::new(spec, n_adds, init),
            feed_forward_norm: init.norm(spec.d_model, spec.norm_eps),
            feed_forward: FeedForward::new(spec.d_model, spec.d_ff, n_adds, init),
        }
    }

    /// `[B, N, D] -> [B, N, D]`; `attend` is the only part that training and decoding do differently.
    fn run(&self, x: Tensor<3>, attend: impl FnOnce(&Attention, Tensor<3>) -> Tensor<3>) -> Tensor<3> {
        let x = x.clone() + attend(&self.attention, norm(&self.attention_norm, x));
        x.clone() + self.feed_forward.forward(norm(&self.feed_forward_norm, x))
    }
}

/// A stack of blocks.
#[derive(Module, Debug)]
pub struct Stack {
    blocks: Vec<Block>,
    norm: RmsNorm,
    #[module(skip)]
    spec: StackSpec,
}

impl Stack {
    /// Fresh weights.
    pub fn new(spec: StackSpec, init: &mut Initializer) -> Self {
        Self {
            blocks: (0..spec.n_layers).map(|_| Block::new(&spec, init)).collect(),
            norm: init.norm(spec.d_model, spec.norm_eps),
            spec,
        }
    }

    /// The stack over whole sequences that start at position 0.
    ///
    /// # Shapes
    ///
    /// `[B, N, D] -> [B, N, D]`
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, n_positions, d_model] = x.dims();
        match self.spec.span {
            // Isolated blocks are sequences of their own.
            Span::Blocks { len, back: 0 } if n_positions.is_multiple_of(len) => {
                let x = self.forward_sequence(x.reshape([batch * n_positions / len, len, d_model]));
                x.reshape([batch, n_positions, d_model])
            }
            _ => self.forward_sequence(x),
        }
    }

    fn forward_sequence(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, n_positions, _] = x.dims();
        let device = x.device();
        let positions = [(0..n_positions).collect()];
        let rotation = self.rotation(&positions, &device);
        let mask: SequenceMask = sequence_mask(&self.spec, batch, n_positions, &device);
        let x = self.blocks.iter().fold(x, |x, block| {
            block.run(x, |attention, x| attention.forward(x, rotation.as_ref(), &mask)) // [B, N, D]
        });
        norm(&self.norm, x)
    }

    /// The stack over new positions of `rows`, with everything before them in the caches.
    ///
    /// # Shapes
    ///
    /// `[b, N, D] -> [b, N, D]` for `b` rows; `positions`: `b` lists of `N` rising absolute positions.
    pub fn step(&self, x: Tensor<3>, caches: &mut [KvCache], rows: &[usize], positions: &[Vec<usize>]) -> Tensor<3> {
        let rotation = self.rotation(positions, &x.device());
        let x = self.blocks.iter().zip(caches).fold(x, |x, (block, cache)| {
            block.run(x, |attention, x| attention.step(x, rotation.as_ref(), cache, rows, positions))
        });
        norm(&self.norm, x)
    }

    /// Empty caches, one a block.
    pub fn new_caches(&self, n_rows: usize, device: &Device) -> Vec<KvCache> {
        let spec = &self.spec;
        let cache = || KvCache::new(n_rows, spec.n_kv_heads, spec.head_dim(), spec.span, device);
        self.blocks.iter().map(|_| cache()).collect()
    }

    fn rotation(&self, positions: &[Vec<usize>], device: &Device) -> Option<Rotation> {
        let Positions::Rope { theta } = self.spec.positions else { return None };
        let counted: Vec<Vec<usize>> = positions
            .iter()
            .map(|row| row.iter().map(|&position| self.spec.span.rope_position(position)).collect())
            .collect();
        Some(Rotation::new(&counted, self.spec.head_dim(), theta, device))
    }
}
