//! How fast a model generates, and what its caches hold: random tokens in, the likeliest token out.

use std::time::Instant;

use burn::tensor::Tensor;
use photon_core::accounting::model_cost;
use photon_core::infer_config::InferPlan;
use photon_core::launches::counted;
use photon_core::memory::peak_memory_bytes;
use photon_core::model::Model;
use photon_core::state::CacheUse;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::session::Session;

/// Bytes of a GiB.
pub const GIB: f64 = (1u64 << 30) as f64;

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BenchConfig {
    /// Tokens of each row's prompt.
    pub prompt_tokens: usize,
    /// Tokens generated for each row.
    pub decode_tokens: usize,
    /// Rows.
    pub batch_size: usize,
    /// Runs that count, after one that does not; medians are reported.
    pub repeats: usize,
}

/// What was measured: medians over the runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BenchReport {
    /// What was asked for.
    pub config: BenchConfig,
    /// From the start of the prompt to the choice of the first token.
    pub time_to_first_token_secs: f64,
    /// Prompt tokens of all rows a second.
    pub prefill_tokens_per_sec: f64,
    /// Generated tokens of all rows a second, after the first.
    pub decode_tokens_per_sec: f64,
    /// The caches at the end.
    pub caches: Vec<CacheUse>,
    /// Bytes that the entries of all caches take at the end.
    pub cache_used_bytes: usize,
    /// Bytes that the tensors of all caches hold at the end.
    pub cache_allocated_bytes: usize,
    /// The most memory that the process held so far, everything included. Absent where the system does not tell.
    pub peak_memory_bytes: Option<usize>,
    /// What the memory of the device holds in reserve at the end, weights and caches included. Absent for the CPU.
    pub device_memory_bytes: Option<u64>,
    /// Weights that decoding reads, in 10^9 bytes a second: what bounds it where memory is the bound. Caches come on top.
    pub weights_read_gb_per_sec: f64,
    /// Kernels that the device is asked to run for a step of all rows, on average over those after the first; 0 on the CPU.
    pub launches_per_step: f64,
    /// `decode_tokens_per_sec` for each GiB of caches allocated.
    pub decode_tokens_per_sec_per_cache_gib: f64,
    /// `decode_tokens_per_sec` for each GiB that the process held.
    pub decode_tokens_per_sec_per_gib: Option<f64>,
}

/// No batch fits the memory that was given.
#[derive(Debug, thiserror::Error)]
#[error(
    "the caches of one row take {row_bytes} bytes after {n_tokens} tokens, of {available_bytes} that were given: \
     give more memory, fewer tokens or a lighter preset"
)]
pub struct NoRoom {
    row_bytes: usize,
    n_tokens: usize,
    available_bytes: usize,
}

/// The last of a run's times, and the caches at its end.
struct Run {
    first_secs: f64,
    decode_secs: f64,
    n_launches: usize,
    caches: Vec<CacheUse>,
}

