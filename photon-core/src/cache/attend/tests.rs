//! The native version against the stock one, and the stock one against plain attention.

use burn::tensor::{Device, Tensor};

use super::super::entries::{EntryFormat, Packed};
use super::super::pack::{pack, stock_unpack};
use super::super::test_data::{normal, numbers};
use super::*;
use crate::cache::kv_cache::MASKED;
use crate::nn::fused;

const FORMATS: [EntryFormat; 7] = [
    EntryFormat::F32,
    EntryFormat::F16,
    EntryFormat::BF16,
    EntryFormat::Int8 { group: 32 },
    EntryFormat::Int4 { group: 32 },
    EntryFormat::Int8 { group: 128 },
    EntryFormat::Int4 { group: 128 },
];

fn unpacked(entries: &Entries) -> Tensor<4> {
    match entries {
        Entries::Dense(numbers) => numbers.clone().cast(FloatDType::F32),
        Entries::Packed(packed) => stock_unpack(packed.clone()),
    }
}

fn whole(segments: &[Segment]) -> [Tensor<4>; 2] {
    let keys = segments.iter().map(|segment| unpacked(&segment.keys)).collect();
    let values = segments.iter().map(|segment| unpacked(&segment.values)).collect();
    [Tensor::cat(keys, SEQ), Tensor::cat(values, SEQ)]
}

/// The sums run in another order, so digits of f32 differ.
fn assert_close(a: &Tensor<4>, b: &Tensor<4>, what: &str) {
    assert_eq!(a.dims(), b.dims(), "{what}");
    let largest = numbers(b).iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    for (a, b) in numbers(a).iter().zip(numbers(b)) {
        assert!((a - b).abs() <= 1e-5 * largest, "{what}: {a} is not {b}");
    }
}

fn assert_agrees(q: &Tensor<4>, segments: &[Segment], mask: &Tensor<4>, sinks: Option<&Tensor<4>>, what: &str) {
    let [keys, values] = whole(segments);
    let (out, weights) = native::attend(q.clone(), segments, mask.clone(), sinks.cloned());
    let expected = stock::attend(q.clone(), keys.clone(), values.clone(), mask.clone(), sinks.cloned());
    assert_close(&out, &expected.0, what);
    assert_close(&weights, &expected.1, what);
    if sinks.is_none() {
        assert_close(&out, &fused::attention(q.clone(), keys, values, mask.clone()), what);
        for sum in numbers(&weights.sum_dim(3)) {
            assert!((sum - 1.0).abs() < 1e-5, "{what}: weights sum to {sum}");
        }
    }
}

/// Keys and values `[b, H, n, K]` in the formats given.
fn segment(shape: [usize; 4], keys: EntryFormat, values: EntryFormat, seed: u64) -> Segment {
    let packed = |format: EntryFormat, seed| pack(normal(shape, seed), format.with_group_for(shape[3]));
    Segment { keys: packed(keys, seed), values: packed(values, seed + 1) }
}

fn no_mask() -> Tensor<4> {
    Tensor::zeros([1, 1, 1, 1], &Device::flex())
}

/// Hides about a third of the entries from each query, never the first.
fn holes(shape: [usize; 4], seed: u64) -> Tensor<4> {
    let mask = normal(shape, seed);
    let hidden = mask.clone().lower_elem(-0.4);
    let mask = mask.zeros_like().mask_fill(hidden, MASKED);
    let first = mask.clone().narrow(3, 0, 1).zeros_like();
    mask.slice_assign([0..shape[0], 0..shape[1], 0..shape[2], 0..1], first)
}

#[test]
fn every_format_and_head_dimension_agrees() {
    for head_dim in [32, 40, 52, 64, 96, 128] {
        for keys in FORMATS {
            for values in FORMATS {
                let segment = segment([2, 2, 37, head_dim], keys, values, 1);
                let q = normal([2, 2, 1, head_dim], 3) / (head_dim as f64).sqrt();
                assert_agrees(&q, &[segment], &no_mask(), None, &format!("{keys:?} {values:?} {head_dim}"));
            }
        }
    }
}

