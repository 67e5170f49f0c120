//! Transformer parts that know nothing of levels.

pub mod activations;
pub mod attention;
pub mod block_pick;
pub mod compute;
pub mod feed_forward;
pub mod fused;
pub mod leaves;
mod recompute;
pub mod rope;
pub mod span;
pub mod stack;
pub mod vocabulary;
