//! Seeded tensors for the tests of this module.

use burn::tensor::{Device, Tensor, TensorData};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

/// Standard normal numbers on the CPU.
pub(super) fn normal(shape: [usize; 4], seed: u64) -> Tensor<4> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| StandardNormal.sample(&mut rng)).collect();
    tensor(numbers, shape)
}

/// Numbers on the CPU.
pub(super) fn tensor(numbers: Vec<f32>, shape: [usize; 4]) -> Tensor<4> {
    Tensor::from_data(TensorData::new(numbers, shape), &Device::flex())
}

/// The numbers of a tensor, in order.
pub(super) fn numbers(x: &Tensor<4>) -> Vec<f32> {
    x.clone().try_to_vec_as().unwrap()
}
