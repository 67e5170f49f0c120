//! Copies of a module that share its weights and no graph of gradients.

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;

/// The module with leaves of its own, on the same device: graphs that share one would be run backward together.
///
/// Burn's `fork` does the same by way of a copy to the device, which leaves a step behind in the graph for each parameter
/// and call, for as long as the program runs.
pub fn with_own_leaves<M: Module>(module: M) -> M {
    struct Detach;
    impl ModuleMapper for Detach {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            // What wants a gradient still does.
            param.map(Tensor::detach)
        }
    }
    module.map(&mut Detach)
}
