//! The architecture of a model: everything that changes what its weights mean, and nothing else.
//!
//! Device, dtype, paths and logging belong to the programs. Files are read by [`crate::config_file`];
//! code past [`ModelConfig::validate`] trusts what it gets.

mod validate;

use serde::{Deserialize, Serialize};

pub use validate::ConfigError;
pub(crate) use validate::{error, require_positive};

use crate::nn::block_pick::BlockPick;
use crate::nn::span::Span;

/// Any model of this crate, told apart by the key `architecture`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "architecture", rename_all = "snake_case")]
pub enum ModelConfig {
    /// The hierarchical model.
    Photon(PhotonConfig),
    /// The plain decoder-only transformer.
    Flat(FlatConfig),
}

/// The hierarchical model: one entry of `levels` per resolution, finest first.
///
/// With one level this is a Block Transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhotonConfig {
    /// Entries of the vocabulary, special tokens included.
    pub vocab_size: usize,
    /// D_0: width of the token decoder, of its embedding table and of the head's input.
    pub d_model: usize,
    /// Width of the encoder's own token embedding. Absent: `levels[0].d_model / levels[0].chunk_len`, and
    /// the first chunker is a bare concatenation without parameters, as in the paper.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d_embed: Option<usize>,
    /// Added under the root of every RMSNorm.
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f64,
    /// Standard deviation of freshly drawn matrices.
    #[serde(default = "default_init_std")]
    pub init_std: f64,
    /// The resolutions above the tokens, finest first.
    pub levels: Vec<LevelConfig>,
}

/// The plain decoder-only transformer with an untied head and a learned start embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlatConfig {
    /// Entries of the vocabulary, special tokens included.
    pub vocab_size: usize,
    /// Width.
    pub d_model: usize,
    /// Added under the root of every RMSNorm.
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f64,
    /// Standard deviation of freshly drawn matrices.
    #[serde(default = "default_init_std")]
    pub init_std: f64,
    /// The transformer.
    pub stack: EncoderConfig,
}

/// One resolution: how it is made (chunker, encoder) and how it is unfolded (converter, decoder).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LevelConfig {
    /// C_l: units of the level below in one unit here.
    pub chunk_len: usize,
    /// D_l: width of the latents of this level.
    pub d_model: usize,
    /// The transformer over the units of this level, width `d_model`.
    pub encoder: EncoderConfig,
    /// From one conditioning vector to the prefix of the decoder.
    pub converter: ConverterConfig,
    /// The transformer that unfolds one unit, of the width of the level below.
    pub decoder: DecoderConfig,
}

/// A causal transformer stack whose attention looks back over a whole sequence of units.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EncoderConfig {
    /// Transformer blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; fewer than `n_heads` is grouped-query attention. Absent: `n_heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_kv_heads: Option<usize>,
    /// Inner width of the SwiGLU feed-forward.
    pub d_ff: usize,
    /// Which earlier units are seen.
    #[serde(default)]
    pub attention: EncoderAttention,
    /// How positions are told.
    #[serde(default)]
    pub positions: Positions,
    /// Whether every head has a learned sink: a logit in the softmax that attends to nothing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sink: bool,
}

/// The converter of a level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConverterConfig {
    /// R_l: prefix vectors made of one conditioning vector.
    pub prefix_len: usize,
}

/// A causal transformer stack over groups of `[prefix ; units of one chunk]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecoderConfig {
    /// Transformer blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; fewer than `n_heads` is grouped-query attention. Absent: `n_heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_kv_heads: Option<usize>,
    /// Inner width of the SwiGLU feed-forward.
    pub d_ff: usize,
    /// Which earlier positions are seen.
    #[serde(default)]
    pub attention: DecoderAttention,
    /// How positions are told.
    #[serde(default)]
    pub positions: Positions,
    /// Whether every head has a learned sink: a logit in the softmax that attends to nothing.
    #[serde(default, skip_serializing_if = "is_false")]
    pub sink: bool,
}

