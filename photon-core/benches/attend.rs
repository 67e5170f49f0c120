//! Attention of a decode step to a cache, by storage format, beside the stock way over dense f32 entries.
//!
//! Four heads of 64 numbers. A case is `[batch, entries, queries]`. `cargo bench --workspace --bench attend` runs all, a
//! word after `--` those whose name holds it.

use burn::tensor::{Device, Distribution, Tensor};
use divan::Bencher;
use photon_core::cache::attend::attend;
use photon_core::cache::entries::{EntryFormat, Segment};
use photon_core::cache::pack::{pack, unpack};
use photon_core::nn::fused;

const N_HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const INT8: EntryFormat = EntryFormat::Int8 { group: HEAD_DIM };
const INT4: EntryFormat = EntryFormat::Int4 { group: HEAD_DIM };

/// `[batch, entries, queries]`.
type Case = [usize; 3];

const CASES: [Case; 12] = [
    [1, 128, 1],
    [1, 1024, 1],
    [1, 8192, 1],
    [8, 128, 1],
    [8, 1024, 1],
    [8, 8192, 1],
    [1, 1024, 4],
    [1, 1024, 8],
    [1, 1024, 16],
    [1, 8192, 4],
    [1, 8192, 8],
    [1, 8192, 16],
];

fn main() {
    photon_core::allocator::keep_freed_memory();
    divan::main();
}

fn random(batch: usize, length: usize) -> Tensor<4> {
    Tensor::random([batch, N_HEADS, length, HEAD_DIM], Distribution::Normal(0.0, 1.0), &Device::flex())
}

fn no_mask() -> Tensor<4> {
    Tensor::zeros([1, 1, 1, 1], &Device::flex())
}

fn measure(bencher: Bencher, [batch, n_entries, n_queries]: Case, keys: EntryFormat, values: EntryFormat) {
    let segment =
        Segment { keys: pack(random(batch, n_entries), keys), values: pack(random(batch, n_entries), values) };
    let (q, segments, mask) = (random(batch, n_queries), [segment], no_mask());
    bencher.bench(|| attend(q.clone(), &segments, mask.clone(), None));
}

#[divan::bench(args = CASES)]
fn stock_f32(bencher: Bencher, [batch, n_entries, n_queries]: Case) {
    let (q, k, v) = (random(batch, n_queries), random(batch, n_entries), random(batch, n_entries));
    let mask = no_mask();
    bencher.bench(|| fused::attention(q.clone(), k.clone(), v.clone(), mask.clone()));
}

#[divan::bench(args = CASES)]
fn stock_int8_unpacked(bencher: Bencher, [batch, n_entries, n_queries]: Case) {
    let entries = || pack(random(batch, n_entries), INT8);
    let (q, k, v, mask) = (random(batch, n_queries), entries(), entries(), no_mask());
    bencher.bench(|| fused::attention(q.clone(), unpack(k.clone()), unpack(v.clone()), mask.clone()));
}

#[divan::bench(args = CASES)]
fn f32(bencher: Bencher, case: Case) {
    measure(bencher, case, EntryFormat::F32, EntryFormat::F32);
}

#[divan::bench(args = CASES)]
fn f16(bencher: Bencher, case: Case) {
    measure(bencher, case, EntryFormat::F16, EntryFormat::F16);
}

#[divan::bench(args = CASES)]
fn bf16(bencher: Bencher, case: Case) {
    measure(bencher, case, EntryFormat::BF16, EntryFormat::BF16);
}

#[divan::bench(args = CASES)]
fn int8(bencher: Bencher, case: Case) {
    measure(bencher, case, INT8, INT8);
}

#[divan::bench(args = CASES)]
fn int8_int4(bencher: Bencher, case: Case) {
    measure(bencher, case, INT8, INT4);
}

#[divan::bench(args = CASES)]
fn int4(bencher: Bencher, case: Case) {
    measure(bencher, case, INT4, INT4);
}

/// `[batch, entries]`: a step's new entry, and a piece of a prompt.
#[divan::bench(args = [[1, 1], [8, 1], [1, 512]])]
fn pack_int8(bencher: Bencher, [batch, n_entries]: [usize; 2]) {
    let x = random(batch, n_entries);
    bencher.bench(|| pack(x.clone(), INT8));
}

/// As `pack_int8`.
#[divan::bench(args = [[1, 1], [8, 1], [1, 512]])]
fn pack_int4(bencher: Bencher, [batch, n_entries]: [usize; 2]) {
    let x = random(batch, n_entries);
    bencher.bench(|| pack(x.clone(), INT4));
}
