//! A training run as a TOML file: the model, the text, and how long to learn how fast.

mod curriculum;
mod optimizer;
mod precision;

pub use curriculum::CurriculumStage;
pub use optimizer::{Adjust, GroupConfig, GroupSettings, MuonConfig, OptimizerConfig, OptimizerKind};
pub use precision::{PrecisionConfig, PrecisionRule};

use std::path::{Path, PathBuf};

use photon_core::config::{ConfigError, ModelConfig};
use photon_core::config_file::{self, ConfigFileError};
use photon_core::tokenizer::{Tokenizer, TokenizerError};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::data::{DataConfig, DataError, Packing};
use crate::guard::GuardConfig;

/// A whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunConfig {
    /// The architecture.
    pub model: ModelConfig,
    /// Everything else.
    pub train: TrainConfig,
}

/// Everything of a run but the architecture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Decides weights, batches and samples.
    #[serde(default)]
    pub seed: u64,
    /// Updates of the weights.
    pub steps: u64,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Rows of an update.
    pub batch_size: usize,
    /// Rows that go through the model at once. Absent: the batch divided among the replicas, at most 16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<usize>,
    /// Models that work side by side on one update, each on a core of its own. Absent: one for each core on the
    /// CPU, one on a GPU. Changes results by rounding only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<usize>,
    /// Whether blocks keep only their input for the backward pass and run again there: less memory, one more forward.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gradient_checkpointing: bool,
    /// Shorter rows in the beginning, stage by stage. Absent: all rows are of `seq_len`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub curriculum: Vec<CurriculumStage>,
    /// The folder of a checkpoint: parameters that fit are taken from there when the run begins. Absent: all are fresh.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub init_from: Option<String>,
    /// Weight of the reconstruction term.
    #[serde(default)]
    pub alpha: f64,
    /// Weight of the mean square of the log of the softmax's denominator, which keeps logits from drifting. 0: none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub z_loss: f64,
    /// In how many bits stacks multiply.
    #[serde(default, skip_serializing_if = "is_default")]
    pub precision: PrecisionConfig,
    /// `bytes`, or the path of a `tokenizer.json`.
    #[serde(default = "default_tokenizer")]
    pub tokenizer: String,
    /// The optimiser.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Evaluations along the way.
    #[serde(default)]
    pub eval: EvalConfig,
    /// Updates between checkpoints; one is written at the end, and after an evaluation that is the best so far, in
    /// any case.
    #[serde(default = "default_checkpoint_every")]
    pub checkpoint_every_steps: u64,
    /// Which checkpoints stay.
    #[serde(default)]
    pub checkpoints: RetentionConfig,
    /// Which updates are skipped.
    #[serde(default)]
    pub guards: GuardConfig,
    /// A moving average of the weights, which is then what is evaluated and exported. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema: Option<EmaConfig>,
    /// The text.
    pub data: DataConfig,
}

/// When and how the model is looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EvalConfig {
    /// Updates between evaluations; one is made before the first and one after the last.
    pub every_steps: u64,
    /// Held-out tokens looked at, at most.
    pub max_tokens: usize,
    /// What a sample begins with.
    pub sample_prompt: String,
    /// Tokens of a sample; 0 for none.
    pub sample_tokens: usize,
    /// Whether TensorBoard gets histograms of the weights and gradients of each stage. All of them are read for that, some
    /// 10 ns each.
    pub histograms: bool,
}

impl Default for EvalConfig {
    fn default() -> Self {
        Self {
            every_steps: 500,
            max_tokens: 65_536,
            sample_prompt: String::new(),
            sample_tokens: 160,
            histograms: true,
        }
    }
}

/// Which checkpoints stay on disk, beside the best ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetentionConfig {
    /// So many of the newest, at least 1. With 2 there is one to fall back on.
    pub keep_last: usize,
    /// Those whose step is a multiple of this. Absent: no others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_every_steps: Option<u64>,
}

impl Default for RetentionConfig {
    fn default() -> Self {
        Self { keep_last: 2, keep_every_steps: None }
    }
}

/// The moving average of the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EmaConfig {
    /// Share of the old average that stays at each update, for example 0.999.
    pub decay: f64,
}

fn default_tokenizer() -> String {
    "bytes".into()
}

fn default_checkpoint_every() -> u64 {
    500
}

/// Why a run config could not be had.
#[derive(Debug, thiserror::Error)]
pub enum RunConfigError {
    /// The file or the model in it.
    #[error(transparent)]
    File(#[from] ConfigFileError),
    /// A value of `data`.
    #[error("{path}: in `data`: {source}")]
    Data {
        /// The file.
        path: PathBuf,
        /// The rule.
        source: DataError,
    },
    /// A value breaks a rule.
    #[error("{path}: {source}")]
    Rule {
        /// The file.
        path: PathBuf,
        /// The key, its value, and what would be right.
        source: ConfigError,
    },
}

impl RunConfig {
    /// Reads a run config: `[model]` is a model config (mostly a `base` and the lines that differ).
    ///
    /// Paths in `data` and `tokenizer` are relative to the file.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or parsed, an unknown key, a value that breaks a rule.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, RunConfigError> {
        Self::from_table(config_file::load_table(path, overrides)?, path)
    }

