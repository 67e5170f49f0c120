//! Decode states on disk: one safetensors file with all caches as they are stored, to go on from later.
//!
//! A snapshot in memory is a clone: states are values, and clones share tensors until one of them writes.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use burn::tensor::{Bytes, DType, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::advance::AdvanceRule;
use crate::atomic_file;
use crate::cache::kv_cache::{CacheRecord, KvCache};
use crate::hex;
use crate::infer_config::InferConfig;
use crate::model::Model;
use crate::nn::activations::Activations;
use crate::state::State;

/// Version of the names and the record.
const FORMAT_VERSION: &str = "1";
const FORMAT_KEY: &str = "photon_state_version";
const RECORD_KEY: &str = "photon_state";

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, TensorData>;

/// Why a snapshot could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The system refuses.
    #[error("cannot {action} the snapshot {path}: {source}")]
    Io {
        /// `read` or `write`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is cut short, or something else.
    #[error("{path} is damaged or no snapshot: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// The snapshot is another model's.
    #[error("{path} is a snapshot of another model: load the checkpoint that it was taken with")]
    OtherModel {
        /// The file.
        path: PathBuf,
    },
}

/// All of a state that is no tensor.
#[derive(Serialize, Deserialize)]
struct StateRecord {
    /// Tells models apart.
    model: String,
    n_tokens: Vec<usize>,
    rule: AdvanceRule,
    activations: Activations,
    /// By stage; none where the advance rule has given them up.
    caches: BTreeMap<String, Vec<CacheRecord>>,
}

/// Writes a state; the file appears whole or not at all.
///
/// # Errors
///
/// When the system refuses; what was there before stays.
pub fn save(state: &State, model: &Model, path: &Path) -> Result<(), SnapshotError> {
    let mut tensors = Tensors::new();
    let mut caches = BTreeMap::new();
    for (stage, of_stage) in state.caches() {
        let layers = of_stage.iter().enumerate();
        let record = |(layer, cache): (usize, &KvCache)| cache.record(&format!("{stage}.{layer}"), &mut tensors);
        caches.insert(stage.to_string(), layers.map(record).collect());
    }
    for (name, store) in state.units() {
        tensors.insert(name, store.read_all().into_data());
    }
    let n_tokens = state.n_tokens().to_vec();
    let (rule, activations) = (state.advance_rule(), state.activations());
    let record = StateRecord { model: fingerprint(model), n_tokens, rule, activations, caches };
    let record = serde_json::to_string(&record).expect("a record is plain data");
    let metadata = HashMap::from([(FORMAT_KEY.to_owned(), FORMAT_VERSION.to_owned()), (RECORD_KEY.to_owned(), record)]);
    let views: Vec<(&String, TensorView<'_>)> = tensors
        .iter()
        .map(|(name, data)| {
            let view = TensorView::new(file_dtype(data.dtype()), data.shape().to_vec(), data.as_bytes());
            (name, view.expect("a tensor has as many bytes as its shape asks for"))
        })
        .collect();
    let io = |source| SnapshotError::Io { action: "write", path: path.into(), source };
    let bytes = safetensors::serialize(views, Some(metadata)).map_err(|error| io(std::io::Error::other(error)))?;
    atomic_file::write(path, &bytes).map_err(io)
}

/// Reads a state of `model`, to go on where it was saved.
///
/// # Errors
///
/// A file that cannot be read, is damaged, or belongs to another model.
pub fn load(path: &Path, model: &Model) -> Result<State, SnapshotError> {
    let damaged = |reason: String| SnapshotError::Damaged { path: path.into(), reason };
    let bytes =
        std::fs::read(path).map_err(|source| SnapshotError::Io { action: "read", path: path.into(), source })?;
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| damaged(error.to_string()))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| damaged(error.to_string()))?;
    let metadata = header.metadata().as_ref();
    let said = |key: &str| metadata.and_then(|metadata| metadata.get(key));
    match said(FORMAT_KEY).map(String::as_str) {
        Some(FORMAT_VERSION) => {}
        found => return Err(damaged(format!("format version {}, expected {FORMAT_VERSION}", found.unwrap_or("none")))),
    }
    let record = said(RECORD_KEY).ok_or_else(|| damaged("it holds no record".into()))?;
    let StateRecord { model: of_model, n_tokens, rule, activations, mut caches } =
        serde_json::from_str(record).map_err(|error| damaged(error.to_string()))?;
    if of_model != fingerprint(model) {
        return Err(SnapshotError::OtherModel { path: path.into() });
    }
    let mut tensors = Tensors::new();
    for (name, view) in file.tensors() {
        let dtype = tensor_dtype(view.dtype()).ok_or_else(|| damaged(format!("{name} has a dtype of no cache")))?;
        let bytes = Bytes::from_bytes_vec(view.data().to_vec());
        tensors.insert(name, TensorData::from_bytes(bytes, view.shape().to_vec(), dtype));
    }
    if n_tokens.is_empty() {
        return Err(damaged("it has no rows".into()));
    }

    let config = InferConfig { activations, ..InferConfig::default() };
    let plan = config.plan(&model.config()).expect("dense caches fit every model");
    let (mut state, _) = model.begin_with(n_tokens.len(), &plan);
    state.switch_rule(rule).map_err(|error| damaged(error.to_string()))?;
    state.set_n_tokens(n_tokens);
    for (stage, of_stage) in state.caches_mut() {
        let records = caches.remove(&stage.to_string()).unwrap_or_default();
        if records.len() != of_stage.len() {
            return Err(damaged(format!("{} caches of {stage}, expected {}", records.len(), of_stage.len())));
        }
        for (layer, (cache, record)) in of_stage.iter_mut().zip(records).enumerate() {
            cache.restore(record, &format!("{stage}.{layer}"), &mut tensors).map_err(damaged)?;
        }
    }
    for (name, store) in state.units_mut() {
        let data = tensors.remove(&name).ok_or_else(|| damaged(format!("{name} is missing")))?;
        store.write_all(data).map_err(|reason| damaged(format!("{name}: {reason}")))?;
    }
    match tensors.keys().next() {
        Some(unused) => Err(damaged(format!("{unused} belongs nowhere"))),
        None => Ok(state),
    }
}

/// A digest of the architecture and of a part of the weights.
fn fingerprint(model: &Model) -> String {
    let config = serde_json::to_string(&model.config()).expect("a model config is plain data");
    let weight = model.head().weights().swap_remove(0);
    let first_row = weight.narrow(0, 0, 1).into_data();
    let digest = Sha256::new().chain_update(config).chain_update(first_row.as_bytes()).finalize();
    hex::encode(&digest)
}

fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        other => panic!("no cache stores {other:?}"),
    }
}

fn tensor_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::I32 => Some(DType::I32),
        _ => None,
    }
}
