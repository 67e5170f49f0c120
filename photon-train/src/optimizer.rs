//! AdamW in two groups, and clipping by the norm of all gradients together (Burn clips each by its own).

use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, GradientsParams, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use photon_core::model::Model;
use photon_core::nn::fused::AdamWUpdate;

use crate::config::OptimizerConfig;

/// AdamW with weight decay on matrices and none on vectors.
pub fn adamw(config: &OptimizerConfig, model: &Model) -> ModuleOptimizer {
    struct Matrices(Vec<ParamId>);
    impl ModuleVisitor for Matrices {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if D >= 2 {
                self.0.push(param.id);
            }
        }
    }
    let mut matrices = Matrices(Vec::new());
    model.visit(&mut matrices);
    let without_decay = OnePassAdamW::new(config, 0.0);
    let with_decay = OnePassAdamW::new(config, config.weight_decay);
    ModuleOptimizer::from(without_decay).with_group(ParamGroup::from_ids(matrices.0), with_decay, None)
}

/// Burn's AdamW, with its state, by the CPU's kernel where there is one: Burn's own takes some fifteen passes.
#[derive(Clone)]
struct OnePassAdamW {
    update: AdamWUpdate,
    stock: AdamW,
}

impl OnePassAdamW {
    fn new(config: &OptimizerConfig, weight_decay: f32) -> Self {
        let &OptimizerConfig { beta_1, beta_2, epsilon, .. } = config;
        let stock = AdamWConfig::new().with_beta_1(beta_1).with_beta_2(beta_2).with_epsilon(epsilon);
        Self {
            update: AdamWUpdate { learning_rate: 0.0, beta_1, beta_2, epsilon, weight_decay, time: 0 },
            stock: stock.with_weight_decay(weight_decay).build(),
        }
    }
}

impl Optimizer for OnePassAdamW {
    type State<const D: usize> = AdamWState<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: f64,
        parameter: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<AdamWState<D>>,
    ) -> (Tensor<D>, Option<AdamWState<D>>) {
        let time = state.as_ref().map_or(0, |state| state.momentum.time) + 1;
        let update = AdamWUpdate { learning_rate: learning_rate as f32, time, ..self.update };
        if !update.serves(&parameter) {
            return self.stock.step(learning_rate, parameter, gradient, state);
        }
        let moments = state.map(|state| [state.momentum.moment_1, state.momentum.moment_2]);
        let [parameter, moment_1, moment_2] = update.apply(parameter, gradient, moments);
        (parameter, Some(AdamWState::new(AdaptiveMomentumState::new(time, moment_1, moment_2))))
    }

    fn to_device<const D: usize>(state: AdamWState<D>, device: &Device) -> AdamWState<D> {
        AdamW::to_device(state, device)
    }
}

/// Scales all gradients so that their common norm is at most `max_norm`; returns the norm before.
pub fn clip_global_norm(model: &Model, grads: GradientsParams, max_norm: f64) -> (GradientsParams, f64) {
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
    let norm = f64::from(Tensor::cat(squares.sums, 0).sum().into_scalar::<f32>()).sqrt();
    if norm <= max_norm {
        return (grads, norm);
    }
    let mut scale = Scale { grads, scaled: GradientsParams::new(), factor: max_norm / norm };
    model.visit(&mut scale);
    (scale.scaled, norm)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use photon_core::config_file;

    fn model() -> Model {
        let toml =
            "architecture = \"flat\"\nvocab_size = 5\nd_model = 4\n[stack]\nn_layers = 1\nn_heads = 1\nd_ff = 4\n";
        let config = config_file::parse_model(toml.parse().unwrap(), "test.toml".as_ref()).unwrap();
        Model::new(&config, 0, &Device::flex().autodiff())
    }

    fn grads(model: &Model) -> GradientsParams {
        let ids = Tensor::from_ints([[1, 2, 3]], &Device::flex().autodiff());
        GradientsParams::from_grads((model.forward(ids) * 100.0).sum().backward(), model)
    }

    #[test]
    fn the_norm_is_that_of_all_gradients_together() {
        let model = model();
        let (clipped, before) = clip_global_norm(&model, grads(&model), 1.0);
        assert!(before > 1.0);
        let (_, after) = clip_global_norm(&model, clipped, f64::INFINITY);
        assert!((after - 1.0).abs() < 1e-4, "{after}");
        let (_, untouched) = clip_global_norm(&model, grads(&model), 2.0 * before);
        assert!((untouched - before).abs() < 1e-3 * before);
    }

    #[test]
    fn only_matrices_decay() {
        let model = model();
        let config = OptimizerConfig { weight_decay: 0.5, ..Default::default() };
        let mut zeros = Zeros(GradientsParams::new());
        model.visit(&mut zeros);
        let moved = adamw(&config, &model).step(0.1, model.clone(), zeros.0);
        let norms = |model: &Model| {
            let mut norms = Norms(Vec::new());
            model.visit(&mut norms);
            norms.0
        };
        for ((rank, before), (_, after)) in norms(&model).into_iter().zip(norms(&moved)) {
            let expected = if rank == 1 { before } else { before * 0.95 };
            assert!((after - expected).abs() < 1e-5, "rank {rank}: {before} became {after}");
        }
    }

    #[test]
    fn one_pass_equals_burns_adamw() {
        let device = Device::flex();
        let config = OptimizerConfig { weight_decay: 0.5, epsilon: 1e-3, ..Default::default() };
        let ours = OnePassAdamW::new(&config, config.weight_decay);
        let start = Tensor::<2>::random([300, 70], burn::tensor::Distribution::Default, &device);
        let (mut one_pass, mut burns) = ((start.clone(), None), (start, None));
        for step in 1..=5 {
            let gradient = (one_pass.0.clone() * step as f64).sin();
            assert!(ours.update.serves(&one_pass.0));
            one_pass = ours.step(0.1, one_pass.0, gradient.clone(), one_pass.1);
            burns = ours.stock.step(0.1, burns.0, gradient, burns.1);
            let difference: f32 = (one_pass.0.clone() - burns.0.clone()).abs().max().into_scalar();
            assert!(difference < 1e-5, "step {step}: {difference}");
        }
    }

    struct Zeros(GradientsParams);
    impl ModuleVisitor for Zeros {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.register(param.id, param.val().inner().zeros_like());
        }
    }

    struct Norms(Vec<(usize, f32)>);
    impl ModuleVisitor for Norms {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((D, param.val().square().sum().sqrt().into_scalar()));
        }
    }
}
