//! AdamW in one pass over a parameter, its gradient and its moments.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::{PIECE, contiguous, numbers, numbers_mut};
use crate::cache::vectorized::vectorized;
use crate::nn::fused::has_kernels;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamWUpdate {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled decay of the parameter.
    pub weight_decay: f32,
    /// Updates so far, this one included.
    pub time: usize,
}

impl AdamWUpdate {
    /// Whether [`AdamWUpdate::apply`] is there for this tensor.
    pub fn serves<const D: usize>(&self, parameter: &Tensor<D>) -> bool {
        !parameter.is_autodiff() && has_kernels(&parameter.device(), parameter.dtype())
    }

    /// The parameter and its moments after the update, in place where nobody else holds them.
    ///
    /// `moments` are absent before the first update.
    ///
    /// # Panics
    ///
    /// Where [`AdamWUpdate::serves`] says no.
    pub fn apply<const D: usize>(
        self,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        moments: Option<[Tensor<D>; 2]>,
    ) -> [Tensor<D>; 3] {
        let open = |x: Tensor<D>| x.try_into_primitive::<Flex>().expect("a tensor of the CPU backend");
        let [moment_1, moment_2] = moments.unwrap_or_else(|| [gradient.zeros_like(), gradient.zeros_like()]);
        self.run([parameter, moment_1, moment_2].map(open), open(gradient)).map(Tensor::from_primitive::<Flex>)
    }

    fn run(self, tensors: [FlexTensor; 3], gradient: FlexTensor) -> [FlexTensor; 3] {
        let [mut parameter, mut moment_1, mut moment_2] = tensors.map(contiguous);
        let gradient = contiguous(gradient);
        let moments =
            numbers_mut(&mut moment_1).par_chunks_mut(PIECE).zip(numbers_mut(&mut moment_2).par_chunks_mut(PIECE));
        numbers_mut(&mut parameter)
            .par_chunks_mut(PIECE)
            .zip(numbers(&gradient).par_chunks(PIECE))
            .zip(moments)
            .for_each(|((parameter, gradient), (moment_1, moment_2))| {
                vectorized(Piece { update: self, parameter, gradient, moment_1, moment_2 });
            });
        [parameter, moment_1, moment_2]
    }
}

struct Piece<'a> {
    update: AdamWUpdate,
    parameter: &'a mut [f32],
    gradient: &'a [f32],
    moment_1: &'a mut [f32],
    moment_2: &'a mut [f32],
}

impl WithSimd for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let AdamWUpdate { learning_rate, beta_1, beta_2, epsilon, weight_decay, time } = self.update;
        let [correction_1, correction_2] = [beta_1, beta_2].map(|beta| 1.0 / (1.0 - beta.powi(time as i32)));
        let kept = 1.0 - learning_rate * weight_decay;
        let moments = self.moment_1.iter_mut().zip(self.moment_2);
        for ((parameter, gradient), (moment_1, moment_2)) in self.parameter.iter_mut().zip(self.gradient).zip(moments) {
            *moment_1 = *moment_1 * beta_1 + gradient * (1.0 - beta_1);
            *moment_2 = *moment_2 * beta_2 + gradient * gradient * (1.0 - beta_2);
            let step = *moment_1 * correction_1 / ((*moment_2 * correction_2).sqrt() + epsilon);
            *parameter = *parameter * kept - learning_rate * step;
        }
    }
}
