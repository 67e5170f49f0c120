//! Gradient checkpointing: a block that keeps its input alone, and runs again when gradients are wanted.
//!
//! Burn's own checkpointing recomputes elementwise operations; this recomputes whole blocks. A step then costs one more
//! forward, and of a block a single tensor stays in memory until the backward pass reaches it.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};

use super::fused::has_kernels;
use super::leaves::with_own_leaves;

type Tracked = Autodiff<Flex, BalancedCheckpointing>;

/// The input and the parameters of a block, at most.
const MAX_TENSORS: usize = 11;
const BACKEND: &str = "a tensor of the CPU backend with checkpointing";

/// Whether blocks over `x` are to be recomputed: on a device with checkpointing, and so far on the CPU alone.
pub(super) fn applies(x: &Tensor<3>) -> bool {
    x.gradient_checkpointing_strategy() == Some(GradientCheckpointingStrategy::Balanced)
        && has_kernels(&x.device(), x.dtype())
}

/// `run(block, x)`, of which nothing but `x` is kept for the backward pass.
///
/// # Panics
///
/// Where [`applies`] says no, or if the block has more parameters than a transformer block.
pub(super) fn run_again_later<M, F>(block: &M, x: Tensor<3>, run: F) -> Tensor<3>
where
    M: Module + Sync + 'static,
    F: Fn(&M, Tensor<3>) -> Tensor<3> + Clone + Send + 'static,
{
    let device = x.device();
    let mut tensors = vec![x.clone().try_into_primitive::<Tracked>().expect(BACKEND)];
    tensors.extend(parameters(block));
    assert!(tensors.len() <= MAX_TENSORS, "a block has at most {} parameters", MAX_TENSORS - 1);
    let nothing: Tensor<1> = Tensor::zeros([1], &device);
    tensors.resize_with(MAX_TENSORS, || nothing.clone().try_into_primitive::<Tracked>().expect(BACKEND));
    let nodes = tensors.iter().map(FloatTensor::<Tracked>::node).collect::<Vec<_>>();
    let nodes = nodes.try_into().expect("the list was filled up");

    let out = run(&block.valid(), x.clone().inner()).try_into_primitive::<Flex>().expect(BACKEND);
    let step = Recompute(std::marker::PhantomData);
    let out: FloatTensor<Tracked> = match step.prepare::<BalancedCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let x = <Tracked as AutodiffBackend>::inner(tensors.swap_remove(0));
            // Leaves of its own: the graph of the second run is not to hang together with this one.
            prep.finish(Again { block: with_own_leaves(block.clone()), x, run }, out)
        }
        OpsKind::UnTracked(prep) => prep.finish(out),
    };
    Tensor::from_primitive::<Tracked>(out)
}

struct Recompute<M, F>(std::marker::PhantomData<fn() -> (M, F)>);

#[derive(Clone)]
struct Again<M, F> {
    block: M,
    x: FlexTensor,
    run: F,
}

impl<M, F> std::fmt::Debug for Recompute<M, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recompute")
    }
}

impl<M, F> std::fmt::Debug for Again<M, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Again")
    }
}

impl<M, F> Backward<Flex, MAX_TENSORS> for Recompute<M, F>
where
    M: Module + Sync + 'static,
    F: Fn(&M, Tensor<3>) -> Tensor<3> + Clone + Send + 'static,
{
    type State = Again<M, F>;

    fn backward(self, ops: Ops<Self::State, MAX_TENSORS>, grads: &mut Gradients, _: &mut Checkpointer) {
        let Again { block, x, run } = ops.state;
        let with_gradients = |x: FlexTensor| {
            let x = Tensor::<3>::from_primitive::<Flex>(x).autodiff();
            x.with_gradient_checkpointing_strategy(GradientCheckpointingStrategy::Balanced)
        };
        let d_out = with_gradients(grads.consume::<Flex>(&ops.node));
        let x = with_gradients(x).require_grad();
        let found = (run(&block, x.clone()) * d_out).sum().backward();

        let [x_node, nodes @ ..] = ops.parents;
        if let (Some(node), Some(gradient)) = (x_node, x.grad(&found)) {
            grads.register::<Flex>(node.id, gradient.try_into_primitive::<Flex>().expect(BACKEND));
        }
        for (node, gradient) in nodes.into_iter().zip(gradients(&block, &found)) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<Flex>(node.id, gradient);
            }
        }
    }
}

fn parameters(block: &impl Module) -> Vec<FloatTensor<Tracked>> {
    struct Visit(Vec<FloatTensor<Tracked>>);
    impl ModuleVisitor for Visit {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.val().try_into_primitive::<Tracked>().expect(BACKEND));
        }
    }
    let mut visit = Visit(Vec::new());
    block.visit(&mut visit);
    visit.0
}

/// In the order of [`parameters`].
fn gradients(block: &impl Module, found: &burn::tensor::Gradients) -> Vec<Option<FlexTensor>> {
    struct Visit<'a> {
        found: &'a burn::tensor::Gradients,
        gradients: Vec<Option<FlexTensor>>,
    }
    impl ModuleVisitor for Visit<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let gradient = param.val().grad(self.found);
            self.gradients.push(gradient.map(|x| x.try_into_primitive::<Flex>().expect(BACKEND)));
        }
    }
    let mut visit = Visit { found, gradients: Vec::new() };
    block.visit(&mut visit);
    visit.gradients
}
