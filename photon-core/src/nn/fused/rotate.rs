//! Rotation of coordinate pairs; the gradient turns back by the same angles.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, TensorMetadata};
use burn::tensor::Slice;

const HEAD_DIM: usize = 3;

pub(super) fn forward<B: Backend>(x: FloatTensor<B>, cos: FloatTensor<B>, sin: FloatTensor<B>) -> FloatTensor<B> {
    let (first, second) = halves::<B>(x);
    let turned_first =
        B::float_sub(B::float_mul(first.clone(), cos.clone()), B::float_mul(second.clone(), sin.clone()));
    let turned_second = B::float_add(B::float_mul(second, cos), B::float_mul(first, sin));
    B::float_cat(vec![turned_first, turned_second], HEAD_DIM)
}

pub(super) fn tracked<B: Backend, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    cos: FloatTensor<Autodiff<B, C>>,
    sin: FloatTensor<Autodiff<B, C>>,
) -> FloatTensor<Autodiff<B, C>> {
    #[derive(Debug)]
    struct Rotate;

    impl<B: Backend> Backward<B, 1> for Rotate {
        type State = (FloatTensor<B>, FloatTensor<B>);

        fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
            let [node] = ops.parents;
            let (cos, sin) = ops.state;
            let d_out = grads.consume::<B>(&ops.node);
            if let Some(node) = node {
                grads.register::<B>(node.id, forward::<B>(d_out, cos, B::float_neg(sin)));
            }
        }
    }

    let nodes = [x.node()];
    let [x, cos, sin] = [x, cos, sin].map(<Autodiff<B, C> as AutodiffBackend>::inner);
    match Rotate.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((cos.clone(), sin.clone()), forward::<B>(x, cos, sin)),
        OpsKind::UnTracked(prep) => prep.finish(forward::<B>(x, cos, sin)),
    }
}

fn halves<B: Backend>(x: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    let shape = x.shape();
    let half = shape[HEAD_DIM] / 2;
    let part = |x: FloatTensor<B>, start: usize| {
        let mut slices: Vec<Slice> = (0..HEAD_DIM).map(|axis| Slice::from(0..shape[axis])).collect();
        slices.push(Slice::from(start..start + half));
        B::float_slice(x, &slices)
    };
    (part(x.clone(), 0), part(x, half))
}
