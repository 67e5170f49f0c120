//! A model on disk: a folder with `model.safetensors`, `config.toml` and `tokenizer.json`.
//!
//! Loading is strict: what the file holds and what the config asks for must be the same tensors, and the header is
//! checked against the file's length before anything is allocated.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use burn::store::{ModuleSnapshot, ModuleStore, SafetensorsStore};
use burn::tensor::Device;
use safetensors::tensor::Metadata;

use crate::accounting::model_cost;
use crate::atomic_file;
use crate::config::ModelConfig;
use crate::config_file::{self, ConfigFileError};
use crate::device::{DeviceError, check_tensors};
use crate::model::Model;
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Version of the folder's layout and of the names of its tensors.
pub const FORMAT_VERSION: &str = "1";

const FORMAT_KEY: &str = "photon_format_version";
const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.toml";
const TOKENIZER: &str = "tokenizer.json";
/// What a run leaves beside its checkpoints.
const RUN: &str = "run.toml";

/// The largest header that is read; a billion-parameter model's is some 100 kB.
const MAX_HEADER_BYTES: u64 = 64 << 20;

/// Everything that generation and evaluation need.
#[derive(Debug)]
pub struct Checkpoint {
    /// The weights.
    pub model: Model,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
}

/// The files of a checkpoint, read by someone else: where there is no file system.
#[derive(Clone, Debug)]
pub struct CheckpointFiles {
    /// `config.toml`.
    pub config: String,
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `model.safetensors`.
    pub weights: Vec<u8>,
}

/// Why a checkpoint could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder lacks a file.
    #[error("{path} is no photon checkpoint: it has no {file}")]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
        /// The file it lacks.
        file: &'static str,
    },
    /// The system refuses.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// `read`, `write`, ...
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The weights cannot be written, mostly for want of space.
    #[error("cannot write {path}: {reason}; is the disk full? The previous file is untouched")]
    Write {
        /// The file.
        path: PathBuf,
        /// The store's reason.
        reason: String,
    },
    /// The file is cut short, or no safetensors file at all.
    #[error("{path} is damaged or no safetensors file: {reason}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// The file was not written by photon, or by a version with another layout.
    #[error("{path} has format version {found}, expected {FORMAT_VERSION}: {fix}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What it says of itself.
        found: String,
        /// What to do.
        fix: &'static str,
    },
    /// Tensors and config disagree.
    #[error("{path} does not fit its config: {}", .problems.join("; "))]
    Tensors {
        /// The file.
        path: PathBuf,
        /// Missing, unused and misshapen tensors.
        problems: Vec<String>,
    },
    /// The folder is taken.
    #[error("{path} holds a model already: choose another folder or remove it")]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The tokenizer is another one than the model was built for.
    #[error("{path}: the tokenizer has {found} entries, the model's vocab_size is {expected}")]
    Vocabulary {
        /// The folder.
        path: PathBuf,
        /// The model's.
        expected: usize,
        /// The tokenizer's.
        found: usize,
    },
    /// The device cannot hold the model.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The config file.
    #[error(transparent)]
    Config(#[from] ConfigFileError),
    /// The tokenizer file.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl Checkpoint {
    /// Loads a folder onto `device`.
    ///
    /// # Errors
    ///
    /// Anything that is missing, damaged, or does not fit together.
    pub fn load(folder: &Path, device: &Device) -> Result<Self, CheckpointError> {
        for file in [CONFIG, TOKENIZER, WEIGHTS] {
            if !folder.join(file).is_file() {
                return Err(CheckpointError::NotACheckpoint { path: folder.into(), file });
            }
        }
        let config = load_config(folder)?;
        let tokenizer = Tokenizer::load(&folder.join(TOKENIZER))?;
        check_vocabulary(&config, &tokenizer, folder)?;
        let model = load_weights(&folder.join(WEIGHTS), &config, device)?;
        Ok(Self { model, tokenizer })
    }

    /// Loads a folder whose files are in memory onto `device`.
    ///
    /// # Errors
    ///
    /// Anything that is damaged, or does not fit together.
    pub fn from_files(files: CheckpointFiles, device: &Device) -> Result<Self, CheckpointError> {
        let CheckpointFiles { config, tokenizer, weights } = files;
        let config = config_file::parse_model_text(&config, CONFIG.as_ref())?;
        let tokenizer = Tokenizer::from_bytes(&tokenizer, TOKENIZER)?;
        check_vocabulary(&config, &tokenizer, TOKENIZER.as_ref())?;
        let path = Path::new(WEIGHTS);
        let header = header_of(weights.as_slice(), weights.len() as u64, path)?;
        let model = load_tensors(SafetensorsStore::from_bytes(Some(weights)), &header, path, &config, device)?;
        Ok(Self { model, tokenizer })
    }
}

