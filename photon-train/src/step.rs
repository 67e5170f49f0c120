//! One update of the weights: gradients of a batch, clipped together, through the optimiser.

use burn::optim::GradientsParams;
use photon_core::loss::Objective;
use photon_core::model::Model;

use crate::clip::clip_global_norm;
use crate::config::OptimizerConfig;
use crate::data::Batch;
use crate::optimizer::Optimizer;
use crate::replicas::Replicas;

/// What turns batches into better weights.
pub struct Learner {
    replicas: Replicas,
    optimizer: Optimizer,
    clip_norm: f64,
    alpha: f64,
    z_loss: f64,
    loss_scale: f64,
    micro_batch_size: usize,
    /// Rows of a micro-batch are counted at this length: there are more of shorter ones.
    seq_len: Option<usize>,
}

/// Which way to go, and how far the batch was from what was predicted.
pub struct Gradients {
    /// Clipped, unless they are not finite.
    pub grads: GradientsParams,
    /// In numbers.
    pub update: Update,
    /// Norm of the gradients of each stage before clipping, in the order of the model.
    pub stage_norms: Vec<(String, f64)>,
}

/// One update in numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Mean cross-entropy of the batch before the update, in nats a token.
    pub cross_entropy_nats: f64,
    /// Mean reconstruction distance, summed over levels, before `alpha`.
    pub reconstruction: f64,
    /// Mean square of the log of the softmax's denominator, before its weight; 0 where that is.
    pub z: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
}

impl Update {
    /// Whether the weights can still be trusted.
    pub fn is_finite(&self) -> bool {
        self.cross_entropy_nats.is_finite() && self.gradient_norm.is_finite()
    }
}

impl Learner {
    /// A learner without memory of earlier gradients.
    pub fn new(
        model: &Model,
        config: &OptimizerConfig,
        alpha: f64,
        micro_batch_size: usize,
        replicas: Replicas,
    ) -> Self {
        Self {
            replicas,
            optimizer: Optimizer::new(config, model),
            clip_norm: config.clip_norm,
            alpha,
            z_loss: 0.0,
            loss_scale: 1.0,
            micro_batch_size,
            seq_len: None,
        }
    }

    /// The same with a z-loss of this weight.
    #[must_use]
    pub fn with_z_loss(self, z_loss: f64) -> Self {
        Self { z_loss, ..self }
    }

    /// The same with the loss times `loss_scale` while gradients are made: in f16 small ones would be zero.
    #[must_use]
    pub fn with_loss_scale(self, loss_scale: f64) -> Self {
        Self { loss_scale, ..self }
    }

    /// The same with the rows of a micro-batch counted at this length; shorter rows go through in larger numbers.
    #[must_use]
    pub fn with_rows_of(self, seq_len: usize) -> Self {
        Self { seq_len: Some(seq_len), ..self }
    }

    /// The workers, for evaluations in between.
    pub fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    /// What remembers earlier gradients.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The same, to take up what an earlier run remembered.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    /// The gradients of a batch, clipped together. Every rank is given the whole batch, works on its share of it, and has
    /// the gradients of all.
    pub fn gradients(&self, model: &Model, batch: &Batch) -> Gradients {
        let objective = Objective::of_places(&model.config(), self.alpha, &batch.is_real(), batch.rows())
            .with_z_loss(self.z_loss)
            .scaled(self.loss_scale);
        let row_len = batch.seq_len();
        let rows = self.micro_batch_size * self.seq_len.unwrap_or(row_len) / row_len;
        let share = batch.part(self.replicas.ranks().share(batch.rows()));
        let result = self.replicas.gradients(model, &objective, &share.split(rows.max(1)));
        let (grads, norms) = clip_global_norm(model, result.grads, self.clip_norm, self.loss_scale);
        let update = Update {
            cross_entropy_nats: result.cross_entropy_nats,
            reconstruction: result.reconstruction,
            z: result.z,
            gradient_norm: norms.all,
        };
        Gradients { grads, update, stage_norms: norms.stages }
    }

    /// Moves the weights.
    pub fn apply(&mut self, model: Model, gradients: Gradients, learning_rate: f64) -> Model {
        self.optimizer.step(learning_rate, model, gradients.grads)
    }

    /// Learns from a batch. Where the gradient is not finite the weights stay as they are.
    pub fn learn(&mut self, model: Model, batch: &Batch, learning_rate: f64) -> (Model, Update) {
        let gradients = self.gradients(&model, batch);
        let update = gradients.update;
        match update.is_finite() {
            true => (self.apply(model, gradients, learning_rate), update),
            false => (model, update),
        }
    }
}
