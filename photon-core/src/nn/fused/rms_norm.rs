//! RMSNorm: with `n = x / rms`, `dx = (dn - n * mean(dn * n)) / rms` and `dn = dy * gain`.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend};

const WIDTH: usize = 2;

pub(super) struct Output<B: Backend> {
    /// `x / rms`, `[B, N, D]`.
    normed: FloatTensor<B>,
    /// `1 / rms`, `[B, N, 1]`.
    scale: FloatTensor<B>,
    pub(super) out: FloatTensor<B>,
}

/// `x: [B, N, D]`, `gain: [1, 1, D]`.
pub(super) fn forward<B: Backend>(x: FloatTensor<B>, gain: FloatTensor<B>, epsilon: f64) -> Output<B> {
    let mean_square = B::float_mean_dim(B::float_mul(x.clone(), x.clone()), WIDTH); // [B, N, 1]
    let scale = B::float_recip(B::float_sqrt(B::float_add_scalar(mean_square, epsilon.into())));
    let normed = B::float_mul(x, scale.clone());
    Output { out: B::float_mul(normed.clone(), gain), normed, scale }
}

pub(super) fn tracked<B: Backend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    gain: FloatTensor<Autodiff<B, C>>,
    epsilon: f64,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct RmsNorm;

    #[derive(Clone, Debug)]
    struct Kept<T> {
        normed: T,
        scale: T,
        gain: T,
    }

    impl<B: Backend> Backward<B, 2> for RmsNorm {
        type State = Kept<FloatTensor<B>>;

        fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [x_node, gain_node] = ops.parents;
            let Kept { normed, scale, gain } = ops.state;
            let d_out = grads.consume::<B>(&ops.node); // [B, N, D]
            if let Some(node) = gain_node {
                let d_gain = B::float_mul(d_out.clone(), normed.clone());
                grads.register::<B>(node.id, B::float_sum_dims(d_gain, &[0, 1]));
            }
            if let Some(node) = x_node {
                let d_normed = B::float_mul(d_out, gain);
                let along = B::float_mean_dim(B::float_mul(d_normed.clone(), normed.clone()), WIDTH); // [B, N, 1]
                let across = B::float_sub(d_normed, B::float_mul(normed, along));
                grads.register::<B>(node.id, B::float_mul(across, scale));
            }
        }
    }

    let nodes = [x.node(), gain.node()];
    let [x, gain] = [x, gain].map(<Autodiff<B, C> as AutodiffBackend>::inner);
    match RmsNorm.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let Output { normed, scale, out } = forward::<B>(x, gain.clone(), epsilon);
            prep.finish(Kept { normed, scale, gain }, out)
        }
        OpsKind::UnTracked(prep) => prep.finish(forward::<B>(x, gain, epsilon).out),
    }
}
