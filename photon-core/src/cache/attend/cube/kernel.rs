//! The kernel: one segment for one query of one head.

use cubecl::prelude::*;

use crate::cache::entries::Code;
use crate::cache::kv_cache::MASKED;
use crate::cards::{largest_of_units, sum_of_units};

/// Number `k` of a head's entry.
#[cube]
fn number<N: Float>(
    numbers: &Tensor<N>, // [b, H, E, K], or [b, 1, E, P]
    codes: &Tensor<i32>, // [b, 1, E, W]
    row: usize,
    head: usize,
    n_heads: usize,
    entry: usize,
    k: usize,
    #[comptime] bits: usize,
    #[comptime] group: usize,
) -> f32 {
    if comptime!(bits == 0) {
        let place =
            row * numbers.stride(0) + head * numbers.stride(1) + entry * numbers.stride(2) + k * numbers.stride(3);
        f32::cast_from(numbers[place])
    } else {
        let per_word = comptime!(32 / bits);
        let n_params = comptime!(if bits == Code::Int8.bits() { 1usize } else { 2usize });
        let words_per_head = codes.shape(3) / n_heads;
        let word_of_entry = head * words_per_head + k / per_word;
        let word = codes[row * codes.stride(0) + entry * codes.stride(2) + word_of_entry * codes.stride(3)];
        let shift = (k % per_word * bits) as i32;
        let code = (word >> shift) & comptime!((1i32 << bits) - 1);
        let params_per_head = numbers.shape(3) / n_heads;
        let param_of_entry = head * params_per_head + k / group * n_params;
        let param = row * numbers.stride(0) + entry * numbers.stride(2) + param_of_entry * numbers.stride(3);
        let scale = f32::cast_from(numbers[param]);
        if comptime!(bits == Code::Int8.bits()) {
            f32::cast_from((code ^ 128) - 128) * scale
        } else {
            f32::cast_from(code) * scale + f32::cast_from(numbers[param + numbers.stride(3)])
        }
    }
}

/// Attention to one more segment; see [`super::attend`].
#[cube(launch)]
pub(super) fn attend_segment<K: Float, V: Float>(
    q: &Tensor<f32>, // [b, H, N, K]
    key_numbers: &Tensor<K>,
    key_codes: &Tensor<i32>,
    value_numbers: &Tensor<V>,
    value_codes: &Tensor<i32>,
    mask: &Tensor<f32>,        // [b or 1, 1, N or 1, E of all segments or 1]
    sinks: &Tensor<f32>,       // [1, H, N, 1]
    out: &mut Tensor<f32>,     // [b, H, N, K]: until the last segment not yet divided
    carried: &mut Tensor<f32>, // [b, H, N, 2]: the largest score so far, and the sum of exponentials
    n_entries: usize,
    first_column: usize,
    #[comptime] key_bits: usize,
    #[comptime] key_group: usize,
    #[comptime] value_bits: usize,
    #[comptime] value_group: usize,
    #[comptime] n_units: usize,
    #[comptime] is_first: bool,
    #[comptime] is_last: bool,
    #[comptime] has_sinks: bool,
    #[define(K, V)] _types: [ElemType; 2],
) {
    let unit = UNIT_POS as usize;
    let n_queries = q.shape(2);
    let n_heads = q.shape(1);
    let head_dim = q.shape(3);
    let query = CUBE_POS_X as usize;
    let head = CUBE_POS_Y as usize % n_heads;
    let row = CUBE_POS_Y as usize / n_heads;
    let line = (row * n_heads + head) * n_queries + query;

    let mut asked = Shared::new_slice(n_units);
    let mut shares = Shared::new_slice(n_units);
    let mut scratch = Shared::new_slice(n_units);
    if unit < head_dim {
        asked[unit] = q[row * q.stride(0) + head * q.stride(1) + query * q.stride(2) + unit * q.stride(3)];
    }
    let mut largest = MASKED.runtime();
    let mut sum = 0.0f32.runtime();
    let mut total = 0.0f32.runtime();
    if comptime!(!is_first) {
        largest = carried[2 * line];
        sum = carried[2 * line + 1];
        if unit < head_dim {
            total = out[line * head_dim + unit];
        }
    } else if comptime!(has_sinks) {
        // One more logit, which has no value.
        largest = sinks[head * sinks.stride(1) + query * sinks.stride(2)];
        sum = 1.0f32;
    }
    sync_cube();

    let mask_line = row % mask.shape(0) * mask.stride(0) + query % mask.shape(2) * mask.stride(2);
    let mut first = 0usize.runtime();
    while first < n_entries {
        let entry = first + unit;
        let mut score = MASKED.runtime();
        if entry < n_entries {
            let mut product = 0.0f32.runtime();
            for k in 0..head_dim {
                product +=
                    asked[k] * number::<K>(key_numbers, key_codes, row, head, n_heads, entry, k, key_bits, key_group);
            }
            score = product + mask[mask_line + (first_column + entry) % mask.shape(3) * mask.stride(3)];
        }
        let new_largest = max(largest, largest_of_units(score, &mut scratch, n_units));
        let mut share = 0.0f32.runtime();
        if entry < n_entries {
            share = (score - new_largest).exp();
        }
        shares[unit] = share;
        let sum_here = sum_of_units(share, &mut scratch, n_units);
        let faded = (largest - new_largest).exp();
        sum = sum * faded + sum_here;
        total *= faded;
        if unit < head_dim {
            let n_here = min(n_units, n_entries - first);
            for i in 0..n_here {
                total += shares[i]
                    * number::<V>(
                        value_numbers,
                        value_codes,
                        row,
                        head,
                        n_heads,
                        first + i,
                        unit,
                        value_bits,
                        value_group,
                    );
            }
        }
        largest = new_largest;
        first += n_units;
        sync_cube();
    }

    if unit < head_dim {
        if comptime!(is_last) {
            total /= sum;
        }
        out[line * head_dim + unit] = total;
    }
    if comptime!(!is_last) && unit == 0 {
        carried[2 * line] = largest;
        carried[2 * line + 1] = sum;
    }
}
