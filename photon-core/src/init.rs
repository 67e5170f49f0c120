//! Fresh parameters, drawn on the host: one seed gives the same weights on every backend.

use burn::module::Param;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::{Device, Tensor, TensorData};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal};

use crate::nn::vocabulary::{Head, MAX_PIECE_NUMBERS, Table, pieces};

/// Draws parameters in the order in which modules ask for them.
pub struct Initializer<'a> {
    device: &'a Device,
    source: Source,
}

#[expect(clippy::large_enum_variant, reason = "one value for each model that is made")]
enum Source {
    Normal { rng: ChaCha8Rng, std: f64 },
    Zeros,
}

impl<'a> Initializer<'a> {
    /// Parameters on `device`, matrices normal with standard deviation `std`.
    ///
    /// # Panics
    ///
    /// If `std` is negative or not finite; a validated config never is.
    pub fn new(seed: u64, std: f64, device: &'a Device) -> Self {
        assert!(std.is_finite() && std >= 0.0, "init_std = {std} is not a standard deviation");
        Self { device, source: Source::Normal { rng: ChaCha8Rng::seed_from_u64(seed), std } }
    }

    /// Zeros where numbers would be drawn, for weights that come from a file.
    pub fn blank(device: &'a Device) -> Self {
        Self { device, source: Source::Zeros }
    }

    /// Normal numbers, of the standard deviation of matrices times `scale`.
    fn normal<const D: usize>(&mut self, shape: [usize; D], scale: f64) -> Param<Tensor<D>> {
        let n = shape.iter().product();
        let values = match &mut self.source {
            Source::Zeros => vec![0.0; n],
            Source::Normal { rng, std } => {
                let normal = Normal::new(0.0, (*std * scale) as f32).expect("std was checked in new");
                normal.sample_iter(rng).take(n).collect()
            }
        };
        self.param(values, shape)
    }

    fn param<const D: usize>(&self, values: Vec<f32>, shape: [usize; D]) -> Param<Tensor<D>> {
        Param::from_data(TensorData::new(values, shape), self.device)
    }

    /// A matrix without bias.
    pub fn linear(&mut self, d_input: usize, d_output: usize) -> Linear {
        Linear { weight: self.normal([d_input, d_output], 1.0), bias: None }
    }

    /// A matrix that adds to the residual stream: narrower by the root of the `n_adds` that sum up there,
    /// so that the stream's size does not grow with depth (GPT-2).
    pub fn residual_linear(&mut self, d_input: usize, d_output: usize, n_adds: usize) -> Linear {
        Linear { weight: self.normal([d_input, d_output], 1.0 / (n_adds as f64).sqrt()), bias: None }
    }

    /// A matrix with a bias that starts at zero.
    pub fn linear_with_bias(&mut self, d_input: usize, d_output: usize) -> Linear {
        let bias = self.param(vec![0.0; d_output], [d_output]);
        Linear { bias: Some(bias), ..self.linear(d_input, d_output) }
    }

    /// A table of `vocab_size` rows.
    pub fn embedding(&mut self, vocab_size: usize, d_model: usize) -> Table {
        let pieces = pieces(vocab_size, d_model, MAX_PIECE_NUMBERS);
        Table::of_pieces(pieces.map(|piece| self.normal([piece.len(), d_model], 1.0)).collect())
    }

    /// A matrix from hidden states to logits.
    pub fn head(&mut self, d_model: usize, vocab_size: usize) -> Head {
        let pieces = pieces(vocab_size, d_model, MAX_PIECE_NUMBERS);
        Head::of_pieces(pieces.map(|piece| self.normal([d_model, piece.len()], 1.0)).collect())
    }

    /// A norm whose gain starts at one.
    pub fn norm(&mut self, d_model: usize, epsilon: f64) -> RmsNorm {
        RmsNorm { gamma: self.param(vec![1.0; d_model], [d_model]), epsilon }
    }

    /// A learned vector. Never zero: an RMSNorm of zeros has an exploding gradient.
    pub fn vector(&mut self, d_model: usize) -> Param<Tensor<1>> {
        self.normal([d_model], 1.0)
    }

    /// Logits of attention sinks, one a head, starting at zero (the weight of one average key).
    pub fn sinks(&mut self, n_heads: usize) -> Param<Tensor<1>> {
        self.param(vec![0.0; n_heads], [n_heads])
    }
}
