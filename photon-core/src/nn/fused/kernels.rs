//! What the fused operations need of a backend, forward and backward; by that backend's own operations where it has
//! nothing better.

use burn::backend::Backend;
use burn::backend::tensor::FloatTensor;

/// Passes of the fused operations, without gradients.
pub trait Kernels: Backend {
    /// `x: [B, N, D]`, `gain: [1, 1, D]`; the normed lines and `1 / rms` of each, `[B, N, 1]`.
    fn rms_norm(x: FloatTensor<Self>, gain: FloatTensor<Self>, epsilon: f64) -> (FloatTensor<Self>, FloatTensor<Self>) {
        stock::rms_norm::<Self>(x, gain, epsilon)
    }

    /// The gradients of `x` and `gain`; `scale` is what [`Kernels::rms_norm`] returned.
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        scale: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        stock::rms_norm_backward::<Self>(x, gain, scale, d_out)
    }

    /// `x: [B, N, H, K]`, `cos, sin: [B or 1, N, 1, K/2]`
    fn rotate(x: FloatTensor<Self>, cos: FloatTensor<Self>, sin: FloatTensor<Self>) -> FloatTensor<Self> {
        stock::rotate::<Self>(x, cos, sin)
    }

    /// `silu(gate) * up`
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        stock::swiglu::<Self>(gate, up)
    }

    /// The gradients of `gate` and `up`.
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        d_out: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        stock::swiglu_backward::<Self>(gate, up, d_out)
    }
}

/// The passes by a backend's own operations.
pub(super) mod stock {
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{Backend, TensorMetadata};
    use burn::tensor::Slice;

    const WIDTH: usize = 2;
    const HEAD_DIM: usize = 3;

    pub(in super::super) fn rms_norm<B: Backend>(
        x: FloatTensor<B>,
        gain: FloatTensor<B>,
        epsilon: f64,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let mean_square = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), WIDTH); // [B, N, 1]
        let scale = B::float_recip(B::float_sqrt(B::float_add_scalar(mean_square, epsilon.into())));
        let normed = B::float_mul(x, scale.clone());
        (B::float_mul(normed, gain), scale)
    }

    /// With `n = x / rms`: `dx = (dn - n * mean(dn * n)) / rms` and `dn = dy * gain`.
    pub(in super::super) fn rms_norm_backward<B: Backend>(
        x: FloatTensor<B>,
        gain: FloatTensor<B>,
        scale: FloatTensor<B>,
        d_out: FloatTensor<B>,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let normed = B::float_mul(x, scale.clone());
        let d_gain = B::float_sum_dims(B::float_mul(d_out.clone(), normed.clone()), &[0, 1]);
        let d_normed = B::float_mul(d_out, gain);
        let along = B::float_mean_dim(B::float_mul(d_normed.clone(), normed.clone()), WIDTH); // [B, N, 1]
        let across = B::float_sub(d_normed, B::float_mul(normed, along));
        (B::float_mul(across, scale), d_gain)
    }

    pub(in super::super) fn rotate<B: Backend>(
        x: FloatTensor<B>,
        cos: FloatTensor<B>,
        sin: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (first, second) = halves::<B>(x);
        let turned_first =
            B::float_sub(B::float_mul(first.clone(), cos.clone()), B::float_mul(second.clone(), sin.clone()));
        let turned_second = B::float_add(B::float_mul(second, cos), B::float_mul(first, sin));
        B::float_cat(vec![turned_first, turned_second], HEAD_DIM)
    }

    fn halves<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let shape = x.shape();
        let half = shape[HEAD_DIM] / 2;
        let part = |x: FloatTensor<B>, start: usize| {
            let mut slices: Vec<Slice> = (0..HEAD_DIM).map(|axis| Slice::from(0..shape[axis])).collect();
            slices.push(Slice::from(start..start + half));
            B::float_slice(x, &slices)
        };
        (part(x.clone(), 0), part(x, half))
    }

    pub(in super::super) fn swiglu<B: Backend>(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
        let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
        B::float_mul(silu, up)
    }

    /// With `s = sigmoid(gate)`: `d_gate = dy * up * (s + silu * (1 - s))` and `d_up = dy * silu`.
    pub(in super::super) fn swiglu_backward<B: Backend>(
        gate: FloatTensor<B>,
        up: FloatTensor<B>,
        d_out: FloatTensor<B>,
    ) -> (FloatTensor<B>, FloatTensor<B>) {
        let share = B::sigmoid(gate.clone());
        let silu = B::float_mul(gate, share.clone());
        let rest = B::float_add_scalar(B::float_neg(share.clone()), 1.0.into());
        let slope = B::float_add(share, B::float_mul(silu.clone(), rest));
        let d_gate = B::float_mul(B::float_mul(d_out.clone(), up), slope);
        (d_gate, B::float_mul(d_out, silu))
    }
}
