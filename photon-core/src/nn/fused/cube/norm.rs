//! RMSNorm: a cube for each line.

use cubecl::prelude::*;

use super::{cubes, dims, units_of_line};
use crate::cards::{CubeTensor, empty, sum_of_units};

/// The normed lines and `1 / rms` of each.
pub(super) fn forward(x: CubeTensor, gain: CubeTensor, epsilon: f32) -> (CubeTensor, CubeTensor) {
    let [batch, n_positions, width] = dims(&x);
    let n_units = units_of_line(width);
    let client = x.client.clone();
    let (out, scale) = (empty(&x, [batch, n_positions, width]), empty(&x, [batch, n_positions, 1]));
    norm_lines::launch(
        &client,
        cubes(batch * n_positions),
        CubeDim::new_1d(n_units as u32),
        x.into_tensor_arg(),
        gain.into_tensor_arg(),
        out.clone().into_tensor_arg(),
        scale.clone().into_tensor_arg(),
        epsilon,
        n_units,
    );
    (out, scale)
}

#[cube(launch)]
fn norm_lines(
    x: &Tensor<f32>,    // [B, N, D]
    gain: &Tensor<f32>, // [1, 1, D]
    out: &mut Tensor<f32>,
    scale: &mut Tensor<f32>, // [B, N, 1]
    epsilon: f32,
    #[comptime] n_units: usize,
) {
    let line = CUBE_POS;
    let n_positions = x.shape(1);
    let width = x.shape(2);
    if line >= x.shape(0) * n_positions {
        terminate!();
    }
    let first = line / n_positions * x.stride(0) + line % n_positions * x.stride(1);
    let unit = UNIT_POS as usize;
    let mut squares = 0.0f32.runtime();
    let mut i = unit;
    while i < width {
        let number = x[first + i * x.stride(2)];
        squares += number * number;
        i += n_units;
    }
    let mut scratch = Shared::new_slice(n_units);
    let sum = sum_of_units(squares, &mut scratch, n_units);
    let factor = 1.0f32 / (sum / width as f32 + epsilon).sqrt();
    let mut i = unit;
    while i < width {
        out[line * width + i] = x[first + i * x.stride(2)] * factor * gain[i * gain.stride(2)];
        i += n_units;
    }
    if unit == 0 {
        scale[line] = factor;
    }
}
