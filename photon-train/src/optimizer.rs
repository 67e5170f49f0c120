//! AdamW in two groups, and clipping by the norm of all gradients together (Burn clips each by its own).
//!
//! Burn's own optimiser of a whole module gives its memory out in a format of its own, and reads it back onto the
//! default device. This one names the memory after the parameters, so that it can be kept as tensors in a file.

use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{DynOptimizer, DynState, GradientsParams, StateSink, StateSource};
use burn::tensor::{Tensor, TensorData};
use photon_core::model::Model;

use crate::adamw::OnePassAdamW;
use crate::config::OptimizerConfig;
use crate::parameters::ParameterPath;

/// Updates every parameter by the rule of its group, with a memory of earlier gradients for each.
pub struct Optimizer {
    /// The last one that a parameter belongs to decides.
    groups: Vec<(ParamGroup, Box<dyn DynOptimizer>)>,
    states: HashMap<ParamId, DynState>,
}

/// What an optimiser remembers: tensors and counts, each named `path.of.the.parameter.name.of.the.value`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OptimizerMemory {
    /// Running means of gradients and the like.
    pub tensors: BTreeMap<String, TensorData>,
    /// Updates made.
    pub counts: BTreeMap<String, u64>,
}

impl Optimizer {
    /// AdamW with weight decay on matrices and none on vectors.
    pub fn adamw(config: &OptimizerConfig, model: &Model) -> Self {
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
        Self {
            groups: vec![
                (ParamGroup::all(), Box::new(OnePassAdamW::new(config, 0.0))),
                (ParamGroup::from_ids(matrices.0), Box::new(OnePassAdamW::new(config, config.weight_decay))),
            ],
            states: HashMap::new(),
        }
    }

    /// One update of every parameter that has a gradient.
    pub fn step(&mut self, learning_rate: f64, model: Model, grads: GradientsParams) -> Model {
        model.map(&mut Step { optimizer: self, learning_rate, grads, path: ParameterPath::default() })
    }

    /// All that it remembers of the parameters of `model`.
    pub fn memory(&self, model: &Model) -> OptimizerMemory {
        let mut reader = ReadMemory { optimizer: self, memory: OptimizerMemory::default(), path: Default::default() };
        model.visit(&mut reader);
        reader.memory
    }

    /// Takes up what [`Optimizer::memory`] gave for a model of the same parameters, and forgets the rest.
    ///
    /// # Errors
    ///
    /// Names that are not understood, or shapes that do not fit; nothing has changed then.
    pub fn restore(&mut self, model: &Model, memory: OptimizerMemory) -> Result<(), Vec<String>> {
        let mut unknown: BTreeMap<String, Vec<usize>> =
            memory.tensors.iter().map(|(name, data)| (name.clone(), data.shape().to_vec())).collect();
        unknown.extend(memory.counts.keys().map(|name| (name.clone(), Vec::new())));
        let mut source = StateSource::new(memory.counts.into_iter().map(|(name, n)| (name, n.into())).collect());
        memory.tensors.into_iter().for_each(|(name, data)| source.insert_tensor(name, data));
        let mut writer = WriteMemory {
            optimizer: self,
            source,
            unknown,
            problems: Vec::new(),
            states: HashMap::new(),
            path: ParameterPath::default(),
        };
        model.visit(&mut writer);
        let WriteMemory { unknown, mut problems, states, .. } = writer;
        problems.extend(unknown.into_keys().map(|name| format!("{name} is nothing that the optimiser remembers")));
        if !problems.is_empty() {
            return Err(problems);
        }
        self.states = states;
        Ok(())
    }

    fn rule(&self, id: ParamId, path: &str) -> &dyn DynOptimizer {
        let matching = self.groups.iter().rev().find(|(group, _)| group.matches(&id, Some(path)));
        &*matching.expect("the first group takes every parameter").1
    }
}

struct Step<'a> {
    optimizer: &'a mut Optimizer,
    learning_rate: f64,
    grads: GradientsParams,
    path: ParameterPath,
}

