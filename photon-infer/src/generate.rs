//! The loop from prompts to text: one model call a step for all rows that still run.
//!
//! Rows stand wherever their prompts end. A row that meets its end leaves the batch; the others do not notice.
//! Several continuations of one prompt are a batch of their own: the prompt goes through the model once, and they share
//! what its caches hold.
//!
//! [`generate`] runs batches to their end. A program that must not wait for its device, in a browser, steps a [`Batch`]
//! itself and reads the logits in between by [`read_logits`].

use std::collections::BTreeMap;

use burn::tensor::{ExecutionError, Int, Tensor, TensorData};
use photon_core::checkpoint::Checkpoint;
use photon_core::infer_config::InferPlan;
use photon_core::model::Model;
use photon_core::sampler::{Sampler, SamplerError, SamplingConfig};
use photon_core::state::CacheUse;
use photon_core::tokenizer::{ByteStream, TokenizerError};
use serde::Serialize;

use crate::cache_log::CacheLog;
use crate::session::{Relief, Session, SessionError};
use crate::text_stream::TextStream;

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// Tokens of each row, at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Texts that end a row; they are not part of its text.
    pub stops: Vec<String>,
    /// Continuations of each prompt, at least 1. Continuation s of prompt p is row `p * samples + s`, and draws from
    /// the stream of random numbers of that row, which the seed and the row decide.
    pub samples: usize,
    /// How caches store and keep entries, and how generated tokens go up; made for the model.
    pub plan: InferPlan,
}

/// What came of it.
#[derive(Debug)]
pub struct Generation {
    /// One for each row.
    pub completions: Vec<Completion>,
    /// The caches: sizes are the largest at the end of a row, counters go over all rows.
    pub caches: Vec<CacheUse>,
    /// What gave way for want of memory, in order.
    pub reliefs: Vec<Relief>,
    /// Why rows ended before their time, if memory ran out.
    pub refusal: Option<SessionError>,
}

/// What to go on from, in tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Number of the row of its first continuation; the others follow.
    pub row: usize,
    /// None where the model begins by itself.
    pub token_ids: Vec<u32>,
}

/// Why nothing is generated any more.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// A prompt cannot be encoded.
    #[error("prompt {row}: {source}")]
    Prompt {
        /// Which, counted from 0.
        row: usize,
        /// Why not.
        source: TokenizerError,
    },
    /// The logits are no numbers.
    #[error("row {row}, token {position}: {source}")]
    Sampler {
        /// Which, counted from 0.
        row: usize,
        /// Tokens generated before.
        position: usize,
        /// What was wrong with them.
        source: SamplerError,
    },
    /// The prompts do not fit in the memory budget, or cannot be gone on with as planned.
    #[error("prompt: {0}")]
    Session(#[from] SessionError),
    /// Nobody takes the text any more.
    #[error("while writing the text: {0}")]
    Emit(#[from] std::io::Error),
    /// The device gives no logits.
    #[error("the device does not answer any more, it may be lost: start anew, there or on another device ({0})")]
    Device(#[from] ExecutionError),
}

/// Why a row ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// It has `max_tokens` tokens.
    Length,
    /// The model ended the document.
    Eos,
    /// A stop text came up.
    Stop,
    /// The memory budget holds no further token.
    Memory,
}

/// A finished row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Completion {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Every token sampled, the end-of-document token left out.
    pub token_ids: Vec<u32>,
    /// Their text, up to a stop text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
}

/// Told each piece of text: row and text. An error ends the generation.
pub type Emit<'a> = dyn FnMut(usize, &str) -> std::io::Result<()> + 'a;

/// Rows that go through the model together, one token each at a step.
pub struct Batch<'a> {
    config: &'a GenerateConfig,
    eos_id: Option<u32>,
    /// Numbers of all rows, in the order of their prompts.
    rows: Vec<usize>,
    running: Vec<Row<'a>>,
    session: Session<'a>,
    finished: BTreeMap<usize, Completion>,
    log: CacheLog,
}

/// A row under way.
struct Row<'a> {
    index: usize,
    prompt_tokens: usize,
    sampler: Sampler,
    bytes: ByteStream<'a>,
    text_stream: TextStream,
    token_ids: Vec<u32>,
    text: String,
}

