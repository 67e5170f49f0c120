//! A cache against a plain reference that takes up one position at a time, on random sequences of operations.

use burn::tensor::{Device, Tensor, TensorData};
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::cache::config::{Budget, Storage};
use crate::cache::pack::{pack, unpack};
use crate::cache::policy::{AttentionMass, KNorm, Lru, PolicyConfig, Random, SnapKv, Tova, Window};

const N_HEADS: usize = 4;
const N_KV_HEADS: usize = 2;
const HEAD_DIM: usize = 4;
const N_NEWEST: usize = 2;

/// One position: queries by head, keys and values by kv head.
#[derive(Clone, Debug)]
struct Past {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
}

/// An entry as it is stored at the moment.
#[derive(Clone, Debug)]
struct Kept {
    position: usize,
    key: Vec<f32>,
    value: Vec<f32>,
    is_exact: bool,
    stats: EntryStats,
}

#[derive(Clone, Debug, Default)]
struct ReferenceRow {
    history: Vec<Past>,
    entries: Vec<Kept>,
    n_evicted: usize,
}

#[derive(Clone, Debug)]
struct Reference {
    config: CacheConfig,
    span: Span,
    rows: Vec<ReferenceRow>,
}

/// What is left of numbers `[H_kv, K]` after a stay in the cache.
fn rounded(numbers: &[f32], storage: Storage, group: usize) -> Vec<f32> {
    let data = TensorData::new(numbers.to_vec(), [1, N_KV_HEADS, 1, HEAD_DIM]);
    let entries = pack(Tensor::from_data(data, &Device::flex()), storage.format(group, HEAD_DIM));
    unpack(entries).try_to_vec_as().unwrap()
}

impl Reference {
    fn sees(&self, query: usize, key: usize) -> bool {
        let in_window = match &self.config.policy {
            PolicyConfig::Window(Window { recent, sinks }) => key < *sinks || key + recent > query,
            _ => true,
        };
        self.span.sees(query, key) && in_window
    }

    /// Takes up one position and returns its output, `[H, K]`.
    fn step(&mut self, row: usize, past: Past, sinks: Option<&[f32]>) -> Vec<f32> {
        let config = self.config.clone();
        let position = self.rows[row].history.len();
        let is_exact = config.residual > 0;
        let (key, value) = match is_exact {
            true => (past.key.clone(), past.value.clone()),
            false => (rounded(&past.key, config.keys, config.group), rounded(&past.value, config.values, config.group)),
        };
        let key_norm = past.key.iter().map(|x| x * x).sum::<f32>().sqrt();
        let stats = EntryStats { position, key_norm, last_used: position, ..EntryStats::default() };
        let mut entries = std::mem::take(&mut self.rows[row].entries);
        entries.retain(|entry| self.sees(position, entry.position));
        entries.push(Kept { position, key, value, is_exact, stats });
        let (out, weights) = attention(&past.query, &entries, sinks);

        if let Some(ranking) = config.policy.ranking() {
            let mut stats: Vec<EntryStats> = entries.iter().map(|entry| entry.stats.clone()).collect();
            if ranking.evidence() == Evidence::Weights {
                ranking.observe(&mut stats, &weights, Query { position, n_seen: entries.len() });
            }
            entries.iter_mut().zip(stats).for_each(|(entry, stats)| entry.stats = stats);
        }
        entries.retain(|entry| self.sees(position + 1, entry.position));
        self.rows[row].history.push(past);
        self.rows[row].entries = entries;
        if (position + 1).is_multiple_of(config.block) {
            let n_old = (position + 1).saturating_sub(config.residual) / config.block * config.block;
            for entry in self.rows[row].entries.iter_mut().filter(|entry| entry.is_exact && entry.position < n_old) {
                entry.key = rounded(&entry.key, config.keys, config.group);
                entry.value = rounded(&entry.value, config.values, config.group);
                entry.is_exact = false;
            }
            self.evict(row, Schedule::EveryBlock);
        }
        out
    }

