//! What kernels for graphics cards have in common: their tensors, and numbers that the units of a cube bring together.

use burn::backend::Cube;
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;
use cubecl::prelude::*;

/// A tensor of a graphics card.
pub(crate) type CubeTensor = FloatTensor<Cube>;

/// Cubes along an axis of a launch, at most: what every device takes.
pub(crate) const MOST_CUBES: usize = 65_535;

/// A tensor in f32 whose numbers wait to be written, one after another, beside `like`.
pub(crate) fn empty<const D: usize>(like: &CubeTensor, shape: [usize; D]) -> CubeTensor {
    let handle = like.client.empty(shape.iter().product::<usize>() * size_of::<f32>());
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), shape.into(), handle, DType::F32)
}

/// The sum of the numbers of all units, a power of two; `scratch` has room for each.
#[cube]
pub(crate) fn sum_of_units(number: f32, scratch: &mut Shared<[f32]>, #[comptime] n_units: usize) -> f32 {
    let unit = UNIT_POS as usize;
    scratch[unit] = number;
    sync_cube();
    let mut n_left = comptime!(n_units / 2).runtime();
    while n_left > 0 {
        if unit < n_left {
            scratch[unit] += scratch[unit + n_left];
        }
        sync_cube();
        n_left /= 2;
    }
    let sum = scratch[0];
    // Before anyone writes there again.
    sync_cube();
    sum
}

/// The largest of the numbers of all units, a power of two; `scratch` has room for each.
#[cube]
pub(crate) fn largest_of_units(number: f32, scratch: &mut Shared<[f32]>, #[comptime] n_units: usize) -> f32 {
    let unit = UNIT_POS as usize;
    scratch[unit] = number;
    sync_cube();
    let mut n_left = comptime!(n_units / 2).runtime();
    while n_left > 0 {
        if unit < n_left {
            scratch[unit] = max(scratch[unit], scratch[unit + n_left]);
        }
        sync_cube();
        n_left /= 2;
    }
    let largest = scratch[0];
    sync_cube();
    largest
}
