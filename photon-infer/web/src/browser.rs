//! What the worker calls.

use js_sys::{Function, Promise};
use photon_core::checkpoint::CheckpointFiles;
use photon_core::device::{DeviceChoice, OpenDevice, open_in_browser};
use wasm_bindgen::prelude::wasm_bindgen;
use wasm_bindgen::{JsError, JsValue};
use wasm_bindgen_futures::JsFuture;

use crate::runner::{Progress, Runner};

#[expect(unsafe_code, reason = "the linker's own function, which takes nothing")]
unsafe extern "C" {
    /// Runs what libraries have put together to run before anything else.
    safe fn __wasm_call_ctors();
}

/// Makes the program ready, and sends the messages of panics to the browser's console.
///
/// Where nobody calls the constructors, the linker calls all of them at each call from JavaScript: most of the time of a step.
#[wasm_bindgen(start)]
fn start() {
    __wasm_call_ctors();
    console_error_panic_hook::set_once();
}

/// A checkpoint that the worker holds.
#[wasm_bindgen]
#[derive(Debug)]
pub struct PhotonRunner {
    runner: Runner,
    note: Option<String>,
}

#[wasm_bindgen]
impl PhotonRunner {
    /// Loads the three files of a checkpoint onto `auto`, `wgpu` or `cpu`. A worker does this once.
    ///
    /// # Errors
    ///
    /// Files that are damaged or do not fit together, a device that cannot be had or cannot take the model.
    pub async fn load(config: String, tokenizer: Vec<u8>, weights: Vec<u8>, device: String) -> Result<Self, JsError> {
        let (device, note) = open(device.parse()?).await?;
        let runner = Runner::load(CheckpointFiles { config, tokenizer, weights }, device)?;
        Ok(Self { runner, note })
    }

    /// What it runs on: `cpu`, or `wgpu` and the name of the adapter.
    pub fn device(&self) -> String {
        self.runner.device().to_string()
    }

    /// Why `auto` has not chosen WebGPU, where it has not.
    pub fn note(&self) -> Option<String> {
        self.note.clone()
    }

    /// What the model is, in TOML.
    ///
    /// # Errors
    ///
    /// None that a checkpoint gives rise to.
    pub fn config(&self) -> Result<String, JsError> {
        Ok(serde_json::to_string(&self.runner.config())?)
    }

    /// Every preset with `name`, `summary` and, where it cannot be had, `refused`; JSON.
    ///
    /// # Errors
    ///
    /// None that a checkpoint gives rise to.
    pub fn presets(&self) -> Result<String, JsError> {
        Ok(serde_json::to_string(&self.runner.presets())?)
    }

    /// Generates what a request, as JSON, asks for; returns how it ended, as JSON. `told` is called with the progress of every
    /// step, as JSON, and returns a promise: of `false` to stop.
    ///
    /// # Errors
    ///
    /// A request that cannot be met, a device that does not answer.
    pub async fn generate(&self, request: String, told: Function) -> Result<String, JsError> {
        let request = serde_json::from_str(&request)?;
        let told = async |progress: Progress| go_on(&told, &progress).await.unwrap_or(false);
        let outcome = self.runner.generate(request, told).await?;
        Ok(serde_json::to_string(&outcome)?)
    }
}

/// The device, and why it is not WebGPU where the choice was left open.
async fn open(choice: DeviceChoice) -> Result<(OpenDevice, Option<String>), JsError> {
    match choice {
        DeviceChoice::Auto => match open_in_browser().await {
            Ok(device) => Ok((device, None)),
            Err(error) => Ok((DeviceChoice::Cpu.open()?, Some(error.to_string()))),
        },
        DeviceChoice::Wgpu => Ok((open_in_browser().await?, None)),
        DeviceChoice::Cpu | DeviceChoice::Cuda => Ok((choice.open()?, None)),
    }
}

async fn go_on(told: &Function, progress: &Progress) -> Result<bool, JsValue> {
    let progress = serde_json::to_string(progress).map_err(JsError::from)?;
    let answer = Promise::from(told.call1(&JsValue::NULL, &progress.into())?);
    Ok(JsFuture::from(answer).await?.as_bool().unwrap_or(true))
}
