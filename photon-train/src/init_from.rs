//! The weights of a new run from the checkpoint of another, as far as the two models agree.
//!
//! A parameter is carried over where the source has one of the same name, shape and heads; the rest is fresh. So a run may
//! first train few levels and then more: levels are named from the bottom, and a level that is added on top changes no
//! name. The start latent stands for the top latent, so it goes along only if the number of levels stays.
//!
//! Out of a flat model grows a hierarchy whose token decoder is that model: it too reads tokens at the width of the head
//! and predicts them. The table of tokens, the head, and the blocks and the norm of the stack go to `decoders.0`; the table
//! also to the first encoder, where that is as wide.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor, TensorData};
use photon_core::checkpoint::{Checkpoint, CheckpointError};
use photon_core::config::{ModelConfig, StackSpec};
use photon_core::infer_config::Stage;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use serde::Serialize;

use crate::checkpoint::file_hash;
use crate::parameters::{ParameterPath, SeeParameters, see_parameters};
use crate::parts::Place;

/// Why nothing could be carried over.
#[derive(Debug, thiserror::Error)]
pub enum InitFromError {
    /// The checkpoint.
    #[error("init_from: {0}")]
    Checkpoint(#[from] CheckpointError),
    /// The model file cannot be read.
    #[error("init_from: cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The source speaks of other tokens.
    #[error(
        "init_from = {path}: its tokenizer is another one ({found}) than this run's ({expected}), so its tokens mean other \
         text: train with its tokenizer.json, or begin afresh"
    )]
    Tokenizer {
        /// The folder.
        path: PathBuf,
        /// Fingerprint of the run's.
        expected: String,
        /// Fingerprint of the source's.
        found: String,
    },
    /// The models have nothing in common.
    #[error("init_from = {path}: no parameter of it fits this model by name and shape: leave init_from out")]
    Nothing {
        /// The folder.
        path: PathBuf,
    },
}

/// What was carried over from where.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Carried {
    /// The folder of the checkpoint.
    pub folder: PathBuf,
    /// SHA-256 of its weights.
    pub model_sha256: String,
    /// Numbers carried over.
    pub parameters: usize,
    /// Numbers of the new model.
    pub of_parameters: usize,
    /// Names of the new model's parameters that are fresh.
    pub fresh: Vec<String>,
    /// Names of the source's parameters that found no place.
    pub unplaced: Vec<String>,
}

impl fmt::Display for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { folder, parameters, of_parameters, fresh, unplaced, .. } = self;
        write!(f, "{parameters} of {of_parameters} parameters are carried over from {}", folder.display())?;
        for (what, names) in [("fresh", fresh), ("without a place here", unplaced)] {
            if !names.is_empty() {
                write!(f, "; {what}: {}", summary(names))?;
            }
        }
        Ok(())
    }
}

/// Names as the parts that they belong to, with how many there are of each.
fn summary(names: &[String]) -> String {
    let part = |name: &String| -> String {
        let words: Vec<&str> = name.split('.').collect();
        let n_words = words.iter().position(|word| word.parse::<usize>().is_ok()).map_or(1, |index| index + 1);
        words[..n_words].join(".")
    };
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    names.iter().for_each(|name| *counts.entry(part(name)).or_default() += 1);
    let say = |(part, n): (String, usize)| if n == 1 { part } else { format!("{part} ({n} tensors)") };
    counts.into_iter().map(say).collect::<Vec<_>>().join(", ")
}

/// `model` with what fits it of the checkpoint in `folder`.
///
/// # Errors
///
/// A checkpoint that cannot be loaded, another tokenizer, or nothing that fits.
pub fn carry_over(model: Model, folder: &Path, tokenizer: &Tokenizer) -> Result<(Model, Carried), InitFromError> {
    let source = Checkpoint::load(folder, &Device::flex())?;
    let (expected, found) = (tokenizer.fingerprint(), source.tokenizer.fingerprint());
    if expected != found {
        let (expected, found) = (expected.into(), found.into());
        return Err(InitFromError::Tokenizer { path: folder.into(), expected, found });
    }
    let weights = folder.join("model.safetensors");
    let model_sha256 = file_hash(&weights).map_err(|source| InitFromError::Read { path: weights, source })?;

    let tensors = tensors_of(&source.model);
    let mut carry = Carry {
        line_up: LineUp { source: source.model.config(), target: model.config() },
        tensors: &tensors,
        path: ParameterPath::default(),
        n_carried: 0,
        used: BTreeSet::new(),
        fresh: Vec::new(),
    };
    let of_parameters = model.num_params();
    let model = model.map(&mut carry);
    let Carry { n_carried: parameters, used, fresh, .. } = carry;
    if parameters == 0 {
        return Err(InitFromError::Nothing { path: folder.into() });
    }
    let unplaced = tensors.keys().filter(|name| !used.contains(*name)).cloned().collect();
    Ok((model, Carried { folder: folder.into(), model_sha256, parameters, of_parameters, fresh, unplaced }))
}

