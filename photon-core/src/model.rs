//! One face for every architecture: what the trainer, the evaluator and the generator call.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::cache::row_store::indices;
use crate::config::{ModelConfig, PhotonConfig};
use crate::documents::Documents;
use crate::flat::Flat;
use crate::infer_config::{InferConfig, InferPlan, Stage};
use crate::init::Initializer;
use crate::nn::compute::{Compute, with_matrices_in};
use crate::nn::vocabulary::Head;
use crate::photon::{Photon, Reconstruction};
use crate::state::State;
use crate::watch::{Unwatched, Watch};

/// Any model.
#[derive(Module, Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "one value for each model that is made; which builds warn hangs on their tensors"
)]
pub enum Model {
    /// The hierarchical model.
    Photon(Photon),
    /// The plain transformer.
    Flat(Flat),
}

/// Outcome of a training forward.
#[derive(Clone, Debug)]
pub struct Hidden {
    /// The state that predicts each token, `[B, T, D]`.
    pub tokens: Tensor<3>,
    /// One for each level from 1 to L-1; none for a flat model. They cover the padded sequence.
    pub reconstructions: Vec<Reconstruction>,
}

impl Model {
    /// Fresh weights, the same on every backend.
    pub fn new(config: &ModelConfig, seed: u64, device: &Device) -> Self {
        Self::build(config, &mut Initializer::new(seed, config.init_std(), device))
    }

    /// Weights that wait to be loaded.
    pub(crate) fn blank(config: &ModelConfig, device: &Device) -> Self {
        Self::build(config, &mut Initializer::blank(device))
    }

    fn build(config: &ModelConfig, init: &mut Initializer) -> Self {
        match config {
            ModelConfig::Photon(config) => Self::Photon(Photon::new(config, init)),
            ModelConfig::Flat(config) => Self::Flat(Flat::new(config, init)),
        }
    }

    /// The same weights, with the products of each stack in the format that `of` gives for its stage: in the training
    /// forward alone, while generation stays as the weights are stored.
    #[must_use]
    pub fn with_compute(mut self, of: impl Fn(Stage) -> Compute) -> Self {
        match &mut self {
            Self::Photon(model) => {
                let encoders = model.encoders.iter_mut().zip(1..);
                encoders.for_each(|(encoder, level)| encoder.stack.set_compute(of(Stage::Encoder(level))));
                let decoders = model.decoders.iter_mut().zip(1..);
                decoders.for_each(|(decoder, level)| decoder.stack.set_compute(of(Stage::Decoder(level))));
            }
            Self::Flat(model) => model.stack.set_compute(of(Stage::Stack)),
        }
        self
    }

    /// The same model with its matrices stored in a format, and every product with them made in it, in generation too.
    #[must_use]
    pub fn with_weights(self, stored: Compute) -> Self {
        with_matrices_in(self, stored)
    }

    /// The architecture.
    pub fn config(&self) -> ModelConfig {
        match self {
            Self::Photon(model) => ModelConfig::Photon(model.config().clone()),
            Self::Flat(model) => ModelConfig::Flat(model.config().clone()),
        }
    }

    /// The hierarchy, where there is one.
    pub fn hierarchy(&self) -> Option<&PhotonConfig> {
        match self {
            Self::Photon(model) => Some(model.config()),
            Self::Flat(_) => None,
        }
    }

    /// The device of the weights.
    pub fn device(&self) -> Device {
        self.head().weights()[0].device()
    }

    /// The training forward up to the head, of rows that are one document each.
    ///
    /// # Shapes
    ///
    /// `[B, T] -> [B, T, D]`, T ≥ 1
    pub fn hidden(&self, token_ids: Tensor<2, Int>) -> Hidden {
        self.hidden_watched(token_ids, &mut Unwatched)
    }

    /// The training forward up to the head, of each document as if it were alone.
    ///
    /// # Shapes
    ///
    /// `[B, T] -> [B, T, D]`, T ≥ 1
    ///
    /// # Panics
    ///
    /// If `documents` are of another number of rows, or one does not start with a unit of the top level.
    pub fn hidden_apart(&self, token_ids: Tensor<2, Int>, documents: &Documents) -> Hidden {
        self.hidden_of(token_ids, documents, &mut Unwatched)
    }

    /// The training forward up to the head, of rows that are one document each, with a look at every part.
    ///
    /// # Shapes
    ///
    /// `[B, T] -> [B, T, D]`, T ≥ 1
    pub fn hidden_watched(&self, token_ids: Tensor<2, Int>, watch: &mut dyn Watch) -> Hidden {
        let documents = Documents::whole_rows(token_ids.dims()[0]);
        self.hidden_of(token_ids, &documents, watch)
    }

