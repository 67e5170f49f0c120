//! RMSNorm as `x * (1 / rms) * gain`.
//!
//! The parameters are Burn's; its own forward divides the whole input, whose gradient takes three passes more.

use burn::nn::RmsNorm;
use burn::tensor::Tensor;

/// Root-mean-square norm over the last axis.
///
/// # Shapes
///
/// `[B, N, D] -> [B, N, D]`
pub fn rms_norm(norm: &RmsNorm, x: Tensor<3>) -> Tensor<3> {
    const WIDTH: usize = 2;
    let mean_square = (x.clone() * x.clone()).mean_dim(WIDTH); // [B, N, 1]
    let scale = (mean_square + norm.epsilon).sqrt().recip(); // [B, N, 1]
    x * scale * norm.gamma.val().unsqueeze()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init::Initializer;
    use burn::tensor::{Device, Distribution};

    #[test]
    fn it_is_burns_norm() {
        let device = Device::flex();
        let norm = Initializer::new(0, 1.0, &device).norm(6, 1e-5);
        let norm = RmsNorm { gamma: norm.gamma.map(|gamma| gamma.random_like(Distribution::Normal(1.0, 0.3))), ..norm };
        let x = Tensor::random([2, 3, 6], Distribution::Normal(0.0, 2.0), &device);
        let difference: f32 = (rms_norm(&norm, x.clone()) - norm.forward(x)).abs().max().into_scalar();
        assert!(difference < 1e-6, "{difference}");
    }
}
