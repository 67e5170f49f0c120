//! The advance rules: what stands for a unit below the top, once its tokens are generated.
//!
//! A prompt is taken up by the `hierarchical` rule, exactly. [`crate::state::State::switch_rule`] chooses another for
//! the tokens after it, at any place in a chunk: an unfinished chunk keeps the units that it has and goes on with the
//! new kind.

use std::fmt::{Display, Formatter};

use serde::{Deserialize, Serialize};

/// What an upper decoder reads for a unit, and what the level above takes up of it.
///
/// The top encoder runs under every rule, so its cache grows under every rule; caches of decoders are local and stay.
/// A model of one level has nothing below its top: there all rules are the same.
///
/// Rules stand from the exact to the light; a state can be switched in this order only.
///
/// # Source
///
/// Paper §2.3.3 and definitions A.2 (`hierarchical`) and A.3 (`recursive`). The paper advances by whole meta-chunks;
/// here a unit advances as soon as its last token is known, which is the function that training computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvanceRule {
    /// The encoder's latent: the logits are those of the training forward. Every encoder keeps its cache.
    #[default]
    Hierarchical,
    /// The chunker's output, without the encoder's transformer: a unit knows its own tokens and nothing before them.
    /// Only the top encoder keeps its cache.
    Chunk,
    /// What the decoder above emitted for the unit before having seen it. Tokens do not go up at all, so a generated
    /// token reaches later chunks only where the token decoder itself looks back; of the chunkers only the top's
    /// works. Only the top encoder keeps its cache.
    Recursive,
}

impl Display for AdvanceRule {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Hierarchical => "hierarchical",
            Self::Chunk => "chunk",
            Self::Recursive => "recursive",
        })
    }
}

/// Why a state cannot be switched to a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdvanceError {
    /// What the wanted rule needs of the tokens so far has not been kept.
    #[error("advance rule {wanted}: the state has gone on by {current}, which keeps too little for it; start anew")]
    NoWayBack {
        /// The rule of the state.
        current: AdvanceRule,
        /// The rule that was asked for.
        wanted: AdvanceRule,
    },
    /// A flat model has no units above its tokens.
    #[error("advance rule {wanted}: architecture flat has no levels; only hierarchical is possible")]
    Flat {
        /// The rule that was asked for.
        wanted: AdvanceRule,
    },
}
