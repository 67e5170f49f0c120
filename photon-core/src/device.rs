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
        match self {
            Self::Auto => Ok(cuda().or_else(|_| wgpu(Adapters::Hardware)).unwrap_or_else(|_| cpu())),
            Self::Cpu => Ok(cpu()),
            Self::Cuda => cuda(),
            Self::Wgpu => wgpu(Adapters::Any),
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
fn cuda() -> Result<OpenDevice, DeviceError> {
    use burn::tensor::DeviceType;
    // Enumerating asks the driver; opening a device that is not there would panic on a worker thread.
    match Device::enumerate(DeviceType::Cuda).into_vec().into_iter().next() {
        Some(device) => Ok(OpenDevice { device, name: "cuda" }),
        None => Err(DeviceError::NotFound { name: "cuda", needs: "an NVIDIA driver" }),
    }
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<OpenDevice, DeviceError> {
    Err(DeviceError::NotBuilt { name: "cuda" })
}

#[cfg(feature = "wgpu")]
fn wgpu(adapters: Adapters) -> Result<OpenDevice, DeviceError> {
    use burn::tensor::{DeviceKind, DeviceType};
    let found = Device::enumerate(DeviceType::Wgpu).into_vec();
    let is_software = |device: &Device| *device == Device::wgpu(DeviceKind::Cpu);
    match found.into_iter().find(|device| adapters == Adapters::Any || !is_software(device)) {
        Some(device) => Ok(OpenDevice { device, name: "wgpu" }),
        None => Err(DeviceError::NotFound { name: "wgpu", needs: "a Vulkan, Metal or DirectX driver" }),
    }
}

#[cfg(not(feature = "wgpu"))]
fn wgpu(_: Adapters) -> Result<OpenDevice, DeviceError> {
    Err(DeviceError::NotBuilt { name: "wgpu" })
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
