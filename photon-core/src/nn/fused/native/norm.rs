//! RMSNorm: a line is read once while the nearest cache still holds it.

use burn::backend::flex::FlexTensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{PIECE, contiguous, dims, numbers, numbers_mut, tensor};
use crate::cache::attend::kernels::dots;
use crate::cache::vectorized::vectorized;

/// The normed lines and `1 / rms` of each.
pub(super) fn forward(x: FlexTensor, gain: FlexTensor, epsilon: f32) -> (FlexTensor, FlexTensor) {
    let [batch, n_positions, width] = dims(&x);
    let (x, gain) = (contiguous(x), contiguous(gain));
    let n_at_once = (PIECE / width).max(1);
    let mut out = vec![0.0; batch * n_positions * width];
    let mut scale = vec![0.0; batch * n_positions];
    let pieces = numbers(&x).par_chunks(n_at_once * width).zip(scale.par_chunks_mut(n_at_once));
    out.par_chunks_mut(n_at_once * width)
        .zip(pieces)
        .for_each(|(out, (x, scale))| vectorized(Forward { x, gain: numbers(&gain), epsilon, out, scale }));
    (tensor(out, [batch, n_positions, width]), tensor(scale, [batch, n_positions, 1]))
}

/// The gradients of `x` and the gain; the first takes the place of `d_out`, if nobody else holds it.
pub(super) fn backward(
    x: FlexTensor,
    gain: FlexTensor,
    scale: FlexTensor,
    d_out: FlexTensor,
) -> (FlexTensor, FlexTensor) {
    let [.., width] = dims::<3>(&x);
    let (x, gain, scale, mut d_x) = (contiguous(x), contiguous(gain), contiguous(scale), contiguous(d_out));
    let n_at_once = (PIECE / width).max(1);
    let pieces = numbers(&x).par_chunks(n_at_once * width).zip(numbers(&scale).par_chunks(n_at_once));
    let d_gains: Vec<Vec<f32>> = numbers_mut(&mut d_x)
        .par_chunks_mut(n_at_once * width)
        .zip(pieces)
        .map(|(d, (x, scale))| {
            let mut d_gain = vec![0.0; width];
            vectorized(Backward { x, gain: numbers(&gain), scale, d, d_gain: &mut d_gain });
            d_gain
        })
        .collect();
    let mut d_gain = vec![0.0; width];
    for part in d_gains {
        d_gain.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    (d_x, tensor(d_gain, [1, 1, width]))
}

struct Forward<'a> {
    x: &'a [f32],
    gain: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
    scale: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let width = self.gain.len();
        let lines = self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)).zip(self.scale);
        for ((x, out), scale) in lines {
            *scale = 1.0 / (dots(simd, x, [x])[0] / width as f32 + self.epsilon).sqrt();
            for ((out, x), gain) in out.iter_mut().zip(x).zip(self.gain) {
                *out = x * *scale * gain;
            }
        }
    }
}

struct Backward<'a> {
    x: &'a [f32],
    gain: &'a [f32],
    scale: &'a [f32],
    /// First the gradient of the output, then that of `x`.
    d: &'a mut [f32],
    d_gain: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { x, gain, scale, d, d_gain } = self;
        let width = gain.len();
        for ((x, d), scale) in x.chunks_exact(width).zip(d.chunks_exact_mut(width)).zip(scale) {
            for (((d, d_gain), x), gain) in d.iter_mut().zip(d_gain.iter_mut()).zip(x).zip(gain) {
                *d_gain += *d * x * scale;
                *d *= gain;
            }
            let along = dots(simd, d, [x])[0] * scale * scale / width as f32;
            for (d, x) in d.iter_mut().zip(x) {
                *d = (*d - x * along) * scale;
            }
        }
    }
}
