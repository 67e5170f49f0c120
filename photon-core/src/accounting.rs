//! What a model costs, as pure functions of its config: parameters, arithmetic, layer-positions, cache bytes.
//!
//! One multiply and one add are two FLOPs; only matrix products count, attention by the pairs that its span sees.
//! Kernels work on blocks and compute a few pairs at their edges besides, which serve nobody and are not counted.
//! Sequences count whole: documents that are kept apart in a row have fewer pairs than that.
//! Where blocks are picked by their scores, those are the most pairs that a pick can open, and the scores count too.
//! Training is three forwards: the backward pass makes two products for each one.

use crate::config::{ModelConfig, PhotonConfig, StackSpec};
use crate::nn::vocabulary::MAX_PIECE_NUMBERS;

/// One stage of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct StageCost {
    /// `encoder 1`, `head`, ...
    pub stage: String,
    /// Parameters.
    pub parameters: usize,
    /// Forward FLOPs for a whole sequence.
    pub sequence_flops: u128,
    /// Transformer blocks times positions, for a whole sequence.
    pub layer_positions: usize,
    /// Numbers of the largest tensor of weights.
    pub largest_tensor: usize,
    /// Generated tokens for each time that all its weights are read; none for tables, of which a token reads one row.
    pub tokens_per_run: Option<usize>,
}

/// The costs of every stage for sequences of `seq_len` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelCost {
    /// Tokens of the sequence.
    pub seq_len: usize,
    /// Stages in the order of the data.
    pub stages: Vec<StageCost>,
    /// The learned start vector, which the paper's tables leave out.
    pub start_parameters: usize,
}

/// How the keys and values of a dense cache are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheDtype {
    /// Four bytes.
    F32,
    /// Two bytes.
    F16,
}

impl CacheDtype {
    /// Bytes of one number.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }
}

/// The cache of one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheCost {
    /// `encoder 1`, `decoder 1`, ... or `stack`.
    pub stage: String,
    /// Numbers stored for one entry: keys and values of all layers.
    pub numbers_per_entry: usize,
    /// Tokens that one entry stands for; 1/`tokens_per_entry` entries come with every token.
    pub tokens_per_entry: usize,
    /// The most entries that are kept; `None` where they grow with the context.
    pub max_entries: Option<usize>,
    /// Where they grow, one entry in so many is kept for good.
    pub kept_one_in: usize,
}

impl ModelCost {
    /// All parameters, as the paper counts them: without the start vector.
    pub fn parameters(&self) -> usize {
        self.stages.iter().map(|stage| stage.parameters).sum()
    }

    /// Forward FLOPs per token.
    pub fn forward_flops_per_token(&self) -> f64 {
        self.stages.iter().map(|stage| stage.sequence_flops).sum::<u128>() as f64 / self.seq_len as f64
    }

    /// Weights that a generated token reads, those of a level shared by the tokens of its units.
    pub fn weights_read_per_token(&self) -> f64 {
        let read =
            |stage: &StageCost| stage.tokens_per_run.map_or(0.0, |tokens| stage.parameters as f64 / tokens as f64);
        self.stages.iter().map(read).sum()
    }

    /// Training FLOPs per token.
    pub fn training_flops_per_token(&self) -> f64 {
        3.0 * self.forward_flops_per_token()
    }

    /// Layer-positions per token.
    pub fn layer_positions_per_token(&self) -> f64 {
        self.stages.iter().map(|stage| stage.layer_positions).sum::<usize>() as f64 / self.seq_len as f64
    }
}

impl CacheCost {
    /// Bytes that every further token adds, in the long run.
    pub fn growth_bytes_per_token(&self, dtype: CacheDtype) -> f64 {
        match self.max_entries {
            Some(_) => 0.0,
            None => (self.numbers_per_entry * dtype.bytes()) as f64 / (self.tokens_per_entry * self.kept_one_in) as f64,
        }
    }
}

/// The cost of every stage of a model for sequences of `seq_len` tokens, padded to whole meta-chunks.
pub fn model_cost(config: &ModelConfig, seq_len: usize) -> ModelCost {
    match config {
        ModelConfig::Photon(config) => photon_cost(config, seq_len),
        ModelConfig::Flat(config) => {
            let matrix = config.vocab_size * config.d_model;
            ModelCost {
                seq_len,
                stages: vec![
                    table("embedding", matrix),
                    stack_cost("stack".into(), &config.spec(), seq_len, 1),
                    head_cost(matrix, seq_len),
                ],
                start_parameters: config.d_model,
            }
        }
    }
}

