//! Attention of a decode step to a cache, by storage format, beside the stock way over dense f32 entries.
//!
//! Each case is `[batch, entries]` with 4 heads of 64 numbers. `cargo bench --bench attend` runs all, a word after `--`
//! those whose name holds it.

use burn::tensor::{Device, Distribution, Tensor};
use divan::{Bencher, counter::ItemsCount};
use photon_core::cache::attend::attend;
use photon_core::cache::entries::{EntryFormat, Segment};
use photon_core::cache::pack::{pack, unpack};
use photon_core::nn::fused;

const N_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const CASES: [[usize; 2]; 6] = [[1, 128], [1, 1024], [1, 8192], [8, 128], [8, 1024], [8, 8192]];

fn main() {
    photon_core::allocator::keep_freed_memory();
    divan::main();
}

fn random(shape: [usize; 4]) -> Tensor<4> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex())
}

fn mask() -> Tensor<4> {
    Tensor::zeros([1, 1, 1, 1], &Device::flex())
}

fn measure(bencher: Bencher, [batch, n_entries]: [usize; 2], keys: EntryFormat, values: EntryFormat) {
    measure_queries(bencher, [batch, n_entries, 1], keys, values);
}

fn measure_queries(
    bencher: Bencher,
    [batch, n_entries, n_queries]: [usize; 3],
    keys: EntryFormat,
    values: EntryFormat,
) {
    let entries = || random([batch, N_HEADS, n_entries, HEAD_DIM]);
    let segments = [Segment { keys: pack(entries(), keys), values: pack(entries(), values) }];
    let (q, mask) = (random([batch, N_HEADS, n_queries, HEAD_DIM]), mask());
    let bencher = bencher.counter(ItemsCount::new(batch * n_entries));
    bencher.bench(|| attend(q.clone(), &segments, mask.clone(), None));
}

#[divan::bench(args = CASES)]
fn stock_f32(bencher: Bencher, [batch, n_entries]: [usize; 2]) {
    stock_f32_queries(bencher, [batch, n_entries, 1]);
}

#[divan::bench(args = CASES)]
fn f32(bencher: Bencher, case: [usize; 2]) {
    measure(bencher, case, EntryFormat::F32, EntryFormat::F32);
}

#[divan::bench(args = CASES)]
fn f16(bencher: Bencher, case: [usize; 2]) {
    measure(bencher, case, EntryFormat::F16, EntryFormat::F16);
}

#[divan::bench(args = CASES)]
fn bf16(bencher: Bencher, case: [usize; 2]) {
    measure(bencher, case, EntryFormat::BF16, EntryFormat::BF16);
}

#[divan::bench(args = CASES)]
fn int8(bencher: Bencher, case: [usize; 2]) {
    measure(bencher, case, EntryFormat::Int8 { group: 64 }, EntryFormat::Int8 { group: 64 });
}

#[divan::bench(args = CASES)]
fn int8_int4(bencher: Bencher, case: [usize; 2]) {
    measure(bencher, case, EntryFormat::Int8 { group: 64 }, EntryFormat::Int4 { group: 64 });
}

#[divan::bench(args = CASES)]
fn int4(bencher: Bencher, case: [usize; 2]) {
    measure(bencher, case, EntryFormat::Int4 { group: 64 }, EntryFormat::Int4 { group: 64 });
}

const QUERY_CASES: [[usize; 3]; 8] =
    [[1, 1024, 2], [1, 1024, 4], [1, 1024, 8], [1, 1024, 16], [1, 8192, 2], [1, 8192, 4], [1, 8192, 8], [1, 8192, 16]];

#[divan::bench(args = QUERY_CASES)]
fn stock_f32_queries(bencher: Bencher, [batch, n_entries, n_queries]: [usize; 3]) {
    let entries = || random([batch, N_HEADS, n_entries, HEAD_DIM]);
    let (k, v, mask) = (entries(), entries(), mask());
    let q = random([batch, N_HEADS, n_queries, HEAD_DIM]);
    let bencher = bencher.counter(ItemsCount::new(batch * n_entries));
    bencher.bench(|| fused::attention(q.clone(), k.clone(), v.clone(), mask.clone()));
}

#[divan::bench(args = QUERY_CASES)]
fn f32_queries(bencher: Bencher, case: [usize; 3]) {
    measure_queries(bencher, case, EntryFormat::F32, EntryFormat::F32);
}

#[divan::bench(args = QUERY_CASES)]
fn int8_queries(bencher: Bencher, case: [usize; 3]) {
    measure_queries(bencher, case, EntryFormat::Int8 { group: 64 }, EntryFormat::Int8 { group: 64 });
}

#[divan::bench(args = QUERY_CASES)]
fn int8_unpacked_queries(bencher: Bencher, [batch, n_entries, n_queries]: [usize; 3]) {
    let entries = || pack(random([batch, N_HEADS, n_entries, HEAD_DIM]), EntryFormat::Int8 { group: 64 });
    let (k, v, mask) = (entries(), entries(), mask());
    let q = random([batch, N_HEADS, n_queries, HEAD_DIM]);
    let bencher = bencher.counter(ItemsCount::new(batch * n_entries));
    bencher.bench(|| fused::attention(q.clone(), unpack(k.clone()), unpack(v.clone()), mask.clone()));
}

#[divan::bench(args = CASES)]
fn pack_int8(bencher: Bencher, [batch, n_entries]: [usize; 2]) {
    let x = random([batch, N_HEADS, n_entries, HEAD_DIM]);
    let bencher = bencher.counter(ItemsCount::new(batch * n_entries));
    bencher.bench(|| pack(x.clone(), EntryFormat::Int8 { group: 64 }));
}
