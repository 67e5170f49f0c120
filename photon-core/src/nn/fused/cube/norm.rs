//! RMSNorm: a cube for each line.

use cubecl::prelude::*;

use super::{CubeTensor, cubes, dims, empty, units_of_line};

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
    let mut sums = Shared::new_slice(n_units);
    sums[unit] = squares;
    sync_cube();
    let mut n_left = comptime!(n_units / 2).runtime();
    while n_left > 0 {
        if unit < n_left {
            sums[unit] = sums[unit] + sums[unit + n_left];
        }
        sync_cube();
        n_left /= 2;
    }
    let factor = 1.0f32 / (sums[0] / width as f32 + epsilon).sqrt();
    let mut i = unit;
    while i < width {
        out[line * width + i] = x[first + i * x.stride(2)] * factor * gain[i * gain.stride(2)];
        i += n_units;
    }
    if unit == 0 {
        scale[line] = factor;
    }
}
