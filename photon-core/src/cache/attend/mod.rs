//! Attention that reads entries as they are stored.

mod codes;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod cube;
pub(crate) mod kernels;
mod native;
mod stock;

use burn::tensor::{FloatDType, Tensor};

use super::entries::{Entries, Segment};
use super::pack::unpack;

const SEQ: usize = 2;

/// `softmax(q kᵀ + mask) v` over the entries of all segments, one segment after another.
///
/// A sink is one more logit in the softmax that has no value.
///
/// # Shapes
///
/// `q: [b, H, N, K]`, scaled, for `H` kv heads; query heads that share a kv head stand among the `N`. `mask`, which is
/// added to the scores, broadcasts to `[b, 1, N, E]`, `sinks` to `[b, H, N, 1]`. `-> [b, H, N, K]`, in f32.
///
/// # Panics
///
/// If there is no segment.
pub fn attend(q: Tensor<4>, segments: &[Segment], mask: Tensor<4>, sinks: Option<Tensor<4>>) -> Tensor<4> {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    if cube::serves(&q, segments) {
        return cube::attend(plain(q), segments, plain(mask), sinks.map(plain));
    }
    attend_with_weights(q, segments, mask, sinks).0
}

/// The same as [`attend`], with the weight of each entry for each query; they sum to one with that of the sink.
///
/// # Shapes
///
/// As [`attend`], and weights `[b, H, N, E]`.
pub fn attend_with_weights(
    q: Tensor<4>,
    segments: &[Segment],
    mask: Tensor<4>,
    sinks: Option<Tensor<4>>,
) -> (Tensor<4>, Tensor<4>) {
    let (q, mask, sinks) = (plain(q), plain(mask), sinks.map(plain));
    if native::serves(&q, segments) {
        return native::attend(q, segments, mask, sinks);
    }
    let keys = join(segments.iter().map(|segment| &segment.keys));
    let values = join(segments.iter().map(|segment| &segment.values));
    stock::attend(q, keys, values, mask, sinks)
}

/// In f32, without gradients.
fn plain(x: Tensor<4>) -> Tensor<4> {
    x.inner().cast(FloatDType::F32)
}

fn join<'a>(entries: impl Iterator<Item = &'a Entries>) -> Tensor<4> {
    let mut unpacked: Vec<_> = entries.cloned().map(unpack).collect();
    match unpacked.len() {
        1 => unpacked.remove(0),
        _ => Tensor::cat(unpacked, SEQ),
    }
}

#[cfg(test)]
mod tests;
