//! The CPU backend's tensors as slices.

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchDevice, Flex};
use burn::tensor::{Device, Int, Tensor, TensorData};

/// Whether the native kernels serve tensors of `device`, gradients left aside.
///
/// They read words as bytes, which big-endian machines order otherwise.
pub(super) fn serves(device: &Device) -> bool {
    cfg!(target_endian = "little") && matches!(device.as_dispatch(), DispatchDevice::Flex(_))
}

/// A tensor whose last axis lies in memory without gaps, by itself or by a copy, and where its lines start.
pub(super) struct Lines {
    tensor: FlexTensor,
}

impl Lines {
    /// Of floats.
    ///
    /// # Panics
    ///
    /// If [`serves`] denies the tensor's device.
    pub(super) fn floats(x: Tensor<4>) -> Self {
        Self::new(x.try_into_primitive::<Flex>().expect("a tensor of the CPU backend"))
    }

    /// Of words.
    ///
    /// # Panics
    ///
    /// As [`Lines::floats`].
    pub(super) fn words(x: Tensor<4, Int>) -> Self {
        Self::new(x.try_into_primitive::<Flex>().expect("a tensor of the CPU backend"))
    }

    fn new(tensor: FlexTensor) -> Self {
        let strides = tensor.layout().strides();
        let has_lines = strides[3] == 1 && strides.iter().all(|&stride| stride >= 0);
        Self { tensor: if has_lines { tensor } else { tensor.to_contiguous() } }
    }

    /// The tensor, for its storage.
    pub(super) fn tensor(&self) -> &FlexTensor {
        &self.tensor
    }

    /// Where line `[i, j, 0]` starts in the storage.
    pub(super) fn start(&self, i: usize, j: usize) -> usize {
        self.tensor.layout().start_offset() + i * self.stride(0) + j * self.stride(1)
    }

    /// Line `[i, j, k]` of floats in f32; an axis of length one stands for any index.
    pub(super) fn line(&self, i: usize, j: usize, k: usize) -> &[f32] {
        let dims = self.tensor.layout().shape();
        let [i, j, k] = [(0, i), (1, j), (2, k)].map(|(axis, index)| index.min(dims[axis] - 1));
        &self.tensor.storage()[self.start(i, j) + k * self.line_stride()..][..dims[3]]
    }

    /// The distance of lines along the third axis.
    pub(super) fn line_stride(&self) -> usize {
        self.stride(2)
    }

    fn stride(&self, axis: usize) -> usize {
        self.tensor.layout().strides()[axis].unsigned_abs()
    }
}

/// A float tensor of the CPU backend.
pub(super) fn from_floats(data: TensorData) -> Tensor<4> {
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(data))
}

/// An integer tensor of the CPU backend.
pub(super) fn from_words(data: TensorData) -> Tensor<4, Int> {
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(data))
}
