//! How fast a model trains here, and how much of the machine's matrix-product rate that uses.

use std::time::Instant;

use burn::tensor::Device;
use photon_core::accounting::model_cost;
use photon_core::config::ModelConfig;
use photon_core::device::OpenDevice;
use photon_core::model::Model;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use crate::config::OptimizerConfig;
use crate::data::Batch;
use crate::peak::{product_flops, product_secs};
use crate::replicas::{Replicas, divide};
use crate::step::Learner;

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TrainBenchConfig {
    /// Rows of an update.
    pub batch_size: usize,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Updates that count.
    pub steps: usize,
    /// Updates before that do not.
    pub warmup_steps: usize,
    /// Models side by side; `None`: one for each core on the CPU.
    pub replicas: Option<usize>,
    /// Rows that go through a model at once; `None`: as in a run.
    pub micro_batch_size: Option<usize>,
    /// Whether blocks run again in the backward pass.
    pub gradient_checkpointing: bool,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainBenchReport {
    /// From the median update.
    pub training_tokens_per_sec: f64,
    /// Useful arithmetic of one token: three forwards.
    pub training_flops_per_token: f64,
    /// Rate of a product of two 2048 x 2048 matrices on all cores, in 10⁹ FLOPs a second.
    pub matmul_gflops: f64,
    /// Share of that rate which the useful arithmetic of training reaches.
    pub training_mfu: f64,
    /// Parameters.
    pub parameters: usize,
    /// Models side by side.
    pub replicas: usize,
    /// Rows that went through a model at once.
    pub micro_batch_size: usize,
}

/// Trains fresh weights on random tokens and takes the time.
///
/// # Errors
///
/// If the system gives no threads.
pub fn bench_training(
    model_config: &ModelConfig,
    config: TrainBenchConfig,
    device: &OpenDevice,
) -> Result<TrainBenchReport, rayon::ThreadPoolBuildError> {
    let (replicas, micro_batch_size) = divide(config.batch_size, config.replicas, config.micro_batch_size, device.name);
    let mut model = Model::new(model_config, 0, &device.with_gradients(config.gradient_checkpointing));
    let optimizer = OptimizerConfig::default();
    let mut learner = Learner::new(&model, &optimizer, 0.0, micro_batch_size, Replicas::new(replicas)?);
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let mut secs = Vec::with_capacity(config.steps);
    for step in 0..config.warmup_steps + config.steps {
        let n_tokens = config.batch_size * config.seq_len;
        let token_ids = (0..n_tokens).map(|_| rng.random_range(0..model_config.vocab_size() as u32)).collect();
        let batch = Batch::full(token_ids, config.seq_len);
        let started = Instant::now();
        (model, _) = learner.learn(model, &batch, optimizer.learning_rate);
        // Work that is still queued belongs to this update.
        device.device.sync().expect("the device that has just worked still does");
        if step >= config.warmup_steps {
            secs.push(started.elapsed().as_secs_f64());
        }
    }
    let cost = model_cost(model_config, config.seq_len);
    let training_tokens_per_sec = (config.batch_size * config.seq_len) as f64 / median(secs);
    let matmul_gflops = matmul_gflops(&device.device);
    Ok(TrainBenchReport {
        training_tokens_per_sec,
        training_flops_per_token: cost.training_flops_per_token(),
        matmul_gflops,
        training_mfu: training_tokens_per_sec * cost.training_flops_per_token() / (matmul_gflops * 1e9),
        parameters: cost.parameters(),
        replicas,
        micro_batch_size,
    })
}

/// The rate of a large square matrix product, in 10⁹ FLOPs a second: the median of several.
fn matmul_gflops(device: &Device) -> f64 {
    const SIZE: usize = 2048;
    const RUNS: usize = 7;
    product_flops(SIZE) / median(product_secs(device, SIZE, RUNS)) / 1e9
}

/// Of an even number of values the upper one of the two in the middle.
///
/// # Panics
///
/// If there is none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