fn check_vocabulary(config: &ModelConfig, tokenizer: &Tokenizer, path: &Path) -> Result<(), CheckpointError> {
    let (expected, found) = (config.vocab_size(), tokenizer.vocab_size());
    match expected == found {
        true => Ok(()),
        false => Err(CheckpointError::Vocabulary { path: path.into(), expected, found }),
    }
}

/// Reads only what the model of a folder is.
///
/// # Errors
///
/// A config that is missing or wrong.
pub fn load_config(folder: &Path) -> Result<ModelConfig, CheckpointError> {
    let path = folder.join(CONFIG);
    match path.is_file() {
        true => Ok(config_file::load_model(&path, &[])?),
        false => Err(CheckpointError::NotACheckpoint { path: folder.into(), file: CONFIG }),
    }
}

/// Tokens of a row in the training that a checkpoint comes from, if its run is at hand: a `run.toml` in the folder or, for
/// the `checkpoints` of a run, two folders up.
pub fn trained_seq_len(folder: &Path) -> Option<usize> {
    let seq_len = |path: PathBuf| {
        let run: toml::Table = std::fs::read_to_string(path).ok()?.parse().ok()?;
        usize::try_from(run.get("seq_len")?.as_integer()?).ok()
    };
    seq_len(folder.join(RUN)).or_else(|| seq_len(folder.join("../..").join(RUN)))
}

/// Writes a model into `folder`, which is made if it is not there; each file appears whole or not at all.
///
/// # Errors
///
/// When the system refuses; what was there before stays.
pub fn save(folder: &Path, model: &Model, tokenizer: &Tokenizer) -> Result<(), CheckpointError> {
    save_around_weights(folder, &model.config(), tokenizer)?;
    save_weights(&folder.join(WEIGHTS), model)
}

/// Writes only the weights; the file appears whole or not at all.
///
/// # Errors
///
/// When the system refuses; what was there before stays.
pub fn save_weights(weights: &Path, model: &Model) -> Result<(), CheckpointError> {
    let mut store = SafetensorsStore::from_file(weights)
        .overwrite(true)
        .skip_enum_variants(true)
        .metadata(FORMAT_KEY, FORMAT_VERSION);
    let written = match model {
        Model::Photon(model) => store.collect_from(model),
        Model::Flat(model) => store.collect_from(model),
    };
    written.map_err(|error| CheckpointError::Write { path: weights.into(), reason: error.to_string() })
}

/// Writes a checkpoint whose tensors come from elsewhere, under photon's names.
///
/// # Errors
///
/// As [`save`], and if `folder` holds a checkpoint, or a part of one, already.
pub(crate) fn save_tensors(
    folder: &Path,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    tensors: HashMap<String, impl safetensors::View>,
) -> Result<(), CheckpointError> {
    if [WEIGHTS, CONFIG, TOKENIZER].iter().any(|file| folder.join(file).exists()) {
        return Err(CheckpointError::Exists { path: folder.into() });
    }
    save_around_weights(folder, config, tokenizer)?;
    let weights = folder.join(WEIGHTS);
    let metadata = HashMap::from([(FORMAT_KEY.to_owned(), FORMAT_VERSION.to_owned())]);
    // The crate writes to a temporary file and renames it.
    safetensors::serialize_to_file(tensors, Some(metadata), &weights)
        .map_err(|error| CheckpointError::Write { path: weights, reason: error.to_string() })
}

/// Everything of a checkpoint but its weights.
fn save_around_weights(folder: &Path, config: &ModelConfig, tokenizer: &Tokenizer) -> Result<(), CheckpointError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| CheckpointError::Io { action, path, source }
    };
    std::fs::create_dir_all(folder).map_err(io("make the folder", folder))?;
    let config = toml::to_string(config).expect("a model config is plain data");
    atomic_file::write(&folder.join(CONFIG), config.as_bytes()).map_err(io("write", &folder.join(CONFIG)))?;
    tokenizer.save(&folder.join(TOKENIZER))?;
    Ok(())
}

fn check_format(metadata: &Metadata, weights: &Path) -> Result<(), CheckpointError> {
    let found = metadata.metadata().as_ref().and_then(|entries| entries.get(FORMAT_KEY)).cloned();
    match found.as_deref() {
        Some(FORMAT_VERSION) => Ok(()),
        Some(_) => Err(CheckpointError::Format {
            path: weights.into(),
            found: found.unwrap_or_default(),
            fix: "use the photon version that wrote it",
        }),
        None => Err(CheckpointError::Format {
            path: weights.into(),
            found: "none".into(),
            fix: "photon did not write this file; a Llama model comes in through `photon-train import-llama`",
        }),
    }
}

