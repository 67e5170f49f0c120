//! `photon-infer devices`.

use anyhow::Result;
use burn::tensor::DType;
use clap::Args;
use photon_core::device::{OpenDevice, max_tensor_bytes};
use serde::Serialize;

use super::{Format, print, table};

#[derive(Args)]
pub(super) struct DevicesArgs {
    /// How to print: a table, or one JSON array.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// What a device can do.
#[derive(Serialize)]
struct Line {
    device: &'static str,
    adapter: Option<String>,
    f16: bool,
    bf16: bool,
    /// Of one tensor; absent where there is no limit.
    max_tensor_bytes: Option<u64>,
}

impl From<OpenDevice> for Line {
    fn from(device: OpenDevice) -> Self {
        Self {
            device: device.name,
            f16: device.device.supports_dtype(DType::F16),
            bf16: device.device.supports_dtype(DType::BF16),
            max_tensor_bytes: max_tensor_bytes(&device.device),
            adapter: device.adapter,
        }
    }
}

pub(super) fn run(args: &DevicesArgs) -> Result<()> {
    let lines: Vec<Line> = OpenDevice::all().into_iter().map(Line::from).collect();
    match args.format {
        Format::Json => print(serde_json::to_string(&lines)?),
        Format::Text => {
            let mut devices = table(&["--device", "adapter", "f16", "bf16", "largest tensor, MiB"]);
            let word = |is_there| if is_there { "yes" } else { "no" };
            for Line { device, adapter, f16, bf16, max_tensor_bytes } in &lines {
                let largest = max_tensor_bytes.map_or("any".into(), |bytes| (bytes >> 20).to_string());
                devices.add_row([device, adapter.as_deref().unwrap_or(""), word(*f16), word(*bf16), &largest]);
            }
            print(devices)
        }
    }
}
