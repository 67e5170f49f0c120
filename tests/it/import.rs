//! A Llama that `transformers` wrote, imported, computes what `transformers` computes from it.
//!
//! The golden files are made by `golden/llama/make.py`, which names the versions.

use std::path::{Path, PathBuf};

use burn::tensor::{bf16, f16};
use photon_core::checkpoint::{Checkpoint, CheckpointError};
use photon_core::config::{ModelConfig, Positions};
use photon_core::import_llama::{ImportError, import_llama};
use photon_core::tokenizer::Tokenizer;
use safetensors::Dtype;
use serde_json::Value;
use tempfile::TempDir;

use crate::programs::{assert_says, complaint_of, load, photon_train, stdout_of};
use crate::support::{forward, max_difference, rows_of};
use crate::weights::{Stored, Weights};

/// f32, sums in another order, two layers deep; the logits reach some ten.
const TOLERANCE: f32 = 1e-4;

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/llama")
}

/// The tokens after BOS and the logits that `transformers` gives at BOS and at each of them.
fn expected() -> (Vec<u32>, Vec<Vec<f32>>) {
    let tensors = Weights::read(&golden().join("expected.safetensors")).tensors;
    let token_ids: Vec<u32> = tensors["input_ids"].values_i64().into_iter().map(|id| id as u32).collect();
    assert_eq!(token_ids[0], 1, "the golden text starts with BOS");
    let vocab_size = tensors["logits"].shape[1];
    let logits = tensors["logits"].values_f32().chunks(vocab_size).map(<[f32]>::to_vec).collect();
    (token_ids[1..].to_vec(), logits)
}

/// A copy of the golden model that a test may change.
struct Llama(TempDir);

impl Llama {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("model")).unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            std::fs::copy(golden().join("model").join(file), folder.path().join("model").join(file)).unwrap();
        }
        Self(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join("model").join(name)
    }

    fn out(&self) -> PathBuf {
        self.0.path().join("imported")
    }

    fn set(&self, key: &str, value: impl Into<Value>) {
        let path = self.file("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config[key] = value.into();
        std::fs::write(&path, config.to_string()).unwrap();
    }

    fn edit(&self, change: impl FnOnce(&mut Weights)) {
        Weights::edit(&self.file("model.safetensors"), change);
    }

    fn import(&self) -> Result<ModelConfig, ImportError> {
        import_llama(&self.0.path().join("model"), &self.out())
    }

    fn imported(&self) -> Checkpoint {
        let config = self.import().unwrap();
        let checkpoint = load(&self.out());
        assert_eq!(checkpoint.model.config(), config);
        checkpoint
    }

    /// Importing fails, and leaves nothing.
    fn refused(&self) -> ImportError {
        let error = self.import().unwrap_err();
        assert!(!self.out().exists(), "{error}");
        error
    }
}

/// Logits at every position, the last predicting what follows the text.
fn logits_of(checkpoint: &Checkpoint, token_ids: &[u32]) -> Vec<Vec<f32>> {
    // The last token is predicted, not read: any will do.
    let row = token_ids.iter().copied().chain([0]).collect();
    forward(&checkpoint.model, &[row]).remove(0)
}

#[track_caller]
fn assert_close(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    for (position, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = max_difference(found, expected);
        assert!(difference <= TOLERANCE, "position {position}: {difference}");
    }
}

#[test]
fn an_imported_llama_gives_the_logits_of_transformers() {
    let checkpoint = Llama::new().imported();
    let (token_ids, expected) = expected();
    assert_eq!(expected.len(), 41);
    assert_close(&logits_of(&checkpoint, &token_ids), &expected);
}

#[test]
fn an_imported_llama_decodes_the_logits_of_transformers() {
    let checkpoint = Llama::new().imported();
    let (token_ids, expected) = expected();
    for piece_len in [1, 7, token_ids.len()] {
        let (mut state, first) = checkpoint.model.begin(1);
        assert_close(&rows_of(first), &expected[..1]);
        let mut n_tokens = 0;
        for piece in token_ids.chunks(piece_len) {
            n_tokens += piece.len();
            let logits = checkpoint.model.extend(&mut state, &[0], &[piece.to_vec()]);
            assert_close(&rows_of(logits), &expected[n_tokens..=n_tokens]);
        }
    }
}