#[test]
fn masks_sinks_queries_and_segments_agree() {
    let [int8, int4] = [EntryFormat::Int8 { group: 32 }, EntryFormat::Int4 { group: 64 }];
    for seed in 0..24 {
        let (batch, n_heads, n_queries) = (1 + seed as usize % 3, 1 + seed as usize % 2, 1 + seed as usize % 7);
        let shape = |n| [batch, n_heads, n, 64];
        let segments = [
            segment(shape(70), int8, int4, seed),
            segment(shape(1 + seed as usize), EntryFormat::F16, int8, seed + 100),
            segment(shape(9), EntryFormat::F32, EntryFormat::F32, seed + 200),
        ];
        let n_entries = 80 + seed as usize;
        let q = normal([batch, n_heads, n_queries, 64], seed + 300) / 8.0;
        let sinks = (seed % 2 == 0).then(|| normal([1, n_heads, n_queries, 1], seed + 400));
        let masks = [
            no_mask(),
            holes([batch, 1, n_queries, n_entries], seed),
            holes([1, 1, n_queries, n_entries], seed),
            holes([batch, 1, 1, n_entries], seed),
            holes([1, 1, 1, n_entries], seed).expand([batch, 1, n_queries, n_entries]),
        ];
        for mask in masks {
            assert_agrees(&q, &segments, &mask, sinks.as_ref(), &format!("{seed} {:?}", mask.dims()));
        }
    }
}

#[test]
fn views_are_read_where_they_lie() {
    let dense = |seed| Entries::Dense(normal([3, 20, 2, 40], seed).swap_dims(1, 2).narrow(0, 1, 2).narrow(2, 4, 11));
    let narrowed = |format, seed| match pack(normal([3, 2, 20, 40], seed), format) {
        Entries::Dense(numbers) => Entries::Dense(numbers.narrow(0, 1, 2).narrow(2, 4, 11)),
        Entries::Packed(Packed { codes, params, packing }) => Entries::Packed(Packed {
            codes: codes.narrow(0, 1, 2).narrow(2, 4, 11),
            params: params.narrow(0, 1, 2).narrow(2, 4, 11),
            packing,
        }),
    };
    let q = normal([2, 4, 2, 40], 1).swap_dims(1, 2);
    let pairs = [
        (dense(2), dense(3)),
        (narrowed(EntryFormat::BF16, 2), narrowed(EntryFormat::F16, 3)),
        (narrowed(EntryFormat::Int8 { group: 20 }, 2), narrowed(EntryFormat::Int4 { group: 20 }, 3)),
        (narrowed(EntryFormat::Int4 { group: 10 }, 2), narrowed(EntryFormat::Int8 { group: 40 }, 3)),
    ];
    for (index, (keys, values)) in pairs.into_iter().enumerate() {
        assert_agrees(&q, &[Segment { keys, values }], &no_mask(), None, &format!("pair {index}"));
    }
}

#[test]
fn groups_of_odd_length_agree() {
    let odd = EntryFormat::Int4 { group: 13 };
    assert_agrees(&normal([1, 2, 3, 52], 5), &[segment([1, 2, 9, 52], odd, odd, 1)], &no_mask(), None, "odd");
}

#[test]
fn many_queries_and_parameters_in_f32_go_by_the_stock_way() {
    let int4 = EntryFormat::Int4 { group: 26 };
    let few = [segment([1, 2, 9, 52], int4, int4, 1), segment([1, 2, 3, 52], int4, EntryFormat::F32, 3)];
    let with_f32_params = |entries: &Entries| match entries.clone() {
        Entries::Packed(packed) => {
            Entries::Packed(Packed { params: packed.params.clone().cast(FloatDType::F32), ..packed })
        }
        dense => dense,
    };
    let as_without_f16 = few
        .clone()
        .map(|segment| Segment { keys: with_f32_params(&segment.keys), values: with_f32_params(&segment.values) });
    let [keys, values] = whole(&few);
    for (n_queries, segments, is_native) in [(1, &few, true), (200, &few, false), (1, &as_without_f16, false)] {
        let q = normal([1, 2, n_queries, 52], 5);
        assert_eq!(native::serves(&q, segments), is_native);
        let expected = fused::attention(q.clone(), keys.clone(), values.clone(), no_mask());
        assert_close(&attend(q, segments, no_mask(), None), &expected, "either way");
    }
}

