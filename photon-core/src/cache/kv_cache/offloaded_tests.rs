//! A cache with a tier of host memory against one without, and what the tier counts.

use burn::tensor::{Device, Tensor, TensorData};
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cache::offload::Offload;
use crate::snapshot::Tensors;

const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 4;

fn layer(pick: BlockPick) -> LayerShape {
    LayerShape { n_kv_heads: N_KV_HEADS, head_dim: HEAD_DIM, span: Span::Full, pick: Some(pick), n_newest: 1 }
}

fn with_tier(config: &CacheConfig, resident_blocks: usize, prefetch: bool) -> CacheConfig {
    CacheConfig { offload: Some(Offload { resident_blocks, prefetch }), ..config.clone() }
}

fn numbers(rng: &mut ChaCha8Rng, n_rows: usize, n_heads: usize, n_new: usize) -> Tensor<4> {
    let values: Vec<f32> = (0..n_rows * n_heads * n_new * HEAD_DIM).map(|_| rng.random_range(-1.5..1.5)).collect();
    Tensor::from_data(TensorData::new(values, [n_rows, n_heads, n_new, HEAD_DIM]), &Device::flex())
}

/// The same cache with a tier and without, and what drives them.
struct Twins {
    offloaded: KvCache,
    plain: KvCache,
    rng: ChaCha8Rng,
    case: String,
}

impl Twins {
    fn new(config: CacheConfig, pick: BlockPick, n_rows: usize, seed: u64) -> Self {
        let cache = |config: &CacheConfig| KvCache::new(config, layer(pick), n_rows, &Device::flex());
        let plain = CacheConfig { offload: None, ..config.clone() };
        Self {
            offloaded: cache(&config),
            plain: cache(&plain),
            rng: ChaCha8Rng::seed_from_u64(seed),
            case: format!("case {seed}, {pick:?}, {config:?}"),
        }
    }

    fn append(&mut self, rows: &[usize], n_new: usize) {
        let first = |&row: &usize| self.plain.rows[row].n_seen;
        let positions: Vec<Vec<usize>> = rows.iter().map(|row| (first(row)..first(row) + n_new).collect()).collect();
        let queries = numbers(&mut self.rng, rows.len(), N_HEADS, n_new);
        let keys = numbers(&mut self.rng, rows.len(), N_KV_HEADS, n_new);
        let values = numbers(&mut self.rng, rows.len(), N_KV_HEADS, n_new);
        let new = || NewEntries {
            rows,
            positions: &positions,
            queries: queries.clone(),
            keys: keys.clone(),
            values: values.clone(),
        };
        let sinks = self.rng.random_bool(0.3).then(|| Tensor::from_floats([0.3, -0.5, 1.0, 0.1], &Device::flex()));
        let foretold = self.offloaded.bytes_after(n_new);
        let expected = self.plain.attend(new(), sinks.clone());
        let found = self.offloaded.attend(new(), sinks);
        let difference: f32 = (expected - found).abs().max().into_scalar();
        assert!(difference < 1e-5, "{}: {n_new} new of {rows:?}: {difference}", self.case);
        assert!(self.offloaded.bytes() <= foretold, "{}: {} > {foretold}", self.case, self.offloaded.bytes());
    }

    fn truncate(&mut self) {
        let n_seen: Vec<usize> = self.plain.rows.iter().map(|row| row.n_seen).collect();
        let n_positions: Vec<usize> = n_seen.iter().map(|&n| self.rng.random_range(n / 2..=n)).collect();
        self.plain.truncate(&n_positions).unwrap();
        self.offloaded.truncate(&n_positions).unwrap();
    }

    fn select(&mut self) {
        let n_rows = self.plain.rows.len();
        let rows: Vec<usize> = (0..self.rng.random_range(1..=3)).map(|_| self.rng.random_range(0..n_rows)).collect();
        self.plain.select_rows(&rows);
        self.offloaded.select_rows(&rows);
    }

    fn lighten(&mut self) {
        let CacheConfig { keys, values, .. } = *self.plain.config();
        let (keys, values) = (keys.lighter().unwrap_or(keys), values.lighter().unwrap_or(values));
        self.plain.set_storage(keys, values);
        self.offloaded.set_storage(keys, values);
    }