#[test]
fn the_tokenizer_comes_along() {
    let checkpoint = Llama::new().imported();
    let original = Tokenizer::load(&golden().join("model/tokenizer.json")).unwrap();
    assert_eq!(checkpoint.tokenizer.fingerprint(), original.fingerprint());
    assert_eq!(checkpoint.tokenizer.eos_id(), Some(2));
}

#[test]
fn a_tied_head_is_the_embedding() {
    let tied = Llama::new();
    tied.set("tie_word_embeddings", true);
    tied.edit(|weights| drop(weights.tensors.remove(HEAD)));
    let written_out = Llama::new();
    written_out.edit(|weights| {
        let embedding = weights.tensors[EMBEDDING].clone();
        weights.tensors.insert(HEAD.into(), embedding);
    });
    let (token_ids, _) = expected();
    assert_eq!(logits_of(&tied.imported(), &token_ids), logits_of(&written_out.imported(), &token_ids));
}

#[test]
fn rows_of_the_vocabulary_without_a_token_are_dropped() {
    let padded = Llama::new();
    padded.set("vocab_size", 328);
    padded.edit(|weights| {
        for name in [EMBEDDING, HEAD] {
            let rows = weights.tensors[name].padded(8);
            weights.tensors.insert(name.into(), rows);
        }
    });
    let checkpoint = padded.imported();
    assert_eq!(checkpoint.model.config().vocab_size(), 320);
    let (token_ids, expected) = expected();
    assert_close(&logits_of(&checkpoint, &token_ids), &expected);
}

#[test]
fn halves_are_widened_exactly() {
    type Halves = (Dtype, fn(f32) -> [u8; 2], fn(f32) -> f32);
    let kinds: [Halves; 2] = [
        (Dtype::BF16, |x| bf16::from_f32(x).to_le_bytes(), |x| bf16::from_f32(x).to_f32()),
        (Dtype::F16, |x| f16::from_f32(x).to_le_bytes(), |x| f16::from_f32(x).to_f32()),
    ];
    let (token_ids, _) = expected();
    for (dtype, narrow, round) in kinds {
        let (halves, rounded) = (Llama::new(), Llama::new());
        halves.edit(|weights| {
            weights.tensors.values_mut().for_each(|tensor| *tensor = tensor.halves(dtype, narrow));
        });
        rounded.edit(|weights| {
            for tensor in weights.tensors.values_mut() {
                let values: Vec<f32> = tensor.values_f32().into_iter().map(round).collect();
                *tensor = Stored::f32(&tensor.shape, &values);
            }
        });
        assert_eq!(logits_of(&halves.imported(), &token_ids), logits_of(&rounded.imported(), &token_ids));
    }
}

#[test]
fn rope_theta_is_read_in_either_place() {
    for (key, value) in [
        ("rope_parameters", serde_json::json!({ "rope_type": "default", "rope_theta": 500_000.0 })),
        ("rope_theta", 500_000.0.into()),
    ] {
        let llama = Llama::new();
        llama.set("rope_parameters", Value::Null);
        llama.set(key, value);
        match llama.import().unwrap() {
            ModelConfig::Flat(config) => assert_eq!(config.stack.positions, Positions::Rope { theta: 500_000.0 }),
            ModelConfig::Photon(_) => panic!("a Llama is flat"),
        }
    }
}

#[test]
fn a_missing_file_is_named() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let llama = Llama::new();
        let path = llama.file(file);
        std::fs::remove_file(&path).unwrap();
        assert_says(&llama.refused().to_string(), &[&path.display().to_string()]);
    }
}

