//! `silu(gate) * up`.

use burn::backend::flex::FlexTensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{PIECE, contiguous, exp, numbers, numbers_mut};
use crate::cache::vectorized::vectorized;

/// The product takes the place of `up`, if nobody else holds it.
pub(super) fn forward(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
    let (gate, mut out) = (contiguous(gate), contiguous(up));
    let gates = numbers(&gate).par_chunks(PIECE);
    numbers_mut(&mut out).par_chunks_mut(PIECE).zip(gates).for_each(|(up, gate)| vectorized(Forward { gate, up }));
    out
}

/// The gradients of gate and up; they take the places of these, if nobody else holds them.
pub(super) fn backward(gate: FlexTensor, up: FlexTensor, d_out: FlexTensor) -> (FlexTensor, FlexTensor) {
    let (mut gate, mut up, d_out) = (contiguous(gate), contiguous(up), contiguous(d_out));
    let (gates, ups) = (numbers_mut(&mut gate).par_chunks_mut(PIECE), numbers_mut(&mut up).par_chunks_mut(PIECE));
    gates
        .zip(ups)
        .zip(numbers(&d_out).par_chunks(PIECE))
        .for_each(|((gate, up), d_out)| vectorized(Backward { gate, up, d_out }));
    (gate, up)
}

struct Forward<'a> {
    gate: &'a [f32],
    up: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (up, &gate) in self.up.iter_mut().zip(self.gate) {
            *up *= gate * sigmoid(gate);
        }
    }
}

struct Backward<'a> {
    gate: &'a mut [f32],
    up: &'a mut [f32],
    d_out: &'a [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for ((gate, up), &d_out) in self.gate.iter_mut().zip(self.up).zip(self.d_out) {
            let share = sigmoid(*gate);
            let silu = *gate * share;
            *gate = d_out * *up * (share + silu * (1.0 - share));
            *up = d_out * silu;
        }
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let power = exp(-x.abs());
    let numerator = if x < 0.0 { power } else { 1.0 };
    numerator / (1.0 + power)
}
