//! Folds the units of a chunk into one vector: concatenation, then (where widths ask for it) norm and matrix.

use burn::module::Module;
use burn::nn::{Linear, RmsNorm};
use burn::tensor::Tensor;

use crate::config::PhotonConfig;
use crate::init::Initializer;
use crate::nn::compute::as_stored;
use crate::nn::fused::norm;

/// The chunker of one level.
///
/// # Source
///
/// Paper §2.1.1 and tables 10 to 12: parameter-free at level 1, `RMSNorm(C·D)` and a matrix with bias above.
#[derive(Module, Debug)]
pub struct Chunker {
    projection: Option<ChunkProjection>,
    chunk_len: usize,
}

#[derive(Module, Debug)]
struct ChunkProjection {
    norm: RmsNorm,
    proj: Linear,
}

impl Chunker {
    /// Fresh weights for `level` (1-based).
    pub fn new(config: &PhotonConfig, level: usize, init: &mut Initializer) -> Self {
        let chunk_len = config.levels[level - 1].chunk_len;
        let d_concatenated = chunk_len * config.chunker_input_width(level);
        let projection = config.chunker_projects(level).then(|| ChunkProjection {
            norm: init.norm(d_concatenated, config.norm_eps),
            proj: init.linear_with_bias(d_concatenated, config.width(level)),
        });
        Self { projection, chunk_len }
    }

    /// Folds whole chunks.
    ///
    /// With C = 2, `[u0 u1 u2 u3] -> [u0‖u1, u2‖u3]`, projected.
    ///
    /// # Shapes
    ///
    /// `[B, M·C, D_in] -> [B, M, D]`
    pub fn forward(&self, units: Tensor<3>) -> Tensor<3> {
        let [batch, n_units, d_in] = units.dims();
        let chunks = units.reshape([batch, n_units / self.chunk_len, self.chunk_len * d_in]); // [B, M, C*D_in]
        match &self.projection {
            Some(projection) => as_stored(&projection.proj, norm(&projection.norm, chunks)), // [B, M, D]
            None => chunks,
        }
    }
}
