//! Files of weights, opened, changed and written again.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// A tensor as it lies in the file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Weights {
    pub(crate) tensors: BTreeMap<String, Stored>,
    pub(crate) metadata: Option<HashMap<String, String>>,
}

impl Stored {
    pub(crate) fn f32(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn values_f32(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::F32);
        self.bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    }

    pub(crate) fn values_i64(&self) -> Vec<i64> {
        assert_eq!(self.dtype, Dtype::I64);
        self.bytes.as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect()
    }

    /// The same numbers, rounded to two bytes each by `narrow`.
    pub(crate) fn halves(&self, dtype: Dtype, narrow: impl Fn(f32) -> [u8; 2]) -> Self {
        let bytes = self.values_f32().into_iter().flat_map(narrow).collect();
        Self { dtype, shape: self.shape.clone(), bytes }
    }

    /// With `n` more rows of zeros.
    pub(crate) fn padded(&self, n: usize) -> Self {
        let row_bytes = self.bytes.len() / self.shape[0];
        let mut padded = self.clone();
        padded.shape[0] += n;
        padded.bytes.resize(padded.shape[0] * row_bytes, 0);
        padded
    }
}

impl Weights {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let stored = |(name, view): (String, TensorView)| {
            let bytes = view.data().to_vec();
            (name, Stored { dtype: view.dtype(), shape: view.shape().to_vec(), bytes })
        };
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(stored).collect();
        Self { tensors, metadata: header.metadata().clone() }
    }

    pub(crate) fn write(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, Stored { dtype, shape, bytes })| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, self.metadata.clone(), path).unwrap();
    }

    /// Changes the file at `path`.
    pub(crate) fn edit(path: &Path, change: impl FnOnce(&mut Self)) {
        let mut weights = Self::read(path);
        change(&mut weights);
        weights.write(path);
    }
}
