//! Many requests at once, answered in their order.
//!
//! Rows to score go through the training forward together, longest first, whichever request they belong to. Requests to
//! generate go through the caches in batches of equal settings.

use std::cmp::Reverse;

use photon_core::checkpoint::Checkpoint;
use photon_core::sampler::SamplingConfig;
use photon_core::score::{ScoreRow, TokenScore, batches, score};
use serde::Serialize;

use super::tokens::{pair_row, rolling_rows};
use super::{LmEvalConfig, Request, RequestError};
use crate::generate::{Completion, FinishReason, GenerateConfig, GenerateError, Prompt, generate_after};

/// Tokens that are generated where a request leaves it open; lm-eval's own default.
const DEFAULT_GEN_TOKENS: usize = 256;

/// What comes of a request.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Answer {
    /// Of `loglikelihood`.
    Loglikelihood {
        /// Natural logarithm of the continuation's probability.
        logprob: f64,
        /// Whether each of its tokens is the likeliest.
        is_greedy: bool,
        /// Tokens scored.
        tokens: usize,
        /// Tokens of the context that there was no room for.
        dropped_tokens: usize,
    },
    /// Of `loglikelihood_rolling`.
    LoglikelihoodRolling {
        /// Natural logarithm of the text's probability.
        logprob: f64,
        /// Tokens scored: all.
        tokens: usize,
    },
    /// Of `generate_until`.
    GenerateUntil {
        /// Up to a text that ends it.
        text: String,
        /// Why it ended.
        finish_reason: FinishReason,
        /// Tokens generated.
        tokens: usize,
        /// Tokens of the context that there was no room for.
        dropped_tokens: usize,
    },
    /// Of any that cannot be answered.
    Error {
        /// Number of the request's line, from 1.
        line: usize,
        /// What is wrong, and what can be done.
        error: String,
    },
}

/// What a request takes.
enum Work {
    Score { rows: Vec<ScoreRow>, dropped_tokens: usize },
    Generate(Generating),
}

/// What is known so far of a request that is scored.
struct Sum {
    place: usize,
    dropped_tokens: usize,
    rows_left: usize,
    logprob: f64,
    is_greedy: bool,
    tokens: usize,
}

/// A request to generate.
struct Generating {
    place: usize,
    prompt: Prompt,
    config: GenerateConfig,
    dropped_tokens: usize,
}

/// Takes the answer to the request at a place, or why there is none.
type Finish<'a> = dyn FnMut(usize, Result<Answer, String>) + 'a;

/// Answers requests, each with the number of its line; `progress` is told how many are done, out of all.
pub fn answer(
    checkpoint: &Checkpoint,
    config: &LmEvalConfig,
    requests: &[(usize, &Request)],
    progress: &dyn Fn(usize, usize),
) -> Vec<Answer> {
    let mut answers: Vec<Option<Answer>> = vec![None; requests.len()];
    let mut n_done = 0;
    let mut finish = |place: usize, answer: Result<Answer, String>| {
        answers[place] = Some(answer.unwrap_or_else(|error| Answer::Error { line: requests[place].0, error }));
        n_done += 1;
        progress(n_done, requests.len());
    };
    let (mut sums, mut rows, mut generatings) = (Vec::new(), Vec::new(), Vec::new());
    for (place, &(line, request)) in requests.iter().enumerate() {
        match plan(checkpoint, config, place, line, request) {
            Ok(Work::Score { rows: own, dropped_tokens }) => {
                let index = sums.len();
                sums.push(Sum::new(place, dropped_tokens, own.len()));
                rows.extend(own.into_iter().map(|row| (index, row)));
            }
            Ok(Work::Generate(generating)) => generatings.push(generating),
            Err(error) => finish(place, Err(error.to_string())),
        }
    }
    score_all(checkpoint, requests, sums, rows, &mut finish);
    generate_all(checkpoint, config.batch_size, generatings, &mut finish);
    answers.into_iter().map(|answer| answer.expect("every request is scored, generates or fails")).collect()
}

