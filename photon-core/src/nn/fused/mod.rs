//! Operations with hand-written gradients: the same numbers as the composed ones, in fewer passes.
//!
//! Autodiff derives the gradient of a composed softmax, norm or rotation step by step, and every step is a pass over
//! memory; on a CPU those passes cost as much as the matrix products. Each operation here runs on any backend by that
//! backend's own operations ([`kernels`]); the CPU has loops of its own (`native`), which do in one pass what tensors do
//! in several, and in place where nobody looks, and graphics cards have kernels (`cube`). `composed.rs` holds the plain versions, which the tests compare with.

mod attention;
#[cfg(test)]
mod composed;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod cube;
pub mod kernels;
mod native;
mod rms_norm;
mod rotate;
pub mod span_attention;
mod swiglu;

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, DispatchDevice, Flex, backend_extension};
use burn::nn::RmsNorm;
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor};

use self::kernels::Kernels;
pub use self::native::AdamWUpdate;

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
    fn fused_rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self>;

    /// See [`rotate`].
    fn fused_rotate(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`swiglu`].
    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// A backend without gradients runs the kernels.
macro_rules! without_gradients {
    ($backend:ty) => {
        impl FusedOps for $backend {
            fn fused_rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self> {
                Self::rms_norm(x, gain, epsilon).0
            }

            fn fused_rotate(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
                Self::rotate(x, cos, sin)
            }

            fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
                Self::swiglu(gate, up)
            }
        }
    };
}

without_gradients!(Flex);

#[cfg(any(feature = "cuda", feature = "wgpu"))]
without_gradients!(burn::backend::Cube);