    fn evict(&mut self, row: usize, schedule: Schedule) {
        let config = self.config.clone();
        let Some(ranking) = config.policy.ranking().filter(|ranking| ranking.schedule() == schedule) else { return };
        let n_seen = self.rows[row].history.len();
        let entry_bytes = config.entry_bytes(N_KV_HEADS, HEAD_DIM);
        let n_keep = match ranking.budget() {
            Budget::Share(share) => (share * n_seen as f64).ceil() as usize,
            Budget::Entries(n) if schedule == Schedule::PromptEnd => n,
            Budget::Entries(n) => n - config.block,
            Budget::Bytes(bytes) if schedule == Schedule::PromptEnd => bytes / entry_bytes,
            Budget::Bytes(bytes) => bytes / entry_bytes - config.block,
        };
        let entries = std::mem::take(&mut self.rows[row].entries);
        let stats: Vec<EntryStats> = entries.iter().map(|entry| entry.stats.clone()).collect();
        let places = kept(ranking, &stats, N_NEWEST, n_keep);
        self.rows[row].n_evicted += entries.len() - places.len();
        self.rows[row].entries = places.iter().map(|&place| entries[place].clone()).collect();
    }

    /// What the row would be had it only seen its first positions.
    fn replay(&mut self, row: usize, n_positions: usize) {
        let history = std::mem::take(&mut self.rows[row]).history;
        for past in history.into_iter().take(n_positions) {
            self.step(row, past, None);
        }
    }
}

/// The output of one query `[H, K]`, and the weights of entries, mean over heads.
fn attention(query: &[f32], entries: &[Kept], sinks: Option<&[f32]>) -> (Vec<f32>, Vec<f32>) {
    let mut out = Vec::new();
    let mut mean_weights = vec![0.0; entries.len()];
    for head in 0..N_HEADS {
        let of_head = |x: &[f32], head: usize| x[head * HEAD_DIM..(head + 1) * HEAD_DIM].to_vec();
        let (query, kv_head) = (of_head(query, head), head / (N_HEADS / N_KV_HEADS));
        let dot = |key: Vec<f32>| query.iter().zip(key).map(|(q, k)| f64::from(q * k)).sum::<f64>();
        let scores: Vec<f64> = entries.iter().map(|entry| dot(of_head(&entry.key, kv_head)).exp()).collect();
        let total = scores.iter().sum::<f64>() + sinks.map_or(0.0, |sinks| f64::from(sinks[head]).exp());
        let mut head_out = vec![0.0; HEAD_DIM];
        for ((score, entry), mean_weight) in scores.iter().zip(entries).zip(&mut mean_weights) {
            let weight = score / total;
            *mean_weight += (weight / N_HEADS as f64) as f32;
            for (out, value) in head_out.iter_mut().zip(of_head(&entry.value, kv_head)) {
                *out += weight * f64::from(value);
            }
        }
        out.extend(head_out.into_iter().map(|x| x as f32));
    }
    (out, mean_weights)
}

/// A cache and its reference, and what drives them.
struct Pair {
    cache: KvCache,
    reference: Reference,
    rng: ChaCha8Rng,
    case: String,
}

impl Pair {
    fn new(config: CacheConfig, span: Span, n_rows: usize, seed: u64) -> Self {
        let layer = LayerShape { n_kv_heads: N_KV_HEADS, head_dim: HEAD_DIM, span, pick: None, n_newest: N_NEWEST };
        Self {
            cache: KvCache::new(&config, layer, n_rows, &Device::flex()),
            case: format!("case {seed}, {span:?}, {config:?}"),
            reference: Reference { config, span, rows: vec![ReferenceRow::default(); n_rows] },
            rng: ChaCha8Rng::seed_from_u64(seed),
        }
    }

    fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.rng.random_range(-1.5..1.5)).collect()
    }

    /// Appends `n_new` positions to some rows and compares all that they see.
    fn append(&mut self, rows: &[usize], n_new: usize) {
        let sinks = self.rng.random_bool(0.3).then(|| self.numbers(N_HEADS));
        // A reference that is replayed has no sinks; where they do not matter to what is kept, any will do.
        let is_ranked = self.reference.config.policy.ranking().is_some();
        let sinks = sinks.filter(|_| !is_ranked);
        let past: Vec<Vec<Past>> = rows
            .iter()
            .map(|_| {
                let mut one = || Past {
                    query: self.numbers(N_HEADS * HEAD_DIM),
                    key: self.numbers(N_KV_HEADS * HEAD_DIM),
                    value: self.numbers(N_KV_HEADS * HEAD_DIM),
                };
                (0..n_new).map(|_| one()).collect()
            })
            .collect();
        let stacked = |n_heads: usize, of: fn(&Past) -> &[f32]| {
            let heads = past.iter().flat_map(|row| (0..n_heads).map(move |head| (row, head)));
            let values: Vec<f32> = heads
                .flat_map(|(row, head)| {
                    row.iter().flat_map(move |past| of(past)[head * HEAD_DIM..(head + 1) * HEAD_DIM].iter().copied())
                })
                .collect();
            Tensor::from_data(TensorData::new(values, [rows.len(), n_heads, n_new, HEAD_DIM]), &Device::flex())
        };
        let first = |&row: &usize| self.reference.rows[row].history.len();
        let positions: Vec<Vec<usize>> = rows.iter().map(|row| (first(row)..first(row) + n_new).collect()).collect();
        let new = NewEntries {
            rows,
            positions: &positions,
            queries: stacked(N_HEADS, |past| &past.query),
            keys: stacked(N_KV_HEADS, |past| &past.key),
            values: stacked(N_KV_HEADS, |past| &past.value),
        };
        let sink_logits = sinks.as_ref().map(|sinks| Tensor::from_floats(sinks.as_slice(), &Device::flex()));
        let out: Vec<f32> = self.cache.attend(new, sink_logits).try_to_vec_as().unwrap();
        for (index, (&row, past)) in rows.iter().zip(past).enumerate() {
            for (query, past) in past.into_iter().enumerate() {
                let expected = self.reference.step(row, past, sinks.as_deref());
                for (head, expected) in expected.chunks(HEAD_DIM).enumerate() {
                    let at = ((index * N_HEADS + head) * n_new + query) * HEAD_DIM;
                    for (a, b) in out[at..at + HEAD_DIM].iter().zip(expected) {
                        let case = &self.case;
                        assert!((a - b).abs() < 1e-4, "{case}: row {row}, query {query} of {n_new}: {a}, not {b}");
                    }
                }
            }
        }
    }

    fn truncate(&mut self) {
        let n_seen: Vec<usize> = self.reference.rows.iter().map(|row| row.history.len()).collect();
        let n_positions: Vec<usize> = n_seen.iter().map(|&n| self.rng.random_range(n / 2..=n)).collect();
        let config = &self.reference.config;
        match self.cache.truncate(&n_positions) {
            Ok(()) => {
                let rows = n_positions.into_iter().zip(n_seen).enumerate();
                for (row, (n_positions, _)) in rows.filter(|(_, (n_positions, n_seen))| n_positions < n_seen) {
                    self.reference.replay(row, n_positions);
                }
            }
            Err(error) => {
                let can_always =
                    self.reference.span == Span::Full && config.policy == PolicyConfig::Full && config.residual == 0;
                assert!(!can_always, "{}: {error}", self.case);
                assert_ne!(n_positions, n_seen, "{}: nothing to take back, but {error}", self.case);
            }
        }
    }

    fn select(&mut self) {
        let n_rows = self.reference.rows.len();
        let rows: Vec<usize> = match self.rng.random_bool(0.5) {
            true => vec![self.rng.random_range(0..n_rows); self.rng.random_range(1..=3)],
            false => (0..self.rng.random_range(1..=3)).map(|_| self.rng.random_range(0..n_rows)).collect(),
        };
        self.cache.select_rows(&rows);
        self.reference.rows = rows.iter().map(|&row| self.reference.rows[row].clone()).collect();
    }

    fn check_counts(&self) {
        for (row, reference) in self.reference.rows.iter().enumerate() {
            let n_live = reference.entries.len();
            // Dead entries in the middle may wait for a block's worth of them.
            let n_most = n_live + self.reference.config.block;
            let n_stored = self.cache.n_entries(row);
            assert!((n_live..=n_most).contains(&n_stored), "{}: row {row}: {n_stored}, live {n_live}", self.case);
        }
        assert!(self.cache.used_bytes() <= self.cache.bytes(), "{}", self.case);
    }

    fn any_rows(&mut self) -> Vec<usize> {
        let n_rows = self.reference.rows.len();
        let mut rows: Vec<usize> = (0..n_rows).collect();
        match self.rng.random_bool(0.6) {
            true => rows,
            false => {
                rows.retain(|_| self.rng.random_bool(0.5));
                if rows.is_empty() { vec![self.rng.random_range(0..n_rows)] } else { rows }
            }
        }
    }

    fn run(mut self, n_operations: usize) {
        let mut saved = (self.cache.clone(), self.reference.clone());
        let mut has_ended_prompt = false;
        for _ in 0..n_operations {
            match self.rng.random_range(0..12) {
                0 => self.select(),
                1 => self.truncate(),
                2 => saved = (self.cache.clone(), self.reference.clone()),
                3 => (self.cache, self.reference) = (saved.0.clone(), saved.1.clone()),
                4 if !has_ended_prompt => {
                    has_ended_prompt = true;
                    self.cache.end_prompt();
                    (0..self.reference.rows.len()).for_each(|row| self.reference.evict(row, Schedule::PromptEnd));
                    saved = (self.cache.clone(), self.reference.clone());
                }
                _ => {
                    let rows = self.any_rows();
                    let n_new = *[1, 1, 1, 2, 5, 13].choose(&mut self.rng).unwrap();
                    self.append(&rows, n_new);
                }
            }
            self.check_counts();
        }
    }
}

