//! Kernels and masks against all pairs, in values and gradients.

use burn::tensor::{DType, Device, TensorData};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::mask::{all_pairs_mask, blocks_mask};
use super::*;
use crate::config::Positions;
use crate::documents::Documents;
use crate::nn::fused::has_kernels;

const SPANS: [Span; 13] = [
    Span::Full,
    Span::Window { len: 1 },
    Span::Window { len: 3 },
    Span::Window { len: 40 },
    Span::Window { len: 500 },
    Span::Blocks { len: 4, back: 0 },
    Span::Blocks { len: 3, back: 1 },
    Span::Blocks { len: 2, back: 3 },
    Span::Strided { window: 1, sinks: 0, block: 1, every: 2 },
    Span::Strided { window: 2, sinks: 3, block: 2, every: 3 },
    Span::Strided { window: 3, sinks: 0, block: 2, every: 1 },
    Span::Strided { window: 20, sinks: 2, block: 4, every: 4 },
    Span::Strided { window: 500, sinks: 1, block: 2, every: 2 },
];

/// Grouped queries in heads that vectors do not divide.
fn spec(span: Span, sink: bool) -> StackSpec {
    StackSpec {
        d_model: 24,
        n_layers: 1,
        n_heads: 4,
        n_kv_heads: 2,
        d_ff: 8,
        span,
        pick: None,
        positions: Positions::Rope { theta: 100.0 },
        sink,
        norm_eps: 1e-5,
    }
}

fn random(shape: [usize; 3], device: &Device) -> Tensor<3> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// The output, and the gradients of `x`, the key and value matrices and the sinks under an uneven weighing of it.
fn run(
    attention: &Attention,
    x: &Tensor<3>,
    documents: &Documents,
    mask: &SequenceMask,
) -> Vec<(&'static str, Vec<f32>)> {
    let x = x.clone().detach().require_grad();
    let rope_positions = |row: &Vec<usize>| row.iter().map(|&place| attention.span.rope_position(place)).collect();
    let positions: Vec<Vec<usize>> = documents.positions(x.dims()[1]).iter().map(rope_positions).collect();
    let rotation = Rotation::new(&positions, attention.head_dim, 100.0, &x.device());
    let out = attention.forward(x.clone(), Some(&rotation), mask, Compute::F32);
    let weighed = (out.clone() * (out.clone().detach() * 3.0 + 0.5).sin()).sum();
    let gradients = weighed.backward();
    let list = |x: Tensor<2>| x.try_into_vec_as().unwrap();
    let mut found = vec![("output", out.inner().try_into_vec_as().unwrap())];
    found.push(("gradient of x", x.grad(&gradients).unwrap().try_into_vec_as().unwrap()));
    for (name, layer) in [("gradient of q", &attention.q_proj), ("k", &attention.k_proj), ("v", &attention.v_proj)] {
        found.push((name, list(layer.weight.val().grad(&gradients).unwrap())));
    }
    if let Some(sinks) = &attention.sinks {
        found.push(("sinks", sinks.val().grad(&gradients).unwrap().try_into_vec_as().unwrap()));
    }
    found
}

fn assert_close(a: &[(&str, Vec<f32>)], b: &[(&str, Vec<f32>)], context: &str) {
    for ((name, a), (_, b)) in a.iter().zip(b) {
        // Gradients of matrices add up over positions: relative to the largest.
        let size = b.iter().fold(1.0f32, |size, x| size.max(x.abs()));
        let difference = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(difference <= 1e-5 * size, "{context}: {name}: {difference} of {size}");
        assert!(a.iter().any(|x| *x != 0.0), "{context}: {name} is zero");
    }
}

#[test]
fn kernels_and_masks_compute_what_all_pairs_compute() {
    let device = Device::flex().autodiff();
    assert!(has_kernels(&device, DType::F32));
    let whole = Documents::whole_rows(2);
    for (span, sink) in SPANS.into_iter().flat_map(|span| [(span, false), (span, true)]) {
        let attention = Attention::new(&spec(span, sink), 1, &mut Initializer::new(1, 0.3, &device));
        for n_positions in [1, 2, 7, 32, 45, 97] {
            let x = random([2, n_positions, 24], &device);
            let all_pairs = SequenceMask::AllPairs(all_pairs_mask(span, &whole, n_positions, &device));
            let all = run(&attention, &x, &whole, &all_pairs);
            // One position sees itself alone: its score has no gradient.
            let context = format!("{span:?}, sink {sink}, {n_positions} positions");
            let kernel = run(&attention, &x, &whole, &SequenceMask::Kernel(whole.clone()));
            let blocks = run(&attention, &x, &whole, &blocks_mask(span, &whole, n_positions, &device));
            let n_compared = if n_positions == 1 || span == (Span::Window { len: 1 }) { 2 } else { all.len() };
            assert_close(&kernel[..n_compared], &all[..n_compared], &context);
            assert_close(&blocks[..n_compared], &all[..n_compared], &context);
        }
    }
}

