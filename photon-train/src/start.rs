//! How a run comes to its first step: from fresh weights, or from its newest checkpoint that is whole.

use burn::module::Module;
use photon_core::device::OpenDevice;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use serde::Serialize;

use crate::average::Average;
use crate::checkpoint::{Found, MadeWith, TrainState, TrainingCheckpointError, differences};
use crate::config::RunConfig;
use crate::data::Prepared;
use crate::peak::Peak;
use crate::record::{Claim, Existing, RunFolder};
use crate::replicas::{Replicas, divide};
use crate::report::Observer;
use crate::schedule::learning_rate;
use crate::step::Learner;
use crate::trainer::TrainError;

/// A run before its next step.
pub(crate) struct Start {
    pub(crate) model: Model,
    pub(crate) average: Option<Average>,
    pub(crate) learner: Learner,
    pub(crate) folder: RunFolder,
    pub(crate) state: TrainState,
}

/// What a run is made of.
pub(crate) struct Setting<'a> {
    pub(crate) config: &'a RunConfig,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) data: &'a Prepared,
    pub(crate) device: &'a OpenDevice,
    pub(crate) peak: Option<Peak>,
}

/// What was asked for beside the config, and with what.
#[derive(Serialize)]
struct RunFacts<'a> {
    seed: u64,
    commit: &'a str,
    version: &'a str,
    device: &'a str,
    replicas: usize,
    micro_batch_size: usize,
    parameters: usize,
    train_tokens: usize,
    train_bytes: u64,
    held_out_tokens: usize,
    held_out_bytes: u64,
    tokenizer: &'a str,
    data: &'a str,
    peak: Option<Peak>,
}

/// One line of `resumes.jsonl`.
#[derive(Serialize)]
struct Resumed<'a> {
    from_step: u64,
    steps: u64,
    made_with: &'a MadeWith,
    peak: Option<Peak>,
}

/// Begins a run or goes on with one, whichever is asked for and possible.
pub(crate) fn start(
    setting: &Setting,
    claim: Claim,
    existing: Existing,
    observer: &mut dyn Observer,
) -> Result<Start, TrainError> {
    let checkpoints = claim.checkpoints();
    if existing != Existing::Resume {
        return begin(setting, claim, existing);
    }
    checkpoints.clean()?;
    let (found, damaged) = checkpoints.newest_whole()?;
    let Some(found) = found else {
        observer.notice(&format!("{} has no checkpoint to go on from: beginning at step 0", claim.path().display()));
        return begin(setting, claim, Existing::Resume);
    };
    let start = go_on(setting, claim, found, observer)?;
    for damaged in damaged {
        let aside = checkpoints.set_aside(&damaged)?;
        observer.notice(&format!(
            "warning: a checkpoint is damaged; going on from step {} instead. {damaged}; it is now {}",
            start.state.step,
            aside.display()
        ));
    }
    checkpoints.publish(&start.state)?;
    Ok(start)
}

fn begin(setting: &Setting, claim: Claim, existing: Existing) -> Result<Start, TrainError> {
    let Setting { config, data, device, .. } = *setting;
    let train = &config.train;
    let model = Model::new(&config.model, train.seed, &device.with_gradients(train.gradient_checkpointing));
    let made_with = setting.made_with();
    let facts = RunFacts {
        seed: train.seed,
        commit: &made_with.commit,
        version: &made_with.version,
        device: device.name,
        replicas: made_with.replicas,
        micro_batch_size: made_with.micro_batch_size,
        parameters: model.num_params(),
        train_tokens: data.train.len(),
        train_bytes: data.train.text_bytes(),
        held_out_tokens: data.valid.len(),
        held_out_bytes: data.valid.text_bytes(),
        tokenizer: &made_with.tokenizer,
        data: &made_with.data,
        peak: setting.peak,
    };
    Ok(Start {
        average: train.ema.as_ref().map(|ema| Average::new(ema, &model)),
        learner: setting.learner(&model, &made_with)?,
        folder: RunFolder::create(claim, existing, &config.to_toml(), &facts)?,
        state: TrainState::new(made_with),
        model,
    })
}

