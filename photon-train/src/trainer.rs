//! The loop: batch, gradients, clip, update; now and then an evaluation, a sample, a checkpoint.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use photon_core::checkpoint::{self, CheckpointError};
use photon_core::device::OpenDevice;
use photon_core::loss::bits_per_byte;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use serde::Serialize;

use crate::config::RunConfig;
use crate::data::{BatchLoader, BatchSource, Prepared, TokenStore};
use crate::eval::{Evaluation, evaluate};
use crate::record::{Existing, RecordError, RunFolder};
use crate::replicas::{Replicas, divide, without_gradients};
use crate::sample::{SampleError, sample_text};
use crate::schedule::learning_rate;
use crate::step::Learner;

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The run folder.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A sample.
    #[error("no sample could be drawn: {0}")]
    Sample(#[from] SampleError),
    /// The tokenizer is not the model's.
    #[error("model.vocab_size = {expected}, but the tokenizer has {found} entries: set model.vocab_size={found}")]
    Vocabulary {
        /// The config's.
        expected: usize,
        /// The tokenizer's.
        found: usize,
    },
    /// The loss, the gradients or an evaluation are no numbers any more.
    #[error(
        "the loss or its gradient is not finite at step {step}: lower optimizer.learning_rate or lengthen \
         optimizer.warmup_steps; the last checkpoint is as it was"
    )]
    NotFinite {
        /// The step.
        step: u64,
    },
    /// No threads for the replicas.
    #[error("cannot start the worker threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

/// One update in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepReport {
    /// Updates made, this one included.
    pub step: u64,
    /// Tokens seen, this update's included.
    pub tokens: u64,
    /// Mean cross-entropy of the batch before the update.
    pub loss_nats: f64,
    /// The same in bits a byte of text.
    pub bits_per_byte: f64,
    /// Reconstruction distance before `alpha`.
    pub reconstruction: f64,
    /// Norm of all gradients before clipping.
    pub gradient_norm: f64,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Tokens a second over this update.
    pub tokens_per_sec: f64,
}

/// One evaluation in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalReport {
    /// Updates made.
    pub step: u64,
    /// On held-out text.
    pub held_out: Evaluation,
    /// Text from the model.
    pub sample: Option<String>,
    /// Whether no evaluation before was better; never so for fresh weights, which are no result.
    pub is_best: bool,
}

/// Who watches a run.
pub trait Observer {
    /// After each update.
    fn step(&mut self, report: &StepReport);
    /// After each evaluation.
    fn evaluation(&mut self, report: &EvalReport);
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Updates made.
    pub steps: u64,
    /// The last evaluation.
    pub last: Evaluation,
    /// Fewest held-out bits per byte of any evaluation after a step; infinite if there was none.
    pub best_bits_per_byte: f64,
    /// Whether it was asked to stop before the last step.
    pub interrupted: bool,
}

/// What was asked for beside the config, and with what.
#[derive(Serialize)]
struct RunFacts {
    seed: u64,
    commit: &'static str,
    version: &'static str,
    device: &'static str,
    replicas: usize,
    micro_batch_size: usize,
    parameters: usize,
    train_tokens: usize,
    train_bytes: u64,
    held_out_tokens: usize,
    held_out_bytes: u64,
}

/// Where and under whose eyes a run goes.
pub struct RunPlace<'a> {
    /// The run folder.
    pub folder: &'a Path,
    /// What becomes of one that is there already.
    pub existing: Existing,
    /// Set to end the run after the step at hand, with a checkpoint.
    pub stop: &'a AtomicBool,
    /// Told of every step and evaluation.
    pub observer: &'a mut dyn Observer,
}

/// A run under way.
struct Trainer<'a> {
    config: &'a RunConfig,
    tokenizer: &'a Tokenizer,
    valid: &'a TokenStore,
    learner: Learner,
    folder: RunFolder,
    best_bits_per_byte: f64,
}

