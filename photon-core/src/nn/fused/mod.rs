//! Operations with hand-written gradients: the same numbers as the composed ones, in fewer passes.
//!
//! Autodiff derives the gradient of a composed softmax, norm or rotation step by step, and every step is a pass over
//! memory; on a CPU those passes cost as much as the matrix products. Each operation here runs on any backend by that
//! backend's own operations. `composed.rs` holds the plain versions, which the tests compare with.

mod attention;
#[cfg(test)]
mod composed;
mod rms_norm;
mod rotate;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, backend_extension};
use burn::nn::RmsNorm;
use burn::tensor::Tensor;

/// The operations, as backends see them.
#[backend_extension(Flex, Autodiff, Cube: cfg(any(feature = "cuda", feature = "wgpu")))]
pub trait FusedOps: Backend {
    /// See [`attention`].
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        attention::forward::<Self>(q, k, v, mask).out
    }

    /// See [`rms_norm`].
    fn fused_rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        rms_norm::forward::<Self>(x, gain, epsilon).out
    }

    /// See [`rotate`].
    fn fused_rotate(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        rotate::forward::<Self>(x, cos, sin)
    }
}

impl FusedOps for Flex {}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
impl FusedOps for burn::backend::Cube {}

impl<B: FusedOps, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        mask: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        attention::tracked::<B, C>(q, k, v, mask)
    }

    fn fused_rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
        rms_norm::tracked::<B, C>(x, gain, epsilon)
    }

    fn fused_rotate(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        rotate::tracked::<B, C>(x, cos, sin)
    }
}

/// `softmax(q kᵀ + mask) v` over the last axis; the mask is a constant.
///
/// # Shapes
///
/// `q: [B, H, N, K]`, `k, v: [B, H, E, K]`, `mask` broadcasts to `[B, H, N, E]`; `-> [B, H, N, K]`
pub fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: Tensor<4>) -> Tensor<4> {
    let [q, k, v, mask] = [q, k, v, mask].map(Tensor::into_dispatch);
    Tensor::from_dispatch(Dispatch::fused_attention(q, k, v, mask))
}

/// A norm layer over the last axis: `[B, N, D] -> [B, N, D]`. The parameters are Burn's.
pub fn norm(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    rms_norm(x, norm.gamma.val(), norm.epsilon)
}

/// `x / rms(x) * gain` over the last axis.
///
/// # Shapes
///
/// `x: [B, N, D]`, `gain: [D] -> [B, N, D]`
pub fn rms_norm(x: Tensor<3>, gain: Tensor<1>, epsilon: f64) -> Tensor<3> {
    let gain = gain.unsqueeze::<3>();
    Tensor::from_dispatch(Dispatch::fused_rms_norm(x.into_dispatch(), gain.into_dispatch(), epsilon))
}

/// Turns coordinate `k` with `k + K/2` by the angles whose cosines and sines are given, as constants.
///
/// # Shapes
///
/// `x: [B, N, H, K]`, `cos, sin: [B or 1, N, 1, K/2] -> [B, N, H, K]`
pub fn rotate(x: Tensor<4>, cos: Tensor<4>, sin: Tensor<4>) -> Tensor<4> {
    let [x, cos, sin] = [x, cos, sin].map(Tensor::into_dispatch);
    Tensor::from_dispatch(Dispatch::fused_rotate(x, cos, sin))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex().autodiff()).require_grad()
    }

    /// Outputs and gradients of both, under random upstream gradients.
    fn assert_equal<const D: usize>(fused: Tensor<D>, composed: Tensor<D>, inputs: &[(&str, Tensor<4>)]) {
        let difference = |a: Tensor<D>, b: Tensor<D>| -> f32 { (a - b).abs().max().into_scalar() };
        assert!(difference(fused.clone(), composed.clone()) < 1e-5);
        let upstream = fused.random_like(Distribution::Normal(0.0, 1.0)).detach();
        let fused = (fused * upstream.clone()).sum().backward();
        let composed = (composed * upstream).sum().backward();
        for (name, input) in inputs {
            let gradients = (input.grad(&fused).unwrap(), input.grad(&composed).unwrap());
            let difference: f32 = (gradients.0 - gradients.1).abs().max().into_scalar();
            assert!(difference < 1e-5, "gradient of {name}: {difference}");
        }
    }

    #[test]
    fn attention_equals_the_composed_one() {
        let (q, k, v) = (random([2, 3, 4, 6]), random([2, 3, 5, 6]), random([2, 3, 5, 6]));
        let mask = Tensor::<3>::from_floats([[[0.0, 0.0, -1e30, 0.0, -1e30]; 4]; 1], &q.device()).reshape([1, 1, 4, 5]);
        let fused = attention(q.clone(), k.clone(), v.clone(), mask.clone());
        let composed = composed::attention(q.clone(), k.clone(), v.clone(), mask);
        assert_equal(fused, composed, &[("q", q), ("k", k), ("v", v)]);
    }

    #[test]
    fn rms_norm_equals_the_composed_one() {
        let (x, gain) = (random([1, 2, 3, 6]), random([1, 1, 1, 6]));
        let fused = rms_norm(x.clone().reshape([2, 3, 6]), gain.clone().reshape([6]), 1e-5);
        let composed = composed::rms_norm(x.clone().reshape([2, 3, 6]), gain.clone().reshape([6]), 1e-5);
        assert_equal(fused, composed, &[("x", x), ("gain", gain)]);
    }

    #[test]
    fn rotate_equals_the_composed_one() {
        let x = random([2, 3, 2, 6]);
        let angles = Tensor::random([1, 3, 1, 3], Distribution::Uniform(-3.0, 3.0), &x.device());
        let (cos, sin) = (angles.clone().cos(), angles.sin());
        let fused = rotate(x.clone(), cos.clone(), sin.clone());
        assert_equal(fused, composed::rotate(x.clone(), cos, sin), &[("x", x)]);
    }
}
