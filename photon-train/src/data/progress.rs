//! How far the preparation of data has come.

use std::fmt;

/// Told to whoever waits, from any thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub stage: Stage,
    /// Bytes (tokens, while comparing) done in this stage.
    pub done_bytes: u64,
    /// In all.
    pub total_bytes: u64,
}

/// What is done to a source, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Files are read and counted.
    Reading,
    /// Text becomes tokens.
    Tokenising,
    /// Shards are read again.
    Checking,
    /// The held-out side is looked for in the training side.
    Comparing,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reading => "reading",
            Self::Tokenising => "tokenising",
            Self::Checking => "checking",
            Self::Comparing => "comparing",
        })
    }
}
