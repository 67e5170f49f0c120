//! What a cache cannot do, and why.

/// A cache refuses: what was asked for would not be what a cache that never saw the rest would hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// Positions to be seen again have been dropped, because attention had moved past them.
    #[error("cannot go back to {n_positions} positions: entries that they see have left the window")]
    Dropped {
        /// Positions asked for.
        n_positions: usize,
    },
    /// A policy has evicted entries since.
    #[error("cannot go back to {n_positions} positions: the policy {policy} has evicted entries since")]
    Evicted {
        /// Positions asked for.
        n_positions: usize,
        /// The policy.
        policy: &'static str,
    },
    /// A policy has learnt from queries that would have to be unlearnt.
    #[error("cannot go back to {n_positions} positions: the policy {policy} has counted the attention of later ones")]
    Observed {
        /// Positions asked for.
        n_positions: usize,
        /// The policy.
        policy: &'static str,
    },
    /// Entries that would still be exact have been packed.
    #[error("cannot go back to {n_positions} positions: entries of the residual window have been packed since")]
    Packed {
        /// Positions asked for.
        n_positions: usize,
    },
}