/// A policy that fits a block, drawn.
fn any_policy(rng: &mut ChaCha8Rng, kind: usize, config: &CacheConfig) -> PolicyConfig {
    let sinks = rng.random_range(0..3);
    let n_least = sinks + N_NEWEST + config.block;
    let entry_bytes = config.entry_bytes(N_KV_HEADS, HEAD_DIM);
    let budget = match rng.random_range(0..3) {
        0 => Budget::Entries(n_least + rng.random_range(0..6)),
        1 => Budget::Bytes(n_least * entry_bytes + rng.random_range(0..300)),
        _ => Budget::Share(0.4),
    };
    match kind {
        0 => PolicyConfig::Full,
        1 => PolicyConfig::Window(Window { recent: rng.random_range(1..9), sinks }),
        2 => PolicyConfig::Lru(Lru { budget, sinks, floor: 1.0 }),
        3 => {
            let coverage = rng.random_bool(0.5).then_some(0.9);
            PolicyConfig::AttentionMass(AttentionMass { budget, coverage, floor: 0.3, sinks, recent: 0 })
        }
        4 => PolicyConfig::Tova(Tova { budget, sinks }),
        5 => PolicyConfig::SnapKv(SnapKv { budget, observation: 3, pool: 3, sinks }),
        6 => PolicyConfig::KNorm(KNorm { budget, sinks }),
        _ => PolicyConfig::Random(Random { budget, seed: 3, sinks }),
    }
}

#[test]
fn any_sequence_of_operations_equals_the_reference() {
    let storages = [Storage::F32, Storage::F16, Storage::Bf16, Storage::Int8, Storage::Int4];
    let spans = [
        Span::Full,
        Span::Full,
        Span::Window { len: 6 },
        Span::Blocks { len: 4, back: 1 },
        Span::Strided { window: 3, sinks: 1, block: 2, every: 2 },
    ];
    for seed in 0..600 {
        let mut rng = ChaCha8Rng::seed_from_u64(1000 + seed);
        let mut config = CacheConfig {
            keys: *storages.choose(&mut rng).unwrap(),
            values: *storages.choose(&mut rng).unwrap(),
            group: *[2, 4].choose(&mut rng).unwrap(),
            residual: *[0, 0, 3, 8].choose(&mut rng).unwrap(),
            block: *[1, 4, 5].choose(&mut rng).unwrap(),
            ..CacheConfig::default()
        };
        config.policy = any_policy(&mut rng, seed as usize % 8, &config);
        let span = *spans.choose(&mut rng).unwrap();
        let n_rows = rng.random_range(1..=3);
        Pair::new(config, span, n_rows, seed).run(30);
    }
}

