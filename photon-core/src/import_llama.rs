//! Turns a Llama-architecture model of the `transformers` package into a photon checkpoint of a flat model.
//!
//! A file becomes a file: tensors are renamed, matrices transposed (`[out, in]` there, `[in, out]` here), halves
//! widened to f32. The start embedding becomes the embedding of the model's BOS token, so that the photon model
//! on a text equals the original on BOS and that text.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::Deserialize;

use crate::checkpoint::{self, CheckpointError};
use crate::config::{EncoderAttention, EncoderConfig, FlatConfig, ModelConfig, Positions};
use crate::config_file::ConfigFileError;
use crate::nn::vocabulary::{MAX_PIECE_NUMBERS, piece_name, pieces};
use crate::tokenizer::Tokenizer;

/// Why a model cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A file of the folder cannot be read.
    #[error("cannot read {path}: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// The model uses something that `Flat` does not have.
    #[error("{path}: {key} = {value} is not supported: {reason}")]
    Unsupported {
        /// The config file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would be.
        reason: &'static str,
    },
    /// A tensor is missing, misshapen or of another type.
    #[error("{path}: tensor {name} {reason}")]
    Tensor {
        /// The weights.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The checkpoint cannot be written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// The keys of `config.json` that decide what the weights mean.
#[derive(Debug, Deserialize)]
struct LlamaConfig {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    rope_theta: Option<f64>,
    /// Newer files keep the base here.
    rope_parameters: Option<serde_json::Value>,
    rope_scaling: Option<serde_json::Value>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default)]
    tie_word_embeddings: bool,
    bos_token_id: Option<usize>,
    hidden_act: Option<String>,
}

/// Converts the folder `from` into a checkpoint in `to`, which must not hold one yet.
///
/// # Errors
///
/// A file that is missing or damaged, an architecture that `Flat` cannot express, a tokenizer of another size.
pub fn import_llama(from: &Path, to: &Path) -> Result<ModelConfig, ImportError> {
    let config_path = from.join("config.json");
    let llama: LlamaConfig =
        serde_json::from_slice(&read(&config_path)?).map_err(|error| read_error(&config_path, error))?;
    let config = flat_config(&llama, &config_path)?;
    ModelConfig::Flat(config.clone())
        .validate()
        .map_err(|source| CheckpointError::from(ConfigFileError::Rule { path: config_path.clone(), source }))?;
    let tokenizer = Tokenizer::load(&from.join("tokenizer.json")).map_err(CheckpointError::from)?;
    if tokenizer.vocab_size() > llama.vocab_size {
        let (expected, found) = (llama.vocab_size, tokenizer.vocab_size());
        return Err(CheckpointError::Vocabulary { path: from.into(), expected, found }.into());
    }
    let weights_path = from.join("model.safetensors");
    checkpoint::read_header(&weights_path)?;
    let bytes = read(&weights_path)?;
    let weights = SafeTensors::deserialize(&bytes).map_err(|error| read_error(&weights_path, error))?;
    let source = Source { path: &weights_path, weights: &weights };
    let tensors = convert(&llama, tokenizer.vocab_size(), &source)?;
    let config = ModelConfig::Flat(FlatConfig { vocab_size: tokenizer.vocab_size(), ..config });
    checkpoint::save_tensors(to, &config, &tokenizer, tensors)?;
    Ok(config)
}

fn flat_config(llama: &LlamaConfig, path: &Path) -> Result<FlatConfig, ImportError> {
    let unsupported =
        |key, value: String, reason| Err(ImportError::Unsupported { path: path.into(), key, value, reason });
    if llama.model_type != "llama" {
        return unsupported("model_type", llama.model_type.clone(), "only \"llama\" is");
    }
    if llama.attention_bias || llama.mlp_bias {
        return unsupported("attention_bias or mlp_bias", "true".into(), "the blocks have no biases");
    }
    if let Some(act) = llama.hidden_act.as_ref().filter(|act| *act != "silu") {
        return unsupported("hidden_act", act.clone(), "only \"silu\" is");
    }
    if let Some(head_dim) = llama.head_dim.filter(|dim| dim * llama.num_attention_heads != llama.hidden_size) {
        return unsupported("head_dim", head_dim.to_string(), "only hidden_size / num_attention_heads is");
    }
    let scaling = llama.rope_scaling.as_ref().or(llama.rope_parameters.as_ref());
    let rope_type =
        scaling.and_then(|value| value.get("rope_type").or(value.get("type"))).and_then(|kind| kind.as_str());
    if let Some(kind) = rope_type.filter(|kind| *kind != "default") {
        return unsupported("rope_scaling", kind.into(), "only plain RoPE is");
    }
    let nested_theta =
        llama.rope_parameters.as_ref().and_then(|value| value.get("rope_theta")).and_then(|v| v.as_f64());
    let theta = llama.rope_theta.or(nested_theta).unwrap_or(10_000.0);
    if llama.bos_token_id.is_none_or(|id| id >= llama.vocab_size) {
        let value = llama.bos_token_id.map_or("none".into(), |id| id.to_string());
        return unsupported("bos_token_id", value, "the start embedding is taken from the BOS token's");
    }
    Ok(FlatConfig {
        vocab_size: llama.vocab_size,
        d_model: llama.hidden_size,
        norm_eps: llama.rms_norm_eps,
        init_std: 0.02,
        stack: EncoderConfig {
            n_layers: llama.num_hidden_layers,
            n_heads: llama.num_attention_heads,
            n_kv_heads: llama.num_key_value_heads,
            d_ff: llama.intermediate_size,
            attention: EncoderAttention::Full,
            positions: Positions::Rope { theta },
            sink: false,
        },
    })
}

