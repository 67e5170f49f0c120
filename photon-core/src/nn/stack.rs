//! A causal transformer: pre-norm blocks of attention and feed-forward, and a final norm.
//!
//! Encoders, decoders and the flat model are all this, with spans of their own.

use burn::module::Module;
use burn::nn::RmsNorm;
use burn::tensor::{Device, Tensor};

use super::activations::Activations;
use super::attention::{Attention, SequenceMask, sequence_mask};
use super::compute::Compute;
use super::feed_forward::FeedForward;
use super::fused::{has_kernels, norm};
use super::recompute;
use super::rope::Rotation;
use super::span::Span;
use crate::cache::config::CacheConfig;
use crate::cache::kv_cache::{KvCache, LayerShape};
use crate::config::{Positions, StackSpec};
use crate::documents::Documents;
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
    fn run(
        &self,
        x: Tensor<3>,
        activations: Activations,
        compute: Compute,
        attend: impl FnOnce(&Attention, Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        // The branch stands first: the sum takes its place in memory, which nobody else holds.
        let x = attend(&self.attention, norm(&self.attention_norm, x.clone())) + x;
        self.feed_forward.forward(norm(&self.feed_forward_norm, x.clone()), activations, compute) + x
    }
}

/// A stack of blocks.
#[derive(Module, Debug)]
pub struct Stack {
    blocks: Vec<Block>,
    norm: RmsNorm,
    #[module(skip)]
    spec: StackSpec,
    /// What whole sequences are computed in; steps over caches go by how weights are stored.
    #[module(skip)]
    compute: Compute,
}

/// What a stack carries from call to call.
#[derive(Clone, Debug)]
pub struct StackState {
    /// One a block.
    pub(crate) caches: Vec<KvCache>,
    pub(crate) activations: Activations,
}

impl StackState {
    /// Keeps the given rows, in the given order.
    pub(crate) fn select_rows(&mut self, rows: &[usize]) {
        self.caches.iter_mut().for_each(|cache| cache.select_rows(rows));
    }
}

impl Stack {
    /// Fresh weights.
    pub fn new(spec: StackSpec, init: &mut Initializer) -> Self {
        Self {
            blocks: (0..spec.n_layers).map(|_| Block::new(&spec, init)).collect(),
            norm: init.norm(spec.d_model, spec.norm_eps),
            spec,
            compute: Compute::F32,
        }
    }

    /// The same weights, with products of whole sequences in another format.
    pub(crate) fn set_compute(&mut self, compute: Compute) {
        self.compute = compute;
    }

    /// The stack over whole sequences, in which positions count from the start of their document.
    ///
    /// # Shapes
    ///
    /// `[B, N, D] -> [B, N, D]`
    pub fn forward(&self, x: Tensor<3>, documents: &Documents) -> Tensor<3> {
        let [batch, n_positions, d_model] = x.dims();
        let asks_the_span = has_kernels(&x.device(), x.dtype());
        match self.spec.span {
            // Isolated blocks are sequences of their own: no other document is seen from them.
            Span::Blocks { len, back: 0 } if documents.start_at_multiples_of(len) => {
                if asks_the_span || !n_positions.is_multiple_of(len) {
                    return self.forward_sequence(x, &Documents::whole_rows(batch));
                }
                let n_blocks = batch * n_positions / len;
                let x = self.forward_sequence(x.reshape([n_blocks, len, d_model]), &Documents::whole_rows(n_blocks));
                x.reshape([batch, n_positions, d_model])
            }
            _ => self.forward_sequence(x, documents),
        }
    }

    fn forward_sequence(&self, x: Tensor<3>, documents: &Documents) -> Tensor<3> {
        let [_, n_positions, _] = x.dims();
        let device = x.device();
        let rotation = self.rotation(&[(0..n_positions).collect()], &device);
        let rotation = match documents.are_whole_rows() {
            true => rotation,
            false => rotation.map(|rotation| rotation.at(&documents.positions(n_positions))),
        };
        let mask: SequenceMask = sequence_mask(&self.spec, documents, n_positions, &device);
        let compute = self.compute;
        let run = move |block: &Block, x: Tensor<3>| {
            let (rotation, mask) = match x.is_autodiff() {
                true => (rotation.clone(), mask.clone()),
                false => (rotation.clone().map(Rotation::inner), mask.clone().inner()),
            };
            let attend = |attention: &Attention, x: Tensor<3>| attention.forward(x, rotation.as_ref(), &mask, compute);
            block.run(x, Activations::F32, compute, attend) // [B, N, D]
        };
        let x = match recompute::applies(&x) {
            true => self.blocks.iter().fold(x, |x, block| recompute::run_again_later(block, x, run.clone())),
            false => self.blocks.iter().fold(x, |x, block| run(block, x)),
        };
        norm(&self.norm, x)
    }

    /// The stack over new positions of `rows`, with everything before them in the caches.
    ///
    /// # Shapes
    ///
    /// `[b, N, D] -> [b, N, D]` for `b` rows; `positions`: `b` lists of `N` rising absolute positions.
    pub fn step(&self, x: Tensor<3>, state: &mut StackState, rows: &[usize], positions: &[Vec<usize>]) -> Tensor<3> {
        let rotation = self.rotation(positions, &x.device());
        let activations = state.activations;
        assert_eq!(state.caches.len(), self.blocks.len(), "the caches of this stack have been given up");
        let x = self.blocks.iter().zip(&mut state.caches).fold(x, |x, (block, cache)| {
            block.run(x, activations, Compute::F32, |attention, x| {
                attention.step(x, rotation.as_ref(), cache, rows, positions, activations)
            })
        });
        norm(&self.norm, x)
    }

    /// The state before any position.
    ///
    /// `n_newest` entries no policy evicts.
    pub fn start(
        &self,
        n_rows: usize,
        cache: &CacheConfig,
        n_newest: usize,
        activations: Activations,
        device: &Device,
    ) -> StackState {
        let layer = LayerShape {
            n_kv_heads: self.spec.n_kv_heads,
            head_dim: self.spec.head_dim(),
            span: self.spec.span,
            pick: self.spec.pick,
            n_newest,
        };
        let caches = self.blocks.iter().map(|_| KvCache::new(cache, layer, n_rows, device)).collect();
        StackState { caches, activations }
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
