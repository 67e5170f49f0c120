//! How a run comes to its first step: from fresh weights, or from its newest checkpoint that is whole.

use std::path::Path;
use std::rc::Rc;

use burn::module::Module;
use photon_core::device::OpenDevice;
use photon_core::model::Model;
use photon_core::tokenizer::Tokenizer;
use serde::Serialize;

use crate::average::Average;
use crate::checkpoint::{Checkpoints, Difference, Found, MadeWith, TrainState, TrainingCheckpointError, differences};
use crate::config::RunConfig;
use crate::data::Prepared;
use crate::init_from::{Carried, carry_over};
use crate::optimizer::freeze;
use crate::peak::Peak;
use crate::ranks::{Ranks, RanksError};
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
    /// Of the first rank, which alone writes.
    pub(crate) folder: Option<RunFolder>,
    pub(crate) state: TrainState,
}

/// What a run is made of.
pub(crate) struct Setting<'a> {
    pub(crate) config: &'a RunConfig,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) data: &'a Prepared,
    pub(crate) device: &'a OpenDevice,
    pub(crate) ranks: &'a Rc<Ranks>,
    /// Keys that may differ from those of the run that goes on.
    pub(crate) accept: &'a [String],
    pub(crate) peak: Option<Peak>,
}

/// What was asked for beside the config, and with what.
#[derive(Serialize)]
struct RunFacts<'a> {
    seed: u64,
    commit: &'a str,
    version: &'a str,
    device: &'a str,
    ranks: usize,
    replicas: usize,
    micro_batch_size: usize,
    parameters: usize,
    train_tokens: usize,
    train_bytes: u64,
    held_out_tokens: usize,
    held_out_bytes: u64,
    tokenizer: &'a str,
    data: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    init_from: Option<Carried>,
    peak: Option<Peak>,
}

/// One line of `resumes.jsonl`.
#[derive(Serialize)]
struct Resumed<'a> {
    from_step: u64,
    steps: u64,
    made_with: &'a MadeWith,
    /// Changes of the config that were meant.
    accepted: &'a [Difference],
    peak: Option<Peak>,
}

