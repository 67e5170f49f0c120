//! What the machine could compute at most: the measure of how well training uses it.

use std::fmt;
use std::hint::black_box;
use std::time::Instant;

use burn::tensor::{Device, Distribution, Tensor};
use serde::Serialize;

/// The machine's peak.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Peak {
    /// Arithmetic a second.
    pub flops_per_sec: f64,
    /// How it is known.
    pub source: PeakSource,
}

/// How a peak is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PeakSource {
    /// Somebody said so, from a data sheet for instance.
    Given,
    /// The best of some products of two matrices of so many rows and columns.
    Measured {
        /// Rows and columns.
        size: usize,
    },
}

impl Peak {
    /// What somebody says.
    pub fn given(flops_per_sec: f64) -> Self {
        Self { flops_per_sec, source: PeakSource::Given }
    }

    /// Measures it by products of f32 matrices, in some tenths of a second.
    ///
    /// Matrices grow until one product takes long enough for its start to count for nothing.
    pub fn measure(device: &Device) -> Self {
        const ENOUGH_SECS: f64 = 0.01;
        const MAX_SIZE: usize = 8192;
        const RUNS: usize = 5;
        let mut size = 512;
        // The first product of a size may compile or tune a kernel.
        while size < MAX_SIZE && product_secs(device, size, 2)[1] < ENOUGH_SECS {
            size *= 2;
        }
        let best_secs = product_secs(device, size, RUNS).into_iter().fold(f64::INFINITY, f64::min);
        Self { flops_per_sec: product_flops(size) / best_secs, source: PeakSource::Measured { size } }
    }
}

impl fmt::Display for Peak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} GFLOP/s", self.flops_per_sec / 1e9)?;
        match self.source {
            PeakSource::Given => f.write_str(", as given"),
            PeakSource::Measured { size } => write!(f, ", measured by products of {size} x {size} matrices"),
        }
    }
}

/// Arithmetic of a product of two square matrices.
pub(crate) fn product_flops(size: usize) -> f64 {
    2.0 * (size as f64).powi(3)
}

/// How long each of some products of two square matrices takes.
pub(crate) fn product_secs(device: &Device, size: usize, runs: usize) -> Vec<f64> {
    let matrix = || Tensor::<2>::random([size, size], Distribution::Normal(0.0, 1.0), device);
    let (a, b) = (matrix(), matrix());
    let run = |_| {
        let started = Instant::now();
        let product = a.clone().matmul(b.clone());
        // Reading one number waits for the product.
        black_box(product.slice([0..1, 0..1]).into_scalar::<f32>());
        started.elapsed().as_secs_f64()
    };
    (0..runs).map(run).collect()
}
