//! Several copies of the model at work on one update, each on a core of its own.
//!
//! One model keeps little more than one core busy on the CPU backend. Copies share their weights (tensors are
//! reference-counted). Each adds up the gradients of its micro-batches, then the sums are added, and those of all ranks:
//! however many replicas and ranks there are, results differ by the order of additions only.

use std::rc::Rc;
use std::thread;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Int, Tensor, TensorData};
use photon_core::loss::Objective;
use photon_core::model::Model;
use photon_core::nn::compute::Compute;
use photon_core::nn::leaves::with_own_leaves;
use rayon::ThreadPool;

use crate::data::Batch;
use crate::ranks::Ranks;

/// The workers of a run in this process, and what joins them with those of others.
pub struct Replicas {
    ranks: Rc<Ranks>,
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
    /// `n` workers, in the only process of a run.
    ///
    /// # Errors
    ///
    /// If the system gives no threads.
    pub fn new(n: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        Self::on_rank(Rc::new(Ranks::alone()), n)
    }

    /// `n` workers on one of the ranks of a run.
    ///
    /// # Errors
    ///
    /// If the system gives no threads.
    pub fn on_rank(ranks: Rc<Ranks>, n: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let pool = || rayon::ThreadPoolBuilder::new().num_threads(1).build();
        let pools = if n > 1 { (0..n).map(|_| pool()).collect::<Result<_, _>>()? } else { Vec::new() };
        Ok(Self { ranks, pools })
    }

    /// The processes of the run.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Gradients of the batch of which `micro_batches` are this rank's share.
    pub fn gradients(&self, model: &Model, objective: &Objective, micro_batches: &[Batch]) -> BatchGradients {
        let shares = self.map(model, micro_batches, |model, share| {
            let parts = share.iter().map(|batch| {
                let (ids, is_real) = (batch_ids(batch, model), batch.is_real());
                let loss = objective.loss_apart(model, ids, &is_real, &batch.apart);
                let grads = GradientsParams::from_grads(loss.total.backward(), model);
                // Read after the backward pass is under way: a read waits for the device.
                let values = Tensor::cat(vec![loss.cross_entropy, loss.reconstruction, loss.z], 0);
                let values: Vec<f32> = values.try_into_vec_as().expect("losses are f32");
                let [cross_entropy_nats, reconstruction, z] = [0, 1, 2].map(|index| f64::from(values[index]));
                BatchGradients { grads, cross_entropy_nats, reconstruction, z }
            });
            sum(model, parts)
        });
        sum_over_ranks(&self.ranks, model, sum(model, shares))
    }

    /// Shares pieces of work out among the replicas, in runs of neighbours; one result for each share, in order.
    pub fn map<T: Sync, R: Send>(
        &self,
        model: &Model,
        pieces: &[T],
        work: impl Fn(&Model, &[T]) -> R + Sync,
    ) -> Vec<R> {
        let n_replicas = self.pools.len().min(pieces.len());
        if n_replicas <= 1 {
            return vec![work(model, pieces)];
        }
        let work = &work;
        thread::scope(|scope| {
            let shares = pieces.chunks(pieces.len().div_ceil(n_replicas));
            let workers: Vec<_> = shares
                .zip(&self.pools)
                .map(|(share, pool)| {
                    let model = with_own_leaves(model.clone());
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

/// The sums of what all ranks hold.
fn sum_over_ranks(ranks: &Ranks, model: &Model, own: BatchGradients) -> BatchGradients {
    struct Flat<'a> {
        grads: &'a GradientsParams,
        tensors: Vec<Tensor<1>>,
    }
    impl ModuleVisitor for Flat<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.tensors.extend(self.grads.get::<D>(param.id).map(|grad| grad.reshape::<1, _>([-1])));
        }
    }
    struct Apart<'a> {
        grads: &'a GradientsParams,
        values: Tensor<1>,
        taken: usize,
        summed: GradientsParams,
    }
    impl ModuleVisitor for Apart<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(grad) = self.grads.get::<D>(param.id) else { return };
            let (shape, first) = (grad.shape(), self.taken);
            self.taken += shape.num_elements();
            let own = self.values.clone().narrow(0, first, shape.num_elements());
            self.summed.register::<D>(param.id, own.reshape(shape));
        }
    }

    if ranks.n_ranks() == 1 {
        return own;
    }
    let mut losses = [own.cross_entropy_nats, own.reconstruction, own.z];
    ranks.sum(&mut losses);
    let mut flat = Flat { grads: &own.grads, tensors: Vec::new() };
    model.visit(&mut flat);
    // One sum, not one for each tensor.
    let values = ranks.sum_tensor(Tensor::cat(flat.tensors, 0));
    let mut apart = Apart { grads: &own.grads, values, taken: 0, summed: GradientsParams::new() };
    model.visit(&mut apart);
    let [cross_entropy_nats, reconstruction, z] = losses;
    BatchGradients { grads: apart.summed, cross_entropy_nats, reconstruction, z }
}

/// The ids of a batch on the model's device: `[B, T]`.
pub fn batch_ids(batch: &Batch, model: &Model) -> Tensor<2, Int> {
    let ids: Vec<i64> = batch.token_ids.iter().map(|&id| i64::from(id)).collect();
    Tensor::from_data(TensorData::new(ids, [batch.rows(), batch.seq_len()]), &model.device())
}

/// Replicas and rows of a micro-batch for `batch_size` rows of one process, where a config leaves them open.
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
