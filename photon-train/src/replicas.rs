//! Several copies of the model at work on one update, each on a core of its own.
//!
//! One model keeps little more than one core busy on the CPU backend. Copies share their weights (tensors are
//! reference-counted). Each adds up the gradients of its micro-batches, then the sums are added: however many
//! replicas there are, results differ by the order of additions only.

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
        let shares = self.map(model, micro_batches, |model, share| {
            let mut sum = Share { grads: GradientsAccumulator::new(), cross_entropy: 0.0, reconstruction: 0.0 };
            for batch in share {
                let loss = objective.loss(model, batch_ids(batch, model), &batch.lens);
                sum.grads.accumulate(model, GradientsParams::from_grads(loss.total.backward(), model));
                // Read after the backward pass is under way: a read waits for the device.
                let parts = Tensor::cat(vec![loss.cross_entropy, loss.reconstruction], 0);
                let parts: Vec<f32> = parts.try_into_vec_as().expect("losses are f32");
                sum.cross_entropy += f64::from(parts[0]);
                sum.reconstruction += f64::from(parts[1]);
            }
            sum
        });
        let mut grads = GradientsAccumulator::new();
        let (mut cross_entropy_nats, mut reconstruction) = (0.0, 0.0);
        for mut share in shares {
            grads.accumulate(model, share.grads.grads());
            cross_entropy_nats += share.cross_entropy;
            reconstruction += share.reconstruction;
        }
        BatchGradients { grads: grads.grads(), cross_entropy_nats, reconstruction }
    }

    /// Shares the batches out among the replicas, in runs of neighbours; one result for each share, in order.
    pub fn map<R: Send>(
        &self,
        model: &Model,
        batches: &[Batch],
        work: impl Fn(&Model, &[Batch]) -> R + Sync,
    ) -> Vec<R> {
        let n_replicas = self.pools.len().min(batches.len());
        if n_replicas <= 1 {
            return vec![work(model, batches)];
        }
        let work = &work;
        thread::scope(|scope| {
            let shares = batches.chunks(batches.len().div_ceil(n_replicas));
            let workers: Vec<_> = shares
                .zip(&self.pools)
                .map(|(share, pool)| {
                    // Leaves of its own: graphs that share one would be run backward together.
                    let model = model.clone().fork(&model.device());
                    scope.spawn(move || pool.install(move || work(&model, share)))
                })
                .collect();
            let join = |worker: thread::ScopedJoinHandle<'_, R>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().map(join).collect()
        })
    }
}

/// What one replica has added up.
struct Share {
    grads: GradientsAccumulator<Model>,
    cross_entropy: f64,
    reconstruction: f64,
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
