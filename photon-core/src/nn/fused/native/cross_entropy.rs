//! Cross-entropies and their gradients by the logits, in place of the logits.

use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::attention_blocks::powers;
use super::{PIECE, contiguous, numbers, numbers_mut};
use crate::cache::vectorized::vectorized;
use crate::nn::fused::LineLosses;

/// The cross-entropy of each line, and the gradient by its logits of what it adds to the loss by its weight.
///
/// # Shapes
///
/// `logits: [n, V]`, `targets, weights: [n, 1]`
pub(crate) fn cross_entropy(logits: Tensor<2>, targets: Tensor<2, Int>, weights: Tensor<2>, z_loss: f32) -> LineLosses {
    const BACKEND: &str = "a tensor of the CPU backend";
    let [n_lines, vocab_size] = logits.dims();
    let device = logits.device();
    let targets: Vec<i64> = targets.try_into_vec_as().expect("targets are whole numbers");
    let mut logits = contiguous(logits.try_into_primitive::<Flex>().expect(BACKEND));
    let weights = contiguous(weights.try_into_primitive::<Flex>().expect(BACKEND));
    let n_at_once = (PIECE / vocab_size).max(1);
    let (mut nats, mut log_sums) = (vec![0.0; n_lines], vec![0.0; n_lines]);
    let pieces = targets.par_chunks(n_at_once).zip(numbers(&weights).par_chunks(n_at_once));
    numbers_mut(&mut logits)
        .par_chunks_mut(n_at_once * vocab_size)
        .zip(nats.par_chunks_mut(n_at_once).zip(log_sums.par_chunks_mut(n_at_once)))
        .zip(pieces)
        .for_each(|((lines, (nats, log_sums)), (targets, weights))| {
            vectorized(Piece { vocab_size, lines, nats, log_sums, targets, weights, z_loss })
        });
    let column = |numbers| Tensor::from_data(TensorData::new(numbers, [n_lines, 1]), &device);
    LineLosses { nats: column(nats), log_sums: column(log_sums), gradient: Tensor::from_primitive::<Flex>(logits) }
}

struct Piece<'a> {
    vocab_size: usize,
    /// First logits, then their gradients.
    lines: &'a mut [f32],
    nats: &'a mut [f32],
    log_sums: &'a mut [f32],
    targets: &'a [i64],
    weights: &'a [f32],
    z_loss: f32,
}

impl WithSimd for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lines = self.lines.chunks_exact_mut(self.vocab_size).zip(self.nats.iter_mut().zip(self.log_sums));
        for ((line, (nats, log_sum)), (&target, &weight)) in lines.zip(self.targets.iter().zip(self.weights)) {
            let logit = line[target as usize];
            let (largest, sum) = powers(simd, line, f32::NEG_INFINITY);
            *nats = sum.ln() + (largest - logit);
            *log_sum = sum.ln() + largest;
            // softmax - one_hot(target), and 2 log_sum softmax; without a z-loss the factor is exactly 1.
            let share = weight * (1.0 + 2.0 * self.z_loss * *log_sum) / sum;
            line.iter_mut().for_each(|power| *power *= share);
            line[target as usize] -= weight;
        }
    }
}
