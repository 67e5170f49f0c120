//! Packing by Burn's own operations, on any backend.

use burn::tensor::{DType, FloatDType, Int, IntDType, Tensor};

use super::{F16_STEP, MAX_F16, MAX_INT4, MAX_INT8, MIN_SCALE};
use crate::cache::entries::{Code, Packed, Packing, params_dtype};

const HEAD: usize = 1;
const SEQ: usize = 2;
const LAST: usize = 3;

/// See [`super::pack`]; `x` is in f32.
pub(super) fn pack(x: Tensor<4>, packing: Packing) -> Packed {
    let [batch, n_heads, n_entries, head_dim] = x.dims();
    let n_groups = n_heads * packing.groups_per_head();
    let groups = x.swap_dims(HEAD, SEQ).reshape([batch, n_entries, n_groups, packing.group]);
    let (codes, params) = match packing.code {
        Code::Int8 => {
            let largest = groups.clone().abs().max_dim(LAST);
            let scale = scale(largest / MAX_INT8);
            let codes = (groups / divisor(&scale)).round().clamp(-MAX_INT8, MAX_INT8);
            (codes, scale)
        }
        Code::Int4 => {
            let (smallest, largest) = (groups.clone().min_dim(LAST), groups.clone().max_dim(LAST));
            let minimum = round_up(smallest.neg().clamp(-MAX_F16, MAX_F16)).neg();
            let scale = scale((largest - minimum.clone()) / MAX_INT4);
            let codes = ((groups - minimum.clone()) / divisor(&scale)).round().clamp(0.0, MAX_INT4);
            (codes, Tensor::cat(vec![scale, minimum], LAST)) // [b, E, G, 2]
        }
    };
    let params_dtype = FloatDType::from(params_dtype(&params.device()));
    Packed {
        codes: to_words(codes.cast(IntDType::I32).reshape([batch, n_entries, n_heads, head_dim]), &packing),
        params: params.cast(params_dtype).reshape([batch, 1, n_entries, packing.n_params()]),
        packing,
    }
}

/// See [`super::unpack`].
pub(in crate::cache) fn unpack(packed: Packed) -> Tensor<4> {
    let Packed { codes, params, packing } = packed;
    let [batch, _, n_entries, _] = codes.dims();
    let n_groups = packing.n_heads * packing.groups_per_head();
    let codes = from_words(codes, &packing).cast(FloatDType::F32); // [b, E, H, K]
    let codes = codes.reshape([batch, n_entries, n_groups, packing.group]);
    let params = params.inner().cast(FloatDType::F32);
    let params = params.reshape([batch, n_entries, n_groups, packing.code.n_params()]);
    let steps = codes * params.clone().narrow(LAST, 0, 1);
    let numbers = match packing.code {
        Code::Int8 => steps,
        Code::Int4 => steps + params.narrow(LAST, 1, 1),
    };
    numbers.reshape([batch, n_entries, packing.n_heads, packing.head_dim]).swap_dims(HEAD, SEQ)
}

/// The scale to store for a wished one.
fn scale(wished: Tensor<4>) -> Tensor<4> {
    round_up(wished.clamp(MIN_SCALE, MAX_F16))
}

/// The scale as a divisor: a device that takes small f16 for zero must not divide by it.
fn divisor(scale: &Tensor<4>) -> Tensor<4> {
    scale.clone().clamp_min(MIN_SCALE)
}

/// The smallest f16 that is no smaller, or the number itself where the device has no f16.
fn round_up(x: Tensor<4>) -> Tensor<4> {
    if params_dtype(&x.device()) != DType::F16 {
        return x;
    }
    let as_f16 = |x: Tensor<4>| x.cast(FloatDType::F16).cast(FloatDType::F32);
    let nearest = as_f16(x.clone());
    let next = as_f16(nearest.clone() + (nearest.clone().abs() * F16_STEP).clamp_min(MIN_SCALE));
    nearest.clone().mask_where(nearest.lower(x), next)
}

/// `[b, E, H, K]` codes to `[b, 1, E, W]` words.
fn to_words(codes: Tensor<4, Int>, packing: &Packing) -> Tensor<4, Int> {
    let [batch, n_entries, n_heads, head_dim] = codes.dims();
    let n_fill = packing.words_per_head() * packing.code.per_word() - head_dim;
    let codes = match n_fill {
        0 => codes,
        _ => {
            let fill = Tensor::zeros([batch, n_entries, n_heads, n_fill], (&codes.device(), DType::I32));
            Tensor::cat(vec![codes, fill], LAST)
        }
    };
    let codes = codes.reshape([batch, n_entries, packing.n_words(), packing.code.per_word()]);
    let bits = packing.code.bits();
    let in_place = |i: usize| {
        let code = codes.clone().narrow(LAST, i, 1).bitwise_and_scalar((1 << bits) - 1);
        code.bitwise_left_shift_scalar((i * bits) as i32)
    };
    let words = (1..packing.code.per_word()).fold(in_place(0), |word, i| word.bitwise_or(in_place(i)));
    words.reshape([batch, 1, n_entries, packing.n_words()])
}

/// `[b, 1, E, W]` words to `[b, E, H, K]` codes.
fn from_words(words: Tensor<4, Int>, packing: &Packing) -> Tensor<4, Int> {
    let [batch, _, n_entries, n_words] = words.dims();
    let words = words.reshape([batch, n_entries, n_words, 1]);
    let bits = packing.code.bits();
    let codes = (0..packing.code.per_word()).map(|i| {
        // Whether a shift fills up with the sign or with zeros, the mask leaves the same bits.
        let code = words.clone().bitwise_right_shift_scalar((i * bits) as i32).bitwise_and_scalar((1 << bits) - 1);
        match packing.code {
            Code::Int8 => code.bitwise_xor_scalar(128) - 128,
            Code::Int4 => code,
        }
    });
    let codes = Tensor::cat(codes.collect(), LAST); // [b, E, W, codes of a word]
    let padded = packing.words_per_head() * packing.code.per_word();
    codes.reshape([batch, n_entries, packing.n_heads, padded]).narrow(LAST, 0, packing.head_dim)
}
