//! Entries of one block in host memory, as they were stored on the device: bytes, never unpacked.

use std::sync::Arc;

use burn::tensor::{Bytes, DType, Device, Tensor, TensorData};

use crate::cache::entries::{Entries, EntryFormat, Layout, Packed, Packing, Segment, params_dtype};
use crate::snapshot::Tensors;

/// Keys and values of a block of one row.
#[derive(Debug)]
pub(super) struct HostBlock {
    keys: HostEntries,
    values: HostEntries,
}

/// Keys or values, `[1, H, E, K]` or codes and parameters.
#[derive(Debug)]
enum HostEntries {
    Dense(TensorData),
    Packed { codes: TensorData, params: TensorData, packing: Packing },
}

impl HostBlock {
    /// Copies a block from the device.
    pub(super) fn from_device(Segment { keys, values }: Segment) -> Self {
        Self { keys: HostEntries::from_device(keys), values: HostEntries::from_device(values) }
    }

    /// A copy on the device.
    pub(super) fn to_device(&self, device: &Device) -> Segment {
        Segment { keys: self.keys.to_device(device), values: self.values.to_device(device) }
    }

    /// Bytes of host memory.
    pub(super) fn bytes(&self) -> usize {
        self.parts().map(|(_, data)| data.as_bytes().len()).sum()
    }

    /// What it is made of, by the endings of names in a snapshot.
    fn parts(&self) -> impl Iterator<Item = (String, &TensorData)> {
        [("keys", &self.keys), ("values", &self.values)].into_iter().flat_map(|(kind, entries)| {
            let parts = match entries {
                HostEntries::Dense(numbers) => vec![("", numbers)],
                HostEntries::Packed { codes, params, .. } => vec![(".codes", codes), (".params", params)],
            };
            parts.into_iter().map(move |(ending, data)| (format!("{kind}{ending}"), data))
        })
    }
}

impl HostEntries {
    fn from_device(entries: Entries) -> Self {
        match entries {
            Entries::Dense(numbers) => Self::Dense(numbers.into_data()),
            Entries::Packed(Packed { codes, params, packing }) => {
                Self::Packed { codes: codes.into_data(), params: params.into_data(), packing }
            }
        }
    }

    fn to_device(&self, device: &Device) -> Entries {
        match self {
            Self::Dense(numbers) => Entries::Dense(Tensor::from_data(numbers.clone(), (device, numbers.dtype()))),
            Self::Packed { codes, params, packing } => Entries::Packed(Packed {
                codes: Tensor::from_data(codes.clone(), (device, DType::I32)),
                params: Tensor::from_data(params.clone(), (device, params_dtype(device))),
                packing: *packing,
            }),
        }
    }
}

/// Adds blocks of one format to `tensors` under `name`, each part one block after another: `[n, ..]`.
pub(super) fn record(blocks: &[Arc<HostBlock>], name: &str, tensors: &mut Tensors) {
    let Some(first) = blocks.first() else { return };
    for (index, (part, data)) in first.parts().enumerate() {
        let mut shape = data.shape().to_vec();
        shape[0] = blocks.len();
        let of_block = |block: &Arc<HostBlock>| {
            let part = block.parts().nth(index);
            part.expect("blocks of one format have the same parts").1.as_bytes().to_vec()
        };
        let bytes = blocks.iter().flat_map(of_block).collect();
        let joined = TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, data.dtype());
        tensors.insert(format!("{name}.{part}"), joined);
    }
}

/// Takes `n_blocks` blocks out of `tensors`, whose entries have the given dimensions `[H, E, K]`.
pub(super) fn take(
    n_blocks: usize,
    formats: [EntryFormat; 2],
    dims: [usize; 3],
    name: &str,
    tensors: &mut Tensors,
) -> Result<Vec<Arc<HostBlock>>, String> {
    let mut take = |kind: &str, format| take_entries(n_blocks, format, dims, &format!("{name}.{kind}"), tensors);
    let (keys, values) = (take("keys", formats[0])?, take("values", formats[1])?);
    Ok(keys.into_iter().zip(values).map(|(keys, values)| Arc::new(HostBlock { keys, values })).collect())
}

fn take_entries(
    n_blocks: usize,
    format: EntryFormat,
    [n_heads, n_entries, head_dim]: [usize; 3],
    name: &str,
    tensors: &mut Tensors,
) -> Result<Vec<HostEntries>, String> {
    let mut take = |name: &str, n_heads, width, dtypes: &[DType]| {
        take_part(name, n_blocks, [1, n_heads, n_entries, width], dtypes, tensors)
    };
    let packing = match format.layout(n_heads, head_dim) {
        Layout::Packed(packing) => packing,
        Layout::Dense(dtype) => {
            let numbers = take(name, n_heads, head_dim, &[dtype])?;
            return Ok(numbers.into_iter().map(HostEntries::Dense).collect());
        }
    };
    let codes = take(&format!("{name}.codes"), 1, packing.n_words(), &[DType::I32])?;
    let params = take(&format!("{name}.params"), 1, packing.n_params(), &[DType::F16, DType::F32])?;
    let both = codes.into_iter().zip(params);
    Ok(both.map(|(codes, params)| HostEntries::Packed { codes, params, packing }).collect())
}

/// Cuts the tensor `name` into blocks of the given shape.
fn take_part(
    name: &str,
    n_blocks: usize,
    shape: [usize; 4],
    dtypes: &[DType],
    tensors: &mut Tensors,
) -> Result<Vec<TensorData>, String> {
    let data = tensors.remove(name).ok_or(format!("{name} is missing"))?;
    let (found, dtype) = (data.shape().to_vec(), data.dtype());
    let expected = [&[n_blocks], &shape[1..]].concat();
    if found != expected || !dtypes.contains(&dtype) {
        return Err(format!("{name} is {dtype:?} {found:?}, expected {dtypes:?} {expected:?}"));
    }
    let block_bytes = shape.iter().product::<usize>() * dtype.size();
    let block = |bytes: &[u8]| TensorData::from_bytes(Bytes::from_bytes_vec(bytes.to_vec()), shape, dtype);
    Ok(data.as_bytes().chunks_exact(block_bytes).map(block).collect())
}
