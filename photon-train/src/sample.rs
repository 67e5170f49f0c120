//! A short text from the model in training, to see with one's own eyes what it has learnt.

use photon_core::model::Model;
use photon_core::sampler::{Sampler, SamplerError, SamplingConfig};
use photon_core::tokenizer::{Tokenizer, TokenizerError};

/// Why there is no sample.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The prompt cannot be encoded.
    #[error(transparent)]
    Prompt(#[from] TokenizerError),
    /// The logits are no numbers.
    #[error(transparent)]
    Logits(#[from] SamplerError),
}

/// `prompt` and at most `n_tokens` tokens after it, up to the end of the document.
///
/// # Errors
///
/// A prompt that the tokenizer refuses, logits that are not finite.
pub fn sample_text(
    model: &Model,
    tokenizer: &Tokenizer,
    prompt: &str,
    n_tokens: usize,
    seed: u64,
) -> Result<String, SampleError> {
    let config = SamplingConfig { temperature: 0.8, top_k: None, top_p: Some(0.95), seed };
    let mut sampler = Sampler::new(config, 0);
    let mut token_ids = tokenizer.encode(prompt.as_bytes(), "eval.sample_prompt")?;
    let (mut state, mut logits) = model.begin(1);
    if !token_ids.is_empty() {
        logits = model.extend(&mut state, &[0], &[token_ids.clone()]);
    }
    for index in 0..n_tokens {
        let values: Vec<f32> = logits.try_to_vec_as().expect("logits are f32");
        let token_id = sampler.sample(&values)?;
        if Some(token_id) == tokenizer.eos_id() {
            break;
        }
        token_ids.push(token_id);
        if index + 1 < n_tokens {
            logits = model.extend(&mut state, &[0], &[vec![token_id]]);
        }
    }
    Ok(String::from_utf8_lossy(&tokenizer.decode(&token_ids)).into_owned())
}
