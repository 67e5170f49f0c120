//! Parameters of a model by name, as the files of weights name them.

use std::fmt;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use photon_core::model::Model;
use sha2::{Digest, Sha256};

/// Where a visit of a model stands, for instance `encoders.0.stack.blocks.1.attention.q_proj.weight`.
#[derive(Clone, Debug, Default)]
pub struct ParameterPath(Vec<String>);

impl ParameterPath {
    /// What a visitor is told when it enters a module.
    pub fn enter(&mut self, name: &str, container_type: &str) {
        if !is_variant(container_type) {
            self.0.push(name.to_owned());
        }
    }

    /// What a visitor is told when it leaves a module.
    pub fn exit(&mut self, container_type: &str) {
        if !is_variant(container_type) {
            self.0.pop();
        }
    }

    /// The stage that the parameter belongs to, as reports name it: `encoder 1` with its chunker, `decoder 2` with its
    /// converter, `head`, `stack`, ...
    pub fn stage(&self) -> String {
        let index = self.0.get(1).and_then(|part| part.parse::<usize>().ok());
        match (self.0.first(), index) {
            (Some(list), Some(index)) => format!("{} {}", list.trim_end_matches('s'), index + 1),
            (Some(part), None) => part.replace('_', " "),
            (None, _) => String::new(),
        }
    }
}

/// The files name a model's parameters, whichever variant of [`Model`] it is.
fn is_variant(container_type: &str) -> bool {
    container_type.starts_with("Enum:")
}

impl fmt::Display for ParameterPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("."))
    }
}

/// Tells weights that differ in any bit apart.
pub fn fingerprint(model: &Model) -> Vec<u8> {
    struct Hash(Sha256);
    impl ModuleVisitor for Hash {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.update(param.val().into_data().as_bytes());
        }
    }
    let mut hash = Hash(Sha256::new());
    model.visit(&mut hash);
    hash.0.finalize().to_vec()
}

/// Something that looks at parameters and at where they stand.
pub(crate) trait SeeParameters {
    /// Looks at one.
    fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>);
}

/// Shows every parameter, in the order of the model.
pub(crate) fn see_parameters(model: &Model, seer: &mut impl SeeParameters) {
    struct Walk<'a, S> {
        seer: &'a mut S,
        path: ParameterPath,
    }
    impl<S: SeeParameters> ModuleVisitor for Walk<'_, S> {
        fn enter_module(&mut self, name: &str, container_type: &str) {
            self.path.enter(name, container_type);
        }

        fn exit_module(&mut self, _name: &str, container_type: &str) {
            self.path.exit(container_type);
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.seer.see(&self.path, param);
        }
    }
    model.visit(&mut Walk { seer, path: ParameterPath::default() });
}

/// Names of all parameters, in the order of the model.
#[cfg(test)]
pub(crate) fn parameter_names(model: &Model) -> Vec<String> {
    struct Names(Vec<String>);
    impl SeeParameters for Names {
        fn see<const D: usize>(&mut self, path: &ParameterPath, _: &Param<Tensor<D>>) {
            self.0.push(path.to_string());
        }
    }
    let mut names = Names(Vec::new());
    see_parameters(model, &mut names);
    names.0
}

/// Parts of the model, such as `encoders.0` or `head`, with a gradient that is not finite.
pub fn parts_with_bad_gradients(model: &Model, grads: &GradientsParams) -> Vec<String> {
    struct Search<'a> {
        grads: &'a GradientsParams,
        parts: Vec<String>,
    }
    impl SeeParameters for Search<'_> {
        fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>) {
            let Some(grad) = self.grads.get::<D>(param.id) else { return };
            if grad.square().sum().into_scalar::<f32>().is_finite() {
                return;
            }
            let part = match path.0.as_slice() {
                [list, index, ..] if index.parse::<usize>().is_ok() => format!("{list}.{index}"),
                [part, ..] => part.clone(),
                [] => return,
            };
            if self.parts.last() != Some(&part) {
                self.parts.push(part);
            }
        }
    }
    let mut search = Search { grads, parts: Vec::new() };
    see_parameters(model, &mut search);
    search.parts
}
