//! `silu(gate) * up`, which keeps what goes in.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend};

use super::kernels::Kernels;

pub(super) fn tracked<B: Kernels, C: CheckpointStrategy>(
    gate: FloatTensor<Autodiff<B, C>>,
    up: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct SwiGlu;

    impl<B: Kernels> Backward<B, 2> for SwiGlu {
        type State = (FloatTensor<B>, FloatTensor<B>);

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [gate_node, up_node] = ops.parents;
            let (gate, up) = ops.state;
            let d_out = grads.consume::<B>(&ops.node);
            let (d_gate, d_up) = B::swiglu_backward(gate, up, d_out);
            for (node, gradient) in [(gate_node, d_gate), (up_node, d_up)] {
                if let Some(node) = node {
                    grads.register::<B>(node.id, gradient);
                }
            }
        }
    }

    let nodes = [gate.node(), up.node()];
    let [gate, up] = [gate, up].map(<Autodiff<B, C> as AutodiffBackend>::inner);
    match SwiGlu.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((gate.clone(), up.clone()), B::swiglu(gate, up)),
        OpsKind::UnTracked(prep) => prep.finish(B::swiglu(gate, up)),
    }
}
