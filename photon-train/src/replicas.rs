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
use photon_core::nn::compute::Compute;
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
    /// Mean square of the log of the softmax's denominator, before its weight; 0 where that is.
    pub z: f64,
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
            let parts = share.iter().map(|batch| {
                let loss = objective.loss_of_places(model, batch_ids(batch, model), &batch.is_real());
                let grads = GradientsParams::from_grads(loss.total.backward(), model);
                // Read after the backward pass is under way: a read waits for the device.
                let values = Tensor::cat(vec![loss.cross_entropy, loss.reconstruction, loss.z], 0);
                let values: Vec<f32> = values.try_into_vec_as().expect("losses are f32");
                let [cross_entropy_nats, reconstruction, z] = [0, 1, 2].map(|index| f64::from(values[index]));
                BatchGradients { grads, cross_entropy_nats, reconstruction, z }
            });
            sum(model, parts)
        });
        sum(model, shares)
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

/// Adds up parts in their order.
fn sum(model: &Model, parts: impl IntoIterator<Item = BatchGradients>) -> BatchGradients {
    let mut grads = GradientsAccumulator::new();
    let (mut cross_entropy_nats, mut reconstruction, mut z) = (0.0, 0.0, 0.0);
    for part in parts {
        grads.accumulate(model, part.grads);
        cross_entropy_nats += part.cross_entropy_nats;
        reconstruction += part.reconstruction;
        z += part.z;
    }
    BatchGradients { grads: grads.grads(), cross_entropy_nats, reconstruction, z }
}

/// The ids of a batch on the model's device: `[B, T]`.
pub fn batch_ids(batch: &Batch, model: &Model) -> Tensor<2, Int> {
    let ids: Vec<i64> = batch.token_ids.iter().map(|&id| i64::from(id)).collect();
    Tensor::from_data(TensorData::new(ids, [batch.rows(), batch.seq_len()]), &model.device())
}

/// Replicas and rows of a micro-batch for a batch of `batch_size` rows, where a config leaves them open.
pub fn divide(
    batch_size: usize,
    replicas: Option<usize>,
    micro_batch_size: Option<usize>,
    device_name: &str,
) -> (usize, usize) {
    let replicas = replicas.unwrap_or_else(|| default_replicas(device_name)).min(batch_size);
    let micro_batch_size = micro_batch_size.unwrap_or_else(|| batch_size.div_ceil(replicas).clamp(1, 16));
    (replicas, micro_batch_size)
}

/// Workers where the config leaves it open.
pub fn default_replicas(device_name: &str) -> usize {
    match device_name {
        "cpu" => thread::available_parallelism().map_or(1, std::num::NonZero::get),
        _ => 1,
    }
}

/// A copy without gradients, for evaluation: in f32, whatever stacks train in, as whoever loads the weights sees them.
pub fn without_gradients(model: &Model) -> Model {
    model.valid().with_compute(|_| Compute::F32)
}
