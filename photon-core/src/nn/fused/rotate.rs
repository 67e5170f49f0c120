//! Rotation of coordinate pairs; the gradient turns back by the same angles.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend};

use super::kernels::Kernels;

pub(super) fn tracked<B: Kernels, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    cos: FloatTensor<Autodiff<B, C>>,
    sin: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Rotate;

    impl<B: Kernels> Backward<B, 1> for Rotate {
        type State = (FloatTensor<B>, FloatTensor<B>);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [node] = ops.parents;
            let (cos, sin) = ops.state;
            let d_out = grads.consume::<B>(&ops.node);
            if let Some(node) = node {
                grads.register::<B>(node.id, B::rotate(d_out, cos, B::float_neg(sin)));
            }
        }
    }

    let nodes = [x.node()];
    let [x, cos, sin] = [x, cos, sin].map(<Autodiff<B, C> as AutodiffBackend>::inner);
    match Rotate.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((cos.clone(), sin.clone()), B::rotate(x, cos, sin)),
        OpsKind::UnTracked(prep) => prep.finish(B::rotate(x, cos, sin)),
    }
}
