//! Baselines of the size of another model: the flat transformer and the Block Transformer.
//!
//! Both keep the vocabulary, the norms and the width of a head of the token decoder. Of the widths that heads of that size
//! fill, and the depths that then have about the right number of parameters with an inner width of 8/3, the pair is
//! taken whose width is nearest to [`WIDTH_PER_LAYER`] times its depth; then the inner width is fitted. Whatever else is
//! wanted stands in the arm's `set`.

use photon_core::accounting::model_cost;
use photon_core::config::{
    ConverterConfig, DecoderAttention, DecoderConfig, EncoderAttention, EncoderConfig, FlatConfig, LevelConfig,
    ModelConfig, PhotonConfig, Positions,
};
use toml::Table;

use super::experiment::ArmKind;
use crate::config::RunConfig;

/// Small transformers are some thirty times as wide as they are deep.
const WIDTH_PER_LAYER: f64 = 32.0;

/// Chunk and prefix of the Block Transformer's published models.
const BLOCK_CHUNK_LEN: usize = 4;
const BLOCK_PREFIX_LEN: usize = 2;

/// Inner widths that still are those of a usual transformer, over the width.
const D_FF_SHARES: std::ops::RangeInclusive<f64> = 1.5..=4.5;

/// Inner widths are multiples of this.
const D_FF_STEP: usize = 8;

/// What is kept of the model that a baseline stands beside.
struct Kept {
    vocab_size: usize,
    head_dim: usize,
    norm_eps: f64,
    init_std: f64,
    positions: Positions,
}

/// The model of a baseline with about as many parameters as that of `config`.
pub(super) fn derive(kind: ArmKind, config: &RunConfig) -> Table {
    let target = model_cost(&config.model, config.train.seq_len).parameters();
    let kept = Kept::of(&config.model);
    let build = |d_model: usize, n_layers: usize, d_ff: usize| match kind {
        ArmKind::Block => kept.block(d_model, n_layers, d_ff),
        ArmKind::Stated | ArmKind::Flat => kept.flat(d_model, n_layers, d_ff),
    };
    let parameters = |model: &ModelConfig| model_cost(model, config.train.seq_len).parameters();
    let error = |model: &ModelConfig| parameters(model).abs_diff(target);
    // A Block Transformer has two stacks.
    let n_stacks = if kind == ArmKind::Block { 2 } else { 1 };
    let mut best: Option<(f64, ModelConfig)> = None;
    for n_heads in 1..=64 {
        let d_model = n_heads * kept.head_dim;
        for n_layers in 1..=64 {
            // Parameters are linear in the inner width.
            let [one, two] = [1, 2].map(|n| parameters(&build(d_model, n_layers, n * D_FF_STEP)) as f64);
            let n_units = ((target as f64 - one) / (two - one)).round() + 1.0;
            let d_ff = n_units * D_FF_STEP as f64;
            if !D_FF_SHARES.contains(&(d_ff / d_model as f64)) {
                continue;
            }
            let model = build(d_model, n_layers, d_ff as usize);
            if model.validate().is_err() || error(&model) as f64 > super::MATCH_TOLERANCE * target as f64 {
                continue;
            }
            let shape = d_model as f64 / (WIDTH_PER_LAYER * (n_stacks * n_layers) as f64);
            let share = d_ff / d_model as f64 / (8.0 / 3.0);
            // Distances in ratios: twice too wide is as far as half as wide.
            let distance = shape.ln().abs() + share.ln().abs();
            if best.as_ref().is_none_or(|(least, _)| distance < *least) {
                best = Some((distance, model));
            }
        }
    }
    // A model so small that nothing comes near it: the fit says so with its numbers.
    let model = best.map_or_else(|| build(kept.head_dim.max(2), 1, D_FF_STEP), |(_, model)| model);
    Table::try_from(&model).expect("a model config is plain data")
}