/// A tensor on its way: shape and little-endian f32.
pub(crate) struct Converted {
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

struct Source<'a> {
    path: &'a Path,
    weights: &'a SafeTensors<'a>,
}

impl Source<'_> {
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ImportError> {
        let wrong = |reason: String| ImportError::Tensor { path: self.path.into(), name: name.into(), reason };
        let view: TensorView = self.weights.tensor(name).map_err(|_| wrong("is missing".into()))?;
        if view.shape() != shape {
            return Err(wrong(format!("has shape {:?}, the config asks for {shape:?}", view.shape())));
        }
        let halves = |widen: fn([u8; 2]) -> f32| view.data().chunks_exact(2).map(|b| widen([b[0], b[1]])).collect();
        Ok(match view.dtype() {
            Dtype::F32 => view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Dtype::BF16 => halves(|b| burn::tensor::bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => halves(|b| burn::tensor::f16::from_le_bytes(b).to_f32()),
            other => return Err(wrong(format!("is {other:?}, expected F32, BF16 or F16"))),
        })
    }

    fn vector(&self, name: &str, len: usize) -> Result<Converted, ImportError> {
        Ok(converted(vec![len], &self.values(name, &[len])?))
    }

    /// Some rows of a table.
    fn table(&self, name: &str, shape: [usize; 2], rows: Range<usize>) -> Result<Converted, ImportError> {
        let [_, width] = shape;
        let values = &self.values(name, &shape)?[rows.start * width..rows.end * width];
        Ok(converted(vec![rows.len(), width], values))
    }

    /// A matrix stored `[d_output, d_input]`, transposed, of which some outputs are kept.
    fn matrix(
        &self,
        name: &str,
        [d_output, d_input]: [usize; 2],
        outputs: Range<usize>,
    ) -> Result<Converted, ImportError> {
        let values = self.values(name, &[d_output, d_input])?;
        let transposed: Vec<f32> = (0..d_input)
            .flat_map(|i| outputs.clone().map(move |o| (i, o)))
            .map(|(i, o)| values[o * d_input + i])
            .collect();
        Ok(converted(vec![d_input, outputs.len()], &transposed))
    }
}

/// All tensors under photon's names. Rows of the vocabulary beyond the tokenizer's `n_tokens` are padding and dropped.
fn convert(llama: &LlamaConfig, n_tokens: usize, source: &Source) -> Result<HashMap<String, Converted>, ImportError> {
    let (d_model, d_ff) = (llama.hidden_size, llama.intermediate_size);
    let d_kv = llama.num_key_value_heads.unwrap_or(llama.num_attention_heads) * d_model / llama.num_attention_heads;
    let vocab = [llama.vocab_size, d_model];
    let embeddings = "model.embed_tokens.weight";
    let head = if llama.tie_word_embeddings { embeddings } else { "lm_head.weight" };
    let bos = llama.bos_token_id.unwrap_or(0);
    let start = source.values(embeddings, &vocab)?[bos * d_model..(bos + 1) * d_model].to_vec();
    let mut tensors = HashMap::from([
        ("start".to_owned(), converted(vec![d_model], &start)),
        ("stack.norm.gamma".to_owned(), source.vector("model.norm.weight", d_model)?),
    ]);
    for (index, piece) in pieces(n_tokens, d_model, MAX_PIECE_NUMBERS).enumerate() {
        tensors.insert(piece_name("embedding", index), source.table(embeddings, vocab, piece.clone())?);
        tensors.insert(piece_name("head", index), source.matrix(head, vocab, piece)?);
    }
    for layer in 0..llama.num_hidden_layers {
        let (theirs, ours) = (format!("model.layers.{layer}"), format!("stack.blocks.{layer}"));
        for (name, norm) in [("input_layernorm", "attention_norm"), ("post_attention_layernorm", "feed_forward_norm")] {
            let vector = source.vector(&format!("{theirs}.{name}.weight"), d_model)?;
            tensors.insert(format!("{ours}.{norm}.gamma"), vector);
        }
        for (name, [d_output, d_input], ours_in_block) in [
            ("self_attn.q_proj", [d_model, d_model], "attention.q_proj"),
            ("self_attn.k_proj", [d_kv, d_model], "attention.k_proj"),
            ("self_attn.v_proj", [d_kv, d_model], "attention.v_proj"),
            ("self_attn.o_proj", [d_model, d_model], "attention.o_proj"),
            ("mlp.gate_proj", [d_ff, d_model], "feed_forward.gate_proj"),
            ("mlp.up_proj", [d_ff, d_model], "feed_forward.up_proj"),
            ("mlp.down_proj", [d_model, d_ff], "feed_forward.down_proj"),
        ] {
            let matrix = source.matrix(&format!("{theirs}.{name}.weight"), [d_output, d_input], 0..d_output)?;
            tensors.insert(format!("{ours}.{ours_in_block}.weight"), matrix);
        }
    }
    Ok(tensors)
}

fn converted(shape: Vec<usize>, values: &[f32]) -> Converted {
    Converted { shape, bytes: values.iter().flat_map(|value| value.to_le_bytes()).collect() }
}

impl safetensors::View for Converted {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, ImportError> {
    std::fs::read(path).map_err(|error| read_error(path, error))
}

fn read_error(path: &Path, error: impl ToString) -> ImportError {
    ImportError::Read { path: path.into(), reason: error.to_string() }
}