    /// Of a table that was read from `path`, which errors name and to which paths are relative.
    ///
    /// # Errors
    ///
    /// An unknown key, a value that breaks a rule.
    pub fn from_table(mut table: Table, path: &Path) -> Result<Self, RunConfigError> {
        let model = match table.remove("model") {
            Some(Value::Table(model)) => config_file::parse_model(model, path)?,
            _ => {
                let (path, key) = (path.into(), "model".into());
                let reason = "is missing; add a table [model] with `base = \"…/model.toml\"`".into();
                return Err(ConfigFileError::Schema { path, key, reason }.into());
            }
        };
        let mut train: TrainConfig = config_file::parse(table, path)?;
        train.validate(&model).map_err(|source| RunConfigError::Rule { path: path.into(), source })?;
        train.data.validate().map_err(|source| RunConfigError::Data { path: path.into(), source })?;
        // Absolute, so that the resolved config means the same wherever it is kept.
        let absolute =
            std::path::absolute(path).map_err(|source| ConfigFileError::Read { path: path.into(), source })?;
        let folder = absolute.parent().unwrap_or(Path::new(""));
        let beside = |text: &mut String| *text = folder.join(&*text).to_string_lossy().into_owned();
        train.data.for_each_path(beside);
        if train.tokenizer != "bytes" {
            beside(&mut train.tokenizer);
        }
        train.init_from.iter_mut().for_each(beside);
        Ok(Self { model, train })
    }

    /// The run as one table, with nothing left to a base or a default.
    pub fn to_toml(&self) -> String {
        let mut table = Table::try_from(&self.train).expect("a run config is plain data");
        table.insert("model".into(), Value::try_from(&self.model).expect("a model config is plain data"));
        table.to_string()
    }
}

impl TrainConfig {
    /// The tokenizer that the config names.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or is none.
    pub fn load_tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        match self.tokenizer.as_str() {
            "bytes" => Ok(Tokenizer::bytes()),
            path => Tokenizer::load(Path::new(path)),
        }
    }

    fn validate(&self, model: &ModelConfig) -> Result<(), ConfigError> {
        for (key, value) in [
            ("steps", self.steps as usize),
            ("batch_size", self.batch_size),
            ("micro_batch_size", self.micro_batch_size.unwrap_or(1)),
            ("replicas", self.replicas.unwrap_or(1)),
            ("eval.every_steps", self.eval.every_steps as usize),
            ("checkpoint_every_steps", self.checkpoint_every_steps as usize),
            ("checkpoints.keep_last", self.checkpoints.keep_last),
            ("checkpoints.keep_every_steps", self.checkpoints.keep_every_steps.unwrap_or(1) as usize),
            ("guards.max_skips_in_a_row", self.guards.max_skips_in_a_row as usize),
        ] {
            if value == 0 {
                return rule(key, 0, "must be at least 1");
            }
        }
        let check_len = |key: &str, len: usize| self.check_row_len(model, key, len);
        check_len("seq_len", self.seq_len)?;
        self.validate_curriculum(check_len)?;
        if self.data.document_mask && self.data.packing == Packing::Stream && model.meta_chunk_tokens() > 1 {
            let fix = "needs data.packing = \"documents\" beside it: in a stream a chunk holds the end of one document and the \
                       start of the next, which a hierarchical model cannot keep apart";
            return rule("data.document_mask", true, fix);
        }
        if self.eval.max_tokens < self.seq_len {
            return rule("eval.max_tokens", self.eval.max_tokens, "must be at least seq_len");
        }
        for (key, weight) in [("alpha", self.alpha), ("z_loss", self.z_loss)] {
            if !(weight >= 0.0 && weight.is_finite()) {
                return rule(key, weight, "must be 0 or more");
            }
        }
        self.optimizer.validate(model)?;
        self.precision.validate(model)?;
        let spike_factor = self.guards.spike_factor;
        if spike_factor.is_nan() || spike_factor <= 1.0 {
            return rule("guards.spike_factor", spike_factor, "must be above 1; inf switches it off");
        }
        if let Some(EmaConfig { decay }) = self.ema
            && !(0.0..1.0).contains(&decay)
        {
            return rule("ema.decay", decay, "must lie between 0 and 1, 1 excluded, for example 0.999");
        }
        Ok(())
    }

    /// What the model and the data ask of the length of a row.
    fn check_row_len(&self, model: &ModelConfig, key: &str, len: usize) -> Result<(), ConfigError> {
        let chunk_tokens = model.meta_chunk_tokens();
        if len < 2 {
            return rule(key, len, "must be at least 2");
        }
        if len < chunk_tokens {
            let fix =
                "is shorter than the product of the chunk lengths: one unit of the top level would never be whole";
            return rule(key, len, fix);
        }
        if self.data.packing == Packing::Documents && !len.is_multiple_of(chunk_tokens) {
            let fix = "must be a multiple of the product of the chunk lengths where data.packing = \"documents\"";
            return rule(key, len, fix);
        }
        Ok(())
    }
}