/// Measures a model.
///
/// # Panics
///
/// If any count in `config` is zero, fewer than two tokens are to be decoded, or the plan is for another model.
pub fn bench(model: &Model, plan: &InferPlan, config: BenchConfig) -> BenchReport {
    assert!(config.prompt_tokens > 0 && config.batch_size > 0 && config.repeats > 0, "nothing to measure");
    // The first run fills caches and compiles kernels.
    let n_launches = run_once(model, plan, config).n_launches;
    let runs: Vec<Run> = (0..config.repeats).map(|_| run_once(model, plan, config)).collect();
    let first = median(runs.iter().map(|run| run.first_secs).collect());
    let decode = median(runs.iter().map(|run| run.decode_secs).collect());
    let caches = runs.into_iter().last().map(|run| run.caches).unwrap_or_default();
    let steps_per_sec = (config.decode_tokens - 1) as f64 / decode;
    let decode_tokens_per_sec = config.batch_size as f64 * steps_per_sec;
    let per_gib = |bytes: usize| decode_tokens_per_sec / (bytes as f64 / GIB);
    let peak_memory_bytes = peak_memory_bytes();
    let cache_allocated_bytes = allocated_bytes(&caches);
    BenchReport {
        config,
        time_to_first_token_secs: first,
        prefill_tokens_per_sec: (config.batch_size * config.prompt_tokens) as f64 / first,
        decode_tokens_per_sec,
        cache_used_bytes: caches.iter().map(|cache| cache.used_bytes).sum(),
        cache_allocated_bytes,
        peak_memory_bytes,
        device_memory_bytes: model.device().memory_pool_usage().map(|usage| usage.bytes_reserved),
        launches_per_step: n_launches as f64 / (config.decode_tokens - 1) as f64,
        weights_read_gb_per_sec: steps_per_sec * weight_bytes_per_token(model) * 1e-9,
        decode_tokens_per_sec_per_cache_gib: per_gib(cache_allocated_bytes),
        decode_tokens_per_sec_per_gib: peak_memory_bytes.map(per_gib),
        caches,
    }
}

/// Measures a model with as many rows as have room for their caches; `config.batch_size` is not asked.
///
/// # Errors
///
/// If there is no room for one row.
///
/// # Panics
///
/// As [`bench()`].
pub fn bench_in_memory(
    model: &Model,
    plan: &InferPlan,
    config: BenchConfig,
    available_bytes: usize,
) -> Result<BenchReport, NoRoom> {
    let bytes_of =
        |n_rows| allocated_bytes(&run_once(model, plan, BenchConfig { batch_size: n_rows, ..config }).caches);
    let row_bytes = bytes_of(1);
    let n_tokens = config.prompt_tokens + config.decode_tokens;
    // Rows allocate alike, so a multiple of one row is what a batch takes; the loop is there to be sure of it.
    for n_rows in (1..=available_bytes / row_bytes).rev() {
        let report = bench(model, plan, BenchConfig { batch_size: n_rows, ..config });
        if report.cache_allocated_bytes <= available_bytes {
            return Ok(report);
        }
    }
    Err(NoRoom { row_bytes, n_tokens, available_bytes })
}

fn run_once(model: &Model, plan: &InferPlan, config: BenchConfig) -> Run {
    assert!(config.decode_tokens > 1, "the first token belongs to the prompt");
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let vocab_size = model.config().vocab_size() as u32;
    let prompts: Vec<Vec<u32>> = (0..config.batch_size)
        .map(|_| (0..config.prompt_tokens).map(|_| rng.random_range(0..vocab_size)).collect())
        .collect();
    let rows: Vec<usize> = (0..config.batch_size).collect();
    let started = Instant::now();
    let (mut session, logits) = Session::begin(model, plan, &prompts).expect("no memory budget is set");
    let mut newest = likeliest(logits);
    let first = started.elapsed();
    let ((), launches) = counted(|| {
        for _ in 1..config.decode_tokens {
            newest = likeliest(session.extend(&rows, &newest).expect("no memory budget is set"));
        }
    });
    let all = started.elapsed();
    Run {
        first_secs: first.as_secs_f64(),
        decode_secs: (all - first).as_secs_f64(),
        n_launches: launches.values().sum(),
        caches: session.cache_use(),
    }
}

/// Bytes of weights that a step of all rows reads, on average.
fn weight_bytes_per_token(model: &Model) -> f64 {
    let number_bytes = model.head().weights()[0].dtype().size();
    model_cost(&model.config(), 1).weights_read_per_token() * number_bytes as f64
}

fn allocated_bytes(caches: &[CacheUse]) -> usize {
    caches.iter().map(|cache| cache.allocated_bytes).sum()
}

/// The likeliest token of each row.
fn likeliest(logits: Tensor<2>) -> Vec<Vec<u32>> {
    let ids: Vec<i64> = logits.argmax(1).try_into_vec_as().expect("indices are integers");
    ids.into_iter().map(|id| vec![id as u32]).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
