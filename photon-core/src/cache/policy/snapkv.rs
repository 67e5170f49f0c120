//! At the end of the prompt its last queries vote on what stays; what is generated afterwards stays as well.

use serde::{Deserialize, Serialize};

use super::{EntryStats, Evidence, PolicyConfig, Query, Ranking, Schedule};
use crate::cache::config::Budget;

/// Votes of an observation window, pooled over neighbours.
///
/// # Source
///
/// SnapKV (arXiv 2404.14469). Votes are summed over heads here, since all heads of a layer keep the same entries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapKv {
    /// What is kept of the prompt.
    pub budget: Budget,
    /// Queries that vote.
    #[serde(default = "default_observation")]
    pub observation: usize,
    /// Neighbours over which votes are averaged, an odd number.
    #[serde(default = "default_pool")]
    pub pool: usize,
    /// First positions, which never leave.
    #[serde(default)]
    pub sinks: usize,
}

fn default_observation() -> usize {
    16
}

fn default_pool() -> usize {
    5
}

impl Ranking for SnapKv {
    fn evidence(&self) -> Evidence {
        Evidence::Weights
    }

    fn schedule(&self) -> Schedule {
        Schedule::PromptEnd
    }

    fn observe(&self, entries: &mut [EntryStats], weights: &[f32], _query: Query) {
        for (entry, &weight) in entries.iter_mut().zip(weights) {
            entry.votes.push_back(weight);
            if entry.votes.len() > self.observation {
                entry.votes.pop_front();
            }
        }
    }

    fn worths(&self, entries: &[EntryStats]) -> Vec<f32> {
        let votes: Vec<f32> = entries.iter().map(|entry| entry.votes.iter().sum()).collect();
        let reach = self.pool / 2;
        (0..votes.len())
            .map(|index| {
                let near = &votes[index.saturating_sub(reach)..(index + reach + 1).min(votes.len())];
                near.iter().sum::<f32>() / near.len() as f32
            })
            .collect()
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    fn with_budget(&self, budget: Budget) -> PolicyConfig {
        PolicyConfig::SnapKv(Self { budget, ..*self })
    }

    fn sinks(&self) -> usize {
        self.sinks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::{fresh_entries, kept, query};

    #[test]
    fn neighbours_of_what_is_voted_for_stay() {
        let policy = SnapKv { budget: Budget::Entries(3), observation: 1, pool: 3, sinks: 0 };
        let mut entries = fresh_entries(8);
        policy.observe(&mut entries, &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], query(8, 8));
        policy.observe(&mut entries, &[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], query(9, 8));
        assert_eq!(kept(&policy, &entries, 0, 3), [2, 3, 4], "and older votes are forgotten");
    }
}
