//! Clipping by the norm of all gradients together (Burn clips each by its own).

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use photon_core::model::Model;

/// Scales all gradients so that their common norm is at most `max_norm`; returns the norm before.
///
/// The gradients given are `loss_scale` times what they should be, those returned are not.
pub fn clip_global_norm(
    model: &Model,
    grads: GradientsParams,
    max_norm: f64,
    loss_scale: f64,
) -> (GradientsParams, f64) {
    struct SquareSums<'a> {
        grads: &'a GradientsParams,
        sums: Vec<Tensor<1>>,
    }
    impl ModuleVisitor for SquareSums<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.get::<D>(param.id) {
                self.sums.push(grad.square().sum());
            }
        }
    }
    struct Scale {
        grads: GradientsParams,
        scaled: GradientsParams,
        factor: f64,
    }
    impl ModuleVisitor for Scale {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.remove::<D>(param.id) {
                self.scaled.register(param.id, grad * self.factor);
            }
        }
    }
    let mut squares = SquareSums { grads: &grads, sums: Vec::new() };
    model.visit(&mut squares);
    // One read of the device, not one for each tensor.
    let norm = f64::from(Tensor::cat(squares.sums, 0).sum().into_scalar::<f32>()).sqrt() / loss_scale;
    // Where it is not finite the gradients are left alone, so that one can look which of them are not.
    let clipping = if norm <= max_norm { 1.0 } else { max_norm / norm };
    let factor = clipping / loss_scale;
    if factor == 1.0 || !norm.is_finite() {
        return (grads, norm);
    }
    let mut scale = Scale { grads, scaled: GradientsParams::new(), factor };
    model.visit(&mut scale);
    (scale.scaled, norm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{grads, model};

    #[test]
    fn the_norm_is_that_of_all_gradients_together() {
        let model = model();
        let (clipped, before) = clip_global_norm(&model, grads(&model), 1.0, 1.0);
        assert!(before > 1.0);
        let (_, after) = clip_global_norm(&model, clipped, f64::INFINITY, 1.0);
        assert!((after - 1.0).abs() < 1e-4, "{after}");
        let (_, untouched) = clip_global_norm(&model, grads(&model), 2.0 * before, 1.0);
        assert!((untouched - before).abs() < 1e-3 * before);
        // Gradients of a loss that was scaled come out as those of the loss.
        let (unscaled, norm) = clip_global_norm(&model, grads(&model), f64::INFINITY, 4.0);
        let (_, after) = clip_global_norm(&model, unscaled, f64::INFINITY, 1.0);
        assert!((4.0 * norm - before).abs() < 1e-3 * before && (after - norm).abs() < 1e-3 * norm, "{norm} {after}");
    }
}
