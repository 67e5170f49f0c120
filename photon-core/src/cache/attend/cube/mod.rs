//! Attention of few queries on graphics cards: one launch for each segment, packed entries read as they are.
//!
//! A cube works for one query of one head. Its units score as many entries at a time, one each, and then sum the values of
//! those, a number of the output each. What the softmax needs of earlier entries, their largest score and the sum of their
//! exponentials, goes from segment to segment, so nothing is joined and no score is kept.

mod kernel;

use burn::backend::tensor::IntTensor;
use burn::backend::{Cube, DispatchDevice};
use burn::tensor::{DType, Device, Int, Tensor};
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::{CubeCount, CubeDim};

use crate::cache::entries::{Entries, Packed, Segment};
use crate::cards::{CubeTensor, MOST_CUBES, empty};

/// Queries of a head for which reading entries once each costs less than a matrix product launches.
const MAX_QUERIES: usize = 16;
/// Units of a cube, and numbers of a head, at most.
const MAX_UNITS: usize = 256;
/// Units of a cube at least: entries that are scored at a time.
const MIN_UNITS: usize = 64;

/// Entries as the kernel reads them.
struct Readable {
    /// The numbers of dense entries, the parameters of packed ones.
    numbers: CubeTensor,
    /// The words of packed entries; of dense ones anything.
    codes: CubeTensor,
    /// Bits of a code; 0 for dense entries.
    bits: usize,
    /// Numbers that share parameters.
    group: usize,
}

/// Whether [`attend`] is there for these tensors, and the better way.
pub(super) fn serves(q: &Tensor<4>, segments: &[Segment]) -> bool {
    let [batch, n_heads, n_queries, head_dim] = q.dims();
    let is_readable = |entries: &Entries| match entries {
        Entries::Dense(numbers) => elem_type(numbers.dtype()).is_some(),
        Entries::Packed(Packed { codes, params, .. }) => {
            codes.dtype() == DType::I32 && elem_type(params.dtype()).is_some()
        }
    };
    is_cube(&q.device())
        && n_queries <= MAX_QUERIES
        && batch * n_heads <= MOST_CUBES
        && head_dim <= MAX_UNITS
        && segments.iter().all(|segment| is_readable(&segment.keys) && is_readable(&segment.values))
}

fn is_cube(device: &Device) -> bool {
    matches!(device.as_dispatch(), DispatchDevice::Cube(_))
}

fn elem_type(dtype: DType) -> Option<ElemType> {
    match dtype {
        DType::F32 => Some(ElemType::Float(FloatKind::F32)),
        DType::F16 => Some(ElemType::Float(FloatKind::F16)),
        DType::BF16 => Some(ElemType::Float(FloatKind::BF16)),
        _ => None,
    }
}

/// See [`super::attend`]; tensors other than entries are in f32.
pub(super) fn attend(q: Tensor<4>, segments: &[Segment], mask: Tensor<4>, sinks: Option<Tensor<4>>) -> Tensor<4> {
    let [batch, n_heads, n_queries, head_dim] = q.dims();
    let n_units = head_dim.next_power_of_two().max(MIN_UNITS);
    let q = floats(q);
    let mask = floats(mask);
    let has_sinks = sinks.is_some();
    let sinks = sinks.map_or_else(|| q.clone(), floats);
    let client = q.client.clone();
    let out = empty(&q, [batch, n_heads, n_queries, head_dim]);
    let carried = empty(&q, [batch, n_heads, n_queries, 2]);
    let mut first_column = 0;
    for (index, segment) in segments.iter().enumerate() {
        let n_entries = segment.keys.dims()[2];
        let (keys, values) = (Readable::new(&segment.keys), Readable::new(&segment.values));
        let types = [keys.numbers.dtype, values.numbers.dtype];
        kernel::attend_segment::launch(
            &client,
            CubeCount::Static(n_queries as u32, (batch * n_heads) as u32, 1),
            CubeDim::new_1d(n_units as u32),
            q.clone().into_tensor_arg(),
            keys.numbers.into_tensor_arg(),
            keys.codes.into_tensor_arg(),
            values.numbers.into_tensor_arg(),
            values.codes.into_tensor_arg(),
            mask.clone().into_tensor_arg(),
            sinks.clone().into_tensor_arg(),
            out.clone().into_tensor_arg(),
            carried.clone().into_tensor_arg(),
            n_entries,
            first_column,
            keys.bits,
            keys.group,
            values.bits,
            values.group,
            n_units,
            index == 0,
            index + 1 == segments.len(),
            has_sinks,
            types.map(|dtype| elem_type(dtype).expect("a type that `serves` has seen")),
        );
        first_column += n_entries;
    }
    Tensor::from_primitive::<Cube>(out)
}

fn floats(x: Tensor<4>) -> CubeTensor {
    x.try_into_primitive::<Cube>().expect("a tensor of a graphics card")
}

fn words(x: Tensor<4, Int>) -> IntTensor<Cube> {
    x.try_into_primitive::<Cube>().expect("a tensor of a graphics card")
}

impl Readable {
    fn new(entries: &Entries) -> Self {
        match entries {
            Entries::Dense(numbers) => {
                let numbers = floats(numbers.clone().inner());
                Self { codes: numbers.clone(), numbers, bits: 0, group: 1 }
            }
            Entries::Packed(Packed { codes, params, packing }) => Self {
                numbers: floats(params.clone().inner()),
                codes: words(codes.clone()),
                bits: packing.code.bits(),
                group: packing.group,
            },
        }
    }
}