impl Kept {
    fn of(model: &ModelConfig) -> Self {
        match model {
            ModelConfig::Photon(config) => {
                let spec = config.decoder_spec(1);
                Self {
                    vocab_size: config.vocab_size,
                    head_dim: spec.head_dim(),
                    norm_eps: config.norm_eps,
                    init_std: config.init_std,
                    positions: rotary(spec.positions),
                }
            }
            ModelConfig::Flat(config) => Self {
                vocab_size: config.vocab_size,
                head_dim: config.spec().head_dim(),
                norm_eps: config.norm_eps,
                init_std: config.init_std,
                positions: rotary(config.stack.positions),
            },
        }
    }

    fn encoder(&self, d_model: usize, n_layers: usize, d_ff: usize) -> EncoderConfig {
        EncoderConfig {
            n_layers,
            n_heads: d_model / self.head_dim,
            n_kv_heads: None,
            d_ff,
            attention: EncoderAttention::Full,
            positions: self.positions,
            sink: false,
        }
    }

    fn flat(&self, d_model: usize, n_layers: usize, d_ff: usize) -> ModelConfig {
        ModelConfig::Flat(FlatConfig {
            vocab_size: self.vocab_size,
            d_model,
            norm_eps: self.norm_eps,
            init_std: self.init_std,
            stack: self.encoder(d_model, n_layers, d_ff),
        })
    }

    /// As deep above as below, as the published models are.
    fn block(&self, d_model: usize, n_layers: usize, d_ff: usize) -> ModelConfig {
        let encoder = self.encoder(d_model, n_layers, d_ff);
        let decoder = DecoderConfig {
            n_layers,
            n_heads: encoder.n_heads,
            n_kv_heads: None,
            d_ff,
            attention: DecoderAttention::Chunk,
            positions: self.positions,
            sink: false,
        };
        ModelConfig::Photon(PhotonConfig {
            vocab_size: self.vocab_size,
            d_model,
            // Where the chunk does not divide the width there is a table of that width and a projection.
            d_embed: (!d_model.is_multiple_of(BLOCK_CHUNK_LEN)).then_some(d_model),
            norm_eps: self.norm_eps,
            init_std: self.init_std,
            levels: vec![LevelConfig {
                chunk_len: BLOCK_CHUNK_LEN,
                d_model,
                encoder,
                converter: ConverterConfig { prefix_len: BLOCK_PREFIX_LEN },
                decoder,
            }],
        })
    }
}

/// A flat model tells positions apart, whatever the stack did that is kept.
fn rotary(positions: Positions) -> Positions {
    match positions {
        Positions::None => Positions::default(),
        rope => rope,
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_data::run;
    use super::*;

    #[test]
    fn baselines_have_the_size_of_the_model_they_stand_beside() {
        for more in ["", "model.levels.1.encoder.n_layers = 6", "model.vocab_size = 4096"] {
            let config = run(more);
            let target = model_cost(&config.model, 64).parameters() as f64;
            for kind in [ArmKind::Flat, ArmKind::Block] {
                let mut own = config.clone();
                own.model = photon_core::config_file::parse_model(derive(kind, &config), "a.toml".as_ref()).unwrap();
                let found = model_cost(&own.model, 64).parameters() as f64;
                assert!((found - target).abs() <= 0.01 * target, "{more} {kind:?}: {found}, {target}");
                let (spec, n_levels) = match &own.model {
                    ModelConfig::Flat(flat) => (flat.spec(), 0),
                    ModelConfig::Photon(block) => (block.encoder_spec(1), block.n_levels()),
                };
                assert_eq!(n_levels, usize::from(kind == ArmKind::Block));
                assert_eq!((spec.head_dim(), own.model.vocab_size()), (32, config.model.vocab_size()));
                assert!(D_FF_SHARES.contains(&(spec.d_ff as f64 / spec.d_model as f64)), "{spec:?}");
            }
        }
    }
}