/// Trains from fresh weights.
///
/// # Errors
///
/// A tokenizer that does not fit, a loss that is not finite, a system that refuses to write.
pub fn train(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    data: Prepared,
    device: &OpenDevice,
    place: RunPlace,
) -> Result<Outcome, TrainError> {
    let train = &config.train;
    check_vocabulary(config, tokenizer)?;
    let data = data.packed_for(config.model.meta_chunk_tokens());
    let (n_replicas, micro_batch_size) = divide(train.batch_size, train.replicas, train.micro_batch_size, device.name);
    let mut model = Model::new(&config.model, train.seed, &device.device.clone().autodiff());
    let facts = RunFacts {
        seed: train.seed,
        commit: photon_core::BUILD_COMMIT,
        version: env!("CARGO_PKG_VERSION"),
        device: device.name,
        replicas: n_replicas,
        micro_batch_size,
        parameters: burn::module::Module::num_params(&model),
        train_tokens: data.train.len(),
        train_bytes: data.train.text_bytes(),
        held_out_tokens: data.valid.len(),
        held_out_bytes: data.valid.text_bytes(),
    };
    let mut trainer = Trainer {
        config,
        tokenizer,
        valid: &data.valid,
        learner: Learner::new(&model, &train.optimizer, train.alpha, micro_batch_size, Replicas::new(n_replicas)?),
        folder: RunFolder::create(place.folder, place.existing, &config.to_toml(), &facts)?,
        best_bits_per_byte: f64::INFINITY,
    };
    let bytes_per_token = data.train.bytes_per_token();
    let source = Arc::new(BatchSource::new(Arc::new(data.train), train.seq_len, train.batch_size, train.seed));
    let mut batches = BatchLoader::start(&source, 0, 1);
    let mut tokens = 0;
    let mut last = trainer.evaluate(&model, 0, place.observer)?;
    let mut steps_done = 0;
    for step in 0..train.steps {
        if place.stop.load(Ordering::Relaxed) {
            break;
        }
        let started = Instant::now();
        let batch = batches.next_batch();
        let learning_rate = learning_rate(&train.optimizer, step, train.steps);
        let update;
        (model, update) = trainer.learner.learn(model, &batch, learning_rate);
        if !update.is_finite() {
            return Err(TrainError::NotFinite { step: step + 1 });
        }

        steps_done = step + 1;
        tokens += batch.n_tokens() as u64;
        let report = StepReport {
            step: steps_done,
            tokens,
            loss_nats: update.cross_entropy_nats,
            bits_per_byte: bits_per_byte(update.cross_entropy_nats, bytes_per_token),
            reconstruction: update.reconstruction,
            gradient_norm: update.gradient_norm,
            learning_rate,
            tokens_per_sec: batch.n_tokens() as f64 / started.elapsed().as_secs_f64(),
        };
        trainer.record_step(&report)?;
        place.observer.step(&report);
        let is_last = steps_done == train.steps;
        if is_last || steps_done.is_multiple_of(train.eval.every_steps) {
            last = trainer.evaluate(&model, steps_done, place.observer)?;
        }
        if is_last || steps_done.is_multiple_of(train.checkpoint_every_steps) {
            trainer.save_last(&model, steps_done)?;
        }
    }
    let interrupted = steps_done < train.steps;
    if interrupted {
        trainer.save_last(&model, steps_done)?;
    }
    Ok(Outcome { steps: steps_done, last, best_bits_per_byte: trainer.best_bits_per_byte, interrupted })
}

/// Whether model and tokenizer agree on the vocabulary.
///
/// # Errors
///
/// If not.
pub fn check_vocabulary(config: &RunConfig, tokenizer: &Tokenizer) -> Result<(), TrainError> {
    let (expected, found) = (config.model.vocab_size(), tokenizer.vocab_size());
    match expected == found {
        true => Ok(()),
        false => Err(TrainError::Vocabulary { expected, found }),
    }
}

impl Trainer<'_> {
    fn record_step(&mut self, report: &StepReport) -> Result<(), TrainError> {
        self.folder.metrics(&Line::Step(report))?;
        for (tag, value) in [
            ("train/loss_nats", report.loss_nats),
            ("train/bits_per_byte", report.bits_per_byte),
            ("train/gradient_norm", report.gradient_norm),
            ("train/learning_rate", report.learning_rate),
            ("train/tokens_per_sec", report.tokens_per_sec),
        ] {
            self.folder.scalar(tag, value, report.step)?;
        }
        if self.config.train.alpha > 0.0 {
            self.folder.scalar("train/reconstruction", report.reconstruction, report.step)?;
        }
        Ok(())
    }

    fn evaluate(&mut self, model: &Model, step: u64, observer: &mut dyn Observer) -> Result<Evaluation, TrainError> {
        let train = &self.config.train;
        let model = without_gradients(model);
        let held_out =
            evaluate(&model, self.tokenizer, self.valid, train.seq_len, train.eval.max_tokens, self.learner.replicas());
        if !held_out.nats_per_token.is_finite() {
            return Err(TrainError::NotFinite { step });
        }
        let sample = match train.eval.sample_tokens {
            0 => None,
            n => Some(sample_text(&model, self.tokenizer, &train.eval.sample_prompt, n, train.seed)?),
        };
        let is_best = step > 0 && held_out.bits_per_byte < self.best_bits_per_byte;
        let report = EvalReport { step, held_out, sample, is_best };
        self.folder.metrics(&Line::Evaluation(&report))?;
        self.folder.scalar("held_out/bits_per_byte", report.held_out.bits_per_byte, step)?;
        self.folder.scalar("held_out/loss_nats", report.held_out.nats_per_token, step)?;
        if let Some(sample) = &report.sample {
            self.folder.sample(step, sample)?;
        }
        if is_best {
            self.best_bits_per_byte = report.held_out.bits_per_byte;
            checkpoint::save(&self.folder.best_checkpoint(), &model, self.tokenizer)?;
        }
        observer.evaluation(&report);
        Ok(report.held_out)
    }

    /// Saves weights that still predict; others must not take the place of good ones.
    fn save_last(&self, model: &Model, step: u64) -> Result<(), TrainError> {
        let model = without_gradients(model);
        let seq_len = self.config.train.seq_len;
        let glance = evaluate(&model, self.tokenizer, self.valid, seq_len, seq_len, self.learner.replicas());
        if !glance.nats_per_token.is_finite() {
            return Err(TrainError::NotFinite { step });
        }
        Ok(checkpoint::save(&self.folder.last_checkpoint(), &model, self.tokenizer)?)
    }
}

/// One line of `metrics.jsonl`.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line<'a> {
    Step(&'a StepReport),
    Evaluation(&'a EvalReport),
}
