//! The operations on graphics cards: a kernel each, where stock operations would launch several.
//!
//! A step of decoding does little work and waits for launches, so what counts is how many there are. Kernels are for f32;
//! other formats take the stock operations, with which the tests compare.

mod norm;
mod rotate;
mod swiglu;

use burn::backend::Cube;
use burn::tensor::DType;
use cubecl::prelude::{CubeCount, CubeDim};

use super::kernels::{Kernels, stock};
use crate::cards::{CubeTensor, MOST_CUBES};

/// Units of a cube that work on one line, at most.
const MOST_UNITS: usize = 256;

impl Kernels for Cube {
    fn rms_norm(x: CubeTensor, gain: CubeTensor, epsilon: f64) -> (CubeTensor, CubeTensor) {
        match are_f32([&x, &gain]) {
            true => norm::forward(x, gain, epsilon as f32),
            false => stock::rms_norm::<Self>(x, gain, epsilon),
        }
    }

    fn rotate(x: CubeTensor, cos: CubeTensor, sin: CubeTensor) -> CubeTensor {
        match are_f32([&x, &cos, &sin]) {
            true => rotate::rotate(x, cos, sin),
            false => stock::rotate::<Self>(x, cos, sin),
        }
    }

    fn swiglu(gate: CubeTensor, up: CubeTensor) -> CubeTensor {
        match are_f32([&gate, &up]) {
            true => swiglu::forward(gate, up),
            false => stock::swiglu::<Self>(gate, up),
        }
    }

    fn swiglu_backward(gate: CubeTensor, up: CubeTensor, d_out: CubeTensor) -> (CubeTensor, CubeTensor) {
        match are_f32([&gate, &up, &d_out]) {
            true => swiglu::backward(gate, up, d_out),
            false => stock::swiglu_backward::<Self>(gate, up, d_out),
        }
    }
}

fn are_f32<const N: usize>(tensors: [&CubeTensor; N]) -> bool {
    tensors.iter().all(|tensor| tensor.dtype == DType::F32)
}

fn dims<const D: usize>(x: &CubeTensor) -> [usize; D] {
    let shape = x.meta.shape();
    std::array::from_fn(|axis| shape[axis])
}

/// One cube for each of `n` pieces of work; a few of the last may have none.
fn cubes(n: usize) -> CubeCount {
    let n = u32::try_from(n).expect("a tensor's lines are counted in 32 bits");
    let along = n.clamp(1, MOST_CUBES as u32);
    CubeCount::Static(along, n.div_ceil(along).max(1), 1)
}

/// Cubes with a unit for each of `n` numbers; a few of the last units may have none.
fn units(n: usize) -> (CubeCount, CubeDim) {
    (cubes(n.div_ceil(MOST_UNITS)), CubeDim::new_1d(MOST_UNITS as u32))
}

/// Units that share a line of `width` numbers: a power of two.
fn units_of_line(width: usize) -> usize {
    width.next_power_of_two().min(MOST_UNITS)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Distribution, Tensor};

    use super::*;
    use crate::device::DeviceChoice;

    fn device() -> Device {
        DeviceChoice::Wgpu.open().unwrap_or_else(|error| panic!("{error}")).device
    }

    fn random<const D: usize>(shape: [usize; D]) -> CubeTensor {
        primitive(Tensor::<D>::random(shape, Distribution::Normal(0.0, 1.0), &device()))
    }

    fn primitive<const D: usize>(x: Tensor<D>) -> CubeTensor {
        x.try_into_primitive::<Cube>().expect("a tensor of a graphics card")
    }

    fn close<const D: usize>(kernel: CubeTensor, stock: CubeTensor) {
        assert_eq!(dims::<D>(&kernel), dims::<D>(&stock));
        let [kernel, stock] = [kernel, stock].map(Tensor::<D>::from_primitive::<Cube>);
        let difference: f32 = (kernel - stock).abs().max().into_scalar();
        assert!(difference < 1e-5, "{difference}");
    }

    /// Lines whose numbers lie apart in memory.
    fn apart(shape: [usize; 3]) -> CubeTensor {
        let [batch, n_positions, width] = shape;
        let x = Tensor::<3>::random([batch, width, n_positions], Distribution::Normal(0.0, 1.0), &device());
        primitive(x.swap_dims(1, 2))
    }

    #[test]
    #[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
    fn cards_norms_equal_the_stock_ones() {
        for width in [1, 37, 64, 700] {
            for x in [random([2, 5, width]), apart([2, 5, width])] {
                let gain = random([1, 1, width]);
                let (out, scale) = Cube::rms_norm(x.clone(), gain.clone(), 1e-5);
                let (stock_out, stock_scale) = stock::rms_norm::<Cube>(x, gain, 1e-5);
                close::<3>(out, stock_out);
                close::<3>(scale, stock_scale);
            }
        }
    }

    #[test]
    #[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
    fn cards_rotations_equal_the_stock_ones() {
        for angle_rows in [1, 2] {
            let (x, cos, sin) = (random([2, 7, 3, 10]), random([angle_rows, 7, 1, 5]), random([angle_rows, 7, 1, 5]));
            let turned = Cube::rotate(x.clone(), cos.clone(), sin.clone());
            close::<4>(turned, stock::rotate::<Cube>(x, cos, sin));
        }
    }

    #[test]
    #[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
    fn cards_swiglu_equals_the_stock_one() {
        for gate in [random([2, 5, 133]), apart([2, 5, 133])] {
            let (up, d_out) = (random([2, 5, 133]), random([2, 5, 133]));
            close::<3>(Cube::swiglu(gate.clone(), up.clone()), stock::swiglu::<Cube>(gate.clone(), up.clone()));
            let (d_gate, d_up) = Cube::swiglu_backward(gate.clone(), up.clone(), d_out.clone());
            let (stock_gate, stock_up) = stock::swiglu_backward::<Cube>(gate, up, d_out);
            close::<3>(d_gate, stock_gate);
            close::<3>(d_up, stock_up);
        }
    }
}
