//! RMSNorm, which keeps its input and one number for each position.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend};

use super::kernels::Kernels;

pub(super) fn tracked<B: Kernels, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    gain: FloatTensor<Autodiff<B, C>>,
    epsilon: f64,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct RmsNorm;

    #[derive(Clone, Debug)]
    struct Kept<T> {
        x: T,
        gain: T,
        scale: T,
    }

    impl<B: Kernels> Backward<B, 2> for RmsNorm {
        type State = Kept<FloatTensor<B>>;

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [x_node, gain_node] = ops.parents;
            let Kept { x, gain, scale } = ops.state;
            let d_out = grads.consume::<B>(&ops.node); // [B, N, D]
            let (d_x, d_gain) = B::rms_norm_backward(x, gain, scale, d_out);
            for (node, gradient) in [(x_node, d_x), (gain_node, d_gain)] {
                if let Some(node) = node {
                    grads.register::<B>(node.id, gradient);
                }
            }
        }
    }

    let nodes = [x.node(), gain.node()];
    let [x, gain] = [x, gain].map(<Autodiff<B, C> as AutodiffBackend>::inner);
    match RmsNorm.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let (out, scale) = B::rms_norm(x.clone(), gain.clone(), epsilon);
            prep.finish(Kept { x, gain, scale }, out)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::rms_norm(x, gain, epsilon).0),
    }
}
