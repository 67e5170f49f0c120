//! What a way to generate costs against the training forward: on windows of a text, token by token.
//!
//! The first tokens of a window are the prompt. The rest is handed to the caches one token at a time, as if it had been
//! generated, and each prediction is compared with that of the training forward at the same position.

use std::time::{Duration, Instant};

use photon_core::checkpoint::Checkpoint;
use photon_core::infer_config::{InferConfig, InferPlan};
use photon_core::loss::bits_per_byte;
use photon_core::model::Model;
use photon_core::state::CacheUse;
use serde::Serialize;

use crate::divergence::{Divergence, Divergences};
use crate::feedback::{Feedback, feedback};
use crate::generate::{ids_of, rows_of};
use crate::presets::load_preset;
use crate::session::Session;

/// How much is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FidelityConfig {
    /// Tokens of a window; every window starts without context.
    pub context_tokens: usize,
    /// Tokens at the start of a window that are its prompt, fewer than all.
    pub prompt_tokens: usize,
    /// Tokens that are looked at in all, at most; but one window at least.
    pub max_tokens: usize,
    /// Windows that go through the model together.
    pub batch_size: usize,
}

/// The outcome for one way to generate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fidelity {
    /// Predictions compared.
    pub n_tokens: usize,
    /// Mean of `KL(training forward || cached)`, in nats.
    pub kl_mean_nats: f64,
    /// What 99 of 100 divergences do not pass, in nats.
    pub kl_p99_nats: f64,
    /// The largest, in nats.
    pub kl_max_nats: f64,
    /// Share of predictions whose likeliest token is the forward's.
    pub top1_agreement: f64,
    /// Of the training forward, on the tokens compared.
    pub forward_bits_per_byte: f64,
    /// Of the cached path.
    pub cached_bits_per_byte: f64,
    /// By how much the cached path is worse.
    pub bits_per_byte_change: f64,
    /// Whether generated tokens reach later chunks.
    pub feedback: Feedback,
    /// The caches of one row at the end of a window.
    pub caches: Vec<StageBytes>,
    /// Bytes that its entries take, over all stages.
    pub used_bytes: usize,
    /// Bytes that its tensors hold, over all stages.
    pub allocated_bytes: usize,
    /// `used_bytes` over the tokens of the window.
    pub bytes_per_token: f64,
    /// `used_bytes` over those of an f16 cache that evicts nothing.
    pub share_of_f16: f64,
    /// Tokens of all rows a second, one at a time.
    pub decode_tokens_per_sec: f64,
}

/// The cache of one stage, for one row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StageBytes {
    /// `encoder 1`, `decoder 2`, ... or `stack`.
    pub stage: String,
    /// Entries in each of its layers.
    pub entries: usize,
    /// Bytes that they take.
    pub used_bytes: usize,
    /// Bytes that its tensors hold.
    pub allocated_bytes: usize,
}

/// Too little text.
#[derive(Debug, thiserror::Error)]
#[error("the text has {n_tokens} tokens, one window takes {context_tokens}: give more text or a shorter context")]
pub struct TextTooShort {
    n_tokens: usize,
    context_tokens: usize,
}

/// The windows of a text, whole ones only, evenly spread where not all are looked at.
///
/// # Errors
///
/// If there is no whole window.
pub fn windows(token_ids: &[u32], config: &FidelityConfig) -> Result<Vec<Vec<u32>>, TextTooShort> {
    let FidelityConfig { context_tokens, max_tokens, .. } = *config;
    let n_there = token_ids.len() / context_tokens;
    if n_there == 0 {
        return Err(TextTooShort { n_tokens: token_ids.len(), context_tokens });
    }
    let n_wanted = (max_tokens / context_tokens).clamp(1, n_there);
    let starts = (0..n_wanted).map(|index| index * n_there / n_wanted * context_tokens);
    Ok(starts.map(|start| token_ids[start..start + context_tokens].to_vec()).collect())
}

/// Bytes of a row's caches after a window, in f16 and with nothing evicted.
pub fn f16_bytes(model: &Model, window: &[u32]) -> usize {
    let config: InferConfig = load_preset("f16", &[]).expect("a preset that is built in");
    let plan = config.plan(&model.config()).expect("storage alone fits every model");
    let (session, _) = Session::begin(model, &plan, &[window.to_vec()]).expect("no memory budget is set");
    session.cache_use().iter().map(|stage| stage.used_bytes).sum()
}