impl<B: FusedOps + Kernels, C: CheckpointStrategy> FusedOps for Autodiff<B, C> {
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

    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        swiglu::tracked::<B, C>(gate, up)
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

/// The cross-entropies of lines of logits, and what else the loss needs of them.
pub struct LineLosses {
    /// Cross-entropy of each line in nats, `[n, 1]`.
    pub nats: Tensor<2>,
    /// Log of the softmax's denominator of each line, `[n, 1]`.
    pub log_sums: Tensor<2>,
    /// The gradient by the logits, `[n, V]`, of the sum of the lines' `weight * (nats + z_loss * log_sum²)`.
    pub gradient: Tensor<2>,
}

/// The cross-entropy of each line of logits and the gradient by the logits.
///
/// For tensors without gradients: what comes out is one.
///
/// # Shapes
///
/// `logits: [n, V]`, `targets, weights: [n, 1]`
pub fn cross_entropy(logits: Tensor<2>, targets: Tensor<2, Int>, weights: Tensor<2>, z_loss: f64) -> LineLosses {
    if has_kernels(&logits.device(), logits.dtype()) {
        return native::cross_entropy::cross_entropy(logits, targets, weights, z_loss as f32);
    }
    stock_cross_entropy(logits, targets, weights, z_loss)
}

fn stock_cross_entropy(logits: Tensor<2>, targets: Tensor<2, Int>, weights: Tensor<2>, z_loss: f64) -> LineLosses {
    let largest = logits.clone().max_dim(1); // [n, 1]
    let shifted = logits - largest.clone(); // [n, V]
    let target = shifted.clone().gather(1, targets.clone()); // [n, 1]
    let exp = shifted.exp();
    let sum = exp.clone().sum_dim(1);
    let log_sum = sum.clone().log();
    let log_sums = log_sum.clone() + largest;
    // d nats / d logits = softmax - one_hot(target) and d log_sum² / d logits = 2 log_sum softmax, each line times its
    // weight.
    let scale = match z_loss > 0.0 {
        true => weights.clone() * (log_sums.clone() * (2.0 * z_loss) + 1.0) / sum,
        false => weights.clone() / sum,
    }; // [n, 1]
    let gradient = (exp * scale).scatter(1, targets, -weights, IndexingUpdateOp::Add);
    LineLosses { nats: log_sum - target, log_sums, gradient }
}

/// Whether the CPU's kernels serve tensors of this device and type, gradients or not.
pub fn has_kernels(device: &Device, dtype: DType) -> bool {
    dtype == DType::F32 && matches!(device.clone().inner().as_dispatch(), DispatchDevice::Flex(_))
}

/// `silu(gate) * up`, any two tensors of one shape.
pub fn swiglu(gate: Tensor<3>, up: Tensor<3>) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::fused_swiglu(gate.into_dispatch(), up.into_dispatch()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::flex::FlexTensor;
    use burn::backend::ops::FloatTensorOps;
    use burn::tensor::Distribution;

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
    fn swiglu_equals_the_composed_one() {
        let (gate, up) = (random([1, 2, 3, 37]) * 3.0, random([1, 2, 3, 37]));
        let (gate, up) = (gate.detach().require_grad(), up);
        let fused = swiglu(gate.clone().reshape([2, 3, 37]), up.clone().reshape([2, 3, 37]));
        let composed = composed::swiglu(gate.clone().reshape([2, 3, 37]), up.clone().reshape([2, 3, 37]));
        assert_equal(fused, composed, &[("gate", gate), ("up", up)]);
    }

    /// The CPU's kernels compute what the stock passes compute, forward and backward.
    #[test]
    fn kernels_of_the_cpu_equal_the_stock_ones() {
        fn close<const N: usize>(native: [FlexTensor; N], stock: [FlexTensor; N]) {
            for (native, stock) in native.into_iter().zip(stock) {
                assert_eq!(native.layout().shape(), stock.layout().shape());
                let [native, stock] = [native, stock].map(|x| x.into_data().try_into_vec::<f32>().unwrap());
                assert!(native.iter().zip(&stock).all(|(a, b)| (a - b).abs() < 1e-5), "{native:?}\n{stock:?}");
            }
        }
        let plain = |shape: [usize; 3]| -> FlexTensor {
            random(shape).inner().try_into_primitive::<Flex>().expect("a tensor of the CPU backend")
        };
        // Lines that vectors do not divide, and more of them than one thread takes at a time.
        let (x, gain, d_out) = (plain([3, 400, 37]), plain([1, 1, 37]), plain([3, 400, 37]));
        let (out, scale) = Flex::rms_norm(x.clone(), gain.clone(), 1e-5);
        let (stock_out, stock_scale) = kernels::stock::rms_norm::<Flex>(x.clone(), gain.clone(), 1e-5);
        close([out, scale.clone()], [stock_out, stock_scale]);
        let (d_x, d_gain) = Flex::rms_norm_backward(x.clone(), gain.clone(), scale.clone(), d_out.clone());
        let stock = kernels::stock::rms_norm_backward::<Flex>(x.clone(), gain, scale, d_out.clone());
        close([d_x], [stock.0]);
        let relative = |x: FlexTensor| Flex::float_div_scalar(x, 100.0.into());
        close([relative(d_gain)], [relative(stock.1)]);
        let up = plain([3, 400, 37]);
        close([Flex::swiglu(x.clone(), up.clone())], [kernels::stock::swiglu::<Flex>(x.clone(), up.clone())]);
        let (d_gate, d_up) = Flex::swiglu_backward(x.clone(), up.clone(), d_out.clone());
        let stock = kernels::stock::swiglu_backward::<Flex>(x, up, d_out);
        close([d_gate, d_up], [stock.0, stock.1]);
    }

    #[test]
    fn cross_entropy_of_the_cpu_equals_the_stock_one() {
        let device = Device::flex();
        let logits = random([300, 37]).inner() * 3.0;
        let targets = Tensor::<1, Int>::arange(0..300, &device).remainder_scalar(37).unsqueeze_dim::<2>(1);
        let weights = random([300, 1]).inner().abs();
        for z_loss in [0.0, 0.3] {
            let native = cross_entropy(logits.clone(), targets.clone(), weights.clone(), z_loss);
            let stock = stock_cross_entropy(logits.clone(), targets.clone(), weights.clone(), z_loss);
            for (native, stock) in
                [(native.nats, stock.nats), (native.log_sums, stock.log_sums), (native.gradient, stock.gradient)]
            {
                let difference: f32 = (native - stock).abs().max().into_scalar();
                assert!(difference < 1e-5, "z_loss {z_loss}: {difference}");
            }
        }
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
