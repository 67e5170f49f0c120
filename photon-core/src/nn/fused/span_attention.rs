//! Attention of whole sequences on the CPU backend, which needs no mask: the kernel asks the span.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Flex};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};

use super::native::attention::{Inputs, backward, forward};
use crate::documents::Documents;
use crate::nn::span::Span;

/// `softmax(q kᵀ / √K) v` over what each position sees of its document, beside one sink a head.
///
/// Time grows with the pairs that are seen, rounded up to blocks, and memory with the positions alone: no weight is
/// kept for the backward pass, which makes them again.
///
/// # Shapes
///
/// `q: [B, N, H, K]`, `k, v: [B, N, H_kv, K]`, `sinks: [H]` logits, minus infinity for none; `-> [B, N, H, K]`
///
/// # Panics
///
/// Where [`super::has_kernels`] says no.
pub fn span_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sinks: Tensor<1>,
    span: Span,
    documents: &Documents,
) -> Tensor<4> {
    const BACKEND: &str = "a tensor of the CPU backend";
    let documents = documents.clone();
    match q.gradient_checkpointing_strategy() {
        None => {
            let [q, k, v] = [q, k, v].map(|x| x.try_into_primitive::<Flex>().expect(BACKEND));
            let sinks = sinks.try_into_primitive::<Flex>().expect(BACKEND);
            Tensor::from_primitive::<Flex>(forward(&Inputs { q, k, v, sinks, span, documents }).0)
        }
        Some(GradientCheckpointingStrategy::Disabled) => {
            type Tracked = Autodiff<Flex, NoCheckpointing>;
            let [q, k, v] = [q, k, v].map(|x| x.try_into_primitive::<Tracked>().expect(BACKEND));
            let sinks = sinks.try_into_primitive::<Tracked>().expect(BACKEND);
            Tensor::from_primitive::<Tracked>(tracked::<NoCheckpointing>(Inputs { q, k, v, sinks, span, documents }))
        }
        Some(GradientCheckpointingStrategy::Balanced) => {
            type Tracked = Autodiff<Flex, BalancedCheckpointing>;
            let [q, k, v] = [q, k, v].map(|x| x.try_into_primitive::<Tracked>().expect(BACKEND));
            let sinks = sinks.try_into_primitive::<Tracked>().expect(BACKEND);
            Tensor::from_primitive::<Tracked>(tracked::<BalancedCheckpointing>(Inputs {
                q,
                k,
                v,
                sinks,
                span,
                documents,
            }))
        }
    }
}

fn tracked<C: CheckpointStrategy>(inputs: Inputs<FloatTensor<Autodiff<Flex, C>>>) -> FloatTensor<Autodiff<Flex, C>> {
    #[derive(Debug)]
    struct SpanAttention;

    #[derive(Clone, Debug)]
    struct Kept {
        inputs: Inputs<FlexTensor>,
        out: FlexTensor,
        log_sums: FlexTensor,
    }

    impl Backward<Flex, 4> for SpanAttention {
        type State = Kept;

        fn backward(self, ops: Ops<Kept, 4>, grads: &mut Gradients, _: &mut Checkpointer) {
            let Kept { inputs, out, log_sums } = ops.state;
            let d_out = grads.consume::<Flex>(&ops.node); // [B, N, H, K]
            let gradients = backward(&inputs, out, log_sums, d_out);
            for (node, gradient) in ops.parents.into_iter().zip(gradients) {
                if let Some(node) = node {
                    grads.register::<Flex>(node.id, gradient);
                }
            }
        }
    }

    let Inputs { q, k, v, sinks, span, documents } = inputs;
    let nodes = [q.node(), k.node(), v.node(), sinks.node()];
    let [q, k, v, sinks] = [q, k, v, sinks].map(<Autodiff<Flex, C> as AutodiffBackend>::inner);
    let inputs = Inputs { q, k, v, sinks, span, documents };
    let (out, log_sums) = forward(&inputs);
    match SpanAttention.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(Kept { inputs, out: out.clone(), log_sums }, out),
        OpsKind::UnTracked(prep) => prep.finish(out),
    }
}
