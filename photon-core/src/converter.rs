//! Where latents turn down: one conditioning vector becomes the prefix of a decoder's group.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;

use crate::config::PhotonConfig;
use crate::init::Initializer;
use crate::nn::compute::as_stored;

/// A matrix with bias, `D -> R·D_below`, cut into R vectors.
///
/// # Source
///
/// Paper §2.1.3: a one-dimensional convolution of kernel 1, which is this; R = 2 by its parameter counts.
#[derive(Module, Debug)]
pub struct Converter {
    proj: Linear,
    prefix_len: usize,
}

impl Converter {
    /// Fresh weights for `level` (1-based).
    pub fn new(config: &PhotonConfig, level: usize, init: &mut Initializer) -> Self {
        let prefix_len = config.levels[level - 1].converter.prefix_len;
        let proj = init.linear_with_bias(config.width(level), prefix_len * config.width(level - 1));
        Self { proj, prefix_len }
    }

    /// # Shapes
    ///
    /// `[B, G, D] -> [B, G·R, D_below]`
    pub fn forward(&self, conditioning: Tensor<3>) -> Tensor<3> {
        let [batch, n_groups, _] = conditioning.dims();
        let prefix = as_stored(&self.proj, conditioning); // [B, G, R*D_below]
        let d_below = prefix.dims()[2] / self.prefix_len;
        prefix.reshape([batch, n_groups * self.prefix_len, d_below])
    }
}
