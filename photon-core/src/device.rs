//! Where a model runs, chosen when the program starts.
//!
//! CPU is always there; `cuda` and `wgpu` are cargo features, the latter a default one of the programs. An explicit
//! choice that is missing is an error, never a silent fallback.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;

use crate::accounting::model_cost;
use crate::config::ModelConfig;

/// The choice on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// CUDA where this build and this machine have it, else WebGPU on a real adapter, else CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The first CUDA device.
    Cuda,
    /// The default WebGPU adapter.
    Wgpu,
}

/// A device that cannot be had.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DeviceError {
    /// The word is no device.
    #[error("unknown device \"{0}\": use auto, cpu, cuda or wgpu")]
    Unknown(String),
    /// The program was built without the backend.
    #[error("this program was built without {name}: rebuild with `--features {name}`, or use --device cpu")]
    NotBuilt {
        /// Name of the device and of the cargo feature.
        name: &'static str,
    },
    /// Each of those that work together takes a device of its own.
    #[error(
        "rank {index} of this machine finds {found} {name} devices: let {found} work together, or use --device cpu"
    )]
    TooFew {
        /// Name of the device.
        name: &'static str,
        /// Which of them, counted from 0.
        index: usize,
        /// Devices that are there.
        found: usize,
    },
    /// The driver gives a kernel less of one tensor than the model needs.
    #[error(
        "a matrix of the model's {stage} takes {} MiB, and this device takes {} MiB of one tensor at most: use another \
         --device, or a narrower model",
        .bytes.div_ceil(1 << 20),
        .limit_bytes >> 20
    )]
    TensorTooLarge {
        /// The stage with the largest matrix.
        stage: String,
        /// Its size in f32.
        bytes: u64,
        /// What the device takes.
        limit_bytes: u64,
    },
    /// The browser gives no WebGPU device.
    #[error("this browser gives no WebGPU device: {reason}; use the CPU")]
    Browser {
        /// The browser's reason.
        reason: String,
    },
    /// The machine has no such device.
    #[error("no {name} device found: is {needs} installed? Otherwise use {instead}")]
    NotFound {
        /// Name of the device.
        name: &'static str,
        /// What it takes.
        needs: &'static str,
        /// Ways out.
        instead: &'static str,
    },
}

/// A device and what to call it.
#[derive(Clone, Debug)]
pub struct OpenDevice {
    /// The device, without gradients.
    pub device: Device,
    /// `cpu`, `cuda` or `wgpu`.
    pub name: &'static str,
    /// What its driver calls it; the CPU has none.
    pub adapter: Option<String>,
}

impl fmt::Display for OpenDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.adapter {
            Some(adapter) => write!(f, "{} ({adapter})", self.name),
            None => f.write_str(self.name),
        }
    }
}

impl OpenDevice {
    /// Every device that this build and this machine have, those that `auto` prefers first.
    pub fn all() -> Vec<Self> {
        let graphics = cuda_devices().into_iter().map(|device| Self::of(device, "cuda"));
        let graphics = graphics.chain(wgpu_devices().into_iter().map(|device| Self::of(device, "wgpu")));
        graphics.chain([cpu()]).collect()
    }

    fn of(device: Device, name: &'static str) -> Self {
        let adapter = adapter_of(&device);
        Self { device, name, adapter }
    }

    /// The device with gradients; with checkpointing a forward keeps less for the backward pass: on the CPU the input of
    /// each transformer block, which then runs again, on other devices what Burn's own checkpointing keeps.
    pub fn with_gradients(&self, checkpointing: bool) -> Device {
        let device = self.device.clone().autodiff();
        match checkpointing {
            false => device,
            true => device.gradient_checkpointing(),
        }
    }
}

/// Whether a device takes every tensor of a model.
///
/// # Errors
///
/// If not, naming the largest.
pub fn check_tensors(device: &Device, config: &ModelConfig) -> Result<(), DeviceError> {
    match max_tensor_bytes(device) {
        Some(limit_bytes) => check_tensors_within(limit_bytes, config),
        None => Ok(()),
    }
}

fn check_tensors_within(limit_bytes: u64, config: &ModelConfig) -> Result<(), DeviceError> {
    let stages = model_cost(config, 1).stages;
    let largest = stages.into_iter().max_by_key(|stage| stage.largest_tensor).expect("a model has stages");
    let bytes = 4 * largest.largest_tensor as u64;
    match bytes <= limit_bytes {
        true => Ok(()),
        false => Err(DeviceError::TensorTooLarge { stage: largest.stage, bytes, limit_bytes }),
    }
}

impl FromStr for DeviceChoice {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            "wgpu" => Ok(Self::Wgpu),
            other => Err(DeviceError::Unknown(other.into())),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
        })
    }
}

impl DeviceChoice {
    /// Opens the device.
    ///
    /// # Errors
    ///
    /// An explicit choice that this build or this machine does not have.
    pub fn open(self) -> Result<OpenDevice, DeviceError> {
        self.open_on(0)
    }

    /// Opens the device for one of several that work together on this machine, counted from 0: each takes a graphics card
    /// of its own.
    ///
    /// # Errors
    ///
    /// An explicit choice that this build or this machine does not have, or not for so many.
    pub fn open_on(self, index: usize) -> Result<OpenDevice, DeviceError> {
        match self {
            Self::Auto => match cuda(index).or_else(|_| wgpu(Adapters::Hardware, index)) {
                // The first has a card: on a slower device this one would hold it up.
                Err(error @ DeviceError::TooFew { .. }) => Err(error),
                found => Ok(found.unwrap_or_else(|_| cpu())),
            },
            Self::Cpu => Ok(cpu()),
            Self::Cuda => cuda(index),
            Self::Wgpu => wgpu(Adapters::Any, index),
        }
    }
}

