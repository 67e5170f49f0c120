//! The plain decoder-only transformer, from the same blocks: the baseline of every comparison.
//!
//! A learned start embedding stands before the sequence and before each document that is kept apart, so that here too the
//! logits at position i predict token i, the first one included.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};

use crate::config::FlatConfig;
use crate::documents::Documents;
use crate::infer_config::{InferPlan, Stage};
use crate::init::Initializer;
use crate::model::Hidden;
use crate::nn::stack::Stack;
use crate::nn::vocabulary::{Head, Table};
use crate::state::FlatState;
use crate::watch::{Output, Watch};

/// A Llama-style transformer with an untied head.
#[derive(Module, Debug)]
pub struct Flat {
    embedding: Table,
    start: Param<Tensor<1>>,
    pub(crate) stack: Stack,
    head: Head,
    #[module(skip)]
    config: FlatConfig,
}

impl Flat {
    /// Fresh weights.
    pub fn new(config: &FlatConfig, init: &mut Initializer) -> Self {
        Self {
            embedding: init.embedding(config.vocab_size, config.d_model),
            start: init.vector(config.d_model),
            stack: Stack::new(config.spec(), init),
            head: init.head(config.d_model, config.vocab_size),
            config: config.clone(),
        }
    }

    /// The training forward: for every token, the hidden state that predicts it from the tokens before.
    ///
    /// # Shapes
    ///
    /// `[B, T] -> [B, T, D]`
    pub fn hidden(&self, token_ids: Tensor<2, Int>, documents: &Documents, watch: &mut dyn Watch) -> Hidden {
        let [batch, n_tokens] = token_ids.dims();
        let start = self.start_rows(batch); // [B, 1, D]
        let x = match n_tokens {
            1 => start,
            _ => {
                let earlier = self.embedding.forward(token_ids.narrow(1, 0, n_tokens - 1));
                Tensor::cat(vec![start, earlier], 1)
            }
        };
        let x = watch.see(Output::Embedding, documents.begin_with(self.start.val(), x)); // [B, T, D]
        let tokens = watch.see(Output::Stack, self.stack.forward(x, documents));
        Hidden { tokens, reconstructions: Vec::new() }
    }

    /// The state before any token, and the hidden state of the first: `[B, D]`.
    pub fn begin(&self, n_rows: usize, plan: &InferPlan) -> (FlatState, Tensor<2>) {
        let device = self.start.val().device();
        let cache = plan.cache(Stage::Stack);
        let stack = self.stack.start(n_rows, &cache.config, cache.n_newest, plan.activations, &device);
        let mut state = FlatState { n_tokens: vec![0; n_rows], stack };
        let rows: Vec<usize> = (0..n_rows).collect();
        let positions = vec![vec![0]; n_rows];
        let hidden = self.stack.step(self.start_rows(n_rows), &mut state.stack, &rows, &positions);
        let d_model = self.config.d_model;
        (state, hidden.reshape([n_rows, d_model]))
    }

    /// Takes up equally many tokens for each of `rows`; returns the hidden state of the next.
    ///
    /// # Shapes
    ///
    /// `[b, n] -> [b, D]`
    pub fn extend(&self, state: &mut FlatState, rows: &[usize], token_ids: Tensor<2, Int>) -> Tensor<2> {
        let [batch, n_new] = token_ids.dims();
        // The start embedding holds position 0.
        let positions: Vec<Vec<usize>> =
            rows.iter().map(|&row| (state.n_tokens[row] + 1..=state.n_tokens[row] + n_new).collect()).collect();
        let x = self.embedding.forward(token_ids); // [b, n, D]
        let hidden = self.stack.step(x, &mut state.stack, rows, &positions);
        rows.iter().for_each(|&row| state.n_tokens[row] += n_new);
        hidden.narrow(1, n_new - 1, 1).reshape([batch, self.config.d_model])
    }

    /// The matrix from hidden states to logits, `[D, V]`.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The architecture.
    pub fn config(&self) -> &FlatConfig {
        &self.config
    }

    fn start_rows(&self, n_rows: usize) -> Tensor<3> {
        let d_model = self.config.d_model;
        self.start.val().reshape([1, 1, d_model]).expand([n_rows, 1, d_model])
    }
}
