//! The plain versions: what the fused operations mean, with gradients derived step by step.

use burn::tensor::Tensor;
use burn::tensor::activation::{silu, softmax};

pub(super) fn attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, mask: Tensor<4>) -> Tensor<4> {
    softmax(q.matmul(k.swap_dims(2, 3)) + mask, 3).matmul(v)
}

pub(super) fn rms_norm(x: Tensor<3>, gain: Tensor<1>, epsilon: f64) -> Tensor<3> {
    let rms = (x.clone().square().mean_dim(2) + epsilon).sqrt();
    x / rms * gain.unsqueeze()
}

pub(super) fn swiglu(gate: Tensor<3>, up: Tensor<3>) -> Tensor<3> {
    silu(gate) * up
}

pub(super) fn rotate(x: Tensor<4>, cos: Tensor<4>, sin: Tensor<4>) -> Tensor<4> {
    let half = x.dims()[3] / 2;
    let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
    let turned_first = first.clone() * cos.clone() - second.clone() * sin.clone();
    let turned_second = second * cos + first * sin;
    Tensor::cat(vec![turned_first, turned_second], 3)
}
