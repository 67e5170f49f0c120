//! Where a model runs, chosen when the program starts.
//!
//! CPU is always there; `cuda` and `wgpu` are cargo features. An explicit choice that is missing is an error, never
//! a silent fallback.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;

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
    /// The machine has no such device.
    #[error("no {name} device found: is {needs} installed? Otherwise use --device cpu")]
    NotFound {
        /// Name of the device.
        name: &'static str,
        /// What it takes.
        needs: &'static str,
    },
}

/// A device and what to call it.
#[derive(Clone, Debug)]
pub struct OpenDevice {
    /// The device, without gradients.
    pub device: Device,
    /// `cpu`, `cuda` or `wgpu`.
    pub name: &'static str,
}

impl OpenDevice {
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

/// Which WebGPU adapters count.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Adapters {
    /// Software drivers too.
    Any,
    /// Graphics cards only.
    Hardware,
}

fn cpu() -> OpenDevice {
    OpenDevice { device: Device::flex(), name: "cpu" }
}

#[cfg(feature = "cuda")]
fn cuda(index: usize) -> Result<OpenDevice, DeviceError> {
    use burn::tensor::DeviceType;
    // Enumerating asks the driver; opening a device that is not there would panic on a worker thread.
    choose(Device::enumerate(DeviceType::Cuda).into_vec(), index, "cuda", "an NVIDIA driver")
}

#[cfg(not(feature = "cuda"))]
fn cuda(_: usize) -> Result<OpenDevice, DeviceError> {
    Err(DeviceError::NotBuilt { name: "cuda" })
}

#[cfg(feature = "wgpu")]
fn wgpu(adapters: Adapters, index: usize) -> Result<OpenDevice, DeviceError> {
    use burn::tensor::{DeviceKind, DeviceType};
    let mut found = Device::enumerate(DeviceType::Wgpu).into_vec();
    let is_software = |device: &Device| *device == Device::wgpu(DeviceKind::Cpu);
    found.retain(|device| adapters == Adapters::Any || !is_software(device));
    choose(found, index, "wgpu", "a Vulkan, Metal or DirectX driver")
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: Adapters, _: usize) -> Result<OpenDevice, DeviceError> {
    Err(DeviceError::NotBuilt { name: "wgpu" })
}

/// The device of one of those that work together.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn choose(
    devices: Vec<Device>,
    index: usize,
    name: &'static str,
    needs: &'static str,
) -> Result<OpenDevice, DeviceError> {
    let found = devices.len();
    match devices.into_iter().nth(index) {
        Some(device) => Ok(OpenDevice { device, name }),
        None if found == 0 => Err(DeviceError::NotFound { name, needs }),
        None => Err(DeviceError::TooFew { name, index, found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_the_cpu_is_always_there() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda, DeviceChoice::Wgpu] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("gpu".parse::<DeviceChoice>(), Err(DeviceError::Unknown("gpu".into())));
        assert_eq!(DeviceChoice::Cpu.open().unwrap().name, "cpu");
    }

    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    #[test]
    fn a_missing_backend_says_how_to_get_it() {
        let error = DeviceChoice::Cuda.open().unwrap_err().to_string();
        assert!(error.contains("--features cuda") && error.contains("--device cpu"), "{error}");
    }
}