/// 100 entries, of which the newest 8 stay in f32 and blocks of 4 are packed.
#[test]
fn what_is_packed_is_known_to_the_byte() {
    for pieces in [vec![1; 100], vec![100], vec![37, 63], vec![99, 1]] {
        let config =
            CacheConfig { keys: Storage::Int8, values: Storage::Int4, residual: 8, block: 4, ..CacheConfig::default() };
        let mut pair = Pair::new(config, Span::Full, 1, 5);
        pieces.into_iter().for_each(|n_new| pair.append(&[0], n_new));
        let row = &pair.cache.rows[0];
        assert_eq!((row.len(), row.n_main(), row.n_tail), (100, 92, 8));
        // Two heads of four numbers: keys one word and one scale a head, values a word, a scale and a minimum.
        let (packed, exact) = (2 * (4 + 2) + 2 * (4 + 4), 2 * 2 * 4 * 4);
        assert_eq!(pair.cache.used_bytes(), 92 * packed + 8 * exact);
    }
}

#[test]
fn continuations_of_a_prompt_share_what_it_left() {
    let mut pair = Pair::new(CacheConfig::default(), Span::Full, 1, 6);
    pair.append(&[0], 200);
    let one_row = pair.cache.used_bytes();
    pair.cache.select_rows(&[0; 5]);
    pair.reference.rows = vec![pair.reference.rows[0].clone(); 5];
    assert_eq!((pair.cache.used_bytes(), pair.cache.shared_bytes()), (one_row, one_row), "and not five times as much");
    pair.append(&[0, 1, 2, 3, 4], 3);
    pair.append(&[3], 2);
    assert_eq!(pair.cache.used_bytes(), one_row + (15 + 2) * one_row / 200);
    // Forks of a fork share both parts.
    pair.cache.select_rows(&[3; 2]);
    pair.reference.rows = vec![pair.reference.rows[3].clone(); 2];
    assert_eq!(pair.cache.used_bytes(), one_row + 5 * one_row / 200);
    pair.append(&[0, 1], 4);
}

#[test]
fn a_budget_is_never_passed() {
    let policy = PolicyConfig::Tova(Tova { budget: Budget::Entries(12), sinks: 1 });
    let config = CacheConfig { block: 4, policy, ..CacheConfig::default() };
    let mut pair = Pair::new(config, Span::Full, 1, 7);
    pair.append(&[0], 30);
    for _ in 0..50 {
        pair.append(&[0], 1);
        assert!(pair.cache.n_entries(0) <= 12);
    }
    assert!(pair.cache.n_entries(0) >= 8);
    assert_eq!(pair.cache.counters().written - pair.cache.counters().evicted, pair.cache.n_entries(0));
}

#[test]
fn a_bounded_cache_keeps_its_size() {
    let mut pair = Pair::new(CacheConfig::default(), Span::Window { len: 70 }, 1, 8);
    pair.append(&[0], 400);
    let bytes = pair.cache.bytes();
    for _ in 0..300 {
        pair.append(&[0], 1);
        assert_eq!(pair.cache.bytes(), bytes);
        assert_eq!(pair.cache.n_entries(0), 69, "what the next position sees beside itself");
    }
}

#[test]
fn the_room_that_is_foretold_is_the_room_that_is_taken() {
    let mut pair = Pair::new(CacheConfig::default(), Span::Full, 2, 9);
    for n_new in [1, 70, 200, 3, 1, 90] {
        let foretold = pair.cache.bytes_after(n_new);
        pair.append(&[0, 1], n_new);
        assert_eq!(pair.cache.bytes(), foretold);
    }
}
