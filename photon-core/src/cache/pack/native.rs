//! Packing on the CPU backend, group by group.

use burn::tensor::{Shape, Tensor, TensorData, f16};
use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::{F16_STEP, MAX_F16, MAX_INT4, MAX_INT8, MIN_SCALE};
use crate::cache::entries::{Code, Packed, Packing};
use crate::cache::flex::{self, Lines};
use crate::cache::half_float::Stored;
use crate::cache::vectorized::vectorized;

/// See [`super::pack`]; `x` is in f32.
pub(super) fn pack(x: Tensor<4>, packing: Packing) -> Packed {
    let [batch, _, n_entries, _] = x.dims();
    let x = Lines::floats(x);
    let mut words = vec![0; batch * n_entries * packing.n_words()];
    let mut params = vec![f16::ZERO; batch * n_entries * packing.n_params()];
    vectorized(Pack { x: &x, n_entries, packing, words: &mut words, params: &mut params });
    Packed {
        codes: flex::from_words(TensorData::new(words, [batch, 1, n_entries, packing.n_words()])),
        params: flex::from_floats(TensorData::new(params, [batch, 1, n_entries, packing.n_params()])),
        packing,
    }
}

/// See [`super::unpack`]; parameters are in f16.
pub(super) fn unpack(packed: Packed) -> Tensor<4> {
    let Packed { codes, params, packing } = packed;
    let [batch, _, n_entries, _] = codes.dims();
    let (codes, params) = (Lines::words(codes), Lines::floats(params.inner()));
    let shape = Shape::new([batch, packing.n_heads, n_entries, packing.head_dim]);
    let mut numbers = vec![0.0; shape.num_elements()];
    let head_len = (n_entries * packing.head_dim).max(1);
    numbers.par_chunks_mut(head_len).enumerate().for_each(|(index, numbers)| {
        let (row, head) = (index / packing.n_heads, index % packing.n_heads);
        vectorized(UnpackHead { codes: &codes, params: &params, packing, row, head, numbers });
    });
    flex::from_floats(TensorData::new(numbers, shape))
}

struct Pack<'a> {
    x: &'a Lines,
    n_entries: usize,
    packing: Packing,
    words: &'a mut [i32],
    params: &'a mut [f16],
}

impl NullaryFnOnce for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Packing { code, group, n_heads, head_dim } = self.packing;
        let numbers = self.x.tensor().storage::<f32>();
        let mut codes = vec![0; self.packing.words_per_head() * code.per_word()];
        let words = self.words.chunks_exact_mut(self.packing.words_per_head());
        let params = self.params.chunks_exact_mut(self.packing.params_per_head());
        for (index, (words, params)) in words.zip(params).enumerate() {
            let (entry, head) = (index / n_heads, index % n_heads);
            let (row, entry) = (entry / self.n_entries, entry % self.n_entries);
            let start = self.x.start(row, head) + entry * self.x.line_stride();
            let numbers = numbers[start..start + head_dim].chunks_exact(group);
            let groups = numbers.zip(codes.chunks_exact_mut(group)).zip(params.chunks_exact_mut(code.n_params()));
            for ((numbers, codes), params) in groups {
                match code {
                    Code::Int8 => params[0] = to_int8(numbers, codes),
                    Code::Int4 => [params[0], params[1]] = to_int4(numbers, codes),
                }
            }
            let mask = (1 << code.bits()) - 1;
            for (word, codes) in words.iter_mut().zip(codes.chunks_exact(code.per_word())) {
                let codes = codes.iter().enumerate();
                *word = codes.fold(0, |word, (i, &code_bits)| word | (code_bits & mask) << (i * code.bits()));
            }
        }
    }
}

#[inline(always)]
fn to_int8(numbers: &[f32], codes: &mut [i32]) -> f16 {
    let largest = numbers.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    let (stored, scale) = scale(largest / MAX_INT8);
    for (code, x) in codes.iter_mut().zip(numbers) {
        *code = (x / scale).round_ties_even().clamp(-MAX_INT8, MAX_INT8) as i32;
    }
    stored
}

#[inline(always)]
fn to_int4(numbers: &[f32], codes: &mut [i32]) -> [f16; 2] {
    let smallest = numbers.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let stored_minimum = -round_up((-smallest).clamp(-MAX_F16, MAX_F16));
    let minimum = stored_minimum.to_f32();
    let (stored_scale, scale) = scale((largest - minimum) / MAX_INT4);
    for (code, x) in codes.iter_mut().zip(numbers) {
        *code = ((x - minimum) / scale).round_ties_even().clamp(0.0, MAX_INT4) as i32;
    }
    [stored_scale, stored_minimum]
}

/// The scale to store for a wished one, and its value.
fn scale(wished: f32) -> (f16, f32) {
    let stored = round_up(wished.clamp(MIN_SCALE, MAX_F16));
    (stored, stored.to_f32())
}

/// The smallest f16 that is no smaller.
fn round_up(x: f32) -> f16 {
    let nearest = f16::from_f32(x);
    let value = nearest.to_f32();
    match value < x {
        true => f16::from_f32(value + (value.abs() * F16_STEP).max(MIN_SCALE)),
        false => nearest,
    }
}

struct UnpackHead<'a> {
    codes: &'a Lines,
    params: &'a Lines,
    packing: Packing,
    row: usize,
    head: usize,
    numbers: &'a mut [f32],
}

impl NullaryFnOnce for UnpackHead<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Packing { code, group, head_dim, .. } = self.packing;
        let words = self.codes.tensor().storage::<i32>();
        let params = self.params.tensor().storage::<f16>();
        let first_word = self.codes.start(self.row, 0) + self.head * self.packing.words_per_head();
        let first_param = self.params.start(self.row, 0) + self.head * self.packing.params_per_head();
        let mut codes = vec![0.0; self.packing.words_per_head() * code.per_word()];
        for (entry, numbers) in self.numbers.chunks_exact_mut(head_dim).enumerate() {
            let words = &words[first_word + entry * self.codes.line_stride()..][..self.packing.words_per_head()];
            let params = &params[first_param + entry * self.params.line_stride()..][..self.packing.params_per_head()];
            match code {
                Code::Int8 => split_words::<4>(words, &mut codes, |word, i| word << (24 - 8 * i) >> 24),
                Code::Int4 => split_words::<8>(words, &mut codes, |word, i| word >> (4 * i) & 15),
            }
            let groups = numbers.chunks_exact_mut(group).zip(codes.chunks_exact(group));
            for ((numbers, codes), params) in groups.zip(params.chunks_exact(code.n_params())) {
                let scale = params[0].widen();
                let minimum = if code == Code::Int4 { params[1].widen() } else { 0.0 };
                for (x, code) in numbers.iter_mut().zip(codes) {
                    *x = code * scale + minimum;
                }
            }
        }
    }
}

/// Codes of words, `N` to a word, as floats.
#[inline(always)]
fn split_words<const N: usize>(words: &[i32], codes: &mut [f32], code: impl Fn(i32, usize) -> i32) {
    for (word, codes) in words.iter().zip(codes.as_chunks_mut::<N>().0) {
        for (i, slot) in codes.iter_mut().enumerate() {
            *slot = code(*word, i) as f32;
        }
    }
}
