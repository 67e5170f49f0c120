//! Small models of every kind, shaken, and what the properties measure them with.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use photon_core::config::{DecoderAttention, ModelConfig};
use photon_core::config_file;
use photon_core::model::Model;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Vocabulary of the small models.
pub(crate) const VOCAB_SIZE: usize = 13;

/// Sparse attention that is small enough to leave keys out in a short sequence.
pub(crate) const STRIDED: &str = "{ sparse = { window = 2, sinks = 1, block = 2, pick = { every = 2 } } }";
pub(crate) const PICKED: &str = "{ sparse = { window = 2, sinks = 1, block = 2, pick = { top = 1 } } }";

/// A named config of a small model.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) config: ModelConfig,
}

/// Parses a model config written in a test.
pub(crate) fn parse(toml: &str) -> ModelConfig {
    let table = toml.parse().unwrap_or_else(|error| panic!("{error}\n{toml}"));
    config_file::parse_model(table, "test.toml".as_ref()).unwrap_or_else(|error| panic!("{error}\n{toml}"))
}

/// The flat model with one kind of attention.
pub(crate) fn flat_case(attention: &str) -> Case {
    Case {
        name: format!("flat, attention {attention}"),
        config: parse(&format!(
            "architecture = \"flat\"\nvocab_size = {VOCAB_SIZE}\nd_model = 8\n\
             [stack]\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\nd_ff = 12\nattention = {attention}\n"
        )),
    }
}

/// The flat model with every kind of attention, the full one first.
pub(crate) fn flat_cases() -> Vec<Case> {
    ["\"full\"", "{ window = { units = 3 } }", STRIDED, PICKED].map(flat_case).into()
}

/// One to four levels, unequal chunk lengths and widths, with one kind of attention in every encoder and decoder.
pub(crate) fn photon_case(n_levels: usize, encoder: &str, decoder: &str) -> Case {
    let chunk_lens = [2, 3, 2, 2];
    let d_models = [6, 8, 10, 8];
    let mut toml = format!("architecture = \"photon\"\nvocab_size = {VOCAB_SIZE}\nd_model = 8\n");
    for level in 0..n_levels {
        let is_top = level + 1 == n_levels;
        // The top has no parent chunk; it takes the learned sink and goes without positions.
        let encoder = if is_top && encoder == "\"block\"" { "\"full\"" } else { encoder };
        let (positions, sink) = if is_top { ("\"none\"", true) } else { ("{ rope = { theta = 100.0 } }", false) };
        toml += &format!(
            "[[levels]]\nchunk_len = {chunk_len}\nd_model = {d_model}\n\
             encoder = {{ n_layers = 2, n_heads = 1, d_ff = 9, attention = {encoder}, positions = {positions}, sink = {sink} }}\n\
             converter = {{ prefix_len = {prefix_len} }}\n\
             decoder = {{ n_layers = 2, n_heads = {n_heads}, n_kv_heads = 1, d_ff = 10, attention = {decoder} }}\n",
            chunk_len = chunk_lens[level],
            d_model = d_models[level],
            prefix_len = 1 + level % 2,
            n_heads = if level == 0 { 2 } else { 1 },
        );
    }
    Case { name: format!("{n_levels} levels, encoder {encoder}, decoder {decoder}"), config: parse(&toml) }
}

/// Four levels whose decoders, finest first, are of the given kinds.
pub(crate) fn mixed_case(decoders: [&str; 4]) -> Case {
    let case = photon_case(4, "{ window = { units = 2 } }", "\"chunk\"");
    let ModelConfig::Photon(mut config) = case.config else { unreachable!("a photon case") };
    for (level, decoder) in config.levels.iter_mut().zip(decoders) {
        level.decoder.attention = match decoder {
            "chunk" => DecoderAttention::Chunk,
            "lookback" => DecoderAttention::Lookback { chunks: 1 },
            _ => DecoderAttention::Stream { window: 3 },
        };
    }
    Case { name: format!("decoders {decoders:?}"), config: ModelConfig::Photon(config) }
}

