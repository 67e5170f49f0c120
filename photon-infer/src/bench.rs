//! How fast a model generates, and what its caches hold: random tokens in, the likeliest token out.

use std::time::Instant;

use burn::tensor::Tensor;
use photon_core::model::Model;
use photon_core::state::CacheUse;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use crate::generate::prefill;

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
#[derive(Clone, Debug, PartialEq, Serialize)]
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
}

/// Measures a model.
///
/// # Panics
///
/// If any count in `config` is zero, or fewer than two tokens are to be decoded.
pub fn bench(model: &Model, config: BenchConfig) -> BenchReport {
    assert!(config.prompt_tokens > 0 && config.batch_size > 0 && config.repeats > 0, "nothing to measure");
    assert!(config.decode_tokens > 1, "the first token belongs to the prompt");
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let vocab_size = model.config().vocab_size() as u32;
    let prompts: Vec<Vec<u32>> = (0..config.batch_size)
        .map(|_| (0..config.prompt_tokens).map(|_| rng.random_range(0..vocab_size)).collect())
        .collect();
    let rows: Vec<usize> = (0..config.batch_size).collect();
    let mut first_secs = Vec::new();
    let mut decode_secs = Vec::new();
    let mut caches = Vec::new();
    for run in 0..=config.repeats {
        let started = Instant::now();
        let (mut state, first) = model.begin(config.batch_size);
        let mut newest = likeliest(prefill(model, &mut state, &prompts, first));
        let first = started.elapsed();
        for _ in 1..config.decode_tokens {
            newest = likeliest(model.extend(&mut state, &rows, &newest));
        }
        let all = started.elapsed();
        // The first run fills caches and compiles kernels.
        if run > 0 {
            first_secs.push(first.as_secs_f64());
            decode_secs.push((all - first).as_secs_f64());
        }
        caches = state.cache_use();
    }
    let (first, decode) = (median(first_secs), median(decode_secs));
    BenchReport {
        config,
        time_to_first_token_secs: first,
        prefill_tokens_per_sec: (config.batch_size * config.prompt_tokens) as f64 / first,
        decode_tokens_per_sec: (config.batch_size * (config.decode_tokens - 1)) as f64 / decode,
        caches,
    }
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