/// Completes every prompt; `emit` is told each piece of text as soon as it is certain: row and text.
///
/// # Errors
///
/// A prompt that the tokenizer refuses, logits that are not finite.
///
/// # Panics
///
/// If no samples are asked for, or the plan is for another model.
pub fn generate(
    checkpoint: &Checkpoint,
    prompts: &[String],
    config: &GenerateConfig,
    emit: &mut Emit,
) -> Result<Generation, GenerateError> {
    let encode = |(index, prompt): (usize, &String)| {
        let row = index * config.samples;
        let token_ids = checkpoint.tokenizer.encode(prompt.as_bytes(), "the prompt");
        let token_ids = token_ids.map_err(|source| GenerateError::Prompt { row: index, source })?;
        Ok(Prompt { row, token_ids })
    };
    let prompts: Vec<Prompt> = prompts.iter().enumerate().map(encode).collect::<Result<_, GenerateError>>()?;
    generate_after(checkpoint, &prompts, config, emit)
}

/// The same from tokens, for rows that the caller numbers; each number once.
///
/// # Errors
///
/// Logits that are not finite.
///
/// # Panics
///
/// If no samples are asked for, or the plan is for another model.
pub fn generate_after(
    checkpoint: &Checkpoint,
    prompts: &[Prompt],
    config: &GenerateConfig,
    emit: &mut Emit,
) -> Result<Generation, GenerateError> {
    assert!(config.samples > 0, "no sample is asked for");
    let prompts_at_once = if config.samples == 1 { prompts.len().max(1) } else { 1 };
    let mut completions = Vec::with_capacity(prompts.len() * config.samples);
    let mut log = CacheLog::default();
    for prompts in prompts.chunks(prompts_at_once) {
        let (mut batch, mut logits) = Batch::begin(checkpoint, prompts, config)?;
        while let Some(next) = batch.step(&rows_in(logits.try_into_data()?), emit)? {
            logits = next;
        }
        let (new, batch_log) = batch.end();
        completions.extend(new);
        log.add(batch_log);
    }
    Ok(Generation::of(completions, log))
}

/// The logits of each row, `[b, V]` as `b` lists, without waiting for the device.
///
/// # Errors
///
/// If the device does not answer.
pub async fn read_logits(logits: Tensor<2>) -> Result<Vec<Vec<f32>>, GenerateError> {
    Ok(rows_in(logits.into_data_async().await?))
}

/// Rows of equally many token ids, on the model's device: `[B, T]`.
pub(crate) fn ids_of(rows: &[Vec<u32>], model: &Model) -> Tensor<2, Int> {
    let values: Vec<i64> = rows.iter().flatten().map(|&id| i64::from(id)).collect();
    Tensor::from_data(TensorData::new(values, [rows.len(), rows[0].len()]), &model.device())
}

/// `[b, V]` as `b` lists.
pub(crate) fn rows_of(logits: Tensor<2>) -> Vec<Vec<f32>> {
    rows_in(logits.into_data())
}

fn rows_in(logits: TensorData) -> Vec<Vec<f32>> {
    let vocab_size = logits.shape()[1];
    let values: Vec<f32> = logits.iter().collect();
    values.chunks(vocab_size).map(<[f32]>::to_vec).collect()
}

impl Generation {
    fn of(completions: Vec<Completion>, log: CacheLog) -> Self {
        let CacheLog { stages: caches, reliefs, refusal } = log;
        Self { completions, caches, reliefs, refusal }
    }
}

impl<'a> Batch<'a> {
    /// Takes up one prompt with all its samples, or several with one each; the logits of the first token of each row,
    /// `[B, V]`.
    ///
    /// # Errors
    ///
    /// Prompts that do not fit in the memory budget, or cannot be gone on with as planned.
    ///
    /// # Panics
    ///
    /// If the plan is for another model, or there are several prompts with several samples.
    pub fn begin(
        checkpoint: &'a Checkpoint,
        prompts: &[Prompt],
        config: &'a GenerateConfig,
    ) -> Result<(Self, Tensor<2>), GenerateError> {
        assert!(prompts.len() == 1 || config.samples == 1, "prompts with several samples are batches of their own");
        let Checkpoint { model, tokenizer } = checkpoint;
        let repeated =
            prompts.iter().flat_map(|prompt| (prompt.row..).take(config.samples).map(move |row| (row, prompt)));
        let row = |(index, Prompt { token_ids, .. }): (usize, &Prompt)| Row {
            index,
            prompt_tokens: token_ids.len(),
            sampler: Sampler::new(config.sampling, index as u64),
            bytes: tokenizer.stream(token_ids),
            text_stream: TextStream::new(config.stops.clone()),
            token_ids: Vec::new(),
            text: String::new(),
        };
        let running: Vec<Row> = repeated.map(row).collect();
        let rows = running.iter().map(|row| row.index).collect();
        let prompts: Vec<Vec<u32>> = prompts.iter().map(|prompt| prompt.token_ids.clone()).collect();
        let (mut session, mut logits) = Session::begin(model, &config.plan, &prompts)?;
        if config.samples > 1 {
            session.select_rows(&vec![0; config.samples]);
            logits = logits.repeat_dim(0, config.samples);
        }
        let (finished, log) = (BTreeMap::new(), CacheLog::default());
        Ok((Self { config, eos_id: tokenizer.eos_id(), rows, running, session, finished, log }, logits))
    }

