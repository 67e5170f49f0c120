//! The number format of matrix products.
//!
//! What goes into a product and the weights are rounded to the format, and the product comes out in it; norms, the
//! residual stream, rotations and attention over positions are f32. In training weights stay f32 and are rounded for each
//! product; autodiff casts gradients back, so that those of the weights are f32 too. For generation they may be stored in
//! the format, which halves what a token reads of them.

use std::fmt;
use std::str::FromStr;

use burn::module::{Module, ModuleMapper, Param};
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

/// A layer with bias by the format that its weights are stored in, from f32 to f32: `[B, N, D_in] -> [B, N, D_out]`.
pub(crate) fn as_stored(layer: &Linear, x: Tensor<3>) -> Tensor<3> {
    match (Compute::F32.or_stored(layer), &layer.bias) {
        (Compute::F32, _) => layer.forward(x),
        (compute, None) => in_f32(compute.linear(layer, x)),
        (compute, Some(bias)) => in_f32(compute.linear(layer, x)) + bias.val().unsqueeze(),
    }
}

/// What is to be multiplied with weights, in their format.
pub(crate) fn in_format_of<const D: usize>(weights: &Tensor<2>, x: Tensor<D>) -> Tensor<D> {
    match weights.dtype() {
        stored if stored == x.dtype() => x,
        stored => x.cast(stored),
    }
}

/// In f32, from any format.
pub(crate) fn in_f32<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    match x.dtype() {
        DType::F32 => x,
        _ => x.cast(FloatDType::F32),
    }
}

/// The module with its matrices stored in a format; vectors stay f32.
pub(crate) fn with_matrices_in<M: Module>(module: M, compute: Compute) -> M {
    struct Round(Compute);
    impl ModuleMapper for Round {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            match D {
                2 => param.map(|matrix| self.0.round(matrix)),
                _ => param,
            }
        }
    }
    module.map(&mut Round(compute))
}

impl FromStr for Compute {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::F32, Self::Bf16, Self::F16]
            .into_iter()
            .find(|compute| compute.to_string() == text)
            .ok_or_else(|| format!("unknown format \"{text}\": use f32, bf16 or f16"))
    }
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

    /// This format, or that of a layer whose weights are stored in fewer bits.
    pub(crate) fn or_stored(self, layer: &Linear) -> Self {
        match layer.weight.val().dtype() {
            DType::BF16 => Self::Bf16,
            DType::F16 => Self::F16,
            _ => self,
        }
    }

    /// A layer without bias, from any format: `[B, N, D_in] -> [B, N, D_out]`. What comes out is in this format, or in that
    /// of the layer's weights.
    pub(crate) fn linear(self, layer: &Linear, x: Tensor<3>) -> Tensor<3> {
        match self.or_stored(layer) {
            Self::F32 => layer.forward(x),
            compute => module::linear(compute.round(x), compute.round(layer.weight.val()), None),
        }
    }

    /// In this format.
    pub(crate) fn round<const D: usize>(self, x: Tensor<D>) -> Tensor<D> {
        match x.dtype() == DType::from(self.dtype()) {
            true => x,
            false => x.cast(self.dtype()),
        }
    }
}
