//! Both versions of packing, over head dimensions, groups, strides and magnitudes.

use burn::tensor::{Device, Int, Tensor, f16};

use super::super::entries::{Code, Packed, Packing};
use super::super::test_data::{normal, numbers, tensor};
use super::*;

const HEAD_DIMS: [usize; 6] = [32, 40, 52, 64, 96, 128];

fn packings(n_heads: usize, head_dim: usize) -> Vec<Packing> {
    let wished = [32, 64, 13].into_iter().flat_map(|group| [EntryFormat::Int8 { group }, EntryFormat::Int4 { group }]);
    let packing = |format: EntryFormat| match format.with_group_for(head_dim).layout(n_heads, head_dim) {
        Layout::Packed(packing) => packing,
        Layout::Dense(dtype) => panic!("{format:?} lies in {dtype:?}"),
    };
    wished.map(packing).collect()
}

fn words(x: &Tensor<4, Int>) -> Vec<i32> {
    x.clone().try_to_vec_as().unwrap()
}

/// Checks both versions against each other and what they give back against `x`; returns what is stored.
fn assert_packs(x: &Tensor<4>, packing: Packing) -> Packed {
    let (native, stock) = (native::pack(x.clone(), packing), stock::pack(x.clone(), packing));
    assert_eq!(words(&native.codes), words(&stock.codes), "{packing:?}");
    assert_eq!(numbers(&native.params), numbers(&stock.params), "{packing:?}");
    assert_eq!(native.params.dtype(), stock.params.dtype());
    assert_eq!(native.codes.dims(), stock.codes.dims());
    let back = numbers(&native::unpack(Entries::Packed(native.clone())));
    assert_eq!(back, numbers(&stock::unpack(native.clone())), "{packing:?}");
    assert_within_half_a_step(x, &back, &native);
    native
}

fn assert_within_half_a_step(x: &Tensor<4>, back: &[f32], packed: &Packed) {
    let packing = packed.packing;
    let [batch, n_heads, n_entries, head_dim] = x.dims();
    let (x, params) = (numbers(x), numbers(&packed.params));
    for (index, (x, back)) in x.iter().zip(back).enumerate() {
        let (line, k) = (index / head_dim, index % head_dim);
        let (entry, head, row) = (line % n_entries, line / n_entries % n_heads, line / n_entries / n_heads);
        assert!(row < batch);
        let group = head * packing.groups_per_head() + k / packing.group;
        let param = (row * n_entries + entry) * packing.n_params() + group * packing.code.n_params();
        let step = params[param];
        // Decoding rounds to f32: that share of the number comes on top.
        let allowed = step / 2.0 * 1.0001 + x.abs() * 2e-7;
        assert!(back.is_finite() && (x - back).abs() <= allowed, "{x} came back as {back}, step {step}, {packing:?}");
    }
}

#[test]
fn numbers_come_back_within_half_a_step() {
    for (seed, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        for packing in packings(3, head_dim) {
            assert_packs(&normal([2, 3, 5, head_dim], seed as u64), packing);
        }
    }
}

#[test]
fn strides_do_not_matter() {
    for head_dim in HEAD_DIMS {
        let heads_last = normal([2, 5, 3, head_dim], 1);
        let dim_first = normal([2, head_dim, 5, 3], 2);
        let views = [
            heads_last.clone().swap_dims(1, 2),
            dim_first.swap_dims(1, 3),
            normal([2, 3, 9, head_dim], 3).narrow(2, 2, 5),
            normal([1, 3, 5, head_dim], 4).expand([2, 3, 5, head_dim]),
            heads_last.swap_dims(1, 2).flip([2]),
        ];
        for view in views {
            for packing in packings(3, head_dim) {
                let stored = assert_packs(&view, packing);
                let copy = native::pack(tensor(numbers(&view), view.dims()), packing);
                assert_eq!(words(&stored.codes), words(&copy.codes));
            }
        }
    }
}

#[test]
fn extreme_numbers_stay_finite_and_within_half_a_step() {
    let cases: [&dyn Fn(usize) -> f32; 12] = [
        &|_| 0.0,
        &|_| 1.0,
        &|_| -0.3,
        &|_| 1e-8,
        &|k| if k == 3 { 1e-8 } else { 0.0 },
        &|k| -1e-30 * k as f32,
        &|_| 1e4,
        &|k| if k % 2 == 0 { 1e4 } else { -1e4 },
        &|k| 10f32.powi(k as i32 % 9 - 5) * if k % 2 == 0 { 1.0 } else { -1.0 },
        &|k| 5e-4 * (k as f32).sin(),
        &|k| 60_000.0 * (k as f32).sin(),
        &|k| -10_001.0 - k as f32,
    ];
    for case in cases {
        for packing in packings(1, 52) {
            assert_packs(&tensor((0..2 * 52).map(case).collect(), [1, 1, 2, 52]), packing);
        }
    }
}

