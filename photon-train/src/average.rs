//! A moving average of the weights, often better than the weights themselves: it is what is evaluated and exported.

use std::any::Any;
use std::collections::VecDeque;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::tensor::container::TensorContainer;
use photon_core::model::Model;

use crate::config::EmaConfig;
use crate::replicas::without_gradients;

/// The average so far.
pub struct Average {
    decay: f64,
    updates: u64,
    model: Model,
}

impl Average {
    /// Starts at the weights of `model`.
    pub fn new(config: &EmaConfig, model: &Model) -> Self {
        Self { decay: config.decay, updates: 0, model: without_gradients(model) }
    }

    /// Goes on from an earlier average of so many updates, with the parameters of `model`.
    pub fn resume(config: &EmaConfig, updates: u64, model: &Model, average: &Model) -> Self {
        let mut weights = List(VecDeque::new());
        without_gradients(average).visit(&mut weights);
        // Parameters come in the same order, but a model that was loaded by itself has ids of its own.
        let model = without_gradients(model).map(&mut weights);
        Self { decay: config.decay, updates, model }
    }

    /// The averaged weights, without gradients.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Weights that were averaged.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Takes in the weights after an update: `average * decay + weights * (1 - decay)`.
    ///
    /// The decay rises to the configured one, (1 + n) / (10 + n) after n updates, so that the fresh weights are soon
    /// forgotten.
    pub fn take(&mut self, model: &Model) {
        self.updates += 1;
        let decay = self.decay.min((1 + self.updates) as f64 / (10 + self.updates) as f64);
        let mut weights = Weights(TensorContainer::new());
        model.visit(&mut weights);
        self.model = self.model.clone().map(&mut Mix { weights: weights.0, decay });
    }
}

struct Weights(TensorContainer<ParamId>);

impl ModuleVisitor for Weights {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.register(param.id, param.val().inner());
    }
}

/// Weights of one model on their way into another.
struct List(VecDeque<Box<dyn Any>>);

impl ModuleVisitor for List {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push_back(Box::new(param.val()));
    }
}

impl ModuleMapper for List {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let weights = self.0.pop_front().and_then(|weights| weights.downcast::<Tensor<D>>().ok());
        param.map(|_| *weights.expect("both models have the same parameters"))
    }
}

struct Mix {
    weights: TensorContainer<ParamId>,
    decay: f64,
}

impl ModuleMapper for Mix {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let weights: Tensor<D> = self.weights.remove(&param.id).expect("both models have the same parameters");
        param.map(|average| average * self.decay + weights * (1.0 - self.decay))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use photon_core::config_file;

    fn model(seed: u64) -> Model {
        let toml =
            "architecture = \"flat\"\nvocab_size = 5\nd_model = 4\n[stack]\nn_layers = 1\nn_heads = 1\nd_ff = 4\n";
        let config = config_file::parse_model(toml.parse().unwrap(), "test.toml".as_ref()).unwrap();
        Model::new(&config, seed, &Device::flex().autodiff())
    }

    fn head(model: &Model) -> Vec<f32> {
        model.head().weights().remove(0).try_into_vec_as().unwrap()
    }

    /// `model` with other weights and the ids of its parameters, as after an update.
    fn moved(model: &Model) -> Model {
        struct Halve;
        impl ModuleMapper for Halve {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                param.map(|weights| weights * 0.5)
            }
        }
        model.clone().map(&mut Halve)
    }

    #[test]
    fn it_is_the_sum_written_out() {
        let first = model(1);
        let second = moved(&first);
        let mut average = Average::new(&EmaConfig { decay: 0.25 }, &first);
        // 2/11, then 3/12 = 0.25 at most.
        average.take(&second);
        average.take(&second);
        assert_eq!(average.updates(), 2);
        for ((&averaged, a), b) in head(average.model()).iter().zip(head(&first)).zip(head(&second)) {
            let once = a * (2.0 / 11.0) + b * (9.0 / 11.0);
            assert!((averaged - (once * 0.25 + b * 0.75)).abs() < 1e-7, "{averaged} of {a} and {b}");
        }
    }
}