/// What an encoder position sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum EncoderAttention {
    /// All units so far.
    #[default]
    Full,
    /// The newest `units` units, itself included: the cache of this level is bounded.
    Window {
        /// Length of the window.
        units: usize,
    },
    /// The units so far of its own chunk one level up.
    Block,
    /// The newest `window` units, itself included, the first `sinks`, and some blocks of those between.
    Sparse {
        /// Length of the window.
        window: usize,
        /// Units at the beginning that all later ones see. A learned `sink` is something else: it holds no unit.
        sinks: usize,
        /// Units in a block; blocks are counted from the first unit.
        block: usize,
        /// Which blocks.
        pick: SparsePick,
    },
}

/// Which blocks sparse attention sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SparsePick {
    /// The first block and every so many-th after it: of the rest of the cache one unit in so many is kept.
    Every(usize),
    /// So many blocks wholly before the window, those whose mean key fits the query best: all units are kept.
    Top(usize),
}

/// What a decoder position sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum DecoderAttention {
    /// Its own group so far (the paper).
    #[default]
    Chunk,
    /// Its own group so far and the `chunks` groups before.
    Lookback {
        /// Whole groups before the own one.
        chunks: usize,
    },
    /// The newest `window` positions of the stream of groups, itself included.
    Stream {
        /// Length of the window, in positions (prefix vectors count).
        window: usize,
    },
}

/// How a stack tells positions apart.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Positions {
    /// Rotary embedding, halves rotated against each other (the Llama convention).
    Rope {
        /// Base of the wavelengths.
        theta: f64,
    },
    /// None: only the causal mask tells order.
    None,
}

impl Default for Positions {
    fn default() -> Self {
        Self::Rope { theta: 10_000.0 }
    }
}

fn default_norm_eps() -> f64 {
    1e-5
}

fn default_init_std() -> f64 {
    0.02
}

fn is_false(value: &bool) -> bool {
    !value
}

/// A transformer stack as the blocks see it: the common part of encoder, decoder and flat model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StackSpec {
    /// Width.
    pub d_model: usize,
    /// Transformer blocks.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Inner width of the feed-forward.
    pub d_ff: usize,
    /// Which earlier positions can be seen, and so which entries a cache keeps.
    pub span: Span,
    /// Which of them are looked at, where that depends on their contents.
    pub pick: Option<BlockPick>,
    /// How positions are told.
    pub positions: Positions,
    /// Whether heads have a learned sink.
    pub sink: bool,
    /// Added under the root of every RMSNorm.
    pub norm_eps: f64,
}

impl StackSpec {
    /// Width of one head.
    pub fn head_dim(&self) -> usize {
        self.d_model / self.n_heads
    }
}

impl PhotonConfig {
    /// Number of levels above the tokens, L.
    pub fn n_levels(&self) -> usize {
        self.levels.len()
    }

    /// Tokens under one unit of `level` (1-based; 0 is the token itself), C_≤l.
    pub fn tokens_per_unit(&self, level: usize) -> usize {
        self.levels[..level].iter().map(|l| l.chunk_len).product()
    }

    /// Tokens under one top-level unit, B.
    pub fn meta_chunk_tokens(&self) -> usize {
        self.tokens_per_unit(self.n_levels())
    }

    /// Width of the units of `level` as decoders read them: D_0 for the tokens, D_l above.
    pub fn width(&self, level: usize) -> usize {
        match level {
            0 => self.d_model,
            _ => self.levels[level - 1].d_model,
        }
    }

    /// Width of the units that the chunker of `level` (1-based) concatenates.
    pub fn chunker_input_width(&self, level: usize) -> usize {
        match level {
            1 => self.d_embed.unwrap_or(self.levels[0].d_model / self.levels[0].chunk_len),
            _ => self.width(level - 1),
        }
    }

    /// Whether the chunker of `level` (1-based) has a norm and a matrix after the concatenation.
    pub fn chunker_projects(&self, level: usize) -> bool {
        level > 1 || self.d_embed.is_some()
    }