    /// To a record and back.
    fn reload(&mut self) {
        let mut tensors = Tensors::new();
        let record = serde_json::to_string(&self.offloaded.record("cache", &mut tensors)).unwrap();
        let (pick, n_rows) = (self.offloaded.layer.pick.unwrap(), self.offloaded.rows.len());
        let mut restored = KvCache::new(&CacheConfig::default(), layer(pick), n_rows, &Device::flex());
        restored.restore(serde_json::from_str(&record).unwrap(), "cache", &mut tensors).unwrap();
        assert!(tensors.is_empty(), "{}", self.case);
        assert_eq!(restored.offload_use(), self.offloaded.offload_use(), "{}", self.case);
        self.offloaded = restored;
    }

    fn check_counts(&self) {
        let (offloaded, plain) = (&self.offloaded, &self.plain);
        assert!(offloaded.used_bytes() <= offloaded.bytes(), "{}", self.case);
        assert_eq!(plain.offload_use(), None);
        for row in 0..plain.rows.len() {
            assert_eq!(offloaded.n_entries(row), plain.n_entries(row), "{}: row {row}", self.case);
        }
    }

    fn run(mut self, n_operations: usize) {
        let mut saved = (self.offloaded.clone(), self.plain.clone());
        for _ in 0..n_operations {
            match self.rng.random_range(0..14) {
                0 => self.select(),
                1 => self.truncate(),
                2 => saved = (self.offloaded.clone(), self.plain.clone()),
                3 => (self.offloaded, self.plain) = (saved.0.clone(), saved.1.clone()),
                4 if self.rng.random_bool(0.3) => self.lighten(),
                5 => self.reload(),
                _ => {
                    let n_rows = self.plain.rows.len();
                    let mut rows: Vec<usize> = (0..n_rows).collect();
                    if self.rng.random_bool(0.4) {
                        rows = vec![self.rng.random_range(0..n_rows)];
                    }
                    let n_new = *[1, 1, 1, 2, 5, 13].choose(&mut self.rng).unwrap();
                    self.append(&rows, n_new);
                }
            }
            self.check_counts();
        }
    }
}

#[test]
fn any_sequence_of_operations_equals_a_cache_without_a_tier() {
    let storages = [Storage::F32, Storage::F16, Storage::Bf16, Storage::Int8, Storage::Int4];
    for seed in 0..200 {
        let mut rng = ChaCha8Rng::seed_from_u64(2000 + seed);
        let config = CacheConfig {
            keys: *storages.choose(&mut rng).unwrap(),
            values: *storages.choose(&mut rng).unwrap(),
            ..CacheConfig::default()
        };
        let pick = BlockPick {
            window: rng.random_range(1..5),
            sinks: rng.random_range(0..5),
            block: rng.random_range(1..4),
            top: rng.random_range(1..4),
        };
        let config = with_tier(&config, pick.top + rng.random_range(0..3), rng.random_bool(0.7));
        let n_rows = rng.random_range(1..=3);
        Twins::new(config, pick, n_rows, seed).run(30);
    }
}

/// Takes up position after position, each a block, with queries that take the block told, once there is a choice; calls
/// have the given lengths.
fn take_blocks(offload: Offload, taken: &[usize], calls: &[usize]) -> OffloadUse {
    let pick = BlockPick { window: 1, sinks: 0, block: 1, top: 1 };
    let config = CacheConfig { offload: Some(offload), ..CacheConfig::default() };
    let layer = LayerShape { n_kv_heads: 1, head_dim: 2, ..layer(pick) };
    let mut cache = KvCache::new(&config, layer, 1, &Device::flex());
    // Keys lie on a circle, and a query points at the key that it is to take.
    let at = |block: usize| [(0.3 * block as f32).cos(), (0.3 * block as f32).sin()];
    let tensor = |blocks: &[usize]| {
        let values: Vec<f32> = blocks.iter().flat_map(|&block| at(block)).collect();
        Tensor::from_data(TensorData::new(values, [1, 1, blocks.len(), 2]), &Device::flex())
    };
    let mut first = 0;
    for n_new in calls {
        let positions: Vec<usize> = (first..first + n_new).collect();
        let (queries, keys) = (tensor(&taken[first..first + n_new]), tensor(&positions));
        first += n_new;
        let new = NewEntries { rows: &[0], positions: &[positions], queries, values: keys.clone(), keys };
        cache.attend(new, None);
    }
    assert_eq!(first, taken.len());
    cache.offload_use().unwrap()
}

