//! `silu(gate) * up`: a unit for each number.

use cubecl::prelude::*;

use super::{dims, units};
use crate::cards::{CubeTensor, empty};

pub(super) fn forward(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
    let shape: [usize; 3] = dims(&gate);
    let client = gate.client.clone();
    let out = empty(&gate, shape);
    let (count, dim) = units(shape.iter().product());
    swiglu::launch(&client, count, dim, gate.into_tensor_arg(), up.into_tensor_arg(), out.clone().into_tensor_arg());
    out
}

/// The gradients of `gate` and `up`.
pub(super) fn backward(gate: CubeTensor, up: CubeTensor, d_out: CubeTensor) -> (CubeTensor, CubeTensor) {
    let shape: [usize; 3] = dims(&gate);
    let client = gate.client.clone();
    let (d_gate, d_up) = (empty(&gate, shape), empty(&gate, shape));
    let (count, dim) = units(shape.iter().product());
    swiglu_backward::launch(
        &client,
        count,
        dim,
        gate.into_tensor_arg(),
        up.into_tensor_arg(),
        d_out.into_tensor_arg(),
        d_gate.clone().into_tensor_arg(),
        d_up.clone().into_tensor_arg(),
    );
    (d_gate, d_up)
}

/// Place of number `index`, counted line by line.
#[cube]
fn place(x: &Tensor<f32>, index: usize) -> usize {
    let width = x.shape(2);
    let line = index / width;
    line / x.shape(1) * x.stride(0) + line % x.shape(1) * x.stride(1) + index % width * x.stride(2)
}

#[cube]
fn sigmoid(x: f32) -> f32 {
    1.0f32 / (1.0f32 + (0.0f32 - x).exp())
}

#[cube(launch)]
fn swiglu(gate: &Tensor<f32>, up: &Tensor<f32>, out: &mut Tensor<f32>) {
    if ABSOLUTE_POS >= gate.shape(0) * gate.shape(1) * gate.shape(2) {
        terminate!();
    }
    let number = gate[place(gate, ABSOLUTE_POS)];
    out[ABSOLUTE_POS] = number * sigmoid(number) * up[place(up, ABSOLUTE_POS)];
}

/// With `s = sigmoid(gate)`: `d_gate = dy * up * (s + silu * (1 - s))` and `d_up = dy * silu`.
#[cube(launch)]
fn swiglu_backward(
    gate: &Tensor<f32>,
    up: &Tensor<f32>,
    d_out: &Tensor<f32>,
    d_gate: &mut Tensor<f32>,
    d_up: &mut Tensor<f32>,
) {
    if ABSOLUTE_POS >= gate.shape(0) * gate.shape(1) * gate.shape(2) {
        terminate!();
    }
    let number = gate[place(gate, ABSOLUTE_POS)];
    let share = sigmoid(number);
    let silu = number * share;
    let d = d_out[place(d_out, ABSOLUTE_POS)];
    d_gate[ABSOLUTE_POS] = d * up[place(up, ABSOLUTE_POS)] * (share + silu * (1.0f32 - share));
    d_up[ABSOLUTE_POS] = d * silu;
}
