//! Generation in steps that wait for the device and for whoever is told, and never hold up a thread.

use photon_core::checkpoint::{Checkpoint, CheckpointError, CheckpointFiles};
use photon_core::config::{ConfigError, ModelConfig};
use photon_core::device::OpenDevice;
use photon_core::infer_config::{InferPlan, Stage};
use photon_core::sampler::{SamplingConfig, SamplingConfigError};
use photon_core::state::CacheUse;
use photon_core::tokenizer::TokenizerError;
use photon_infer::generate::{Batch, Completion, FinishReason, GenerateConfig, GenerateError, Prompt, read_logits};
use photon_infer::presets::{PRESETS, PresetError, load_preset};
use serde::{Deserialize, Serialize};

/// A checkpoint on its device.
#[derive(Debug)]
pub struct Runner {
    checkpoint: Checkpoint,
    device: OpenDevice,
}

/// What to generate.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// What to continue; the model begins by itself where it is empty.
    pub prompt: String,
    /// Name of a preset.
    pub preset: String,
    /// Tokens, at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
}

/// Where a generation stands after a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Progress {
    /// Text that has become certain.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated so far, the end-of-document token counted.
    pub tokens: usize,
    /// What the caches hold, stage by stage.
    pub caches: Vec<CacheUse>,
}

/// How a generation ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Everything that was generated, as far as it is certain.
    pub text: String,
    /// Tokens generated, the end-of-document token left out.
    pub tokens: usize,
    /// Why it ended; absent where it was stopped from outside.
    pub finish_reason: Option<FinishReason>,
    /// What did not fit in the memory budget, where that ended it.
    pub refusal: Option<String>,
}

/// A preset, and whether it can be had here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PresetChoice {
    /// Its name.
    pub name: &'static str,
    /// What it does, in a line.
    pub summary: &'static str,
    /// Why it cannot be had for this model on this device.
    pub refused: Option<String>,
}

/// Why nothing is generated.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The checkpoint cannot be had.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// There is no such preset.
    #[error(transparent)]
    Preset(#[from] PresetError),
    /// The preset does not fit the model or the device.
    #[error("preset {preset}: {source}")]
    Plan {
        /// Its name.
        preset: String,
        /// What does not fit.
        source: ConfigError,
    },
    /// The caches need answers of the device in the midst of a step.
    #[error(
        "preset {preset}: the caches of {stage} read numbers back from {device} in the midst of a step, which no browser \
         waits for: choose another preset, or the CPU"
    )]
    Waits {
        /// Its name.
        preset: String,
        /// The first stage that does.
        stage: Stage,
        /// What it would wait for.
        device: String,
    },
    /// The sampling config.
    #[error(transparent)]
    Sampling(#[from] SamplingConfigError),
    /// The prompt cannot be encoded.
    #[error("prompt: {0}")]
    Prompt(#[from] TokenizerError),
    /// The generation broke off.
    #[error(transparent)]
    Generate(#[from] GenerateError),
}

impl Runner {
    /// Loads a checkpoint onto a device.
    ///
    /// # Errors
    ///
    /// Files that are damaged or do not fit together, a device that cannot take the model.
    pub fn load(files: CheckpointFiles, device: OpenDevice) -> Result<Self, RunError> {
        let checkpoint = Checkpoint::from_files(files, &device.device)?;
        Ok(Self { checkpoint, device })
    }

    /// The device.
    pub fn device(&self) -> &OpenDevice {
        &self.device
    }

    /// What the model is.
    pub fn config(&self) -> ModelConfig {
        self.checkpoint.model.config()
    }

    /// Every preset, the most faithful first.
    pub fn presets(&self) -> Vec<PresetChoice> {
        let choice = |preset: photon_infer::presets::Preset| PresetChoice {
            name: preset.name,
            summary: preset.summary(),
            refused: self.plan(preset.name).err().map(|error| error.to_string()),
        };
        PRESETS.map(choice).into()
    }

    fn plan(&self, preset: &str) -> Result<InferPlan, RunError> {
        let of_plan = |source| RunError::Plan { preset: preset.to_owned(), source };
        let plan = load_preset(preset, &[])?.plan(&self.config()).map_err(of_plan)?;
        plan.check_formats(&self.device).map_err(of_plan)?;
        match plan.waits_for_device() {
            Some(stage) if self.device.name != "cpu" => {
                Err(RunError::Waits { preset: preset.to_owned(), stage, device: self.device.to_string() })
            }
            _ => Ok(plan),
        }
    }

    /// Generates; `told` hears of every step, and says whether to go on.
    ///
    /// # Errors
    ///
    /// A request that cannot be met, logits that are not finite, a device that does not answer.
    pub async fn generate(
        &self,
        request: Request,
        mut told: impl AsyncFnMut(Progress) -> bool,
    ) -> Result<Outcome, RunError> {
        let Request { prompt, preset, max_tokens, sampling } = request;
        sampling.validate()?;
        let config = GenerateConfig { max_tokens, sampling, stops: Vec::new(), samples: 1, plan: self.plan(&preset)? };
        let token_ids = self.checkpoint.tokenizer.encode(prompt.as_bytes(), "the prompt")?;
        let prompt_tokens = token_ids.len();
        let (mut batch, mut logits) = Batch::begin(&self.checkpoint, &[Prompt { row: 0, token_ids }], &config)?;
        let mut so_far = String::new();
        for tokens in 1.. {
            let rows = read_logits(logits).await?;
            let mut text = String::new();
            let next = batch.step(&rows, &mut |_, piece| {
                text.push_str(piece);
                Ok(())
            })?;
            so_far.push_str(&text);
            let caches = batch.session().cache_use();
            let goes_on = told(Progress { text, prompt_tokens, tokens, caches }).await;
            match next {
                Some(next) if goes_on => logits = next,
                Some(_) => return Ok(Outcome { text: so_far, tokens, finish_reason: None, refusal: None }),
                None => break,
            }
        }
        let mut generation = batch.finish();
        let Completion { text, token_ids, finish_reason, .. } = generation.completions.remove(0);
        let refusal = generation.refusal.map(|refusal| refusal.to_string());
        Ok(Outcome { text, tokens: token_ids.len(), finish_reason: Some(finish_reason), refusal })
    }
}
