//! AdamW and Muon, each parameter by the rule and at the rate of its part of the model.
//!
//! Burn's own optimiser of a whole module gives its memory out in a format of its own, and reads it back onto the
//! default device. This one names the memory after the parameters, so that it can be kept as tensors in a file.

use std::collections::{BTreeMap, HashMap};

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::optim::{DynOptimizer, DynState, GradientsParams, StateSink, StateSource};
use burn::tensor::{Tensor, TensorData};
use photon_core::model::Model;

use crate::adamw::OnePassAdamW;
use crate::config::{OptimizerConfig, OptimizerKind};
use crate::muon::HiddenMuon;
use crate::parameters::{ParameterPath, SeeParameters, see_parameters};
use crate::parts::Place;

/// Updates every parameter by the rule of its group, with a memory of earlier gradients for each.
pub struct Optimizer {
    rules: Vec<Rule>,
    /// Which of them each parameter follows.
    rule_of: HashMap<ParamId, usize>,
    states: HashMap<ParamId, DynState>,
}

/// How parameters of one kind are updated.
struct Rule {
    key: RuleKey,
    optimizer: Box<dyn DynOptimizer>,
}

/// What tells rules apart.
#[derive(Clone, Copy, PartialEq)]
struct RuleKey {
    kind: OptimizerKind,
    /// Times the learning rate of the step.
    factor: f64,
    weight_decay: f32,
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
    /// The rules of a config, laid out for a model: weight decay on matrices and none on vectors.
    pub fn new(config: &OptimizerConfig, model: &Model) -> Self {
        let mut layout =
            Layout { config, n_levels: model.config().n_levels(), rules: Vec::new(), rule_of: HashMap::new() };
        see_parameters(model, &mut layout);
        Self { rules: layout.rules, rule_of: layout.rule_of, states: HashMap::new() }
    }

    /// One update of every parameter that has a gradient.
    pub fn step(&mut self, learning_rate: f64, model: Model, grads: GradientsParams) -> Model {
        model.map(&mut Step { optimizer: self, learning_rate, grads })
    }

    /// All that it remembers of the parameters of `model`.
    pub fn memory(&self, model: &Model) -> OptimizerMemory {
        let mut reader = ReadMemory { optimizer: self, memory: OptimizerMemory::default() };
        see_parameters(model, &mut reader);
        reader.memory
    }

    /// Takes up what [`Optimizer::memory`] gave for a model of the same parameters, and forgets the rest, also what it
    /// gave for parameters that are frozen now.
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
        let mut writer = WriteMemory { optimizer: self, source, unknown, problems: Vec::new(), states: HashMap::new() };
        see_parameters(model, &mut writer);
        let WriteMemory { unknown, mut problems, states, .. } = writer;
        problems.extend(unknown.into_keys().map(|name| format!("{name} is nothing that the optimiser remembers")));
        if !problems.is_empty() {
            return Err(problems);
        }
        self.states = states;
        Ok(())
    }

    fn rule(&self, id: ParamId) -> &Rule {
        &self.rules[self.rule_of[&id]]
    }
}

/// Finds out which rule each parameter follows.
struct Layout<'a> {
    config: &'a OptimizerConfig,
    n_levels: usize,
    rules: Vec<Rule>,
    rule_of: HashMap<ParamId, usize>,
}

impl Layout<'_> {
    fn key(&self, place: Place, rank: usize) -> RuleKey {
        let config = self.config;
        let settings = config.settings(place, self.n_levels);
        let is_outside = matches!(place, Place::Embedding | Place::Start | Place::Head);
        let kind = if rank == 2 && !is_outside { config.kind } else { OptimizerKind::AdamW };
        let muon = config.muon.clone().unwrap_or_default();
        let (rate, decay) = match kind {
            OptimizerKind::AdamW => (None, None),
            OptimizerKind::Muon => (muon.learning_rate, muon.weight_decay),
        };
        let decay = settings.weight_decay.or(decay).unwrap_or(config.weight_decay);
        RuleKey {
            kind,
            factor: settings.learning_rate_factor * rate.map_or(1.0, |rate| rate / config.learning_rate),
            weight_decay: if rank == 1 { 0.0 } else { decay },
        }
    }
}