impl ModuleMapper for Step<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(grad) = self.grads.remove::<D>(param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let (is_trained, checkpointing) = (tensor.is_require_grad(), tensor.gradient_checkpointing_strategy());
        let state = self.optimizer.states.remove(&id);
        let rule = self.optimizer.rule(id, &self.path.to_string());
        let (updated, state) =
            rule.step_dyn(D, self.learning_rate, tensor.inner().into_bridge(), grad.into_bridge(), state);
        self.optimizer.states.extend(state.map(|state| (id, state)));
        let mut updated = Tensor::<D>::from_inner(Tensor::from_bridge(updated));
        if let Some(strategy) = checkpointing {
            updated = updated.with_gradient_checkpointing_strategy(strategy);
        }
        Param::from_mapped_value(id, updated.set_require_grad(is_trained), mapper)
    }
}

struct ReadMemory<'a> {
    optimizer: &'a Optimizer,
    memory: OptimizerMemory,
    path: ParameterPath,
}

impl ModuleVisitor for ReadMemory<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(state) = self.optimizer.states.get(&param.id) else { return };
        let path = self.path.to_string();
        let mut sink = StateSink::default();
        self.optimizer.rule(param.id, &path).state_flatten(&path, state, &mut sink);
        self.memory.tensors.extend(sink.tensors);
        let count = |scalar| u64::try_from(scalar).expect("optimisers remember tensors and counts");
        self.memory.counts.extend(sink.scalars.into_iter().map(|(name, scalar)| (name, count(scalar))));
    }
}

struct WriteMemory<'a> {
    optimizer: &'a Optimizer,
    source: StateSource,
    /// Names that no parameter has taken yet, with their shapes.
    unknown: BTreeMap<String, Vec<usize>>,
    problems: Vec<String>,
    states: HashMap<ParamId, DynState>,
    path: ParameterPath,
}

impl ModuleVisitor for WriteMemory<'_> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (path, tensor) = (self.path.to_string(), param.val());
        let rule = self.optimizer.rule(param.id, &path);
        let Some(state) = rule.state_unflatten(D, &path, &mut self.source, &tensor.clone().inner().device()) else {
            return;
        };
        let mut taken = StateSink::default();
        rule.state_flatten(&path, &state, &mut taken);
        let names = taken.tensors.iter().map(|(name, _)| name).chain(taken.scalars.iter().map(|(name, _)| name));
        for name in names {
            let found = self.unknown.remove(name).unwrap_or_default();
            // Every value of AdamW has the shape of its parameter, or is a number.
            let expected = tensor.dims().to_vec();
            if !found.is_empty() && found != expected {
                self.problems.push(format!("{name} has shape {found:?}, expected {expected:?}"));
            }
        }
        self.states.insert(param.id, state);
    }
}

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
    fn of(parameters: impl IntoIterator<Item = (String, f32)>) -> Self {
        let mut stages: Vec<(String, f64)> = Vec::new();
        for (stage, square_sum) in parameters {
            match stages.last_mut() {
                Some((last, sum)) if *last == stage => *sum += f64::from(square_sum),
                _ => stages.push((stage, square_sum.into())),
            }
        }
        let all = stages.iter().map(|(_, sum)| sum).sum::<f64>().sqrt();
        stages.iter_mut().for_each(|(_, sum)| *sum = sum.sqrt());
        Self { all, stages }
    }
}