/// Every number of levels with every kind of attention, and kinds mixed.
pub(crate) fn photon_cases() -> Vec<Case> {
    let encoders = ["\"full\"", "{ window = { units = 2 } }", "\"block\""];
    let decoders = ["\"chunk\"", "{ lookback = { chunks = 1 } }", "{ stream = { window = 5 } }"];
    (1..=4)
        .flat_map(|n_levels| encoders.map(|encoder| decoders.map(|decoder| photon_case(n_levels, encoder, decoder))))
        .flatten()
        .chain([
            mixed_case(["stream", "chunk", "chunk", "chunk"]),
            mixed_case(["chunk", "stream", "chunk", "lookback"]),
            mixed_case(["lookback", "chunk", "stream", "chunk"]),
            photon_case(1, STRIDED, "\"chunk\""),
            photon_case(1, PICKED, "{ stream = { window = 5 } }"),
            photon_case(2, STRIDED, "{ lookback = { chunks = 1 } }"),
            photon_case(2, PICKED, "\"chunk\""),
        ])
        .collect()
}

/// A model with every parameter random: none stands at an initial zero or one.
pub(crate) fn shaken(config: &ModelConfig, device: &Device) -> Model {
    struct Shake(ChaCha8Rng);
    impl ModuleMapper for Shake {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| {
                let shape = tensor.dims();
                // Around one for gains, around zero for the rest, wide enough for logits to differ.
                let centre = if D == 1 { 1.0 } else { 0.0 };
                let values: Vec<f32> =
                    (0..shape.iter().product::<usize>()).map(|_| centre + self.0.random_range(-0.6..0.6)).collect();
                let moved = Tensor::from_data(TensorData::new(values, shape), &tensor.device());
                if tensor.is_require_grad() { moved.require_grad() } else { moved }
            })
        }
    }
    Model::new(config, 1, device).map(&mut Shake(ChaCha8Rng::seed_from_u64(7)))
}

/// The same with the vocabulary of the byte tokenizer.
pub(crate) fn shaken_bytes(mut config: ModelConfig, device: &Device) -> Model {
    match &mut config {
        ModelConfig::Photon(config) => config.vocab_size = 257,
        ModelConfig::Flat(config) => config.vocab_size = 257,
    }
    shaken(&config, device)
}

/// Random tokens, one list a row.
pub(crate) fn random_rows(n_rows: usize, n_tokens: usize, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n_rows).map(|_| (0..n_tokens).map(|_| rng.random_range(0..VOCAB_SIZE as u32)).collect()).collect()
}

/// Rows of equal length as a tensor `[B, T]`.
pub(crate) fn ids(rows: &[Vec<u32>], device: &Device) -> Tensor<2, Int> {
    let values: Vec<i64> = rows.iter().flatten().map(|&id| i64::from(id)).collect();
    Tensor::from_data(TensorData::new(values, [rows.len(), rows[0].len()]), device)
}

/// Logits of the training forward: by row, by position.
pub(crate) fn forward(model: &Model, rows: &[Vec<u32>]) -> Vec<Vec<Vec<f32>>> {
    logits_of(model.forward(ids(rows, &model.device())))
}

/// The numbers of `[B, T, V]`: by row, by position.
pub(crate) fn logits_of(logits: Tensor<3>) -> Vec<Vec<Vec<f32>>> {
    let [_, n_tokens, vocab_size] = logits.dims();
    let values: Vec<f32> = logits.try_to_vec_as().expect("logits are f32");
    values.chunks(n_tokens * vocab_size).map(|row| row.chunks(vocab_size).map(<[f32]>::to_vec).collect()).collect()
}

/// Rows of a `[b, V]` tensor.
pub(crate) fn rows_of(logits: Tensor<2>) -> Vec<Vec<f32>> {
    let [_, vocab_size] = logits.dims();
    let values: Vec<f32> = logits.try_to_vec_as().expect("logits are f32");
    values.chunks(vocab_size).map(<[f32]>::to_vec).collect()
}

/// Largest absolute difference.
pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