/// Begins a run or goes on with one, whichever is asked for and possible.
///
/// All ranks read the same checkpoint: the folder must be the same one for all of them.
pub(crate) fn start(
    setting: &Setting,
    path: &Path,
    existing: Existing,
    observer: &mut dyn Observer,
) -> Result<Start, TrainError> {
    let ranks = setting.ranks;
    setting.check_ranks()?;
    let claim = if ranks.is_first() { Some(Claim::new(path)?) } else { None };
    if existing != Existing::Resume {
        return begin(setting, claim, existing, observer);
    }
    let checkpoints = Checkpoints::of_run(path);
    if ranks.is_first() {
        checkpoints.clean()?;
    }
    ranks.wait();
    let (found, damaged) = checkpoints.newest_whole()?;
    let found_step = found.as_ref().map(|found| found.state.step);
    let fix = "all ranks must see the same run folder, on a file system that they share";
    ranks.agree("newest checkpoint", fix, || format!("{found_step:?}").into())?;
    let Some(found) = found else {
        observer.notice(&format!("{} has no checkpoint to go on from: beginning at step 0", path.display()));
        return begin(setting, claim, Existing::Resume, observer);
    };
    let start = go_on(setting, path, claim, found, observer)?;
    // Nobody reads any more.
    ranks.wait();
    if !ranks.is_first() {
        return Ok(start);
    }
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

fn begin(
    setting: &Setting,
    claim: Option<Claim>,
    existing: Existing,
    observer: &mut dyn Observer,
) -> Result<Start, TrainError> {
    let Setting { config, data, device, .. } = *setting;
    let train = &config.train;
    let mut model = Model::new(&config.model, train.seed, &device.with_gradients(train.gradient_checkpointing));
    let mut init_from = None;
    if let Some(folder) = &train.init_from {
        let (with_carried, carried) = carry_over(model, Path::new(folder), setting.tokenizer)?;
        observer.notice(&carried.to_string());
        (model, init_from) = (with_carried, Some(carried));
    }
    let model = setting.made_ready(model);
    let made_with = setting.made_with();
    let facts = RunFacts {
        seed: train.seed,
        commit: &made_with.commit,
        version: &made_with.version,
        device: device.name,
        ranks: made_with.ranks,
        replicas: made_with.replicas,
        micro_batch_size: made_with.micro_batch_size,
        parameters: model.num_params(),
        train_tokens: data.train.len(),
        train_bytes: data.train.text_bytes(),
        held_out_tokens: data.valid.len(),
        held_out_bytes: data.valid.text_bytes(),
        tokenizer: &made_with.tokenizer,
        data: &made_with.data,
        init_from,
        peak: setting.peak,
    };
    Ok(Start {
        average: train.ema.as_ref().map(|ema| Average::new(ema, &model)),
        learner: setting.learner(&model, &made_with)?,
        folder: claim.map(|claim| RunFolder::create(claim, existing, &config.to_toml(), &facts)).transpose()?,
        state: TrainState::new(made_with),
        model,
    })
}

fn go_on(
    setting: &Setting,
    path: &Path,
    claim: Option<Claim>,
    found: Found,
    observer: &mut dyn Observer,
) -> Result<Start, TrainError> {
    let Setting { config, device, .. } = *setting;
    let now_with = setting.made_with();
    let was_with = &found.state.made_with;
    let is_meant = |difference: &Difference| difference.may_be_meant() && setting.accept.contains(&difference.key);
    let (accepted, differences): (Vec<_>, Vec<_>) =
        differences(&found.run_config, was_with, config, &now_with).into_iter().partition(is_meant);
    if !differences.is_empty() {
        return Err(TrainingCheckpointError::Differs { path: path.into(), differences }.into());
    }
    let kept = |key: &str, was: usize, now: usize| if accepted.iter().any(|it| it.key == key) { now } else { was };
    let replicas = kept("replicas", was_with.replicas, now_with.replicas);
    let micro_batch_size = kept("micro_batch_size", was_with.micro_batch_size, now_with.micro_batch_size);
    for notice in notices(setting, &found, &now_with, &accepted) {
        observer.notice(&notice);
    }
    let made_with = MadeWith { replicas, micro_batch_size, ..now_with };

    let (model, average) =
        found.load_models(&config.model, &device.with_gradients(config.train.gradient_checkpointing))?;
    let model = setting.made_ready(model);
    let mut learner = setting.learner(&model, &made_with)?;
    learner.optimizer_mut().restore(&model, found.load_memory()?).map_err(|problems| found.misfit(problems))?;
    let ema = config.train.ema.as_ref();
    let updates = found.state.average_updates;
    let average = ema.zip(average).map(|(ema, average)| Average::resume(ema, updates, &model, &average));
    let note = Resumed {
        from_step: found.state.step,
        steps: config.train.steps,
        made_with: &made_with,
        accepted: &accepted,
        peak: setting.peak,
    };
    let resume = |claim| RunFolder::resume(claim, &found.state.files, &config.to_toml(), &note);
    let (folder, lost) = claim.map(resume).transpose()?.unzip();
    for lost in lost.into_iter().flatten() {
        observer.notice(&format!("warning: metrics of earlier steps are lost: {lost}"));
    }
    let mut state = found.state;
    state.made_with = made_with;
    Ok(Start { model, average, learner, folder, state })
}

/// What a person should know before the run goes on.
fn notices(setting: &Setting, found: &Found, now_with: &MadeWith, accepted: &[Difference]) -> Vec<String> {
    let train = &setting.config.train;
    let (state, was_with) = (&found.state, &found.state.made_with);
    let mut notices = vec![format!("going on from step {} of {}", state.step, train.steps)];
    notices
        .extend(accepted.iter().map(|it| format!("changed, as accepted: {}: was {}, now {}", it.key, it.was, it.now)));
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
    let is_accepted = accepted.iter().any(|it| ["replicas", "micro_batch_size"].contains(&it.key.as_str()));
    if !is_accepted && (replicas, micro_batch_size) != (now_with.replicas, now_with.micro_batch_size) {
        notices.push(format!(
            "keeping {replicas} replicas and micro-batches of {micro_batch_size} rows, with which the run was begun"
        ));
    }
    if was_with.ranks != now_with.ranks {
        notices.push(format!(
            "the checkpoint is by {} processes, this run has {}: numbers differ by rounding",
            was_with.ranks, now_with.ranks
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
    /// Whether the ranks can work on one run.
    fn check_ranks(&self) -> Result<(), RanksError> {
        let n_ranks = self.ranks.n_ranks();
        let rows = self.config.train.row_shapes().into_iter().map(|shape| shape.batch_size);
        let batch_size = rows.min().unwrap_or_default();
        if batch_size < n_ranks {
            return Err(RanksError::TooMany { batch_size, n_ranks });
        }
        let mut config = self.config.clone();
        // Where texts lie may differ; what they hold may not.
        config.train.data.for_each_path(String::clear);
        config.train.tokenizer.clear();
        let fix = "start all ranks with the same config and the same --set";
        self.ranks.agree("config", fix, || config.to_toml().into())?;
        let MadeWith { device, tokenizer, data, version, commit, .. } = self.made_with();
        self.ranks.agree("tokenizer", "copy the first one's to all machines", || tokenizer.into())?;
        self.ranks.agree("text", "copy the first one's data to all machines", || data.into())?;
        let fix = "install the same build, on the same kind of device";
        self.ranks.agree("program or device", fix, || format!("{device} {version} {commit}").into())
    }

    fn made_with(&self) -> MadeWith {
        let train = &self.config.train;
        let rows = train.batch_size.div_ceil(self.ranks.n_ranks());
        let (replicas, micro_batch_size) = divide(rows, train.replicas, train.micro_batch_size, self.device.name);
        MadeWith {
            device: self.device.name.into(),
            ranks: self.ranks.n_ranks(),
            replicas,
            micro_batch_size,
            tokenizer: self.tokenizer.fingerprint().into(),
            data: self.data.report.content_hash.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: photon_core::BUILD_COMMIT.into(),
        }
    }

    /// A model as it learns: with frozen parts, and stacks that multiply in their precision.
    fn made_ready(&self, model: Model) -> Model {
        let (train, n_levels) = (&self.config.train, self.config.model.n_levels());
        freeze(&train.optimizer, model.with_compute(|stage| train.precision.compute(stage, n_levels)))
    }

    fn learner(&self, model: &Model, with: &MadeWith) -> Result<Learner, TrainError> {
        let train = &self.config.train;
        let replicas = Replicas::on_rank(self.ranks.clone(), with.replicas)?;
        Ok(Learner::new(model, &train.optimizer, train.alpha, with.micro_batch_size, replicas)
            .with_z_loss(train.z_loss)
            .with_loss_scale(train.precision.loss_scale(&self.config.model))
            .with_rows_of(train.seq_len))
    }
}
