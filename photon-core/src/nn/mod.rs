//! Transformer parts that know nothing of levels.

pub mod attention;
pub mod block_pick;
pub mod feed_forward;
pub mod fused;
pub mod kv_cache;
pub mod rope;
pub mod row_store;
pub mod span;
pub mod stack;