/// Block 0 of position 0 stands for "nothing to take". Two slots:
///
/// ```text
///  position  1     2    3     4               5    6               7
///  takes     0     0    2     1               2    0               2
///            miss  hit  miss  miss, 0 leaves  hit  miss, 1 leaves  hit
/// ```
#[test]
fn hits_and_misses_are_those_of_an_example_by_hand() {
    let taken = [0, 0, 0, 2, 1, 2, 0, 2];
    for calls in [&[1; 8][..], &[8], &[3, 5]] {
        let found = take_blocks(Offload { resident_blocks: 2, prefetch: false }, &taken, calls);
        // A block of one position: key and value of two numbers of four bytes.
        let expected = OffloadUse { host_bytes: 8 * 16, hits: 3, misses: 4, prefetched: 0, prefetches_used: 0 };
        assert_eq!(found, expected, "{calls:?}");
        assert_eq!(found.hit_rate(), Some(3.0 / 7.0));
    }
}

/// Four slots; what was brought in and not yet taken has a star:
///
/// ```text
///  position  takes         brought in ahead       on the device then
///  1         0: miss       1                      0 1*
///  2         0: hit                               0 1*
///  3         2: miss       3                      0 1* 2 3*
///  4         3: hit, used  4 for 1                0 4* 2 3
///  5         1: miss for 4                        0 1 2 3
///  6         4: miss for 0 5 for 2                4 1 5* 3
///  7         5: hit, used  6 for 3                4 1 5 6*
/// ```
#[test]
fn prefetches_are_those_of_an_example_by_hand() {
    let taken = [0, 0, 0, 2, 3, 1, 4, 5];
    let found = take_blocks(Offload { resident_blocks: 4, prefetch: true }, &taken, &[1; 8]);
    let expected = OffloadUse { host_bytes: 8 * 16, hits: 3, misses: 4, prefetched: 5, prefetches_used: 2 };
    assert_eq!(found, expected);
}

/// Two slots: position 3 takes block 1, block 2 comes for block 0, and then both have to stay.
#[test]
fn a_neighbour_does_not_push_out_the_one_before() {
    let found = take_blocks(Offload { resident_blocks: 2, prefetch: true }, &[0, 0, 0, 1], &[1; 4]);
    let expected = OffloadUse { host_bytes: 4 * 16, hits: 2, misses: 1, prefetched: 2, prefetches_used: 1 };
    assert_eq!(found, expected);
}

#[test]
fn what_grows_is_host_memory_and_a_mean_a_block() {
    let pick = BlockPick { window: 8, sinks: 3, block: 4, top: 2 };
    let config = CacheConfig { keys: Storage::Int8, values: Storage::Int4, ..CacheConfig::default() };
    let mut twins = Twins::new(with_tier(&config, 5, true), pick, 1, 1);
    let entry_bytes = config.entry_bytes(N_KV_HEADS, HEAD_DIM);
    let mean_bytes = N_KV_HEADS * HEAD_DIM * 4;
    for n_positions in [200, 600, 2000] {
        let n_new = n_positions - twins.plain.n_entries(0);
        twins.append(&[0], n_new);
        let cache = &twins.offloaded;
        let n_blocks = pick.n_candidates(n_positions);
        assert_eq!(cache.offload_use().unwrap().host_bytes, n_blocks * 4 * entry_bytes);
        // The sinks' block and five more, what is in or about the window, and the means.
        let n_entries = (1 + 5) * 4 + n_positions - n_blocks * 4;
        assert_eq!(cache.used_bytes(), n_entries * entry_bytes + n_blocks * mean_bytes);
        // Room to grow: a share of the means, and no more entries than the main store holds at most.
        let room = cache.bytes() - cache.used_bytes();
        let most = (n_blocks / 8 + 16) * mean_bytes + 24 * entry_bytes;
        assert!(room <= most, "{room} of at most {most} at {n_positions}");
    }
    assert!(twins.offloaded.bytes() < twins.plain.bytes() / 2);
}