impl SeeParameters for Layout<'_> {
    fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>) {
        let name = path.to_string();
        let place = Place::of(&name).unwrap_or_else(|| panic!("{name} stands in no known place of a model"));
        let key = self.key(place, D);
        let known = self.rules.iter().position(|rule| rule.key == key);
        let index = known.unwrap_or_else(|| {
            let optimizer: Box<dyn DynOptimizer> = match key.kind {
                OptimizerKind::AdamW => Box::new(OnePassAdamW::new(self.config, key.weight_decay)),
                OptimizerKind::Muon => {
                    let muon = self.config.muon.clone().unwrap_or_default();
                    Box::new(HiddenMuon::new(&muon, key.weight_decay))
                }
            };
            self.rules.push(Rule { key, optimizer });
            self.rules.len() - 1
        });
        self.rule_of.insert(param.id, index);
    }
}

/// The model with the parts that its groups freeze cut off from gradients.
pub fn freeze(config: &OptimizerConfig, model: Model) -> Model {
    struct Freeze<'a> {
        config: &'a OptimizerConfig,
        n_levels: usize,
        path: ParameterPath,
    }
    impl ModuleMapper for Freeze<'_> {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.enter(name, container_type);
        }

        fn exit_module(&mut self, _name: &str, container_type: &str) {
            self.path.exit(container_type);
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let place = Place::of(&self.path.to_string());
            match place.is_some_and(|place| self.config.settings(place, self.n_levels).frozen) {
                true => param.set_require_grad(false),
                false => param,
            }
        }
    }
    let n_levels = model.config().n_levels();
    model.map(&mut Freeze { config, n_levels, path: ParameterPath::default() })
}

struct Step<'a> {
    optimizer: &'a mut Optimizer,
    learning_rate: f64,
    grads: GradientsParams,
}

impl ModuleMapper for Step<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(grad) = self.grads.remove::<D>(param.id) else { return param };
        let (id, tensor, mapper) = param.consume();
        let (is_trained, checkpointing) = (tensor.is_require_grad(), tensor.gradient_checkpointing_strategy());
        let state = self.optimizer.states.remove(&id);
        let Rule { key, optimizer } = self.optimizer.rule(id);
        let rate = self.learning_rate * key.factor;
        let (updated, state) = optimizer.step_dyn(D, rate, tensor.inner().into_bridge(), grad.into_bridge(), state);
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
}

impl SeeParameters for ReadMemory<'_> {
    fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>) {
        let Some(state) = self.optimizer.states.get(&param.id) else { return };
        let path = path.to_string();
        let mut sink = StateSink::default();
        self.optimizer.rule(param.id).optimizer.state_flatten(&path, state, &mut sink);
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
}

