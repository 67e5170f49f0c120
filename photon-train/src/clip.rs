//! Clipping by the norm of all gradients together (Burn clips each by its own).

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use photon_core::model::Model;

use crate::parameters::{ParameterPath, SeeParameters, see_parameters};

/// Norms of gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientNorms {
    /// Of all together.
    pub all: f64,
    /// Of each stage, named by [`ParameterPath::stage`], in the order of the model.
    pub stages: Vec<(String, f64)>,
}

impl GradientNorms {
    /// From the sum of squares of each parameter, beside the stage that it belongs to.
    fn of(parameters: impl IntoIterator<Item = (String, f32)>, loss_scale: f64) -> Self {
        let mut stages: Vec<(String, f64)> = Vec::new();
        for (stage, square_sum) in parameters {
            match stages.last_mut() {
                Some((last, sum)) if *last == stage => *sum += f64::from(square_sum),
                _ => stages.push((stage, square_sum.into())),
            }
        }
        let all = stages.iter().map(|(_, sum)| sum).sum::<f64>().sqrt() / loss_scale;
        stages.iter_mut().for_each(|(_, sum)| *sum = sum.sqrt() / loss_scale);
        Self { all, stages }
    }
}

/// Scales all gradients so that their common norm is at most `max_norm`; returns the norms before.
///
/// The gradients given are `loss_scale` times what they should be, those returned are not.
pub fn clip_global_norm(
    model: &Model,
    grads: GradientsParams,
    max_norm: f64,
    loss_scale: f64,
) -> (GradientsParams, GradientNorms) {
    struct SquareSums<'a> {
        grads: &'a GradientsParams,
        stages: Vec<String>,
        sums: Vec<Tensor<1>>,
    }
    impl SeeParameters for SquareSums<'_> {
        fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.get::<D>(param.id) {
                self.stages.push(path.stage());
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
    let mut squares = SquareSums { grads: &grads, stages: Vec::new(), sums: Vec::new() };
    see_parameters(model, &mut squares);
    // One read of the device, not one for each tensor.
    let sums: Vec<f32> = Tensor::cat(squares.sums, 0).try_into_vec_as().expect("norms are f32");
    let norms = GradientNorms::of(squares.stages.into_iter().zip(sums), loss_scale);
    // Where it is not finite the gradients are left alone, so that one can look which of them are not.
    let clipping = if norms.all <= max_norm { 1.0 } else { max_norm / norms.all };
    let factor = clipping / loss_scale;
    if factor == 1.0 || !norms.all.is_finite() {
        return (grads, norms);
    }
    let mut scale = Scale { grads, scaled: GradientsParams::new(), factor };
    model.visit(&mut scale);
    (scale.scaled, norms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::tests::{grads, model};

    #[test]
    fn the_norm_is_that_of_all_gradients_together() {
        let model = model();
        let (clipped, before) = clip_global_norm(&model, grads(&model), 1.0, 1.0);
        assert!(before.all > 1.0);
        let (_, after) = clip_global_norm(&model, clipped, f64::INFINITY, 1.0);
        assert!((after.all - 1.0).abs() < 1e-4, "{after:?}");
        let (_, untouched) = clip_global_norm(&model, grads(&model), 2.0 * before.all, 1.0);
        assert!((untouched.all - before.all).abs() < 1e-3 * before.all);
        // Gradients of a loss that was scaled come out as those of the loss.
        let (unscaled, norms) = clip_global_norm(&model, grads(&model), f64::INFINITY, 4.0);
        let (_, after) = clip_global_norm(&model, unscaled, f64::INFINITY, 1.0);
        for ((_, norm), (_, before)) in norms.stages.iter().zip(&before.stages) {
            assert!((4.0 * norm - before).abs() < 1e-3 * before, "{norm} of {before}");
        }
        assert!((4.0 * norms.all - before.all).abs() < 1e-3 * before.all, "{norms:?}");
        assert!((after.all - norms.all).abs() < 1e-3 * norms.all, "{norms:?} {after:?}");
    }

    #[test]
    fn the_norm_of_a_stage_is_that_of_its_gradients() {
        struct Ones {
            grads: GradientsParams,
            n_numbers: usize,
        }
        impl ModuleVisitor for Ones {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let ones = param.val().inner().ones_like();
                self.n_numbers += ones.shape().num_elements();
                self.grads.register(param.id, ones);
            }
        }
        let model = model();
        let mut ones = Ones { grads: GradientsParams::new(), n_numbers: 0 };
        model.visit(&mut ones);
        let (_, norms) = clip_global_norm(&model, ones.grads, 1.0, 1.0);
        let names: Vec<&str> = norms.stages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["embedding", "start", "stack", "head"]);
        let n_numbers = |stage: usize| norms.stages[stage].1.powi(2).round() as usize;
        // Four projections and three matrices of 4 x 4, three gains.
        assert_eq!([0, 1, 2, 3].map(n_numbers), [5 * 4, 4, 7 * 16 + 3 * 4, 4 * 5]);
        assert_eq!(norms.all.powi(2).round() as usize, ones.n_numbers);
    }
}
