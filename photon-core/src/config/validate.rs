//! The rules that the types of a config cannot express.

use super::{EncoderAttention, FlatConfig, PhotonConfig, Positions, SparsePick, StackSpec};
use crate::nn::span::Span;

/// A rule that a config breaks.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{key} = {value}: {fix}")]
pub struct ConfigError {
    /// Path of the key in the file.
    pub key: String,
    /// The offending value.
    pub value: String,
    /// What would be right.
    pub fix: String,
}

pub(crate) fn error<T>(key: &str, value: impl ToString, fix: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError { key: key.into(), value: value.to_string(), fix: fix.into() })
}

pub(crate) fn require_positive(key: &str, value: usize) -> Result<(), ConfigError> {
    match value {
        0 => error(key, 0, "must be at least 1"),
        _ => Ok(()),
    }
}

fn validate_common(vocab_size: usize, d_model: usize, norm_eps: f64, init_std: f64) -> Result<(), ConfigError> {
    require_positive("vocab_size", vocab_size)?;
    require_positive("d_model", d_model)?;
    if !(norm_eps > 0.0 && norm_eps < 1.0) {
        return error("norm_eps", norm_eps, "must lie between 0 and 1, for example 1e-5");
    }
    if !(init_std > 0.0 && init_std.is_finite()) {
        return error("init_std", init_std, "must be a positive number, for example 0.02");
    }
    Ok(())
}

impl StackSpec {
    fn validate(&self, key: &str) -> Result<(), ConfigError> {
        require_positive(&format!("{key}.n_layers"), self.n_layers)?;
        require_positive(&format!("{key}.n_heads"), self.n_heads)?;
        require_positive(&format!("{key}.n_kv_heads"), self.n_kv_heads)?;
        require_positive(&format!("{key}.d_ff"), self.d_ff)?;
        if !self.d_model.is_multiple_of(self.n_heads) {
            return error(
                &format!("{key}.n_heads"),
                self.n_heads,
                format!("must divide the width {} of this stack", self.d_model),
            );
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return error(
                &format!("{key}.n_kv_heads"),
                self.n_kv_heads,
                format!("must divide n_heads = {}", self.n_heads),
            );
        }
        if let Positions::Rope { theta } = self.positions {
            if !(theta > 1.0 && theta.is_finite()) {
                return error(&format!("{key}.positions.rope.theta"), theta, "must be above 1, for example 10000.0");
            }
            if !self.head_dim().is_multiple_of(2) {
                return error(
                    &format!("{key}.n_heads"),
                    self.n_heads,
                    format!("gives an odd head dimension {}, and rope rotates pairs", self.head_dim()),
                );
            }
        }
        if let Span::Window { len: 0 } = self.span {
            return error(&format!("{key}.attention"), 0, "a window must hold at least 1 position");
        }
        Ok(())
    }
}

impl EncoderAttention {
    fn validate(&self, key: &str) -> Result<(), ConfigError> {
        let Self::Sparse { window, block, pick, .. } = *self else { return Ok(()) };
        require_positive(&format!("{key}.attention.sparse.window"), window)?;
        require_positive(&format!("{key}.attention.sparse.block"), block)?;
        match pick {
            SparsePick::Every(every) => require_positive(&format!("{key}.attention.sparse.pick.every"), every),
            SparsePick::Top(top) => require_positive(&format!("{key}.attention.sparse.pick.top"), top),
        }
    }
}

impl PhotonConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        validate_common(self.vocab_size, self.d_model, self.norm_eps, self.init_std)?;
        if self.levels.is_empty() {
            return error("levels", "[]", "list at least one level, or use architecture = \"flat\"");
        }
        for (index, level) in self.levels.iter().enumerate() {
            let key = format!("levels.{index}");
            require_positive(&format!("{key}.chunk_len"), level.chunk_len)?;
            require_positive(&format!("{key}.d_model"), level.d_model)?;
            require_positive(&format!("{key}.converter.prefix_len"), level.converter.prefix_len)?;
            if level.encoder.attention == EncoderAttention::Block && index + 1 == self.levels.len() {
                return error(
                    &format!("{key}.encoder.attention"),
                    "block",
                    "the top level has no parent chunk: use \"full\", a window or sparse attention there",
                );
            }
            level.encoder.attention.validate(&format!("{key}.encoder"))?;
        }
        match self.d_embed {
            Some(width) => require_positive("d_embed", width)?,
            None => {
                let first = &self.levels[0];
                if !first.d_model.is_multiple_of(first.chunk_len) {
                    return error(
                        "levels.0.d_model",
                        first.d_model,
                        format!(
                            "must be a multiple of chunk_len = {}, because the first level concatenates \
                             embeddings of width d_model / chunk_len; or set d_embed",
                            first.chunk_len
                        ),
                    );
                }
            }
        }
        if self.levels.iter().try_fold(1usize, |product, l| product.checked_mul(l.chunk_len)).is_none() {
            return error("levels", "chunk_len", "the product of the chunk lengths overflows");
        }
        for level in 1..=self.n_levels() {
            self.encoder_spec(level).validate(&format!("levels.{}.encoder", level - 1))?;
            self.decoder_spec(level).validate(&format!("levels.{}.decoder", level - 1))?;
        }
        Ok(())
    }
}

impl FlatConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        validate_common(self.vocab_size, self.d_model, self.norm_eps, self.init_std)?;
        if self.stack.attention == EncoderAttention::Block {
            let fix = "a flat model has no chunks: use \"full\", a window or sparse attention";
            return error("stack.attention", "block", fix);
        }
        self.stack.attention.validate("stack")?;
        self.spec().validate("stack")
    }
}