impl SeeParameters for WriteMemory<'_> {
    fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>) {
        let (path, tensor) = (path.to_string(), param.val());
        let rule = &self.optimizer.rule(param.id).optimizer;
        let Some(state) = rule.state_unflatten(D, &path, &mut self.source, &tensor.clone().inner().device()) else {
            return;
        };
        let mut taken = StateSink::default();
        rule.state_flatten(&path, &state, &mut taken);
        let names = taken.tensors.iter().map(|(name, _)| name).chain(taken.scalars.iter().map(|(name, _)| name));
        for name in names {
            let found = self.unknown.remove(name).unwrap_or_default();
            // Every value of AdamW and Muon has the shape of its parameter, or is a number.
            let expected = tensor.dims().to_vec();
            if !found.is_empty() && found != expected {
                self.problems.push(format!("{name} has shape {found:?}, expected {expected:?}"));
            }
        }
        // What is frozen now is no longer remembered.
        if tensor.is_require_grad() {
            self.states.insert(param.id, state);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use burn::module::ModuleVisitor;
    use burn::tensor::Device;
    use photon_core::config_file;

    pub(crate) fn model() -> Model {
        let toml =
            "architecture = \"flat\"\nvocab_size = 5\nd_model = 4\n[stack]\nn_layers = 1\nn_heads = 1\nd_ff = 4\n";
        let config = config_file::parse_model(toml.parse().unwrap(), "test.toml".as_ref()).unwrap();
        Model::new(&config, 0, &Device::flex().autodiff())
    }

    pub(crate) fn grads(model: &Model) -> GradientsParams {
        let ids = Tensor::from_ints([[1, 2, 3]], &Device::flex().autodiff());
        GradientsParams::from_grads((model.forward(ids) * 100.0).sum().backward(), model)
    }

    #[test]
    fn only_matrices_decay() {
        let model = model();
        let config = OptimizerConfig { weight_decay: 0.5, ..Default::default() };
        let mut zeros = Zeros(GradientsParams::new());
        model.visit(&mut zeros);
        let moved = Optimizer::new(&config, &model).step(0.1, model.clone(), zeros.0);
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

    /// Norms of the parameters' changes by one step under gradients of one, by name.
    fn moves(config: &OptimizerConfig) -> BTreeMap<String, f32> {
        let model_config = crate::parts::tests::model_config(2);
        let model = Model::new(&model_config, 0, &Device::flex().autodiff());
        struct Ones(GradientsParams);
        impl ModuleVisitor for Ones {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.register(param.id, param.val().inner().ones_like());
            }
        }
        let mut ones = Ones(GradientsParams::new());
        model.visit(&mut ones);
        let moved = Optimizer::new(config, &model).step(0.1, model.clone(), ones.0);
        let values = |model: &Model| {
            let mut values = Values(Vec::new());
            model.visit(&mut values);
            values.0
        };
        let names = crate::parameters::parameter_names(&model);
        let changes = values(&model).into_iter().zip(values(&moved)).map(|(before, after)| {
            let largest = before.iter().zip(&after).map(|(before, after)| (before - after).abs()).fold(0.0, f32::max);
            (largest * 1e4).round() / 1e4
        });
        names.into_iter().zip(changes).collect()
    }

    #[test]
    fn groups_change_rates_key_by_key() {
        let groups = "weight_decay = 0.0\n[[groups]]\nselect = \"encoders\"\nlearning_rate_factor = 0.5\n\
                      [[groups]]\nselect = \"level 2\"\nlearning_rate_factor = 0.25\n\
                      [[groups]]\nselect = \"chunkers\"\nweight_decay = 0.5\n";
        let moves = moves(&toml::from_str(groups).unwrap());
        // AdamW's first step is as long as the rate.
        for (name, expected) in [
            ("encoder_embedding.weight", 0.1),
            ("head.weight", 0.1),
            ("encoders.0.stack.blocks.0.attention.q_proj.weight", 0.05),
            ("encoders.1.stack.blocks.0.attention.q_proj.weight", 0.025),
            ("encoders.1.stack.norm.gamma", 0.025),
            ("decoders.1.converter.proj.weight", 0.025),
            ("decoders.0.converter.proj.weight", 0.1),
        ] {
            assert_eq!(moves[name], expected, "{name}");
        }
        // And decays on top, matrices alone.
        assert_eq!(moves["encoders.1.chunker.projection.proj.bias"], 0.025);
        assert!(moves["encoders.1.chunker.projection.proj.weight"] > 0.025);
    }

    #[test]
    fn muon_is_for_matrices_between_tables_and_head() {
        let config: OptimizerConfig =
            toml::from_str("kind = \"muon\"\nweight_decay = 0.0\nmuon = { learning_rate = 2e-3 }").unwrap();
        let moves = moves(&config);
        // A gradient of ones has one singular value, so the update is 1 / 4 everywhere, times 0.2 * 2, and the rate's share;
        // Newton-Schulz leaves it between 0.7 and 1.2 of that.
        let whole = 0.1 * (2e-3 / 1e-3) * 0.25 * 0.4;
        for (name, &found) in &moves {
            let is_hidden = (name.starts_with("encoders") || name.starts_with("decoders")) && name.ends_with("weight");
            // Of the chunker's [8, 4] each is 1 / √32, and its size 0.2 √8: the same product.
            match is_hidden {
                true => assert!((0.65..1.25).contains(&(found / whole)), "{name}: {found}, {whole}"),
                false => assert_eq!(found, 0.1, "{name}"),
            }
        }
    }

    #[test]
    fn the_memory_is_named_after_the_parameters_and_moves_to_another_optimizer() {
        let (model, config) = (model(), OptimizerConfig::default());
        let mut first = Optimizer::new(&config, &model);
        let moved = first.step(0.1, model.clone(), grads(&model));
        let memory = first.memory(&moved);
        assert_eq!(memory.counts["head.weight.momentum.time"], 1);
        assert_eq!(memory.tensors["stack.blocks.0.attention.q_proj.weight.momentum.moment_1"].shape().to_vec(), [4, 4]);

        // Other ids, as in another process.
        let other = self::model();
        let mut second = Optimizer::new(&config, &other);
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
        let mut optimizer = Optimizer::new(&OptimizerConfig::default(), &model);
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

    struct Values(Vec<Vec<f32>>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().try_to_vec_as().unwrap());
        }
    }

    struct Norms(Vec<(usize, f32)>);
    impl ModuleVisitor for Norms {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push((D, param.val().square().sum().sqrt().into_scalar()));
        }
    }
}
