//! The loop from prompts to text: one model call a step for all rows that still run.
//!
//! Rows stand wherever their prompts end. A row that meets its end leaves the batch; the others do not notice.

use burn::tensor::Tensor;
use photon_core::checkpoint::Checkpoint;
use photon_core::model::Model;
use photon_core::sampler::{Sampler, SamplerError, SamplingConfig};
use photon_core::state::State;
use photon_core::tokenizer::{ByteStream, TokenizerError};
use serde::Serialize;

use crate::text_stream::TextStream;

/// Tokens of a prompt that go through the model at once; the result does not depend on it.
const PIECE_TOKENS: usize = 256;

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// Tokens of each row, at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Texts that end a row; they are not part of its text.
    pub stops: Vec<String>,
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
    /// Nobody takes the text any more.
    #[error("while writing the text: {0}")]
    Emit(#[from] std::io::Error),
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
pub fn generate(
    checkpoint: &Checkpoint,
    prompts: &[String],
    config: &GenerateConfig,
    emit: &mut Emit,
) -> Result<Vec<Completion>, GenerateError> {
    let Checkpoint { model, tokenizer } = checkpoint;
    let encode = |(row, prompt): (usize, &String)| {
        tokenizer.encode(prompt.as_bytes(), "the prompt").map_err(|source| GenerateError::Prompt { row, source })
    };
    let prompts: Vec<Vec<u32>> = prompts.iter().enumerate().map(encode).collect::<Result<_, _>>()?;
    let mut completions: Vec<Option<Completion>> = prompts.iter().map(|_| None).collect();
    let (mut state, first_logits) = model.begin(prompts.len());
    let mut running: Vec<Row> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| Row {
            index,
            prompt_tokens: prompt.len(),
            sampler: Sampler::new(config.sampling, index as u64),
            bytes: tokenizer.stream(prompt),
            text_stream: TextStream::new(config.stops.clone()),
            token_ids: Vec::new(),
            text: String::new(),
        })
        .collect();
    let mut logits = rows_of(prefill(model, &mut state, &prompts, first_logits));

    while !running.is_empty() {
        let mut staying = Vec::with_capacity(running.len());
        let mut ended = Vec::new();
        for (place, (row, logits)) in running.iter_mut().zip(&logits).enumerate() {
            match row.advance(logits, config, tokenizer.eos_id(), emit)? {
                Some(reason) => ended.push((place, reason)),
                None => staying.push(place),
            }
        }
        for (place, reason) in ended.into_iter().rev() {
            let row = running.remove(place);
            let index = row.index;
            completions[index] = Some(row.finish(reason, emit)?);
        }
        if running.is_empty() {
            break;
        }
        if staying.len() < state.n_rows() {
            state.select_rows(&staying);
        }
        let rows: Vec<usize> = (0..running.len()).collect();
        let newest: Vec<Vec<u32>> =
            running.iter().map(|row| row.token_ids[row.token_ids.len() - 1..].to_vec()).collect();
        logits = rows_of(model.extend(&mut state, &rows, &newest));
    }
    Ok(completions.into_iter().map(|row| row.expect("every row ends")).collect())
}

/// Takes up the prompts, each in pieces; returns the logits of the token after each, `[B, V]`.
///
/// `first` are the logits of the token after an empty prompt.
pub(crate) fn prefill(model: &Model, state: &mut State, prompts: &[Vec<u32>], first: Tensor<2>) -> Tensor<2> {
    let mut logits: Vec<Tensor<2>> = first.split(1, 0);
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    for start in (0..longest).step_by(PIECE_TOKENS) {
        let rows: Vec<usize> = (0..prompts.len()).filter(|&row| prompts[row].len() > start).collect();
        let piece = |&row: &usize| prompts[row][start..(start + PIECE_TOKENS).min(prompts[row].len())].to_vec();
        let pieces: Vec<Vec<u32>> = rows.iter().map(piece).collect();
        let new = model.extend(state, &rows, &pieces).split(1, 0);
        rows.into_iter().zip(new).for_each(|(row, new)| logits[row] = new);
    }
    Tensor::cat(logits, 0)
}

/// `[b, V]` as `b` lists.
fn rows_of(logits: Tensor<2>) -> Vec<Vec<f32>> {
    let [_, vocab_size] = logits.dims();
    let values: Vec<f32> = logits.try_into_vec_as().expect("logits are f32");
    values.chunks(vocab_size).map(<[f32]>::to_vec).collect()
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