/// The cache of every stage of a model, encoders first.
pub fn cache_cost(config: &ModelConfig) -> Vec<CacheCost> {
    match config {
        ModelConfig::Flat(config) => vec![stack_cache("stack".into(), &config.spec(), 1)],
        ModelConfig::Photon(config) => {
            let levels = 1..=config.n_levels();
            let encoders = levels.clone().map(|level| {
                stack_cache(format!("encoder {level}"), &config.encoder_spec(level), config.tokens_per_unit(level))
            });
            let decoders = levels.map(|level| {
                stack_cache(format!("decoder {level}"), &config.decoder_spec(level), config.tokens_per_unit(level - 1))
            });
            encoders.chain(decoders).collect()
        }
    }
}

fn photon_cost(config: &PhotonConfig, seq_len: usize) -> ModelCost {
    let padded = seq_len.next_multiple_of(config.meta_chunk_tokens());
    let mut stages = vec![table("encoder embedding", config.vocab_size * config.chunker_input_width(1))];
    for level in 1..=config.n_levels() {
        let unit_tokens = config.tokens_per_unit(level);
        let n_units = padded / unit_tokens;
        let d_concatenated = config.levels[level - 1].chunk_len * config.chunker_input_width(level);
        let name = format!("chunker {level}");
        stages.push(match config.chunker_projects(level) {
            // The norm's gain and the matrix's bias add no product.
            true => {
                let vectors = d_concatenated + config.width(level);
                matrix_cost(name, d_concatenated * config.width(level), vectors, n_units, unit_tokens)
            }
            false => table(&name, 0),
        });
        stages.push(stack_cost(format!("encoder {level}"), &config.encoder_spec(level), n_units, unit_tokens));
    }
    for level in (1..=config.n_levels()).rev() {
        let unit_tokens = config.tokens_per_unit(level);
        let n_groups = padded / unit_tokens;
        let d_prefix = config.levels[level - 1].converter.prefix_len * config.width(level - 1);
        let name = format!("converter {level}");
        stages.push(matrix_cost(name, config.width(level) * d_prefix, d_prefix, n_groups, unit_tokens));
        let n_positions = n_groups * config.group_len(level);
        let step_tokens = config.tokens_per_unit(level - 1);
        stages.push(stack_cost(format!("decoder {level}"), &config.decoder_spec(level), n_positions, step_tokens));
    }
    let matrix = config.vocab_size * config.d_model;
    stages.push(table("decoder embedding", matrix));
    stages.push(head_cost(matrix, seq_len));
    ModelCost { seq_len, stages, start_parameters: config.width(config.n_levels()) }
}

fn table(stage: &str, parameters: usize) -> StageCost {
    let largest_tensor = parameters.min(MAX_PIECE_NUMBERS);
    StageCost {
        stage: stage.into(),
        parameters,
        sequence_flops: 0,
        layer_positions: 0,
        largest_tensor,
        tokens_per_run: None,
    }
}

/// The head, which like tables comes in pieces.
fn head_cost(matrix: usize, seq_len: usize) -> StageCost {
    StageCost { largest_tensor: matrix.min(MAX_PIECE_NUMBERS), ..matrix_cost("head".into(), matrix, 0, seq_len, 1) }
}

fn matrix_cost(stage: String, matrix: usize, vectors: usize, n_positions: usize, tokens_per_run: usize) -> StageCost {
    StageCost {
        stage,
        parameters: matrix + vectors,
        sequence_flops: 2 * matrix as u128 * n_positions as u128,
        layer_positions: 0,
        largest_tensor: matrix,
        tokens_per_run: Some(tokens_per_run),
    }
}

fn stack_cost(stage: String, spec: &StackSpec, n_positions: usize, tokens_per_run: usize) -> StageCost {
    let (d_model, d_kv) = (spec.d_model, spec.n_kv_heads * spec.head_dim());
    let matrices = 2 * d_model * d_model + 2 * d_model * d_kv + 3 * d_model * spec.d_ff;
    let vectors = 2 * d_model + if spec.sink { spec.n_heads } else { 0 };
    // Scores and their use: two products of a head's width for every pair that is seen.
    let attention = match spec.pick {
        None => 4 * spec.span.visible_pairs(n_positions) * d_model as u128,
        Some(pick) => {
            4 * pick.max_visible_pairs(n_positions) * d_model as u128
                + 2 * pick.scored_pairs(n_positions) * d_kv as u128
        }
    };
    StageCost {
        stage,
        parameters: spec.n_layers * (matrices + vectors) + d_model,
        sequence_flops: spec.n_layers as u128 * (2 * matrices as u128 * n_positions as u128 + attention),
        layer_positions: spec.n_layers * n_positions,
        largest_tensor: d_model * d_model.max(spec.d_ff),
        tokens_per_run: Some(tokens_per_run),
    }
}

fn stack_cache(stage: String, spec: &StackSpec, tokens_per_entry: usize) -> CacheCost {
    CacheCost {
        stage,
        numbers_per_entry: 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim(),
        tokens_per_entry,
        max_entries: spec.span.max_entries(),
        kept_one_in: spec.span.kept_one_in(),
    }
}