    /// Positions of one group of the decoder of `level`: prefix and units.
    ///
    /// A chunk-local decoder never runs the last unit of a chunk: nothing could read it.
    pub fn group_len(&self, level: usize) -> usize {
        let config = &self.levels[level - 1];
        match config.decoder.attention {
            DecoderAttention::Chunk => config.converter.prefix_len + config.chunk_len - 1,
            _ => config.converter.prefix_len + config.chunk_len,
        }
    }

    /// The encoder stack of `level` (1-based).
    pub fn encoder_spec(&self, level: usize) -> StackSpec {
        let config = &self.levels[level - 1];
        let parent_chunk_len = self.levels.get(level).map(|parent| parent.chunk_len);
        config.encoder.spec(config.d_model, parent_chunk_len, self.norm_eps)
    }

    /// The decoder stack of `level` (1-based).
    pub fn decoder_spec(&self, level: usize) -> StackSpec {
        let config = &self.levels[level - 1].decoder;
        let len = self.group_len(level);
        let span = match config.attention {
            DecoderAttention::Chunk => Span::Blocks { len, back: 0 },
            DecoderAttention::Lookback { chunks } => Span::Blocks { len, back: chunks },
            DecoderAttention::Stream { window } => Span::Window { len: window },
        };
        StackSpec {
            d_model: self.width(level - 1),
            n_layers: config.n_layers,
            n_heads: config.n_heads,
            n_kv_heads: config.n_kv_heads.unwrap_or(config.n_heads),
            d_ff: config.d_ff,
            span,
            pick: None,
            positions: config.positions,
            sink: config.sink,
            norm_eps: self.norm_eps,
        }
    }
}

impl EncoderConfig {
    /// The stack; without a parent there are no chunks to stay in.
    fn spec(&self, d_model: usize, parent_chunk_len: Option<usize>, norm_eps: f64) -> StackSpec {
        let (span, pick) = match self.attention {
            EncoderAttention::Full => (Span::Full, None),
            EncoderAttention::Window { units } => (Span::Window { len: units }, None),
            EncoderAttention::Block => (parent_chunk_len.map_or(Span::Full, |len| Span::Blocks { len, back: 0 }), None),
            EncoderAttention::Sparse { window, sinks, block, pick: SparsePick::Every(every) } => {
                (Span::Strided { window, sinks, block, every }, None)
            }
            EncoderAttention::Sparse { window, sinks, block, pick: SparsePick::Top(top) } => {
                (Span::Full, Some(BlockPick { window, sinks, block, top }))
            }
        };
        StackSpec {
            d_model,
            n_layers: self.n_layers,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads.unwrap_or(self.n_heads),
            d_ff: self.d_ff,
            span,
            pick,
            positions: self.positions,
            sink: self.sink,
            norm_eps,
        }
    }
}

impl FlatConfig {
    /// The transformer stack.
    pub fn spec(&self) -> StackSpec {
        self.stack.spec(self.d_model, None, self.norm_eps)
    }
}

impl ModelConfig {
    /// Entries of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Photon(config) => config.vocab_size,
            Self::Flat(config) => config.vocab_size,
        }
    }

    /// Standard deviation of freshly drawn matrices.
    pub fn init_std(&self) -> f64 {
        match self {
            Self::Photon(config) => config.init_std,
            Self::Flat(config) => config.init_std,
        }
    }

    /// Levels above the tokens; 0 for a flat model.
    pub fn n_levels(&self) -> usize {
        match self {
            Self::Photon(config) => config.n_levels(),
            Self::Flat(_) => 0,
        }
    }

    /// Tokens under one top-level unit; 1 for a flat model.
    pub fn meta_chunk_tokens(&self) -> usize {
        match self {
            Self::Photon(config) => config.meta_chunk_tokens(),
            Self::Flat(_) => 1,
        }
    }

    /// Checks every rule that the types cannot express.
    ///
    /// # Errors
    ///
    /// The first broken rule, naming the key, its value and the fix.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::Photon(config) => config.validate(),
            Self::Flat(config) => config.validate(),
        }
    }
}