/// Two models, and which parameter of the one stands for which of the other.
struct LineUp {
    source: ModelConfig,
    target: ModelConfig,
}

impl LineUp {
    /// The name in the source of what the target calls `name`; none where it means something else there.
    fn source_name(&self, name: &str) -> Option<String> {
        let place = Place::of(name)?;
        let grows = matches!((&self.source, &self.target), (ModelConfig::Flat(_), ModelConfig::Photon(_)));
        let (source_name, source_place) = match place {
            Place::Embedding if grows => {
                let (_, piece) = name.split_once('.')?;
                (format!("embedding.{piece}"), place)
            }
            Place::Stack(Stage::Decoder(1)) if grows => {
                (name.strip_prefix("decoders.0.")?.to_owned(), Place::Stack(Stage::Stack))
            }
            _ => (name.to_owned(), place),
        };
        if place == Place::Start && self.source.n_levels() != self.target.n_levels() {
            return None;
        }
        // Matrices of other heads may have the same shape.
        if let (Place::Stack(stage), Place::Stack(source_stage)) = (place, source_place)
            && name.contains(".attention.")
        {
            let heads = |spec: StackSpec| (spec.n_heads, spec.n_kv_heads);
            let ours = spec(&self.target, stage).map(heads);
            if ours != spec(&self.source, source_stage).map(heads) {
                return None;
            }
        }
        Some(source_name)
    }
}

fn spec(config: &ModelConfig, stage: Stage) -> Option<StackSpec> {
    match (config, stage) {
        (ModelConfig::Flat(config), Stage::Stack) => Some(config.spec()),
        (ModelConfig::Photon(config), Stage::Encoder(level)) if level <= config.n_levels() => {
            Some(config.encoder_spec(level))
        }
        (ModelConfig::Photon(config), Stage::Decoder(level)) if level <= config.n_levels() => {
            Some(config.decoder_spec(level))
        }
        _ => None,
    }
}

/// Every parameter by its name.
fn tensors_of(model: &Model) -> BTreeMap<String, TensorData> {
    struct Tensors(BTreeMap<String, TensorData>);
    impl SeeParameters for Tensors {
        fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>) {
            self.0.insert(path.to_string(), param.val().into_data());
        }
    }
    let mut tensors = Tensors(BTreeMap::new());
    see_parameters(model, &mut tensors);
    tensors.0
}

/// Puts them where they fit.
struct Carry<'a> {
    line_up: LineUp,
    tensors: &'a BTreeMap<String, TensorData>,
    path: ParameterPath,
    n_carried: usize,
    used: BTreeSet<String>,
    fresh: Vec<String>,
}