fn plan(
    checkpoint: &Checkpoint,
    config: &LmEvalConfig,
    place: usize,
    line: usize,
    request: &Request,
) -> Result<Work, RequestError> {
    let (tokenizer, max_length) = (&checkpoint.tokenizer, config.max_length);
    match request {
        Request::Loglikelihood { context, continuation } => {
            let (row, dropped_tokens) = pair_row(tokenizer, context, continuation, max_length)?;
            Ok(Work::Score { rows: vec![row], dropped_tokens })
        }
        Request::LoglikelihoodRolling { text } => {
            let rows = rolling_rows(&tokenizer.encode(text.as_bytes(), "text")?, max_length);
            Ok(Work::Score { rows, dropped_tokens: 0 })
        }
        Request::GenerateUntil { context, until, max_gen_toks, temperature, top_k, top_p } => {
            let max_tokens = max_gen_toks.unwrap_or(DEFAULT_GEN_TOKENS.min(max_length / 2));
            if max_tokens == 0 || max_tokens >= max_length {
                return Err(RequestError::MaxGenToks { found: max_tokens, max_length });
            }
            let mut token_ids = tokenizer.encode(context.as_bytes(), "context")?;
            let dropped_tokens = token_ids.len().saturating_sub(max_length - max_tokens);
            token_ids.drain(..dropped_tokens);
            let sampling =
                SamplingConfig { temperature: *temperature, top_k: *top_k, top_p: *top_p, seed: config.seed };
            let (stops, plan) = (until.clone(), config.plan.clone());
            let config = GenerateConfig { max_tokens, sampling, stops, samples: 1, plan };
            let prompt = Prompt { row: line, token_ids };
            Ok(Work::Generate(Generating { place, prompt, config, dropped_tokens }))
        }
    }
}

impl Sum {
    fn new(place: usize, dropped_tokens: usize, rows_left: usize) -> Self {
        Self { place, dropped_tokens, rows_left, logprob: 0.0, is_greedy: true, tokens: 0 }
    }

    fn add(&mut self, scores: &[TokenScore]) {
        self.logprob -= scores.iter().map(|token| f64::from(token.nats)).sum::<f64>();
        self.is_greedy &= scores.iter().all(|token| token.is_likeliest);
        self.tokens += scores.len();
        self.rows_left -= 1;
    }

    fn answer(&self, request: &Request) -> Result<Answer, String> {
        let &Self { logprob, is_greedy, tokens, dropped_tokens, .. } = self;
        match request {
            _ if !logprob.is_finite() => {
                Err(format!("the log-probability is {logprob}: the model's logits are no numbers"))
            }
            Request::Loglikelihood { .. } => Ok(Answer::Loglikelihood { logprob, is_greedy, tokens, dropped_tokens }),
            _ => Ok(Answer::LoglikelihoodRolling { logprob, tokens }),
        }
    }
}

/// Scores rows, each with the index of its sum.
fn score_all(
    checkpoint: &Checkpoint,
    requests: &[(usize, &Request)],
    mut sums: Vec<Sum>,
    mut rows: Vec<(usize, ScoreRow)>,
    finish: &mut Finish,
) {
    let mut end = |sum: &Sum| finish(sum.place, sum.answer(requests[sum.place].1));
    // A text without tokens is certain.
    sums.iter().filter(|sum| sum.rows_left == 0).for_each(&mut end);
    rows.sort_by_key(|(_, row)| Reverse(row.token_ids.len()));
    let (owners, rows): (Vec<usize>, Vec<ScoreRow>) = rows.into_iter().unzip();
    let mut owners = owners.into_iter();
    for batch in batches(&rows) {
        for (scores, owner) in score(&checkpoint.model, batch).iter().zip(owners.by_ref()) {
            let sum = &mut sums[owner];
            sum.add(scores);
            if sum.rows_left == 0 {
                end(sum);
            }
        }
    }
}

fn generate_all(checkpoint: &Checkpoint, batch_size: usize, mut waiting: Vec<Generating>, finish: &mut Finish) {
    while let Some(first) = waiting.first() {
        let config = first.config.clone();
        let (mut group, others): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|it| it.config == config);
        waiting = others;
        for batch in group.chunks_mut(batch_size) {
            let prompts: Vec<Prompt> = batch.iter_mut().map(|it| std::mem::take(&mut it.prompt)).collect();
            let outcome = generate_after(checkpoint, &prompts, &config, &mut |_, _| Ok(()));
            match outcome.map(|generation| (generation.completions, generation.refusal)) {
                Ok((completions, refusal)) => {
                    for (it, completion) in batch.iter().zip(completions) {
                        let out_of_memory = completion.finish_reason == FinishReason::Memory;
                        let error = refusal.as_ref().filter(|_| out_of_memory).map(ToString::to_string);
                        finish(it.place, error.map_or_else(|| Ok(generated(completion, it.dropped_tokens)), Err));
                    }
                }
                Err(error) => batch.iter().for_each(|it| finish(it.place, Err(GenerateError::to_string(&error)))),
            }
        }
    }
}

fn generated(completion: Completion, dropped_tokens: usize) -> Answer {
    let Completion { token_ids, text, finish_reason, .. } = completion;
    Answer::GenerateUntil { text, finish_reason, tokens: token_ids.len(), dropped_tokens }
}
