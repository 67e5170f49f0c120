//! Rotation of coordinate pairs: a unit for each pair.

use cubecl::prelude::*;

use super::{dims, units};
use crate::cards::{CubeTensor, empty};

/// `x: [B, N, H, K]`, `cos, sin: [B or 1, N, 1, K/2]`
pub(super) fn rotate(x: CubeTensor, cos: CubeTensor, sin: CubeTensor) -> CubeTensor {
    let shape: [usize; 4] = dims(&x);
    let client = x.client.clone();
    let out = empty(&x, shape);
    let (count, dim) = units(shape.iter().product::<usize>() / 2);
    rotate_pairs::launch(
        &client,
        count,
        dim,
        x.into_tensor_arg(),
        cos.into_tensor_arg(),
        sin.into_tensor_arg(),
        out.clone().into_tensor_arg(),
    );
    out
}

#[cube(launch)]
fn rotate_pairs(x: &Tensor<f32>, cos: &Tensor<f32>, sin: &Tensor<f32>, out: &mut Tensor<f32>) {
    let half = x.shape(3) / 2;
    let n_heads = x.shape(2);
    let n_positions = x.shape(1);
    let pair = ABSOLUTE_POS;
    if pair >= x.shape(0) * n_positions * n_heads * half {
        terminate!();
    }
    let k = pair % half;
    let head = pair / half % n_heads;
    let position = pair / (half * n_heads) % n_positions;
    let row = pair / (half * n_heads * n_positions);
    // One row of angles serves all, or each has its own.
    let angle_row = row % cos.shape(0);
    let cos = cos[angle_row * cos.stride(0) + position * cos.stride(1) + k * cos.stride(3)];
    let sin = sin[angle_row * sin.stride(0) + position * sin.stride(1) + k * sin.stride(3)];
    let first = row * x.stride(0) + position * x.stride(1) + head * x.stride(2) + k * x.stride(3);
    let a = x[first];
    let b = x[first + half * x.stride(3)];
    let out_first = pair / half * (2 * half) + k;
    out[out_first] = a * cos - b * sin;
    out[out_first + half] = b * cos + a * sin;
}
