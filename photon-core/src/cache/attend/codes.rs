//! Attention of a single query to packed entries, straight from their codes.
//!
//! A group's scale is common to its numbers, so it multiplies a sum instead of each of them, and the minimum of four-bit
//! codes goes with the sum of the query's numbers. Nothing is unpacked to memory: for several queries that would pay,
//! for one it does not.

use crate::cache::entries::Code;
use crate::cache::half_float::Stored;
use crate::cache::heads::PackedHead;

/// Codes that are widened together: what the widest vectors hold as f32.
const LANES: usize = 16;
/// Vectors of a sum that are worked on at once, which hides how long an addition takes.
const MAX_VECTORS: usize = 4;

/// Whether [`scores`] and [`add_weighted`] can read these entries: no vector of codes may straddle two groups.
pub(super) fn serves(head: &PackedHead) -> bool {
    head.group == head.head_dim || head.group.is_multiple_of(LANES)
}

/// `scores[i] = query · entry first + i`.
#[inline(always)]
pub(super) fn scores(head: PackedHead, query: &[f32], first: usize, scores: &mut [f32]) {
    match head.code {
        Code::Int8 => scores_of::<Int8>(head, query, first, scores),
        Code::Int4 => scores_of::<Int4>(head, query, first, scores),
    }
}

/// `sum += Σ weights[i] * entry first + i`.
#[inline(always)]
pub(super) fn add_weighted(head: PackedHead, weights: &[f32], first: usize, sum: &mut [f32]) {
    match head.code {
        Code::Int8 => add_weighted_of::<Int8>(head, weights, first, sum),
        Code::Int4 => add_weighted_of::<Int4>(head, weights, first, sum),
    }
}

/// How codes and their groups' parameters lie in memory.
trait Coding {
    const CODES_PER_BYTE: usize;
    const PARAMS_PER_GROUP: usize;

    /// Codes of bytes, at most [`LANES`] of them; the rest is zero.
    fn widen(bytes: &[u8]) -> [f32; LANES];
}

struct Int8;

impl Coding for Int8 {
    const CODES_PER_BYTE: usize = 1;
    const PARAMS_PER_GROUP: usize = 1;

    #[inline(always)]
    fn widen(bytes: &[u8]) -> [f32; LANES] {
        let bytes: [u8; LANES] = filled(bytes);
        bytes.map(|code| f32::from(code.cast_signed()))
    }
}

struct Int4;

impl Coding for Int4 {
    const CODES_PER_BYTE: usize = 2;
    const PARAMS_PER_GROUP: usize = 2;

    #[inline(always)]
    fn widen(bytes: &[u8]) -> [f32; LANES] {
        let bytes: [u8; LANES / 2] = filled(bytes);
        let words = [0, 4].map(|at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]));
        std::array::from_fn(|i| (words[i / 8] >> (4 * (i % 8)) & 15) as f32)
    }
}

/// The slice as an array, with zeros where it ends early.
#[inline(always)]
fn filled<T: Copy + Default, const N: usize>(slice: &[T]) -> [T; N] {
    match slice.first_chunk() {
        Some(whole) => *whole,
        None => std::array::from_fn(|i| slice.get(i).copied().unwrap_or_default()),
    }
}

#[inline(always)]
fn scores_of<C: Coding>(head: PackedHead, query: &[f32], first: usize, scores: &mut [f32]) {
    scores.fill(0.0);
    for (group, query) in query.chunks_exact(head.group).enumerate() {
        let total: f32 = query.iter().sum();
        let first_byte = group * head.group / C::CODES_PER_BYTE;
        for (index, score) in scores.iter_mut().enumerate() {
            let product = dot::<C>(&head.codes(first + index)[first_byte..], query);
            *score += match head.params(first + index)[group * C::PARAMS_PER_GROUP..][..C::PARAMS_PER_GROUP] {
                [scale, minimum] => scale.widen() * product + minimum.widen() * total,
                ref scale => scale[0].widen() * product,
            };
        }
    }
}

/// `Σ code * query`.
#[inline(always)]
fn dot<C: Coding>(bytes: &[u8], query: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let mut start = 0;
    while start < query.len() {
        let query: [f32; LANES] = filled(&query[start..]);
        let codes = C::widen(&bytes[start / C::CODES_PER_BYTE..]);
        for i in 0..LANES {
            sums[i] += codes[i] * query[i];
        }
        start += LANES;
    }
    // In halves, as vectors add up.
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

#[inline(always)]
fn add_weighted_of<C: Coding>(head: PackedHead, weights: &[f32], first: usize, sum: &mut [f32]) {
    for (group, sum) in sum.chunks_exact_mut(head.group).enumerate() {
        let first_param = group * C::PARAMS_PER_GROUP;
        if C::PARAMS_PER_GROUP == 2 {
            let of_entry =
                |(index, weight): (usize, &f32)| weight * head.params(first + index)[first_param + 1].widen();
            let minimum: f32 = weights.iter().enumerate().map(of_entry).sum();
            sum.iter_mut().for_each(|sum| *sum += minimum);
        }
        for (part, sum) in sum.chunks_mut(MAX_VECTORS * LANES).enumerate() {
            let first_code = group * head.group + part * MAX_VECTORS * LANES;
            let lines = Lines { head, first, first_param, first_byte: first_code / C::CODES_PER_BYTE };
            match sum.len().div_ceil(LANES) {
                1 => lines.add_weighted::<C, 1>(weights, sum),
                2 => lines.add_weighted::<C, 2>(weights, sum),
                3 => lines.add_weighted::<C, 3>(weights, sum),
                _ => lines.add_weighted::<C, MAX_VECTORS>(weights, sum),
            }
        }
    }
}

/// A part of a group of every entry from `first` on.
struct Lines<'a> {
    head: PackedHead<'a>,
    first: usize,
    first_param: usize,
    first_byte: usize,
}

impl Lines<'_> {
    /// The number of vectors is known when this is compiled, so that sums stay in registers.
    #[inline(always)]
    fn add_weighted<C: Coding, const N: usize>(self, weights: &[f32], sum: &mut [f32]) {
        let Self { head, first, first_param, first_byte } = self;
        let mut sums = [[0.0; LANES]; N];
        for (index, &weight) in weights.iter().enumerate() {
            let scale = weight * head.params(first + index)[first_param].widen();
            let bytes = &head.codes(first + index)[first_byte..];
            for (vector, sums) in sums.iter_mut().enumerate() {
                let codes = C::widen(&bytes[vector * LANES / C::CODES_PER_BYTE..]);
                for i in 0..LANES {
                    sums[i] += scale * codes[i];
                }
            }
        }
        for (sum, part) in sum.iter_mut().zip(sums.as_flattened()) {
            *sum += part;
        }
    }
}