#[test]
fn work_for_several_threads_agrees() {
    let (int8, int4) = (EntryFormat::Int8 { group: 64 }, EntryFormat::Int4 { group: 64 });
    for batch in [1, 3] {
        let segments = [segment([batch, 4, 2100, 64], int8, int4, 1)];
        assert_agrees(&(normal([batch, 4, 2, 64], 5) / 8.0), &segments, &no_mask(), None, "threads");
    }
}

#[test]
fn far_apart_scores_stay_finite() {
    let segments = [segment([1, 1, 30, 64], EntryFormat::F32, EntryFormat::F32, 1)];
    assert_agrees(&(normal([1, 1, 1, 64], 5) * 100.0), &segments, &no_mask(), None, "peaked");
}

#[test]
fn gradients_end_at_attention() {
    let q = normal([1, 1, 1, 64], 5).autodiff();
    let (out, weights) = attend_with_weights(
        q.clone(),
        &[segment([1, 1, 30, 64], EntryFormat::F32, EntryFormat::F32, 1)],
        no_mask().autodiff(),
        None,
    );
    assert!(!out.is_autodiff() && !weights.is_autodiff());
    assert!((q + out).is_autodiff(), "the result is a constant beside tracked tensors");
}

#[cfg(feature = "wgpu")]
mod cards {
    use burn::tensor::DType;

    use super::*;
    use crate::device::DeviceChoice;

    /// The same tensors on a graphics card, where an adapter is.
    fn on_card(entries: &Entries, device: &Device) -> Entries {
        match entries.clone() {
            Entries::Dense(numbers) => Entries::Dense(numbers.to_device(device)),
            Entries::Packed(Packed { codes, params, packing }) => {
                Entries::Packed(Packed { codes: codes.to_device(device), params: params.to_device(device), packing })
            }
        }
    }

    #[test]
    #[ignore = "needs a WebGPU adapter: `check` runs it where there is one"]
    fn cards_kernels_equal_the_stock_attention() {
        let device = DeviceChoice::Wgpu.open().unwrap_or_else(|error| panic!("{error}")).device;
        let mut n_compared = 0;
        for (index, format) in FORMATS.into_iter().enumerate() {
            if format == EntryFormat::BF16 && !device.supports_dtype(DType::BF16) {
                continue;
            }
            let other = FORMATS[(index + 3) % FORMATS.len()];
            let other = if other == EntryFormat::BF16 { EntryFormat::F16 } else { other };
            let (head_dim, n_queries) = [(32, 1), (52, 3), (128, 16)][index % 3];
            let shape = |n| [2, 3, n, head_dim];
            // More entries than units, fewer, and a single one.
            let segments = [segment(shape(150), format, other, 1), segment(shape(7), other, format, 2)];
            let segments = [segments.to_vec(), segments[1..].to_vec(), vec![segment(shape(1), format, format, 3)]];
            for segments in segments {
                let n_entries = segments.iter().map(|segment| segment.keys.dims()[2]).sum();
                let q = normal([2, 3, n_queries, head_dim], 4) / (head_dim as f64).sqrt();
                let sinks = normal([1, 3, n_queries, 1], 5);
                for (mask, sinks) in [
                    (no_mask(), None),
                    (holes([2, 1, n_queries, n_entries], 6), Some(sinks.clone())),
                    (holes([1, 1, 1, n_entries], 7), Some(sinks)),
                ] {
                    let [keys, values] = whole(&segments);
                    let (expected, _) = stock::attend(q.clone(), keys, values, mask.clone(), sinks.clone());
                    let there: Vec<Segment> = segments
                        .iter()
                        .map(|Segment { keys, values }| Segment {
                            keys: on_card(keys, &device),
                            values: on_card(values, &device),
                        })
                        .collect();
                    let [q, mask] = [&q, &mask].map(|x| x.clone().to_device(&device));
                    assert!(cube::serves(&q, &there));
                    let sinks = sinks.map(|sinks| sinks.to_device(&device));
                    let found = attend(q, &there, mask, sinks).to_device(&Device::flex());
                    assert_close(&found, &expected, &format!("{format:?} {other:?} {head_dim} {n_entries}"));
                    n_compared += 1;
                }
            }
        }
        assert!(n_compared >= 6 * 9, "{n_compared} comparisons");
    }
}
