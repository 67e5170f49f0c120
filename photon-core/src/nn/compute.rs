//! The number format of matrix products in training: weights stay f32, products may be made in fewer bits.
//!
//! What goes into a product and the weights are rounded to the format, and the product comes out in it; norms, the
//! residual stream, rotations and attention over positions are f32. Autodiff casts gradients back, so that those of the
//! weights are f32 too.

use std::fmt;

use burn::nn::Linear;
use burn::tensor::{DType, FloatDType, Tensor, module};
use serde::{Deserialize, Serialize};

/// A number format to multiply in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// 32 bits.
    #[default]
    F32,
    /// 16 bits with the range of f32 and 8 bits of precision.
    Bf16,
    /// 16 bits with 11 bits of precision and a small range: nothing above 65504, nothing below 6e-8.
    F16,
}

impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        })
    }
}

impl Compute {
    /// The format as Burn names it.
    pub fn dtype(self) -> FloatDType {
        match self {
            Self::F32 => FloatDType::F32,
            Self::Bf16 => FloatDType::BF16,
            Self::F16 => FloatDType::F16,
        }
    }

    /// A layer without bias in this format, from any format: `[B, N, D_in] -> [B, N, D_out]`.
    pub(crate) fn linear(self, layer: &Linear, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::F32 => layer.forward(x),
            _ => module::linear(self.round(x), self.round(layer.weight.val()), None),
        }
    }

    /// In this format.
    pub(crate) fn round<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match x.dtype() == DType::from(self.dtype()) {
            true => x,
            false => x.cast(self.dtype()),
        }
    }

    /// Back in f32.
    pub(crate) fn widen<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Self::F32 => x,
            _ => x.cast(FloatDType::F32),
        }
    }
}
