//! Drop the entry that was attended least recently.

use serde::{Deserialize, Serialize};

use super::{EntryStats, Evidence, PolicyConfig, Query, Ranking};
use crate::cache::config::Budget;

/// Least recently used; a weight of at least `floor / entries` is a use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lru {
    /// What is kept.
    pub budget: Budget,
    /// First positions, which never leave.
    #[serde(default)]
    pub sinks: usize,
    /// How much of the mean weight counts as a use.
    #[serde(default = "default_floor")]
    pub floor: f64,
}

fn default_floor() -> f64 {
    1.0
}

impl Ranking for Lru {
    fn evidence(&self) -> Evidence {
        Evidence::Weights
    }

    fn observe(&self, entries: &mut [EntryStats], weights: &[f32], query: Query) {
        let floor = self.floor as f32 / query.n_seen as f32;
        for (entry, &weight) in entries.iter_mut().zip(weights) {
            if weight >= floor {
                entry.last_used = query.position;
            }
        }
    }

    fn worths(&self, entries: &[EntryStats]) -> Vec<f32> {
        entries.iter().map(|entry| entry.last_used as f32).collect()
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    fn with_budget(&self, budget: Budget) -> PolicyConfig {
        PolicyConfig::Lru(Self { budget, ..*self })
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
    fn an_entry_in_use_outlives_newer_ones() {
        let policy = Lru { budget: Budget::Entries(2), sinks: 0, floor: 1.0 };
        let mut entries = fresh_entries(4);
        policy.observe(&mut entries, &[0.7, 0.0, 0.2, 0.1], query(10, 4));
        assert_eq!(kept(&policy, &entries, 1, 2), [0, 3]);
    }
}