#[test]
fn copies_of_a_row_may_be_cut_back_to_different_places() {
    let pick = BlockPick { window: 2, sinks: 1, block: 2, top: 1 };
    let mut twins = Twins::new(with_tier(&CacheConfig::default(), 2, true), pick, 1, 4);
    twins.append(&[0], 15);
    twins.plain.select_rows(&[0, 0, 0]);
    twins.offloaded.select_rows(&[0, 0, 0]);
    twins.append(&[0, 1, 2], 3);
    for cut in [[18, 16, 13], [18, 17, 4], [5, 17, 0]] {
        let (plain, offloaded) = (twins.plain.clone(), twins.offloaded.clone());
        twins.plain.truncate(&cut).unwrap();
        twins.offloaded.truncate(&cut).unwrap();
        twins.append(&[0, 1, 2], 4);
        twins.check_counts();
        (twins.plain, twins.offloaded) = (plain, offloaded);
    }
}

#[test]
fn copies_of_a_row_share_its_blocks_in_host_memory() {
    let pick = BlockPick { window: 2, sinks: 0, block: 2, top: 1 };
    let mut twins = Twins::new(with_tier(&CacheConfig::default(), 2, true), pick, 1, 2);
    twins.append(&[0], 51);
    let alone = twins.offloaded.offload_use().unwrap().host_bytes;
    twins.offloaded.select_rows(&[0, 0, 0]);
    twins.plain.select_rows(&[0, 0, 0]);
    assert_eq!(twins.offloaded.offload_use().unwrap().host_bytes, alone);
    twins.reload();
    twins.append(&[0, 1, 2], 2);
    let of_three = twins.offloaded.offload_use().unwrap().host_bytes;
    assert_eq!(of_three, alone + 3 * 2 * 2 * N_KV_HEADS * HEAD_DIM * 4, "one block more for each");
}

#[test]
fn records_that_contradict_themselves_are_refused() {
    let pick = BlockPick { window: 2, sinks: 1, block: 2, top: 1 };
    let mut twins = Twins::new(with_tier(&CacheConfig::default(), 3, true), pick, 1, 3);
    twins.append(&[0], 20);
    let mut tensors = Tensors::new();
    let record = serde_json::to_string(&twins.offloaded.record("cache", &mut tensors)).unwrap();
    let refusal = |record: &str, pick: Option<BlockPick>, tensors: &Tensors| {
        let layer = LayerShape { pick, ..layer(BlockPick { window: 2, sinks: 1, block: 2, top: 1 }) };
        let mut cache = KvCache::new(&CacheConfig::default(), layer, 1, &Device::flex());
        cache.restore(serde_json::from_str(record).unwrap(), "cache", &mut tensors.clone()).unwrap_err()
    };
    let expect = |from: &str, to: &str, words: &str| {
        let other = record.replacen(from, to, 1);
        assert_ne!(other, record, "{record}");
        let found = refusal(&other, Some(pick), &tensors);
        assert!(found.contains(words), "{found}");
    };
    expect("\"blocks\":[0,", "\"blocks\":[99,", "blocks in host memory contradict");
    expect("\"blocks\":[0,", "\"blocks\":[", "contradict");
    expect("\"resident_blocks\":3", "\"resident_blocks\":4", "blocks in host memory contradict");
    expect("\"resident_blocks\":3", "\"resident_blocks\":0", "does not fit this model");
    expect("\"tier\":", "\"tier\":null,\"other\":", "contradict the config");
    expect("\"n_seen\":20", "\"n_seen\":24", "on the device and in host memory");
    assert!(refusal(&record, None, &tensors).contains("does not fit this model"));
    let mut fewer = tensors.clone();
    fewer.remove("cache.host.values");
    assert!(refusal(&record, Some(pick), &fewer).contains("cache.host.values is missing"));
}