fn go_on(setting: &Setting, claim: Claim, found: Found, observer: &mut dyn Observer) -> Result<Start, TrainError> {
    let Setting { config, device, .. } = *setting;
    let now_with = setting.made_with();
    let was_with = &found.state.made_with;
    let differences = differences(&found.run_config, was_with, config, &now_with);
    if !differences.is_empty() {
        let path = claim.path().into();
        return Err(TrainingCheckpointError::Differs { path, differences }.into());
    }
    for notice in notices(setting, &found, &now_with) {
        observer.notice(&notice);
    }
    let (replicas, micro_batch_size) = (was_with.replicas, was_with.micro_batch_size);
    let made_with = MadeWith { replicas, micro_batch_size, ..now_with };

    let (model, average) =
        found.load_models(&config.model, &device.with_gradients(config.train.gradient_checkpointing))?;
    let mut learner = setting.learner(&model, &made_with)?;
    learner.optimizer_mut().restore(&model, found.load_memory()?).map_err(|problems| found.misfit(problems))?;
    let ema = config.train.ema.as_ref();
    let updates = found.state.average_updates;
    let average = ema.zip(average).map(|(ema, average)| Average::resume(ema, updates, &model, &average));
    let note =
        Resumed { from_step: found.state.step, steps: config.train.steps, made_with: &made_with, peak: setting.peak };
    let (folder, lost) = RunFolder::resume(claim, &found.state.files, &config.to_toml(), &note)?;
    for lost in lost {
        observer.notice(&format!("warning: metrics of earlier steps are lost: {lost}"));
    }
    let mut state = found.state;
    state.made_with = made_with;
    Ok(Start { model, average, learner, folder, state })
}

/// What a person should know before the run goes on.
fn notices(setting: &Setting, found: &Found, now_with: &MadeWith) -> Vec<String> {
    let train = &setting.config.train;
    let (state, was_with) = (&found.state, &found.state.made_with);
    let mut notices = vec![format!("going on from step {} of {}", state.step, train.steps)];
    let was_steps = found.run_config.get("steps").and_then(toml::Value::as_integer).unwrap_or_default() as u64;
    if was_steps != train.steps {
        let rate = |steps| learning_rate(&train.optimizer, state.step, steps);
        notices.push(format!(
            "steps raised from {was_steps} to {}: from here on the learning rate follows the schedule of {0} steps \
             ({:.3e} instead of {:.3e} now)",
            train.steps,
            rate(train.steps),
            rate(was_steps)
        ));
    }
    let (replicas, micro_batch_size) = (was_with.replicas, was_with.micro_batch_size);
    if (replicas, micro_batch_size) != (now_with.replicas, now_with.micro_batch_size) {
        notices.push(format!(
            "keeping {replicas} replicas and micro-batches of {micro_batch_size} rows, with which the run was begun"
        ));
    }
    let build = |with: &MadeWith| format!("photon {} ({}) on {}", with.version, with.commit, with.device);
    if build(was_with) != build(now_with) {
        notices.push(format!(
            "the checkpoint is by {}, this is {}: numbers may differ by rounding",
            build(was_with),
            build(now_with)
        ));
    }
    notices
}

impl Setting<'_> {
    fn made_with(&self) -> MadeWith {
        let train = &self.config.train;
        let (replicas, micro_batch_size) =
            divide(train.batch_size, train.replicas, train.micro_batch_size, self.device.name);
        MadeWith {
            device: self.device.name.into(),
            replicas,
            micro_batch_size,
            tokenizer: self.tokenizer.fingerprint().into(),
            data: self.data.report.content_hash.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: photon_core::BUILD_COMMIT.into(),
        }
    }

    fn learner(&self, model: &Model, with: &MadeWith) -> Result<Learner, TrainError> {
        let train = &self.config.train;
        let replicas = Replicas::new(with.replicas)?;
        Ok(Learner::new(model, &train.optimizer, train.alpha, with.micro_batch_size, replicas))
    }
}