#[test]
fn random_magnitudes_stay_within_half_a_step() {
    for seed in 0..40 {
        let magnitude = 10f32.powi(seed as i32 % 12 - 8);
        let offset = if seed % 3 == 0 { 5.0 * magnitude } else { 0.0 };
        let x = normal([1, 2, 3, 64], seed) * magnitude + offset;
        for packing in packings(2, 64) {
            assert_packs(&x, packing);
        }
    }
}

#[test]
fn what_no_scale_reaches_becomes_the_nearest_number_that_one_does() {
    let x = tensor(vec![1e30, -1e30, 1.0, f32::MAX], [1, 1, 1, 4]);
    for (code, nearest) in [
        (Code::Int8, [127.0 * MAX_F16, -127.0 * MAX_F16, 0.0, 127.0 * MAX_F16]),
        (Code::Int4, [14.0 * MAX_F16, -MAX_F16, 0.0, 14.0 * MAX_F16]),
    ] {
        let packing = Packing { code, group: 4, n_heads: 1, head_dim: 4 };
        assert_eq!(numbers(&native::unpack(Entries::Packed(native::pack(x.clone(), packing)))), nearest);
        assert_eq!(numbers(&stock::unpack(stock::pack(x.clone(), packing))), nearest);
    }
}

#[test]
fn codes_reach_their_ends_and_no_further() {
    let x = normal([1, 1, 200, 64], 5);
    let packing = Packing { code: Code::Int8, group: 64, n_heads: 1, head_dim: 64 };
    let packed = native::pack(x.clone(), packing);
    let largest = numbers(&x).chunks(64).map(|x| x.iter().fold(0f32, |a, b| a.max(b.abs()))).collect::<Vec<_>>();
    for (largest, scale) in largest.into_iter().zip(numbers(&packed.params)) {
        let wished = largest / 127.0;
        let below = f16::from_bits(f16::from_f32(scale).to_bits() - 1).to_f32();
        assert!(scale >= wished && below < wished, "{scale} is not the next f16 above {wished}");
    }
}

#[test]
fn words_hold_codes_from_their_lowest_bits_on() {
    let packing = |code| Packing { code, group: 10, n_heads: 1, head_dim: 10 };
    let x = tensor([0.0, 1.0, -1.0, 127.0, -127.0, 2.0, 0.0, 0.0, 3.0, 4.0].to_vec(), [1, 1, 1, 10]);
    let packed = native::pack(x, packing(Code::Int8));
    assert_eq!(words(&packed.codes), [0x7fff0100, 0x0000_0281, 0x0000_0403]);
    let x = tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 15.0, 8.0, 9.0].to_vec(), [1, 1, 1, 10]);
    let packed = native::pack(x, packing(Code::Int4));
    assert_eq!(words(&packed.codes), [0xf654_3210_u32.cast_signed(), 0x98]);
    assert_eq!(numbers(&packed.params), [1.0, 0.0]);
}

#[test]
fn stored_bytes_are_those_promised() {
    for head_dim in HEAD_DIMS {
        for wished in [EntryFormat::F32, EntryFormat::F16, EntryFormat::BF16]
            .into_iter()
            .chain([32, 64].into_iter().flat_map(|group| [EntryFormat::Int8 { group }, EntryFormat::Int4 { group }]))
        {
            let format = wished.with_group_for(head_dim);
            let entries = pack(normal([2, 3, 5, head_dim], 6), format);
            assert_eq!(entries.dims(), [2, 3, 5, head_dim]);
            assert_eq!(entries.bytes(), 2 * 5 * format.entry_bytes(3, head_dim), "{format:?}");
        }
    }
}

#[test]
fn gradients_end_at_packing() {
    let x = Tensor::<4>::ones([1, 1, 2, 8], &Device::flex().autodiff()).require_grad();
    for format in [EntryFormat::F32, EntryFormat::Int8 { group: 8 }] {
        let back = unpack(pack(x.clone(), format));
        assert!(!back.is_autodiff());
        assert!(numbers(&back).iter().all(|x| (x - 1.0).abs() < 0.01));
    }
}