/// Scales all gradients so that their common norm is at most `max_norm`; returns the norms before.
pub fn clip_global_norm(model: &Model, grads: GradientsParams, max_norm: f64) -> (GradientsParams, GradientNorms) {
    struct SquareSums<'a> {
        grads: &'a GradientsParams,
        path: ParameterPath,
        stages: Vec<String>,
        sums: Vec<Tensor<1>>,
    }
    impl ModuleVisitor for SquareSums<'_> {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.enter(name, container_type);
        }

        fn exit_module(&mut self, _name: &str, container_type: &str) {
            self.path.exit(container_type);
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.get::<D>(param.id) {
                self.stages.push(self.path.stage());
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
    let mut squares =
        SquareSums { grads: &grads, path: ParameterPath::default(), stages: Vec::new(), sums: Vec::new() };
    model.visit(&mut squares);
    // One read of the device, not one for each tensor.
    let sums: Vec<f32> = Tensor::cat(squares.sums, 0).try_into_vec_as().expect("norms are f32");
    let norms = GradientNorms::of(squares.stages.into_iter().zip(sums));
    // Where it is not finite the gradients are left alone, so that one can look which of them are not.
    if norms.all <= max_norm || !norms.all.is_finite() {
        return (grads, norms);
    }
    let mut scale = Scale { grads, scaled: GradientsParams::new(), factor: max_norm / norms.all };
    model.visit(&mut scale);
    (scale.scaled, norms)
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
        assert!(before.all > 1.0);
        let (_, after) = clip_global_norm(&model, clipped, f64::INFINITY);
        assert!((after.all - 1.0).abs() < 1e-4, "{after:?}");
        let (_, untouched) = clip_global_norm(&model, grads(&model), 2.0 * before.all);
        assert!((untouched.all - before.all).abs() < 1e-3 * before.all);
    }

    #[test]
    fn the_norm_of_a_stage_is_that_of_its_gradients() {
        let model = model();
        let mut ones = Ones { grads: GradientsParams::new(), n_numbers: 0 };
        model.visit(&mut ones);
        let (_, norms) = clip_global_norm(&model, ones.grads, 1.0);
        let names: Vec<&str> = norms.stages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["embedding", "start", "stack", "head"]);
        let n_numbers = |stage: usize| norms.stages[stage].1.powi(2).round() as usize;
        // Four projections and three matrices of 4 x 4, three gains.
        assert_eq!([0, 1, 2, 3].map(n_numbers), [5 * 4, 4, 7 * 16 + 3 * 4, 4 * 5]);
        assert_eq!(norms.all.powi(2).round() as usize, ones.n_numbers);
    }

    #[test]
    fn only_matrices_decay() {
        let model = model();
        let config = OptimizerConfig { weight_decay: 0.5, ..Default::default() };
        let mut zeros = Zeros(GradientsParams::new());
        model.visit(&mut zeros);
        let moved = Optimizer::adamw(&config, &model).step(0.1, model.clone(), zeros.0);
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
    fn the_memory_is_named_after_the_parameters_and_moves_to_another_optimizer() {
        let (model, config) = (model(), OptimizerConfig::default());
        let mut first = Optimizer::adamw(&config, &model);
        let moved = first.step(0.1, model.clone(), grads(&model));
        let memory = first.memory(&moved);
        assert_eq!(memory.counts["head.weight.momentum.time"], 1);
        assert_eq!(memory.tensors["stack.blocks.0.attention.q_proj.weight.momentum.moment_1"].shape().to_vec(), [4, 4]);

        // Other ids, as in another process.
        let other = self::model();
        let mut second = Optimizer::adamw(&config, &other);
        second.restore(&other, memory.clone()).unwrap();
        assert_eq!(second.memory(&other), memory);
        let second_step = |optimizer: &mut Optimizer, model: &Model| {
            let mut zeros = Zeros(GradientsParams::new());
            model.visit(&mut zeros);
            optimizer.step(0.1, model.clone(), zeros.0);
            optimizer.memory(model)
        };
        assert_eq!(second_step(&mut second, &other), second_step(&mut first, &moved));
    }

    #[test]
    fn a_memory_that_does_not_fit_is_refused() {
        let model = model();
        let mut optimizer = Optimizer::adamw(&OptimizerConfig::default(), &model);
        optimizer.step(0.1, model.clone(), grads(&model));
        let memory = optimizer.memory(&model);
        let mut refused = |change: &dyn Fn(&mut OptimizerMemory)| {
            let mut changed = memory.clone();
            change(&mut changed);
            optimizer.restore(&model, changed).unwrap_err().join("; ")
        };
        let name = "head.weight.momentum.moment_1";
        let turned = refused(&|memory| {
            memory.tensors.insert(name.into(), TensorData::from([[1.0_f32]]));
        });
        assert!(turned.contains("head.weight.momentum.moment_1 has shape [1, 1], expected [4, 5]"), "{turned}");
        let missing = refused(&|memory| drop(memory.tensors.remove(name)));
        assert!(missing.contains("head.weight.momentum.moment_2 is nothing"), "{missing}");
        let foreign = refused(&|memory| {
            memory.counts.insert("nose.time".into(), 3);
        });
        assert_eq!(foreign, "nose.time is nothing that the optimiser remembers");
        assert_eq!(optimizer.memory(&model), memory);
    }

    struct Zeros(GradientsParams);
    impl ModuleVisitor for Zeros {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.register(param.id, param.val().inner().zeros_like());
        }
    }

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

    struct Norms(Vec<(usize, f32)>);
    impl ModuleVisitor for Norms {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((D, param.val().square().sum().sqrt().into_scalar()));
        }
    }
}
