//! Packing on the CPU backend, group by group.

use burn::tensor::{Tensor, TensorData, f16};
use pulp::NullaryFnOnce;
use rayon::prelude::*;

use super::{F16_STEP, MAX_F16, MAX_INT4, MAX_INT8, MIN_SCALE};
use crate::cache::entries::{Code, Entries, Packed, Packing};
use crate::cache::flex::{self, Lines};
use crate::cache::heads::{Head, OpenEntries};
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

/// See [`super::unpack`]; entries are readable.
pub(super) fn unpack(entries: Entries) -> Tensor<4> {
    let [batch, n_heads, n_entries, head_dim] = entries.dims();
    let entries = OpenEntries::new(entries);
    let mut numbers = vec![0.0; batch * n_heads * n_entries * head_dim];
    let head_len = (n_entries * head_dim).max(1);
    numbers.par_chunks_mut(head_len).enumerate().for_each(|(index, numbers)| {
        let stored = entries.head(index / n_heads, index % n_heads);
        vectorized(UnpackHead { stored, numbers });
    });
    flex::from_floats(TensorData::new(numbers, [batch, n_heads, n_entries, head_dim]))
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
    stored: Head<'a>,
    numbers: &'a mut [f32],
}

impl NullaryFnOnce for UnpackHead<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        self.stored.read(0, self.numbers);
    }
}
