//! Attention by Burn's own operations, on any backend.

use burn::tensor::Tensor;
use burn::tensor::activation::softmax;

const SEQ: usize = 2;
const LAST: usize = 3;

/// See [`super::attend_with_weights`].
pub(super) fn attend(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Tensor<4>,
    sinks: Option<Tensor<4>>,
) -> (Tensor<4>, Tensor<4>) {
    let scores = q.matmul(k.swap_dims(SEQ, LAST)) + mask; // [b, H, N, E]
    let [batch, n_heads, n_queries, n_entries] = scores.dims();
    let weights = match sinks {
        Some(sinks) => {
            let sinks = sinks.expand([batch, n_heads, n_queries, 1]);
            softmax(Tensor::cat(vec![scores, sinks], LAST), LAST).narrow(LAST, 0, n_entries)
        }
        None => softmax(scores, LAST),
    };
    (weights.clone().matmul(v), weights)
}
