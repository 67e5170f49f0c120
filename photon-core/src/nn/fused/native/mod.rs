//! The operations on the CPU backend: loops over slices, one pass over memory where tensors would take several.

mod adamw;
pub(super) mod attention;
mod attention_blocks;
pub(super) mod cross_entropy;
mod norm;
mod product;
mod rotate;
mod swiglu;

pub use self::adamw::AdamWUpdate;

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, TensorData};

use super::kernels::{Kernels, stock};
use crate::cache::attend::kernels::exp_of_negative;

/// Numbers that one thread takes at a time.
const PIECE: usize = 1 << 14;

impl Kernels for Flex {
    fn rms_norm(x: FlexTensor, gain: FlexTensor, epsilon: f64) -> (FlexTensor, FlexTensor) {
        match are_f32([&x, &gain]) {
            true => norm::forward(x, gain, epsilon as f32),
            false => stock::rms_norm::<Self>(x, gain, epsilon),
        }
    }

    fn rms_norm_backward(
        x: FlexTensor,
        gain: FlexTensor,
        scale: FlexTensor,
        d_out: FlexTensor,
    ) -> (FlexTensor, FlexTensor) {
        match are_f32([&x, &gain, &d_out]) {
            true => norm::backward(x, gain, scale, d_out),
            false => stock::rms_norm_backward::<Self>(x, gain, scale, d_out),
        }
    }

    fn rotate(x: FlexTensor, cos: FlexTensor, sin: FlexTensor) -> FlexTensor {
        match are_f32([&x, &cos, &sin]) {
            true => rotate::rotate(x, cos, sin),
            false => stock::rotate::<Self>(x, cos, sin),
        }
    }

    fn swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        match are_f32([&gate, &up]) {
            true => swiglu::forward(gate, up),
            false => stock::swiglu::<Self>(gate, up),
        }
    }

    fn swiglu_backward(gate: FlexTensor, up: FlexTensor, d_out: FlexTensor) -> (FlexTensor, FlexTensor) {
        match are_f32([&gate, &up, &d_out]) {
            true => swiglu::backward(gate, up, d_out),
            false => stock::swiglu_backward::<Self>(gate, up, d_out),
        }
    }
}

fn are_f32<const N: usize>(tensors: [&FlexTensor; N]) -> bool {
    tensors.iter().all(|tensor| tensor.dtype() == DType::F32)
}

/// The tensor with its numbers one after another.
fn contiguous(x: FlexTensor) -> FlexTensor {
    if x.is_contiguous() { x } else { x.to_contiguous() }
}

/// The numbers of a contiguous tensor.
fn numbers(x: &FlexTensor) -> &[f32] {
    x.as_slice().expect("a contiguous tensor in f32")
}

/// The same for writing; copied if another tensor holds them too.
fn numbers_mut(x: &mut FlexTensor) -> &mut [f32] {
    let (start, end) = x.layout().contiguous_offsets().expect("a contiguous tensor");
    &mut x.storage_mut()[start..end]
}

fn tensor<const D: usize>(numbers: Vec<f32>, shape: [usize; D]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(numbers, shape))
}

fn dims<const D: usize>(x: &FlexTensor) -> [usize; D] {
    let shape = x.layout().shape();
    std::array::from_fn(|axis| shape[axis])
}

/// `exp(x)` for `x <= 0`; what is no number stays none, so that a run that diverges shows it.
#[inline(always)]
fn exp(x: f32) -> f32 {
    if x.is_nan() { x } else { exp_of_negative(x) }
}
