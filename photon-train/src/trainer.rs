//! The loop: batch, gradients, guard, update; now and then an evaluation, a sample, a checkpoint.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use burn::tensor::Device;
use photon_core::accounting::model_cost;
use photon_core::config::ConfigError;
use photon_core::device::{DeviceError, OpenDevice, check_tensors};
use photon_core::loss::bits_per_byte;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;

use crate::average::Average;
use crate::checkpoint::{Best, Contents, Measured, TrainState, TrainingCheckpointError};
use crate::config::RunConfig;
use crate::curves;
use crate::data::{BatchLoader, BatchSource, Prepared, RowShape, TokenStore};
use crate::eval::{Evaluation, evaluate};
use crate::guard::SkipReason;
use crate::histogram::{Spread, stage_histograms};
use crate::init_from::InitFromError;
use crate::parameters::{fingerprint, parts_with_bad_gradients};
use crate::peak::Peak;
use crate::ranks::{Ranks, RanksError};
use crate::record::{Existing, RecordError, RunFolder};
use crate::replicas::without_gradients;
use crate::report::{EvalReport, Line, Memory, Observer, Outcome, SkipReport, StepReport, StuckReport};
use crate::sample::{SampleError, sample_text};
use crate::schedule::learning_rate;
use crate::start::{Setting, Start, start};
use crate::step::{Gradients, Learner};

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The run folder.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] TrainingCheckpointError),
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
    /// An evaluation gives no numbers any more.
    #[error(
        "the weights no longer predict at step {step}: lower optimizer.learning_rate or lengthen \
         optimizer.warmup_steps; the last checkpoint is as it was"
    )]
    NotFinite {
        /// The step.
        step: u64,
    },
    /// Too many updates in a row had to be skipped.
    #[error(transparent)]
    Stuck(Box<StuckReport>),
    /// The processes of the run.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// What the weights should have come from.
    #[error(transparent)]
    InitFrom(#[from] InitFromError),
    /// The device cannot hold the model.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device lacks a precision.
    #[error(transparent)]
    Precision(#[from] ConfigError),
    /// No threads for the replicas.
    #[error("cannot start the worker threads: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}

/// Where and under whose eyes a run goes.
pub struct RunPlace<'a> {
    /// The run folder.
    pub folder: &'a Path,
    /// What becomes of one that is there already.
    pub existing: Existing,
    /// Keys of the config that may differ from those of the run that goes on.
    pub accept: &'a [String],
    /// Set to end the run after the step at hand, with a checkpoint.
    pub stop: &'a AtomicBool,
    /// Told of every step and evaluation.
    pub observer: &'a mut dyn Observer,
    /// The processes that work on it.
    pub ranks: &'a Rc<Ranks>,
    /// What the machine could compute at most, where that is known.
    pub peak: Option<Peak>,
}

/// A run under way.
struct Trainer<'a> {
    config: &'a RunConfig,
    tokenizer: &'a Tokenizer,
    data: HeldOutData<'a>,
    source: Arc<BatchSource>,
    batches: BatchLoader,
    /// The rows that the observer was last told of.
    told_shape: Option<RowShape>,
    bytes_per_token: f64,
    learner: Learner,
    average: Option<Average>,
    /// Of the first rank, which alone writes.
    folder: Option<RunFolder>,
    state: TrainState,
    saved_step: Option<u64>,
    observer: &'a mut dyn Observer,
    device: &'a Device,
    /// Tokens a second at the machine's peak.
    peak_tokens_per_sec: Option<f64>,
}

/// What evaluations look at.
struct HeldOutData<'a> {
    all: &'a TokenStore,
    /// Empty where there is only one.
    sources: Vec<&'a (String, TokenStore)>,
}

