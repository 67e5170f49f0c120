//! How generated tokens climb the hierarchy.

use serde::{Deserialize, Serialize};

/// What upper decoders read and what goes up while tokens are generated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvanceRule {
    /// Encoder latents: equals the training forward.
    #[default]
    Hierarchical,
    /// Chunker outputs.
    Chunk,
    /// What the decoders emitted.
    Recursive,
}