fn rule(key: impl Into<String>, value: impl ToString, fix: impl Into<String>) -> Result<(), ConfigError> {
    Err(ConfigError { key: key.into(), value: value.to_string(), fix: fix.into() })
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let model =
            "architecture = \"flat\"\nvocab_size = 257\nd_model = 8\n[stack]\nn_layers = 1\nn_heads = 2\nd_ff = 8\n";
        std::fs::write(dir.path().join("model.toml"), model).unwrap();
        let path = dir.path().join("run.toml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    const RUN: &str =
        "steps = 3\nseq_len = 8\nbatch_size = 2\n[data]\npaths = [\"a.txt\"]\n[model]\nbase = \"model.toml\"\n";

    #[test]
    fn the_resolved_config_reads_back_as_itself() {
        let (dir, path) = write(RUN);
        let config =
            RunConfig::load(&path, &["optimizer.learning_rate=0.5".into(), "model.d_model=16".into()]).unwrap();
        assert_eq!(config.train.optimizer.learning_rate, 0.5);
        assert_eq!(config.train.data.paths, [dir.path().join("a.txt").to_string_lossy()]);
        std::fs::write(&path, config.to_toml()).unwrap();
        assert_eq!(RunConfig::load(&path, &[]).unwrap(), config);
    }

    #[test]
    fn errors_name_the_key() {
        let (_dir, path) = write(RUN);
        let message = |set: &str| RunConfig::load(&path, &[set.into()]).unwrap_err().to_string();
        assert!(message("stpes=4").contains("unknown field `stpes`"));
        assert!(message("optimizer.lr=4").contains("at `optimizer"), "{}", message("optimizer.lr=4"));
        assert!(message("seq_len=1").contains("seq_len = 1: must be at least 2"));
        assert!(message("model.stack.n_heads=3").contains("stack.n_heads = 3: must divide"));
        assert!(message("batch_size=0").contains("batch_size = 0"));
        assert!(message("batch_size=two").contains("at `batch_size`"));
    }

    #[test]
    fn every_way_to_train_reads_back_and_is_checked() {
        let (_dir, path) = write(RUN);
        let sets = [
            "optimizer.kind=muon",
            "optimizer.muon={ learning_rate = 0.02, adjust = \"original\" }",
            "optimizer.schedule={ wsd = { decay_steps = 9, shape = \"cosine\" } }",
            "optimizer.groups=[{ select = \"embeddings\", frozen = true }, { select = \"stack\", weight_decay = 0.5 }]",
            "curriculum=[{ until_step = 1, seq_len = 4 }]",
            "precision={ stages = [{ stages = \"stack\", compute = \"bf16\" }] }",
            "z_loss=1e-4",
            "init_from=runs/a",
        ];
        let config = RunConfig::load(&path, &sets.map(str::to_owned)).unwrap();
        assert!(Path::new(config.train.init_from.as_ref().unwrap()).is_absolute());
        let again = path.with_file_name("again.toml");
        std::fs::write(&again, config.to_toml()).unwrap();
        assert_eq!(RunConfig::load(&again, &[]).unwrap(), config);

        for (set, fault) in [
            (
                "optimizer.groups=[{ select = \"encoder 1\" }]",
                "groups.0.select = encoder 1: selects nothing of this model",
            ),
            ("optimizer.groups=[{ select = \"encoder 1\" }]", "it has all, stack, embeddings, start, head"),
            ("optimizer.groups=[{ select = \"nose\" }]", "unknown part \"nose\""),
            (
                "optimizer.groups=[{ select = \"all\", frozen = true }]",
                "everything is frozen: leave a part that learns",
            ),
            (
                "optimizer.groups=[{ select = \"head\", learning_rate_factor = 0.0 }]",
                "groups.0.learning_rate_factor = 0:",
            ),
            ("optimizer.muon={}", "optimizer.kind = adamw: has no table optimizer.muon"),
            ("optimizer={ kind = \"muon\", muon = { ns_steps = 0 } }", "optimizer.muon.ns_steps = 0"),
            ("optimizer={ kind = \"muon\", muon = { adjust = \"original\" } }", "set optimizer.muon.learning_rate"),
            ("optimizer.schedule=cosines", "at `optimizer"),
            ("precision={ stages = [{ stages = \"decoders\", compute = \"f16\" }] }", "this model has stack"),
            ("precision.default=f8", "at `precision.default`"),
            ("z_loss=-1.0", "z_loss = -1: must be 0 or more"),
            ("curriculum=[{ until_step = 2, seq_len = 1 }]", "curriculum.0.seq_len = 1: must be at least 2"),
        ] {
            let error = RunConfig::load(&path, &[set.into()]).unwrap_err().to_string();
            assert!(error.contains(fault), "{set}: {error}");
        }
    }
}
