//! Which entries a cache keeps when it may not keep all: one file a policy, behind one enum.
//!
//! `full` and `window` are rules on positions, so a query sees the same whatever was stored when. The others rank
//! entries: at the end of every block of positions those of least worth leave, until the budget is met with room for
//! the next block. Sinks (the first positions), the newest chunk and entries of the block under way never leave.
//!
//! Weights are the softmax weights of queries, mean over the heads of the layer.

mod attention_mass;
mod knorm;
mod lru;
mod random;
mod snapkv;
mod tova;
mod window;

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

pub use attention_mass::AttentionMass;
pub use knorm::KNorm;
pub use lru::Lru;
pub use random::Random;
pub use snapkv::SnapKv;
pub use tova::Tova;
pub use window::Window;

use super::config::Budget;

/// A policy and its settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum PolicyConfig {
    /// Keep all that the attention of the layer can still see.
    #[default]
    Full,
    /// Keep the first and the newest.
    Window(Window),
    /// Drop the least recently attended.
    Lru(Lru),
    /// Keep what holds the most attention.
    AttentionMass(AttentionMass),
    /// Drop the least attended by the newest query.
    Tova(Tova),
    /// At the end of the prompt, keep what its last queries vote for.
    #[serde(rename = "snapkv")]
    SnapKv(SnapKv),
    /// Keep the keys of smallest norm.
    #[serde(rename = "knorm")]
    KNorm(KNorm),
    /// Keep any: the control.
    Random(Random),
}

/// What a ranking policy knows of an entry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EntryStats {
    /// Absolute position.
    pub position: usize,
    /// Euclidean norm of the key, over all heads. Zero unless asked for.
    pub key_norm: f32,
    /// Weights received so far.
    pub mass: f32,
    /// Queries that saw the entry.
    pub n_queries: usize,
    /// The newest query that used it.
    pub last_used: usize,
    /// Weights of the newest queries, oldest first.
    pub votes: VecDeque<f32>,
}

/// What a policy wants to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// Positions are enough.
    Positions,
    /// Norms of keys.
    KeyNorms,
    /// Softmax weights of every query.
    Weights,
}

/// A query whose weights a policy is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// Its position.
    pub position: usize,
    /// Entries that it saw.
    pub n_seen: usize,
}

/// When entries leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// At the end of every block.
    EveryBlock,
    /// Once, at the end of the prompt.
    PromptEnd,
}

/// A policy that ranks entries.
pub trait Ranking {
    /// What it wants to be told.
    fn evidence(&self) -> Evidence;

    /// When entries leave.
    fn schedule(&self) -> Schedule {
        Schedule::EveryBlock
    }

    /// Takes note of the weights that a query gave to the entries up to its own.
    fn observe(&self, _entries: &mut [EntryStats], _weights: &[f32], _query: Query) {}

    /// The worth of each entry; those of least worth leave first.
    fn worths(&self, entries: &[EntryStats]) -> Vec<f32>;

    /// How much is kept at most.
    fn budget(&self) -> Budget;

    /// The same policy with another budget.
    fn with_budget(&self, budget: Budget) -> PolicyConfig;

    /// The first positions, which never leave.
    fn sinks(&self) -> usize;

    /// The newest positions that never leave, beside the newest chunk.
    fn recent(&self) -> usize {
        0
    }

    /// Entries that the policy keeps of its own accord, the budget aside; `worths` are theirs.
    fn wanted(&self, entries: &[EntryStats], _worths: &[f32]) -> Vec<bool> {
        vec![true; entries.len()]
    }
}

impl PolicyConfig {
    /// The ranking, where there is one.
    pub fn ranking(&self) -> Option<&dyn Ranking> {
        match self {
            Self::Full | Self::Window(_) => None,
            Self::Lru(policy) => Some(policy),
            Self::AttentionMass(policy) => Some(policy),
            Self::Tova(policy) => Some(policy),
            Self::SnapKv(policy) => Some(policy),
            Self::KNorm(policy) => Some(policy),
            Self::Random(policy) => Some(policy),
        }
    }

    /// Its name, as configs write it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window(_) => "window",
            Self::Lru(_) => "lru",
            Self::AttentionMass(_) => "attention_mass",
            Self::Tova(_) => "tova",
            Self::SnapKv(_) => "snapkv",
            Self::KNorm(_) => "knorm",
            Self::Random(_) => "random",
        }
    }
}

/// The entries that stay, in their order: what `policy` keeps of them, of which the newest `n_newest` and the sinks
/// are not asked about, nor those that are recent to the policy, down to `n_keep` in all where that is possible.
pub(crate) fn kept(policy: &dyn Ranking, entries: &[EntryStats], n_newest: usize, n_keep: usize) -> Vec<usize> {
    let first_newest = entries.len().saturating_sub(n_newest.max(policy.recent()));
    let is_protected = |index: usize| index >= first_newest || entries[index].position < policy.sinks();
    let worths = policy.worths(entries);
    let wanted = policy.wanted(entries, &worths);
    let n_protected = (0..entries.len()).filter(|&index| is_protected(index)).count();
    let mut ranked: Vec<usize> = (0..entries.len()).filter(|&index| !is_protected(index) && wanted[index]).collect();
    // The newer of equals stays.
    ranked.sort_by(|&a, &b| worths[b].total_cmp(&worths[a]).then(b.cmp(&a)));
    ranked.truncate(n_keep.saturating_sub(n_protected));
    let mut kept: Vec<usize> = (0..entries.len()).filter(|&index| is_protected(index)).chain(ranked).collect();
    kept.sort_unstable();
    kept
}

/// A query that sees as many entries as there are positions before it.
#[cfg(test)]
fn query(position: usize, n_seen: usize) -> Query {
    Query { position, n_seen }
}

/// Entries at positions 0, 1, ... with nothing known of them.
#[cfg(test)]
fn fresh_entries(n: usize) -> Vec<EntryStats> {
    (0..n).map(|position| EntryStats { position, last_used: position, ..EntryStats::default() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sinks_and_the_newest_stay_whatever_they_are_worth() {
        let mut entries = fresh_entries(10);
        entries.iter_mut().for_each(|entry| entry.key_norm = if entry.position == 5 { 1.0 } else { 9.0 });
        let policy = KNorm { budget: Budget::Entries(4), sinks: 1 };
        assert_eq!(kept(&policy, &entries, 2, 4), [0, 5, 8, 9]);
        assert_eq!(kept(&policy, &entries, 2, 1), [0, 8, 9], "the protected may pass the budget");
        assert_eq!(kept(&policy, &entries, 2, 5), [0, 5, 7, 8, 9], "the newer of equals stays");
        assert_eq!(kept(&policy, &entries, 20, 4).len(), 10);
    }
}