/// Reads and checks the header of a safetensors file.
///
/// # Errors
///
/// If the header is too long for the file, is not safetensors, or speaks of more bytes than there are.
pub fn read_header(path: &Path) -> Result<Metadata, CheckpointError> {
    let io = |source| CheckpointError::Io { action: "read", path: path.into(), source };
    let file = File::open(path).map_err(io)?;
    let file_bytes = file.metadata().map_err(io)?.len();
    header_of(file, file_bytes, path)
}

/// The header at the start of a file of so many bytes.
fn header_of(mut file: impl Read, file_bytes: u64, path: &Path) -> Result<Metadata, CheckpointError> {
    let io = |source| CheckpointError::Io { action: "read", path: path.into(), source };
    let damaged = |reason: String| CheckpointError::Damaged { path: path.into(), reason };
    let mut length = [0; 8];
    if file_bytes < 8 {
        return Err(damaged(format!("it has {file_bytes} bytes, the header alone takes more")));
    }
    file.read_exact(&mut length).map_err(io)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > MAX_HEADER_BYTES || header_bytes > file_bytes - 8 {
        return Err(damaged(format!("its header claims {header_bytes} bytes, the file has {file_bytes}")));
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact(&mut header).map_err(io)?;
    // Not `SafeTensors::read_metadata`, which wants the whole file; shapes and offsets are checked here too.
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| damaged(error.to_string()))?;
    let expected = 8 + header_bytes + metadata.data_len() as u64;
    if file_bytes != expected {
        return Err(damaged(format!("its tensors end at byte {expected}, the file has {file_bytes}")));
    }
    Ok(metadata)
}

/// A config that asks for far more parameters than the file holds must not be allocated first. One that is nearly
/// right may be, because then the tensors that differ can be named.
fn check_size(header: &Metadata, config: &ModelConfig, weights: &Path) -> Result<(), CheckpointError> {
    let found: usize = header.tensors().values().map(|info| info.shape.iter().product::<usize>()).sum();
    let cost = model_cost(config, 1);
    let expected = cost.parameters() + cost.start_parameters;
    match expected / 2 <= found {
        true => Ok(()),
        false => Err(CheckpointError::Tensors {
            path: weights.into(),
            problems: vec![format!("it holds {found} parameters, {CONFIG} asks for {expected}")],
        }),
    }
}

/// Loads weights that [`save_weights`] or [`save`] has written.
///
/// # Errors
///
/// A file that is missing or damaged, tensors that are not those of `config`, or a device that cannot take them.
pub fn load_weights(weights: &Path, config: &ModelConfig, device: &Device) -> Result<Model, CheckpointError> {
    let header = read_header(weights)?;
    load_tensors(SafetensorsStore::from_file(weights), &header, weights, config, device)
}

/// A model of the tensors of a store with the given header; `weights` is named in errors.
fn load_tensors(
    store: SafetensorsStore,
    header: &Metadata,
    weights: &Path,
    config: &ModelConfig,
    device: &Device,
) -> Result<Model, CheckpointError> {
    check_format(header, weights)?;
    check_size(header, config, weights)?;
    check_tensors(device, config)?;
    let mut model = Model::blank(config, device);
    match &mut model {
        Model::Photon(model) => apply_strictly(model, store, header, weights),
        Model::Flat(model) => apply_strictly(model, store, header, weights),
    }?;
    Ok(model)
}

/// Puts the tensors of a store into a module that must want exactly those.
fn apply_strictly<M: ModuleSnapshot>(
    module: &mut M,
    store: SafetensorsStore,
    header: &Metadata,
    weights: &Path,
) -> Result<(), CheckpointError> {
    let wrong_dtypes: Vec<String> = header
        .tensors()
        .iter()
        .filter(|(_, info)| info.dtype != safetensors::Dtype::F32)
        .map(|(name, info)| format!("{name} is {:?}, expected F32", info.dtype))
        .collect();
    let tensors = |problems| CheckpointError::Tensors { path: weights.into(), problems };
    if !wrong_dtypes.is_empty() {
        return Err(tensors(wrong_dtypes));
    }
    let result = store
        .allow_partial(true)
        .validate(false)
        .skip_enum_variants(true)
        .apply_to(module)
        .map_err(|error| CheckpointError::Damaged { path: weights.into(), reason: error.to_string() })?;
    let mut problems: BTreeMap<String, String> = BTreeMap::new();
    for error in &result.errors {
        problems.insert(error.to_string(), error.to_string());
    }
    for (path, _) in &result.missing {
        problems.insert(path.clone(), format!("{path} is missing"));
    }
    for path in &result.unused {
        problems.insert(path.clone(), format!("{path} is not part of the model"));
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(tensors(problems.into_values().collect())),
    }
}