impl ModuleMapper for Carry<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let name = self.path.to_string();
        let shape = param.dims();
        let source_name = self.line_up.source_name(&name);
        let found = source_name.and_then(|name| self.tensors.get_key_value(&name));
        let Some((source_name, data)) = found.filter(|(_, data)| data.shape().to_vec() == shape) else {
            self.fresh.push(name);
            return param;
        };
        self.n_carried += shape.iter().product::<usize>();
        self.used.insert(source_name.clone());
        param.map(|tensor| {
            let carried = Tensor::from_data(data.clone(), &tensor.device());
            carried.set_require_grad(tensor.is_require_grad())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use photon_core::{checkpoint, config_file};

    const TWO: &str = "architecture = \"photon\"\nvocab_size = 257\nd_model = 8\n\
        [[levels]]\nchunk_len = 2\nd_model = 16\nencoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\n\
        converter = { prefix_len = 1 }\ndecoder = { n_layers = 2, n_heads = 2, d_ff = 8 }\n\
        [[levels]]\nchunk_len = 2\nd_model = 16\nencoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\n\
        converter = { prefix_len = 1 }\ndecoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\n";
    const FLAT: &str = "architecture = \"flat\"\nvocab_size = 257\nd_model = 8\n\
        [stack]\nn_layers = 3\nn_heads = 2\nd_ff = 8\n";

    fn config(toml: &str) -> ModelConfig {
        config_file::parse_model(toml.parse().unwrap(), "test.toml".as_ref()).unwrap()
    }

    /// A new model of `target` from a saved one of `source`; also the source's tensors and the new model's fresh ones.
    fn carried(source: &str, target: &str) -> (BTreeMap<String, TensorData>, BTreeMap<String, TensorData>, Carried) {
        let folder = tempfile::tempdir().unwrap();
        let device = Device::flex();
        let saved = Model::new(&config(source), 1, &device);
        checkpoint::save(folder.path(), &saved, &Tokenizer::bytes()).unwrap();
        let fresh = Model::new(&config(target), 2, &device.autodiff());
        let (model, carried) = carry_over(fresh.clone(), folder.path(), &Tokenizer::bytes()).unwrap();
        let (source, before, after) = (tensors_of(&saved), tensors_of(&fresh), tensors_of(&model));
        // Every parameter is either as it was or as in the source.
        for (name, data) in &after {
            match carried.fresh.contains(name) {
                true => assert_eq!(data, &before[name], "{name}"),
                false => assert!(source.values().any(|found| found == data), "{name}"),
            }
        }
        let n_carried: usize = after
            .iter()
            .filter(|(name, _)| !carried.fresh.contains(name))
            .map(|(_, data)| data.shape().iter().product::<usize>())
            .sum();
        assert_eq!((carried.parameters, carried.of_parameters), (n_carried, fresh.num_params()));
        (source, after, carried)
    }

    #[test]
    fn a_level_on_top_leaves_the_lower_ones_their_weights() {
        let one = TWO.rsplit_once("[[levels]]").unwrap().0;
        let (source, after, carried) = carried(one, TWO);
        assert!(
            carried
                .fresh
                .iter()
                .all(|name| name.starts_with("encoders.1") || name.starts_with("decoders.1") || name == "start_latent"),
            "{carried:?}"
        );
        assert_eq!(carried.unplaced, ["start_latent"]);
        for name in [
            "encoder_embedding.weight",
            "head.weight",
            "decoders.0.stack.blocks.1.attention.q_proj.weight",
            "decoders.0.converter.proj.bias",
        ] {
            assert_eq!(source[name], after[name], "{name}");
        }
        let said = carried.to_string();
        assert!(said.contains("fresh: decoders.1 (") && said.ends_with("without a place here: start_latent"), "{said}");
    }

    #[test]
    fn the_same_model_is_carried_over_whole() {
        let (source, after, carried) = carried(TWO, TWO);
        assert_eq!(source, after);
        assert_eq!((carried.fresh.len(), carried.unplaced.len()), (0, 0));
        assert_eq!(carried.model_sha256.len(), 64);
    }

    #[test]
    fn a_flat_model_becomes_the_token_decoder() {
        let (source, after, carried) = carried(FLAT, TWO);
        assert_eq!(source["embedding.weight"], after["decoder_embedding.weight"]);
        // As wide as the other table here.
        assert_eq!(source["embedding.weight"], after["encoder_embedding.weight"]);
        assert_eq!(source["head.weight"], after["head.weight"]);
        assert_eq!(source["stack.norm.gamma"], after["decoders.0.stack.norm.gamma"]);
        for block in 0..2 {
            for name in ["attention.o_proj.weight", "feed_forward.down_proj.weight", "attention_norm.gamma"] {
                let [ours, theirs] =
                    ["decoders.0.stack", "stack"].map(|stack| format!("{stack}.blocks.{block}.{name}"));
                assert_eq!(source[&theirs], after[&ours], "{ours}");
            }
        }
        assert!(carried.fresh.iter().all(|name| !name.starts_with("decoders.0.stack")), "{carried:?}");
        assert!(
            carried.unplaced.iter().all(|name| name == "start" || name.starts_with("stack.blocks.2.")),
            "{carried:?}"
        );
        assert_eq!(carried.unplaced.len(), 1 + 9);
    }

    #[test]
    fn other_heads_are_other_weights() {
        let (_, _, carried) = carried(FLAT, &FLAT.replace("n_heads = 2", "n_heads = 4"));
        assert_eq!(carried.fresh.len(), 3 * 4);
        assert!(carried.fresh.iter().all(|name| name.contains(".attention.")), "{carried:?}");
    }

    #[test]
    fn what_does_not_fit_at_all_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let device = Device::flex();
        let saved = Model::new(&config(FLAT), 1, &device);
        checkpoint::save(folder.path(), &saved, &Tokenizer::bytes()).unwrap();
        let wide = config(&TWO.replace("d_model = 8", "d_model = 12").replace("d_model = 16", "d_model = 24"));
        let error =
            carry_over(Model::new(&wide, 1, &device), folder.path(), &Tokenizer::bytes()).unwrap_err().to_string();
        assert!(error.contains("no parameter of it fits this model"), "{error}");
        // As many tokens, but others.
        let bpe = photon_core::tokenizer::train_bpe(std::iter::empty(), 257).unwrap();
        let error = carry_over(saved.clone(), folder.path(), &bpe).unwrap_err().to_string();
        assert!(error.contains("its tokenizer is another one"), "{error}");
        let error = carry_over(saved, &folder.path().join("x"), &Tokenizer::bytes()).unwrap_err().to_string();
        assert!(error.starts_with("init_from: ") && error.contains("is no photon checkpoint"), "{error}");
    }
}
