//! Numbers to entries and back.
//!
//! Parameters are stored in f16, and codes are chosen with the parameters as stored: a scale is rounded up, a minimum
//! down, so that codes cover the group and the error of a number is at most half a step. A scale is at least 2^-24, the
//! smallest f16, so groups of zeros and of tiny numbers need no exception. Numbers beyond what the largest f16 scale
//! reaches become the nearest that can be stored: `Int8` ends at 127 * 65504 on either side, `Int4` at -65504 and at
//! 15 * 65504 above the minimum. Infinity and NaN must not come in.

mod native;
mod stock;

use burn::tensor::{DType, FloatDType, Tensor};

use super::entries::{Entries, EntryFormat, Layout, Segment};
use super::flex;

/// The smallest scale: below it f16 has nothing but zero.
const MIN_SCALE: f32 = 1.0 / (1 << 24) as f32;
/// The largest f16.
const MAX_F16: f32 = 65504.0;
/// The distance of neighbouring f16 as a share of their size lies between 2^-11 and 2^-10: half of the larger and one and
/// a half of the smaller enclose this, so a sum with it rounds to the next neighbour.
const F16_STEP: f32 = 0.6 / 1024.0;
/// The largest magnitude of a code of [`Code::Int8`](super::entries::Code::Int8).
const MAX_INT8: f32 = 127.0;
/// The largest code of [`Code::Int4`](super::entries::Code::Int4).
const MAX_INT4: f32 = 15.0;

/// The same entries in other formats, of keys and of values.
pub(super) fn repack(Segment { keys, values }: Segment, [of_keys, of_values]: [EntryFormat; 2]) -> Segment {
    Segment { keys: pack(unpack(keys), of_keys), values: pack(unpack(values), of_values) }
}

/// Stores numbers in `format`.
///
/// # Shapes
///
/// `x: [b, H, E, K]`, with any strides.
///
/// # Panics
///
/// If the format's group does not divide the head dimension.
pub fn pack(x: Tensor<4>, format: EntryFormat) -> Entries {
    let x = x.inner();
    let [_, n_heads, _, head_dim] = x.dims();
    let packing = match format.layout(n_heads, head_dim) {
        Layout::Dense(dtype) => return Entries::Dense(x.cast(FloatDType::from(dtype))),
        Layout::Packed(packing) => packing,
    };
    let x = x.cast(FloatDType::F32);
    Entries::Packed(match flex::serves(&x.device()) {
        true => native::pack(x, packing),
        false => stock::pack(x, packing),
    })
}

/// The numbers that entries stand for, in f32.
///
/// # Shapes
///
/// `-> [b, H, E, K]`
pub fn unpack(entries: Entries) -> Tensor<4> {
    match entries {
        Entries::Dense(numbers) => numbers.inner().cast(FloatDType::F32),
        Entries::Packed(packed) => {
            let is_native = flex::serves(&packed.codes.device()) && packed.params.dtype() == DType::F16;
            if is_native { native::unpack(Entries::Packed(packed)) } else { stock::unpack(packed) }
        }
    }
}

#[cfg(test)]
pub(super) use stock::unpack as stock_unpack;

#[cfg(test)]
mod tests;
