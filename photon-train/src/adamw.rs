//! AdamW in one pass over parameters, gradients and moments.

use burn::optim::{AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, Optimizer};
use burn::tensor::{Device, Tensor};
use photon_core::nn::fused::AdamWUpdate;

use crate::config::OptimizerConfig;

/// Burn's AdamW, with its state, by the CPU's kernel where there is one: Burn's own takes some fifteen passes.
#[derive(Clone)]
pub(crate) struct OnePassAdamW {
    update: AdamWUpdate,
    stock: AdamW,
}

impl OnePassAdamW {
    /// With the decay of one group of parameters.
    pub(crate) fn new(config: &OptimizerConfig, weight_decay: f32) -> Self {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
