//! The SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`, without biases.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;

use super::activations::Activations;
use super::compute::{Compute, in_f32};
use super::fused::swiglu;
use crate::init::Initializer;

/// A gated feed-forward network.
///
/// # Source
///
/// Shazeer, "GLU Variants Improve Transformer"; Llama.
#[derive(Module, Debug)]
pub struct FeedForward {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl FeedForward {
    /// Fresh weights; `n_adds` is the number of branches that add to the residual stream of the stack.
    pub fn new(d_model: usize, d_ff: usize, n_adds: usize, init: &mut Initializer) -> Self {
        Self {
            gate_proj: init.linear(d_model, d_ff),
            up_proj: init.linear(d_model, d_ff),
            down_proj: init.residual_linear(d_ff, d_model, n_adds),
        }
    }

    /// # Shapes
    ///
    /// `[B, N, D] -> [B, N, D]`
    pub fn forward(&self, x: Tensor<3>, activations: Activations, compute: Compute) -> Tensor<3> {
        let compute = compute.or_stored(&self.gate_proj);
        let x = compute.round(activations.round(x));
        let gate = compute.linear(&self.gate_proj, x.clone()); // [B, N, F]
        let up = compute.linear(&self.up_proj, x); // [B, N, F]
        in_f32(compute.linear(&self.down_proj, activations.round(swiglu(gate, up)))) // [B, N, D]
    }
}