/// Opens the browser's WebGPU device, which nobody can wait for there. It can be opened once.
///
/// # Errors
///
/// A browser that has none, or gives none.
#[cfg(all(feature = "wgpu", target_family = "wasm"))]
pub async fn open_in_browser() -> Result<OpenDevice, DeviceError> {
    match Device::wgpu_options().init_async().await {
        Ok(device) => Ok(OpenDevice::of(device, "wgpu")),
        Err(error) => Err(DeviceError::Browser { reason: error.to_string() }),
    }
}

/// Which WebGPU adapters count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Adapters {
    /// Software drivers too.
    Any,
    /// Graphics cards only.
    Hardware,
}

fn cpu() -> OpenDevice {
    OpenDevice { device: Device::flex(), name: "cpu", adapter: None }
}

fn cuda(index: usize) -> Result<OpenDevice, DeviceError> {
    if !cfg!(feature = "cuda") {
        return Err(DeviceError::NotBuilt { name: "cuda" });
    }
    let instead = "--device wgpu (any graphics card) or --device cpu";
    let none = DeviceError::NotFound { name: "cuda", needs: "an NVIDIA driver", instead };
    choose(cuda_devices(), index, "cuda", none)
}

fn wgpu(adapters: Adapters, index: usize) -> Result<OpenDevice, DeviceError> {
    if !cfg!(feature = "wgpu") {
        return Err(DeviceError::NotBuilt { name: "wgpu" });
    }
    let mut found = wgpu_devices();
    found.retain(|device| adapters == Adapters::Any || !is_software(device));
    let needs = "a Vulkan, Metal or DirectX driver";
    choose(found, index, "wgpu", DeviceError::NotFound { name: "wgpu", needs, instead: "--device cpu" })
}

/// The device of one of those that work together; `none` where there is no device at all.
fn choose(
    devices: Vec<Device>,
    index: usize,
    name: &'static str,
    none: DeviceError,
) -> Result<OpenDevice, DeviceError> {
    let found = devices.len();
    match devices.into_iter().nth(index) {
        Some(device) => Ok(OpenDevice::of(device, name)),
        None if found == 0 => Err(none),
        None => Err(DeviceError::TooFew { name, index, found }),
    }
}

// Enumerating asks the driver; opening a device that is not there would panic on a worker thread.

#[cfg(feature = "cuda")]
fn cuda_devices() -> Vec<Device> {
    Device::enumerate(burn::tensor::DeviceType::Cuda).into_vec()
}

#[cfg(not(feature = "cuda"))]
fn cuda_devices() -> Vec<Device> {
    Vec::new()
}

/// Graphics cards before software drivers.
#[cfg(feature = "wgpu")]
fn wgpu_devices() -> Vec<Device> {
    let mut found = Device::enumerate(burn::tensor::DeviceType::Wgpu).into_vec();
    found.sort_by_key(is_software);
    found
}

#[cfg(not(feature = "wgpu"))]
fn wgpu_devices() -> Vec<Device> {
    Vec::new()
}

#[cfg(feature = "wgpu")]
fn is_software(device: &Device) -> bool {
    *device == Device::wgpu(burn::tensor::DeviceKind::Cpu)
}

#[cfg(not(feature = "wgpu"))]
fn is_software(_: &Device) -> bool {
    false
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn adapter_of(device: &Device) -> Option<String> {
    // Browsers keep it to themselves.
    device.identity().map(|identity| identity.name).filter(|name| !name.is_empty())
}

#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
fn adapter_of(_: &Device) -> Option<String> {
    None
}

/// The most bytes that a kernel can be given as one tensor, where the driver states a limit.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub fn max_tensor_bytes(device: &Device) -> Option<u64> {
    match device.as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) => Some(device.client().properties().memory.max_page_size),
        _ => None,
    }
}

/// The most bytes that a kernel can be given as one tensor, where the driver states a limit.
#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
pub fn max_tensor_bytes(_: &Device) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config_file;

    #[test]
    fn names_round_trip_and_the_cpu_is_always_there() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda, DeviceChoice::Wgpu] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("gpu".parse::<DeviceChoice>(), Err(DeviceError::Unknown("gpu".into())));
        assert_eq!(DeviceChoice::Cpu.open().unwrap().to_string(), "cpu");
        assert_eq!(OpenDevice::all().last().unwrap().name, "cpu");
    }

    #[test]
    fn a_tensor_that_is_too_large_is_named_with_its_stage() {
        let config = "architecture = \"flat\"\nvocab_size = 13\nd_model = 8\n\
                      [stack]\nn_layers = 1\nn_heads = 2\nd_ff = 131072\n";
        let config = config_file::parse_model(config.parse().unwrap(), "test.toml".as_ref()).unwrap();
        assert_eq!(check_tensors_within(4 << 20, &config), Ok(()));
        let error = check_tensors_within((4 << 20) - 1, &config).unwrap_err().to_string();
        assert!(error.contains("the model's stack takes 4 MiB, and this device takes 3 MiB of one tensor"), "{error}");
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_missing_backend_says_how_to_get_it() {
        let error = DeviceChoice::Cuda.open().unwrap_err().to_string();
        assert!(error.contains("--features cuda") && error.contains("--device cpu"), "{error}");
    }
}