/// Measures one way to generate on [`windows`]; `f16_bytes` is what [`f16_bytes`] says of the first.
///
/// # Panics
///
/// If there is no window, the prompt is not shorter than a window, or the plan is for another model.
pub fn fidelity(
    checkpoint: &Checkpoint,
    windows: &[Vec<u32>],
    config: &FidelityConfig,
    plan: &InferPlan,
    f16_bytes: usize,
) -> Fidelity {
    let Checkpoint { model, tokenizer } = checkpoint;
    let FidelityConfig { context_tokens, prompt_tokens, batch_size, .. } = *config;
    assert!(!windows.is_empty() && prompt_tokens < context_tokens, "nothing to compare");
    let mut divergences = Divergences::default();
    let mut decoding = Duration::ZERO;
    let mut caches = Vec::new();
    for rows in windows.chunks(batch_size) {
        let run = TeacherForced { model, rows, n_prompt: prompt_tokens };
        let (session, spent) = run.compare(plan, &mut divergences);
        decoding += spent;
        caches = session.cache_use().into_iter().map(|stage| one_row(stage, rows.len())).collect();
    }
    let n_bytes: usize = windows.iter().flat_map(|row| &row[prompt_tokens..]).map(|&id| tokenizer.text_len(id)).sum();
    let [forward_bits, cached_bits] = divergences.nats().map(|nats| bits_per_byte(nats, n_bytes as f64));
    let used_bytes = caches.iter().map(|stage: &StageBytes| stage.used_bytes).sum();
    Fidelity {
        n_tokens: divergences.len(),
        kl_mean_nats: divergences.mean_kl_nats(),
        kl_p99_nats: divergences.kl_quantile_nats(0.99),
        kl_max_nats: divergences.kl_quantile_nats(1.0),
        top1_agreement: divergences.agreement(),
        forward_bits_per_byte: forward_bits,
        cached_bits_per_byte: cached_bits,
        bits_per_byte_change: cached_bits - forward_bits,
        feedback: feedback(model, &windows[0], prompt_tokens, plan),
        used_bytes,
        allocated_bytes: caches.iter().map(|stage| stage.allocated_bytes).sum(),
        bytes_per_token: used_bytes as f64 / context_tokens as f64,
        share_of_f16: used_bytes as f64 / f16_bytes as f64,
        decode_tokens_per_sec: divergences.len() as f64 / decoding.as_secs_f64(),
        caches,
    }
}

fn one_row(stage: CacheUse, n_rows: usize) -> StageBytes {
    let CacheUse { stage, entries, used_bytes, allocated_bytes, .. } = stage;
    StageBytes { stage, entries, used_bytes: used_bytes / n_rows, allocated_bytes: allocated_bytes / n_rows }
}

/// Windows that go through the training forward at once and through the caches token by token.
struct TeacherForced<'a> {
    model: &'a Model,
    rows: &'a [Vec<u32>],
    n_prompt: usize,
}

impl TeacherForced<'_> {
    /// Returns the state after the last token, and the time that decoding took.
    fn compare(&self, plan: &InferPlan, divergences: &mut Divergences) -> (Session<'_>, Duration) {
        let n_rows = self.rows.len();
        let all: Vec<usize> = (0..n_rows).collect();
        let (n_prompt, n_tokens) = (self.n_prompt, self.rows[0].len());
        // Hidden states are held for the whole window, logits for one position.
        let hidden = self.model.hidden(ids_of(self.rows, self.model)).tokens; // [B, T, D]
        let d_model = hidden.dims()[2];
        let forward = |position: usize| {
            let hidden = hidden.clone().slice([0..n_rows, position..position + 1, 0..d_model]);
            rows_of(self.model.head().forward(hidden.reshape([n_rows, d_model])))
        };

        let prompts: Vec<Vec<u32>> = self.rows.iter().map(|row| row[..n_prompt].to_vec()).collect();
        let (mut session, logits) = Session::begin(self.model, plan, &prompts).expect("no memory budget is set");
        let mut logits = rows_of(logits);
        let mut spent = Duration::ZERO;
        for position in n_prompt..n_tokens {
            for ((row, reference), cached) in self.rows.iter().zip(forward(position)).zip(&logits) {
                divergences.add(Divergence::of(&reference, cached, row[position]));
            }
            let newest: Vec<Vec<u32>> = self.rows.iter().map(|row| vec![row[position]]).collect();
            let started = Instant::now();
            logits = rows_of(session.extend(&all, &newest).expect("no memory budget is set"));
            spent += started.elapsed();
        }
        (session, spent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_whole_and_evenly_spread() {
        let text: Vec<u32> = (0..47).collect();
        let starts = |max_tokens| {
            let config = FidelityConfig { context_tokens: 10, prompt_tokens: 2, max_tokens, batch_size: 1 };
            let windows = windows(&text, &config).unwrap();
            assert!(windows.iter().all(|row| row.len() == 10 && row[9] == row[0] + 9));
            windows.iter().map(|row| row[0]).collect::<Vec<_>>()
        };
        assert_eq!(starts(usize::MAX), [0, 10, 20, 30]);
        assert_eq!(starts(20), [0, 20]);
        assert_eq!(starts(1), [0]);
        let config = FidelityConfig { context_tokens: 48, prompt_tokens: 2, max_tokens: 100, batch_size: 1 };
        let error = windows(&text, &config).unwrap_err().to_string();
        assert!(error.contains("47 tokens, one window takes 48"), "{error}");
    }
}