    fn hidden_of(&self, token_ids: Tensor<2, Int>, documents: &Documents, watch: &mut dyn Watch) -> Hidden {
        assert_eq!(documents.n_rows(), token_ids.dims()[0], "documents of each row");
        match self {
            Self::Photon(model) => model.hidden(token_ids, documents, watch),
            Self::Flat(model) => model.hidden(token_ids, documents, watch),
        }
    }

    /// The training forward: the logits at position i predict token i from the tokens before it.
    ///
    /// # Shapes
    ///
    /// `[B, T] -> [B, T, V]`, T ≥ 1
    pub fn forward(&self, token_ids: Tensor<2, Int>) -> Tensor<3> {
        self.head().forward(self.hidden(token_ids).tokens)
    }

    /// The matrix from hidden states to logits, `[D, V]`.
    pub fn head(&self) -> &Head {
        match self {
            Self::Photon(model) => model.head(),
            Self::Flat(model) => model.head(),
        }
    }

    /// The state before any token, and the logits of the first, with caches that keep all that attention sees, in f32.
    ///
    /// # Shapes
    ///
    /// `-> [B, V]`
    pub fn begin(&self, n_rows: usize) -> (State, Tensor<2>) {
        let plan = InferConfig::default().plan(&self.config()).expect("the default fits every model");
        self.begin_with(n_rows, &plan)
    }

    /// The state before any token, and the logits of the first, with caches as planned.
    ///
    /// # Shapes
    ///
    /// `-> [B, V]`
    ///
    /// # Panics
    ///
    /// If the plan is for another model.
    pub fn begin_with(&self, n_rows: usize, plan: &InferPlan) -> (State, Tensor<2>) {
        let (state, hidden) = match self {
            Self::Photon(model) => {
                let (state, hidden) = model.begin(n_rows, plan);
                (State::Photon(state), hidden)
            }
            Self::Flat(model) => {
                let (state, hidden) = model.begin(n_rows, plan);
                (State::Flat(state), hidden)
            }
        };
        (state, self.head().forward(hidden))
    }

    /// Takes up new tokens of `rows`, any number at least 1 for each, and returns the logits of the next.
    ///
    /// Rows stand wherever they stand: those with equal work run together. As long as the state's advance rule is
    /// `hierarchical`, the logits are those of the training forward. Under the others tokens go through one by one, so
    /// that under every rule it does not matter how they are cut into calls.
    ///
    /// # Shapes
    ///
    /// `b` lists of token ids `-> [b, V]`
    ///
    /// # Panics
    ///
    /// If a row gets no token, is named twice, or the state is another architecture's.
    pub fn extend(&self, state: &mut State, rows: &[usize], token_ids: &[Vec<u32>]) -> Tensor<2> {
        assert_eq!(rows.len(), token_ids.len(), "one list of tokens for each row");
        assert!(token_ids.iter().all(|ids| !ids.is_empty()), "every row takes up at least one token");
        assert_eq!(rows.iter().collect::<BTreeSet<_>>().len(), rows.len(), "no row is named twice");
        let mut groups: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        for (index, (&row, ids)) in rows.iter().zip(token_ids).enumerate() {
            groups.entry(self.work(state, row, ids.len())).or_default().push(index);
        }
        let device = self.device();
        let mut order = Vec::with_capacity(rows.len());
        let mut parts = Vec::with_capacity(groups.len());
        for ((n_new, _), members) in groups {
            let rows: Vec<usize> = members.iter().map(|&index| rows[index]).collect();
            let ids: Vec<i64> = members.iter().flat_map(|&index| &token_ids[index]).map(|&id| i64::from(id)).collect();
            let ids = Tensor::from_data(TensorData::new(ids, [rows.len(), n_new]), &device);
            parts.push(match (self, &mut *state) {
                (Self::Photon(model), State::Photon(state)) => model.extend(state, &rows, ids),
                (Self::Flat(model), State::Flat(state)) => model.extend(state, &rows, ids),
                _ => panic!("the state belongs to a model of another architecture"),
            });
            order.extend(members);
        }
        let hidden = Tensor::cat(parts, 0); // [b, D], in order of work
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, &index)| places[index] = place);
        let hidden = match places.is_sorted() {
            true => hidden,
            false => hidden.select(0, indices(&places, &device)),
        };
        self.head().forward(hidden) // [b, V]
    }

    fn work(&self, state: &State, row: usize, n_new: usize) -> (usize, usize) {
        match (self, state) {
            (Self::Photon(model), State::Photon(state)) => model.work(state, row, n_new),
            _ => (n_new, 0),
        }
    }
}