    /// Chooses a token for each row that still runs, by its logits; the logits of the next, `[b, V]`, or `None` when every
    /// row has ended. `emit` is told each piece of text as soon as it is certain.
    ///
    /// # Errors
    ///
    /// Logits that are not finite, text that nobody takes.
    pub fn step(&mut self, logits: &[Vec<f32>], emit: &mut Emit) -> Result<Option<Tensor<2>>, GenerateError> {
        let mut staying = Vec::with_capacity(self.running.len());
        let mut ended = Vec::new();
        for (place, (row, logits)) in self.running.iter_mut().zip(logits).enumerate() {
            match row.advance(logits, self.config, self.eos_id, emit)? {
                Some(reason) => ended.push((place, reason)),
                None => staying.push(place),
            }
        }
        for (place, reason) in ended.into_iter().rev() {
            let row = self.running.remove(place);
            self.finished.insert(row.index, row.finish(reason, emit)?);
        }
        if self.running.is_empty() {
            self.log.close(&self.session);
            return Ok(None);
        }
        if staying.len() < self.session.state().n_rows() {
            self.log.note(&self.session.cache_use());
            self.session.select_rows(&staying);
        }
        let rows: Vec<usize> = (0..self.running.len()).collect();
        let newest: Vec<Vec<u32>> =
            self.running.iter().map(|row| row.token_ids[row.token_ids.len() - 1..].to_vec()).collect();
        match self.session.extend(&rows, &newest) {
            Ok(logits) => Ok(Some(logits)),
            // What there is by now is kept.
            Err(refusal @ SessionError::OverBudget { .. }) => {
                for row in self.running.drain(..) {
                    self.finished.insert(row.index, row.finish(FinishReason::Memory, emit)?);
                }
                self.log.close(&self.session);
                self.log.refusal = Some(refusal);
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The session as it stands.
    pub fn session(&self) -> &Session<'a> {
        &self.session
    }

    /// What came of it, once every row has ended.
    ///
    /// # Panics
    ///
    /// If one has not.
    pub fn finish(self) -> Generation {
        let (completions, log) = self.end();
        Generation::of(completions, log)
    }

    fn end(mut self) -> (Vec<Completion>, CacheLog) {
        let completions = self.rows.iter().map(|row| self.finished.remove(row).expect("every row has ended"));
        (completions.collect(), self.log)
    }
}

impl Row<'_> {
    /// Chooses the next token; says why the row ends, if it does.
    fn advance(
        &mut self,
        logits: &[f32],
        config: &GenerateConfig,
        eos_id: Option<u32>,
        emit: &mut Emit,
    ) -> Result<Option<FinishReason>, GenerateError> {
        if self.token_ids.len() == config.max_tokens {
            return Ok(Some(FinishReason::Length));
        }
        let (row, position) = (self.index, self.token_ids.len());
        let token_id =
            self.sampler.sample(logits).map_err(|source| GenerateError::Sampler { row, position, source })?;
        if Some(token_id) == eos_id {
            return Ok(Some(FinishReason::Eos));
        }
        self.token_ids.push(token_id);
        let bytes = self.bytes.push(token_id);
        let emitted = self.text_stream.push(&bytes);
        self.say(&emitted.text, emit)?;
        Ok(match emitted.stopped {
            true => Some(FinishReason::Stop),
            // The model need not run for a token that nobody asks for.
            false if self.token_ids.len() == config.max_tokens => Some(FinishReason::Length),
            false => None,
        })
    }

    fn finish(mut self, finish_reason: FinishReason, emit: &mut Emit) -> Result<Completion, GenerateError> {
        let bytes = self.bytes.finish();
        let tail = self.text_stream.push(&bytes).text + &self.text_stream.finish();
        self.say(&tail, emit)?;
        let Self { prompt_tokens, token_ids, text, .. } = self;
        Ok(Completion { prompt_tokens, token_ids, text, finish_reason })
    }

    fn say(&mut self, text: &str, emit: &mut Emit) -> std::io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.text.push_str(text);
        emit(self.index, text)
    }
}
