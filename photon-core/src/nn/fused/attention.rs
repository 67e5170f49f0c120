//! Softmax attention that keeps its weights and differentiates them in one step:
//! `dS = P * (dP - rowsum(dO * O))` with `dP = dO vᵀ`.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend};

const SEQ: usize = 2;
const LAST: usize = 3;

pub(super) struct Output<B: Backend> {
    weights: FloatTensor<B>,
    pub(super) out: FloatTensor<B>,
}

pub(super) fn forward<B: Backend>(
    q: FloatTensor<B>,
    k: FloatTensor<B>,
    v: FloatTensor<B>,
    mask: FloatTensor<B>,
) -> Output<B> {
    let scores = B::float_matmul(q, B::float_swap_dims(k, SEQ, LAST)); // [B, H, N, E]
    let weights = B::softmax(B::float_add(scores, mask), LAST);
    Output { out: B::float_matmul(weights.clone(), v), weights }
}

pub(super) fn tracked<B: Backend, C: CheckpointStrategy>(
    q: FloatTensor<Autodiff<B, C>>,
    k: FloatTensor<Autodiff<B, C>>,
    v: FloatTensor<Autodiff<B, C>>,
    mask: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Attention;

    #[derive(Clone, Debug)]
    struct Kept<T> {
        q: T,
        k: T,
        v: T,
        weights: T,
        out: T,
    }

    impl<B: Backend> Backward<B, 3> for Attention {
        type State = Kept<FloatTensor<B>>;

        fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [q_node, k_node, v_node] = ops.parents;
            let Kept { q, k, v, weights, out } = ops.state;
            let d_out = grads.consume::<B>(&ops.node); // [B, H, N, K]
            if let Some(node) = v_node {
                let weights = B::float_swap_dims(weights.clone(), SEQ, LAST);
                grads.register::<B>(node.id, B::float_matmul(weights, d_out.clone()));
            }
            if q_node.is_none() && k_node.is_none() {
                return;
            }
            let row_sums = B::float_sum_dim(B::float_mul(d_out.clone(), out), LAST); // [B, H, N, 1]
            let d_weights = B::float_matmul(d_out, B::float_swap_dims(v, SEQ, LAST)); // [B, H, N, E]
            let d_scores = B::float_mul(B::float_sub(d_weights, row_sums), weights);
            if let Some(node) = q_node {
                grads.register::<B>(node.id, B::float_matmul(d_scores.clone(), k));
            }
            if let Some(node) = k_node {
                grads.register::<B>(node.id, B::float_matmul(B::float_swap_dims(d_scores, SEQ, LAST), q));
            }
        }
    }

    let nodes = [q.node(), k.node(), v.node()];
    let [q, k, v, mask] = [q, k, v, mask].map(<Autodiff<B, C> as AutodiffBackend>::inner);
    match Attention.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let Output { weights, out } = forward::<B>(q.clone(), k.clone(), v.clone(), mask);
            prep.finish(Kept { q, k, v, weights, out: out.clone() }, out)
        }
        OpsKind::UnTracked(prep) => prep.finish(forward::<B>(q, k, v, mask).out),
    }
}