/// Trains from fresh weights, or from where a run in the folder stands.
///
/// # Errors
///
/// A tokenizer that does not fit, a run that would not be the one begun, updates that are all skipped, a system that
/// refuses to write.
pub fn train(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    data: Prepared,
    device: &OpenDevice,
    place: RunPlace,
) -> Result<Outcome, TrainError> {
    check_vocabulary(config, tokenizer)?;
    check_tensors(&device.device, &config.model)?;
    config.train.precision.check(&config.model, &device.device, device.name)?;
    let data = data.packed_for(config.model.meta_chunk_tokens());
    let RunPlace { accept, peak, ranks, .. } = place;
    let setting = Setting { config, tokenizer, data: &data, device, ranks, accept, peak };
    let Start { model, average, learner, folder, state } =
        start(&setting, place.folder, place.existing, place.observer)?;
    let train = &config.train;
    let bytes_per_token = data.train.bytes_per_token();
    let flops_per_token = model_cost(&config.model, train.seq_len).training_flops_per_token();
    let source = Arc::new(BatchSource::staged(Arc::new(data.train), &train.row_shapes(), train.seed));
    let trainer = Trainer {
        config,
        tokenizer,
        data: HeldOutData::of(&data.valid, &data.valid_sources),
        bytes_per_token,
        batches: BatchLoader::start(&source, state.step, 1),
        source,
        told_shape: None,
        learner,
        average,
        folder,
        // Weights that come from a checkpoint need not be saved again.
        saved_step: state.last.as_ref().map(|_| state.step),
        state,
        observer: place.observer,
        device: &device.device,
        peak_tokens_per_sec: peak.map(|peak| ranks.n_ranks() as f64 * peak.flops_per_sec / flops_per_token),
    };
    trainer.run(model, place.stop)
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

impl<'a> HeldOutData<'a> {
    fn of(all: &'a TokenStore, sources: &'a [(String, TokenStore)]) -> Self {
        // A single token predicts nothing.
        let sources: Vec<_> = sources.iter().filter(|(_, store)| store.n_places() >= 2).collect();
        Self { all, sources: if sources.len() > 1 { sources } else { Vec::new() } }
    }
}

impl Trainer<'_> {
    fn run(mut self, mut model: Model, stop: &AtomicBool) -> Result<Outcome, TrainError> {
        let train = &self.config.train;
        if self.state.last.is_none() {
            self.evaluate(&model)?;
        }
        while self.state.step < train.steps && !self.ranks().any(stop.load(Ordering::Relaxed)) {
            model = self.step(model)?;
            let step = self.state.step;
            let is_last = step == train.steps;
            if self.evaluates_after(step) {
                self.evaluate(&model)?;
            }
            let is_best = self.state.best.is_some_and(|best| best.step == step);
            if is_last || is_best || step.is_multiple_of(train.checkpoint_every_steps) {
                self.save(&model)?;
            }
        }
        if self.saved_step != Some(self.state.step) {
            self.save(&model)?;
        }
        Ok(Outcome {
            steps: self.state.step,
            last: self.state.last.expect("a run evaluates before its first step").held_out,
            best_bits_per_byte: self.state.best.map_or(f64::INFINITY, |best| best.bits_per_byte),
            interrupted: self.state.step < train.steps,
        })
    }

    fn evaluates_after(&self, step: u64) -> bool {
        let train = &self.config.train;
        step == train.steps || step.is_multiple_of(train.eval.every_steps)
    }

    /// One batch, and the update that it leads to unless the guard objects.
    fn step(&mut self, model: Model) -> Result<Model, TrainError> {
        let started = Instant::now();
        let train = &self.config.train;
        self.tell_shape();
        let batch = self.batches.next_batch();
        let learning_rate = learning_rate(&train.optimizer, self.state.step, train.steps);
        let gradients = self.learner.gradients(&model, &batch);
        self.state.step += 1;
        self.state.tokens += batch.n_tokens() as u64;
        if let Some(reason) = self.state.guard.judge(&train.guards, self.state.step, &gradients.update) {
            self.skip(reason, &model, &gradients, learning_rate)?;
            return Ok(model);
        }

        if self.evaluates_after(self.state.step) {
            self.record_histograms("gradients", &model, Spread::Gradients(&gradients.grads))?;
        }
        let (update, stage_gradient_norms) = (gradients.update, gradients.stage_norms.clone());
        let model = self.learner.apply(model, gradients, learning_rate);
        if let Some(average) = &mut self.average {
            average.take(&model);
        }
        let tokens_per_sec = batch.n_tokens() as f64 / started.elapsed().as_secs_f64();
        let report = StepReport {
            step: self.state.step,
            tokens: self.state.tokens,
            loss_nats: update.cross_entropy_nats,
            bits_per_byte: bits_per_byte(update.cross_entropy_nats, self.bytes_per_token),
            reconstruction: update.reconstruction,
            z: update.z,
            seq_len: batch.seq_len(),
            gradient_norm: update.gradient_norm,
            stage_gradient_norms,
            learning_rate,
            tokens_per_sec,
            share_of_peak: self.peak_tokens_per_sec.map(|peak| tokens_per_sec / peak),
            memory: Memory::now(self.device),
        };
        self.record_step(&report)?;
        self.observer.step(&report);
        Ok(model)
    }

    /// Says how long rows are now, where that changes along the run.
    fn tell_shape(&mut self) {
        let (train, step) = (&self.config.train, self.state.step);
        let shape = self.source.shape(step);
        if !train.curriculum.is_empty() && self.told_shape.replace(shape) != Some(shape) {
            let RowShape { seq_len, batch_size, .. } = shape;
            self.observer.notice(&format!("from step {step} on an update has {batch_size} rows of {seq_len} tokens"));
        }
    }

    /// Leaves an update out, and ends the run if that happens too often.
    fn skip(
        &mut self,
        reason: SkipReason,
        model: &Model,
        gradients: &Gradients,
        learning_rate: f64,
    ) -> Result<(), TrainError> {
        let guard = &self.state.guard;
        let report = SkipReport {
            step: self.state.step,
            tokens: self.state.tokens,
            reason,
            loss_nats: gradients.update.cross_entropy_nats,
            gradient_norm: gradients.update.gradient_norm,
            usual_norm: guard.usual_norm(),
            learning_rate,
            bad_parts: parts_with_bad_gradients(model, &gradients.grads),
            skipped_in_a_row: guard.skipped_in_a_row,
        };
        if let Some(folder) = &mut self.folder {
            folder.metrics(&Line::Skip(&report))?;
            folder.scalars(report.step, &[("train/skipped_updates".into(), guard.skipped as f64)])?;
        }
        self.observer.skip(&report);
        if report.skipped_in_a_row < self.config.train.guards.max_skips_in_a_row {
            return Ok(());
        }
        let checkpoint = self.folder.as_ref().map(|folder| folder.checkpoints().newest()).transpose()?.flatten();
        Err(TrainError::Stuck(Box::new(StuckReport { last: report, recent: guard.recent_lines(), checkpoint })))
    }

    fn record_step(&mut self, report: &StepReport) -> Result<(), TrainError> {
        let Some(folder) = &mut self.folder else { return Ok(()) };
        folder.metrics(&Line::Step(report))?;
        let mut curves = curves::of_step(report);
        curves.push(("train/data_wait_share".into(), self.batches.wait_share()));
        let train = &self.config.train;
        for (is_used, tag, value) in [
            (train.alpha > 0.0, "train/reconstruction", report.reconstruction),
            (train.z_loss > 0.0, "train/z", report.z),
            (!train.curriculum.is_empty(), "train/seq_len", report.seq_len as f64),
        ] {
            if is_used {
                curves.push((tag.into(), value));
            }
        }
        Ok(folder.scalars(report.step, &curves)?)
    }

    fn record_histograms(&mut self, kind: &str, model: &Model, spread: Spread) -> Result<(), TrainError> {
        let Some(folder) = &mut self.folder else { return Ok(()) };
        if self.config.train.eval.histograms {
            folder.histograms(self.state.step, kind, &stage_histograms(model, spread))?;
        }
        Ok(())
    }

    fn ranks(&self) -> &Ranks {
        self.learner.replicas().ranks()
    }

    /// The weights that are evaluated and exported: the average where there is one.
    fn evaluated(&self, model: &Model) -> Model {
        match &self.average {
            Some(average) => average.model().clone(),
            None => without_gradients(model),
        }
    }

    fn held_out(&self, model: &Model, store: &TokenStore, max_tokens: usize) -> Evaluation {
        let seq_len = self.config.train.seq_len;
        evaluate(model, self.tokenizer, store, seq_len, max_tokens, self.learner.replicas())
    }

    fn evaluate(&mut self, model: &Model) -> Result<(), TrainError> {
        let (train, step) = (&self.config.train, self.state.step);
        self.record_histograms("weights", model, Spread::Weights)?;
        let model = self.evaluated(model);
        let max_tokens = train.eval.max_tokens;
        let held_out = self.held_out(&model, self.data.all, max_tokens);
        if !held_out.nats_per_token.is_finite() {
            return Err(TrainError::NotFinite { step });
        }
        // All sources together take as long as the whole once more.
        let source_tokens = max_tokens / self.data.sources.len().max(1);
        let of_source = |(name, store): &&(String, _)| (name.clone(), self.held_out(&model, store, source_tokens));
        let sources = self.data.sources.iter().map(of_source).collect();
        let sample = match train.eval.sample_tokens {
            n if n == 0 || self.folder.is_none() => None,
            n => Some(sample_text(&model, self.tokenizer, &train.eval.sample_prompt, n, train.seed)?),
        };
        let bits_per_byte = held_out.bits_per_byte;
        let is_best = step > 0 && self.state.best.is_none_or(|best| bits_per_byte < best.bits_per_byte);
        let report = EvalReport { step, held_out, sources, sample, is_best };
        if let Some(folder) = &mut self.folder {
            folder.metrics(&Line::Evaluation(&report))?;
            folder.scalars(step, &curves::of_evaluation(&report))?;
            if let Some(sample) = &report.sample {
                folder.sample(step, sample)?;
            }
        }
        if is_best {
            self.state.best = Some(Best { step, bits_per_byte });
        }
        self.observer.evaluation(&report);
        self.state.last = Some(Measured { step, held_out: report.held_out });
        Ok(())
    }

    /// Saves weights that still predict; others must not take the place of good ones.
    fn save(&mut self, model: &Model) -> Result<(), TrainError> {
        let step = self.state.step;
        let evaluated = self.evaluated(model);
        if self.state.last.as_ref().is_none_or(|last| last.step != step) {
            let glance = self.held_out(&evaluated, self.data.all, self.config.train.seq_len);
            if !glance.nats_per_token.is_finite() {
                return Err(TrainError::NotFinite { step });
            }
        }
        let same = "a machine or its memory is at fault; go on from the newest checkpoint with --resume";
        self.ranks().agree("weights", same, || fingerprint(model))?;
        self.saved_step = Some(step);
        let Some(folder) = &mut self.folder else { return Ok(()) };
        self.state.files = folder.lengths()?;
        self.state.average_updates = self.average.as_ref().map_or(0, Average::updates);
        let trained = self.average.as_ref().map(|_| without_gradients(model));
        let checkpoints = folder.checkpoints();
        checkpoints.save(&Contents {
            evaluated: &evaluated,
            trained: trained.as_ref(),
            tokenizer: self.tokenizer,
            memory: &self.learner.optimizer().memory(model),
            run_config: &self.config.to_toml(),
            state: &self.state,
        })?;
        checkpoints.retain(&self.config.train.checkpoints)?;
        Ok(())
    }
}