#[test]
fn what_a_flat_model_cannot_do_is_refused_by_its_key() {
    for (key, value) in [
        ("model_type", Value::from("gpt2")),
        ("attention_bias", true.into()),
        ("mlp_bias", true.into()),
        ("hidden_act", "gelu".into()),
        ("head_dim", 16.into()),
        ("bos_token_id", Value::Null),
        ("bos_token_id", 320.into()),
        ("rope_scaling", serde_json::json!({ "rope_type": "llama3", "factor": 8.0 })),
        ("rope_parameters", serde_json::json!({ "rope_type": "yarn", "rope_theta": 10_000.0 })),
    ] {
        let llama = Llama::new();
        llama.set(key, value);
        let error = llama.refused();
        assert!(matches!(error, ImportError::Unsupported { .. }), "{key}: {error}");
        let said = if key == "rope_parameters" { "rope_scaling" } else { key };
        assert_says(&error.to_string(), &["config.json", said]);
    }
}

#[test]
fn a_config_that_no_model_can_have_is_refused() {
    for (key, value, said) in [
        ("num_attention_heads", 0, "n_heads"),
        ("num_attention_heads", 5, "n_heads"),
        ("num_key_value_heads", 3, "n_kv_heads"),
    ] {
        let llama = Llama::new();
        llama.set("head_dim", Value::Null);
        llama.set(key, value);
        assert_says(&llama.refused().to_string(), &["config.json", &format!("{said} = {value}"), "must"]);
    }
}

#[test]
fn weights_that_do_not_fit_the_config_are_named() {
    let name = "model.layers.1.mlp.up_proj.weight";
    type Change = fn(&mut Weights, &str);
    let changes: [(Change, &str); 3] = [
        (|weights, name| drop(weights.tensors.remove(name)), "is missing"),
        (|weights, name| weights.tensors.get_mut(name).unwrap().shape.reverse(), "has shape [32, 64]"),
        (|weights, name| weights.tensors.get_mut(name).unwrap().dtype = Dtype::I32, "is I32"),
    ];
    for (change, said) in changes {
        let llama = Llama::new();
        llama.edit(|weights| change(weights, name));
        assert_says(&llama.refused().to_string(), &["model.safetensors", name, said]);
    }
    let fewer = Llama::new();
    fewer.set("vocab_size", 300);
    assert_says(&fewer.refused().to_string(), &["320", "300"]);
}

#[test]
fn weights_cut_short_are_refused() {
    let llama = Llama::new();
    let path = llama.file("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    for len in [0, 4, 100, whole.len() - 1] {
        std::fs::write(&path, &whole[..len]).unwrap();
        let error = llama.refused();
        assert!(matches!(error, ImportError::Checkpoint(CheckpointError::Damaged { .. })), "{len} bytes: {error}");
    }
}

#[test]
fn a_model_that_is_there_is_not_replaced() {
    for file in ["model.safetensors", "config.toml", "tokenizer.json"] {
        let llama = Llama::new();
        std::fs::create_dir(llama.out()).unwrap();
        std::fs::write(llama.out().join(file), "mine").unwrap();
        let error = llama.import().unwrap_err();
        assert!(matches!(error, ImportError::Checkpoint(CheckpointError::Exists { .. })), "{error}");
        assert_eq!(std::fs::read_to_string(llama.out().join(file)).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(llama.out()).unwrap().count(), 1);
    }
}

#[test]
fn the_command_imports_once_and_then_refuses() {
    let llama = Llama::new();
    let (from, to) = (golden().join("model"), llama.out());
    let command = || photon_train(["import-llama".as_ref(), from.as_os_str(), "--out".as_ref(), to.as_os_str()]);
    let printed = stdout_of(command());
    let checkpoint = load(&to);
    let n_parameters = burn::module::Module::num_params(&checkpoint.model);
    assert_says(&printed, &[&format!("{n_parameters} parameters"), &to.display().to_string()]);
    let (token_ids, expected) = expected();
    assert_close(&logits_of(&checkpoint, &token_ids), &expected);
    assert_says(&complaint_of(command()), &[&to.display().to_string(), "holds a model already"]);
}
