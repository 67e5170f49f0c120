//! Several copies of the model at work on one update, each on a core of its own.
//!
//! One model keeps little more than one core busy on the CPU backend. Copies share their weights (tensors are
//! reference-counted); gradients are added in the order of the micro-batches, whoever computed them, so results
//! depend on how the batch was cut and not on how many replicas there are.

use std::thread;

use burn::module::Module;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Int, Tensor, TensorData};
use photon_core::loss::Objective;
use photon_core::model::Model;
use rayon::ThreadPool;

use crate::data::Batch;

/// The workers of a run.
pub struct Replicas {
    /// One pool of one thread for each replica, so that a replica's products stay on its core. With one replica
    /// there is none: products then use all cores.
    pools: Vec<ThreadPool>,
}

/// What an update learns from.
pub struct BatchGradients {
    /// Gradients of the mean loss.
    pub grads: GradientsParams,
    /// Mean cross-entropy, in nats a token.
    pub cross_entropy_nats: f64,
    /// Mean reconstruction distance, summed over levels, before `alpha`.
    pub reconstruction: f64,
}

impl Replicas {
    /// `n` workers.
    ///
    /// # Errors
    ///
    /// If the system gives no threads.
    pub fn new(n: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let pool = || rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let pools = if n > 1 { (0..n).map(|_| pool()).collect::<Result<_, _>>()? } else { Vec::new() };
        Ok(Self { pools })
    }

    /// Gradients of the batch that `micro_batches` make up.
    pub fn gradients(&self, model: &Model, objective: &Objective, micro_batches: &[Batch]) -> BatchGradients {
        let parts = self.map(model, micro_batches, |model, batch| {
            let loss = objective.loss(model, batch_ids(batch, model), &batch.lens);
            let cross_entropy: f32 = loss.cross_entropy.into_scalar();
            let reconstruction: f32 = loss.reconstruction.into_scalar();
            let grads = GradientsParams::from_grads(loss.total.backward(), model);
            (grads, f64::from(cross_entropy), f64::from(reconstruction))
        });
        let mut sum = GradientsAccumulator::new();
        let (mut cross_entropy_nats, mut total_reconstruction) = (0.0, 0.0);
        for (grads, cross_entropy, reconstruction) in parts {
            sum.accumulate(model, grads);
            cross_entropy_nats += cross_entropy;
            total_reconstruction += reconstruction;
        }
        BatchGradients { grads: sum.grads(), cross_entropy_nats, reconstruction: total_reconstruction }
    }

    /// Applies `work` to every batch, shared out among the replicas; results in the order of the batches.
    pub fn map<R: Send>(&self, model: &Model, batches: &[Batch], work: impl Fn(&Model, &Batch) -> R + Sync) -> Vec<R> {
        let n_replicas = self.pools.len().min(batches.len());
        if n_replicas <= 1 {
            return batches.iter().map(|batch| work(model, batch)).collect();
        }
        let work = &work;
        let mut results: Vec<Option<R>> = batches.iter().map(|_| None).collect();
        thread::scope(|scope| {
            let workers: Vec<_> = self.pools[..n_replicas]
                .iter()
                .enumerate()
                .map(|(replica, pool)| {
                    // Leaves of its own: graphs that share one would be run backward together.
                    let model = model.clone().fork(&model.device());
                    let share = batches.iter().enumerate().skip(replica).step_by(n_replicas);
                    scope.spawn(move || {
                        pool.install(move || share.map(|(i, batch)| (i, work(&model, batch))).collect::<Vec<_>>())
                    })
                })
                .collect();
            for worker in workers {
                let share = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                share.into_iter().for_each(|(index, result)| results[index] = Some(result));
            }
        });
        results.into_iter().map(|result| result.expect("every batch is some replica's")).collect()
    }
}

/// The ids of a batch on the model's device: `[B, T]`.
pub fn batch_ids(batch: &Batch, model: &Model) -> Tensor<2, Int> {
    let ids: Vec<i64> = batch.token_ids.iter().map(|&id| i64::from(id)).collect();
    Tensor::from_data(TensorData::new(ids, [batch.rows(), batch.seq_len()]), &model.device())
}

/// Rows of a micro-batch where the config leaves it open.
pub fn default_micro_batch_size(batch_size: usize, replicas: usize) -> usize {
    batch_size.div_ceil(replicas).clamp(1, 16)
}

/// Workers where the config leaves it open.
pub fn default_replicas(device_name: &str) -> usize {
    match device_name {
        "cpu" => thread::available_parallelism().map_or(1, std::num::NonZero::get),
        _ => 1,
    }
}

/// A copy without gradients, for evaluation.
pub fn without_gradients(model: &Model) -> Model {
    model.valid()
}
