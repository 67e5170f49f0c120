//! A training run as a TOML file: the model, the text, and how long to learn how fast.

use std::path::{Path, PathBuf};

use photon_core::config::ModelConfig;
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
    /// Weight of the reconstruction term.
    #[serde(default)]
    pub alpha: f64,
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

/// AdamW with decoupled decay on matrices, linear warm-up, then a cosine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Learning rate at the end of the warm-up.
    pub learning_rate: f64,
    /// The cosine ends at this share of `learning_rate`.
    pub final_share: f64,
    /// Updates over which the rate rises from zero.
    pub warmup_steps: u64,
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decay of matrices; vectors have none.
    pub weight_decay: f32,
    /// The gradient of all parameters together is scaled down to this norm.
    pub clip_norm: f64,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            final_share: 0.1,
            warmup_steps: 100,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            clip_norm: 1.0,
        }
    }
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
    #[error("{path}: {key} = {value}: {fix}")]
    Rule {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        fix: &'static str,
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
        let mut table = config_file::load_table(path, overrides)?;
        let model = match table.remove("model") {
            Some(Value::Table(model)) => config_file::parse_model(model, path)?,
            _ => {
                let (path, key) = (path.into(), "model".into());
                let reason = "is missing; add a table [model] with `base = \"…/model.toml\"`".into();
                return Err(ConfigFileError::Schema { path, key, reason }.into());
            }
        };
        let mut train: TrainConfig = config_file::parse(table, path)?;
        train.validate(path)?;
        if train.seq_len < model.meta_chunk_tokens() {
            return Err(RunConfigError::Rule {
                path: path.into(),
                key: "seq_len",
                value: train.seq_len.to_string(),
                fix: "is shorter than the product of the chunk lengths: one unit of the top level would never be whole",
            });
        }
        let chunk_tokens = model.meta_chunk_tokens();
        if train.data.packing == Packing::Documents && !train.seq_len.is_multiple_of(chunk_tokens) {
            return Err(RunConfigError::Rule {
                path: path.into(),
                key: "seq_len",
                value: train.seq_len.to_string(),
                fix: "must be a multiple of the product of the chunk lengths where data.packing = \"documents\"",
            });
        }
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

    fn validate(&self, path: &Path) -> Result<(), RunConfigError> {
        let rule = |key, value: String, fix| Err(RunConfigError::Rule { path: path.into(), key, value, fix });
        let OptimizerConfig { learning_rate, final_share, beta_1, beta_2, epsilon, weight_decay, clip_norm, .. } =
            self.optimizer;
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
                return rule(key, "0".into(), "must be at least 1");
            }
        }
        if self.seq_len < 2 {
            return rule("seq_len", self.seq_len.to_string(), "must be at least 2");
        }
        if self.eval.max_tokens < self.seq_len {
            return rule("eval.max_tokens", self.eval.max_tokens.to_string(), "must be at least seq_len");
        }
        if !(self.alpha >= 0.0 && self.alpha.is_finite()) {
            return rule("alpha", self.alpha.to_string(), "must be 0 or more");
        }
        if !(learning_rate > 0.0 && learning_rate.is_finite()) {
            return rule("optimizer.learning_rate", learning_rate.to_string(), "must be above 0, for example 1e-3");
        }
        if !(0.0..=1.0).contains(&final_share) {
            return rule("optimizer.final_share", final_share.to_string(), "must lie between 0 and 1");
        }
        for (key, beta) in [("optimizer.beta_1", beta_1), ("optimizer.beta_2", beta_2)] {
            if !(0.0..1.0).contains(&beta) {
                return rule(key, beta.to_string(), "must lie between 0 and 1, 1 excluded");
            }
        }
        if !(epsilon > 0.0 && epsilon.is_finite()) {
            return rule("optimizer.epsilon", epsilon.to_string(), "must be above 0, for example 1e-8");
        }
        if !(weight_decay >= 0.0 && weight_decay.is_finite()) {
            return rule("optimizer.weight_decay", weight_decay.to_string(), "must be 0 or more");
        }
        if clip_norm.is_nan() || clip_norm <= 0.0 {
            return rule("optimizer.clip_norm", clip_norm.to_string(), "must be above 0; inf switches clipping off");
        }
        let spike_factor = self.guards.spike_factor;
        if spike_factor.is_nan() || spike_factor <= 1.0 {
            return rule("guards.spike_factor", spike_factor.to_string(), "must be above 1; inf switches it off");
        }
        if let Some(EmaConfig { decay }) = self.ema
            && !(0.0..1.0).contains(&decay)
        {
            return rule("ema.decay", decay.to_string(), "must lie between 0 and 1, 1 excluded, for example 0.999");
        }
        Ok(())
    }
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
}