/// Rows of several documents, of one, and of one position each; starts that blocks divide and such that they do not.
fn documents_of_rows(n_positions: usize) -> [Documents; 3] {
    let of = |starts: [&[usize]; 2]| {
        let within = |row: &[usize]| row.iter().copied().filter(|&start| start < n_positions).collect();
        Documents::new(starts.map(within).into())
    };
    let each: Vec<usize> = (0..n_positions).collect();
    [of([&[0, 1, 8, 40, 41, 45], &[0]]), of([&[0, 12, 24, 60], &[0, 36, 72, 84]]), of([&[0, 50], &each])]
}

#[test]
fn kernels_and_masks_keep_documents_apart() {
    let device = Device::flex().autodiff();
    for (span, sink) in SPANS.into_iter().flat_map(|span| [(span, false), (span, true)]) {
        let attention = Attention::new(&spec(span, sink), 1, &mut Initializer::new(1, 0.3, &device));
        for n_positions in [7, 45, 97] {
            let x = random([2, n_positions, 24], &device);
            for documents in documents_of_rows(n_positions) {
                let all_pairs = SequenceMask::AllPairs(all_pairs_mask(span, &documents, n_positions, &device));
                let all = run(&attention, &x, &documents, &all_pairs);
                let context = format!("{span:?}, sink {sink}, {n_positions} positions, {documents:?}");
                let kernel = run(&attention, &x, &documents, &SequenceMask::Kernel(documents.clone()));
                let blocks = run(&attention, &x, &documents, &blocks_mask(span, &documents, n_positions, &device));
                let n_compared = if span == (Span::Window { len: 1 }) { 2 } else { all.len() };
                assert_close(&kernel[..n_compared], &all[..n_compared], &context);
                assert_close(&blocks[..n_compared], &all[..n_compared], &context);
            }
        }
    }
}

#[test]
fn all_pairs_of_a_row_are_those_of_each_document_alone() {
    let (device, n_positions) = (Device::flex().autodiff(), 97);
    for span in SPANS {
        let attention = Attention::new(&spec(span, true), 1, &mut Initializer::new(1, 0.3, &device));
        let x = random([2, n_positions, 24], &device);
        let lines = |x: &Tensor<3>, documents: &Documents| {
            let pairs = SequenceMask::AllPairs(all_pairs_mask(span, documents, x.dims()[1], &device));
            run(&attention, x, documents, &pairs).swap_remove(0).1
        };
        for documents in documents_of_rows(n_positions) {
            let together = lines(&x, &documents);
            for (row, document) in (0..2).flat_map(|row| documents.of_row(row, n_positions).map(move |it| (row, it))) {
                let alone = x.clone().narrow(0, row, 1).narrow(1, document.start, document.len());
                let alone = lines(&alone, &Documents::whole_rows(1));
                let together = &together[(row * n_positions + document.start) * 24..][..alone.len()];
                assert_close(
                    &[("output", together.to_vec())],
                    &[("output", alone)],
                    &format!("{span:?}, {document:?}"),
                );
            }
        }
    }
}

#[test]
fn a_query_that_is_no_number_shows() {
    let device = Device::flex();
    let [q, k, v] = [(); 3].map(|()| random([1, 5, 8], &device).reshape([1, 5, 1, 8]));
    let q = q.slice_assign([0..1, 2..3, 0..1, 0..8], Tensor::full([1, 1, 1, 8], f32::NAN, &device));
    let sinks = Tensor::full([1], f32::NEG_INFINITY, &device);
    let out: Vec<f32> =
        span_attention(q, k, v, sinks, Span::Full, &Documents::whole_rows(1)).try_into_vec_as().unwrap();
    for (index, line) in out.chunks(8).enumerate() {
        assert!(line.iter().all(|x| x.is_nan() == (index == 2)), "{index}: {line:?}");
    }
}
