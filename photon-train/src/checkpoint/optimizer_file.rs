//! The optimiser's memory as a safetensors file: tensors as they are, counts as tensors without axes.

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use photon_core::checkpoint::{CheckpointError, read_header};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use super::TrainingCheckpointError;
use crate::optimizer::OptimizerMemory;

/// Writes a memory.
pub(super) fn save(path: &Path, memory: &OptimizerMemory) -> Result<(), TrainingCheckpointError> {
    let write = |reason: String| TrainingCheckpointError::Write { path: path.into(), reason };
    let counts: HashMap<&String, [u8; 8]> = memory.counts.iter().map(|(name, n)| (name, n.to_le_bytes())).collect();
    let mut views = Vec::new();
    for (name, data) in &memory.tensors {
        if data.dtype() != DType::F32 {
            return Err(write(format!("{name} is {:?}, expected F32", data.dtype())));
        }
        views.push((name, TensorView::new(Dtype::F32, data.shape().to_vec(), data.as_bytes())));
    }
    views.extend(counts.iter().map(|(name, bytes)| (*name, TensorView::new(Dtype::U64, Vec::new(), bytes))));
    let views = views.into_iter().map(|(name, view)| (name, view.expect("a tensor has the bytes of its shape")));
    safetensors::serialize_to_file(views, None, path).map_err(|error| write(error.to_string()))
}

/// Reads a memory; the header is checked against the file before anything is allocated.
pub(super) fn load(path: &Path) -> Result<OptimizerMemory, TrainingCheckpointError> {
    read_header(path)?;
    let bytes = std::fs::read(path).map_err(|error| TrainingCheckpointError::Io {
        action: "read",
        path: path.into(),
        reason: error.to_string(),
    })?;
    let damaged = |reason: String| CheckpointError::Damaged { path: path.into(), reason };
    let file = SafeTensors::deserialize(&bytes).map_err(|error| damaged(error.to_string()))?;
    let mut memory = OptimizerMemory::default();
    for (name, view) in file.iter() {
        match (view.dtype(), <[u8; 8]>::try_from(view.data())) {
            (Dtype::F32, _) => {
                let data = TensorData::from_bytes_vec(view.data().to_vec(), view.shape().to_vec(), DType::F32);
                memory.tensors.insert(name.to_owned(), data);
            }
            (Dtype::U64, Ok(bytes)) => drop(memory.counts.insert(name.to_owned(), u64::from_le_bytes(bytes))),
            (dtype, _) => return Err(damaged(format!("{name} is {dtype:?}, expected F32 or one U64")).into()),
        }
    }
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_comes_back_to_the_bit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("optimizer.safetensors");
        let mut memory = OptimizerMemory::default();
        save(&path, &memory).unwrap();
        assert_eq!(load(&path).unwrap(), memory);
        memory.tensors.insert("a.weight.moment".into(), TensorData::from([[1e-40_f32, -0.1], [f32::MAX, 3.0]]));
        memory.counts.insert("a.weight.time".into(), u64::MAX);
        save(&path, &memory).unwrap();
        assert_eq!(load(&path).unwrap(), memory);
    }
}
