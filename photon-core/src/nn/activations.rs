//! The precision of what goes into the matrices of a transformer block when it generates.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// How the inputs of matrix products are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    /// Not at all.
    #[default]
    F32,
    /// To 255 steps with a scale per position: the numbers of an int8 product, computed in f32. It shows what int8
    /// costs in fidelity, and saves nothing yet.
    Int8,
}

impl Activations {
    /// `[B, N, D] -> [B, N, D]`
    pub fn round(self, x: Tensor<3>) -> Tensor<3> {
        const WIDTH: usize = 2;
        const STEPS: f64 = 127.0;
        match self {
            Self::F32 => x,
            Self::Int8 => {
                // The smallest normal number keeps a position of zeros from dividing by zero.
                let scale = (x.clone().abs().max_dim(WIDTH) / STEPS).clamp_min(f32::MIN_POSITIVE); // [B, N, 1]
                (x / scale.clone()).round() * scale
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn every_position_has_a_scale_of_its_own() {
        let x = Tensor::<3>::from_floats([[[1.27, -0.004, 0.006], [127.0, 0.6, -0.4], [0.0; 3]]], &Device::flex());
        assert_eq!(Activations::F32.round(x.clone()).into_data(), x.clone().into_data());
        let rounded: Vec<f32> = Activations::Int8.round(x).try_to_vec_as().unwrap();
        let expected = [1.27, 0.0, 0.01, 127.0, 1.0, 0.0, 0.0, 0.0, 0.0];
        assert!(rounded.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{rounded:?}");
    }
}
