//! Drop what the newest query attends to least (TOVA).

use serde::{Deserialize, Serialize};

use super::{EntryStats, Evidence, PolicyConfig, Query, Ranking};
use crate::cache::config::Budget;

/// Token omission via attention.
///
/// # Source
///
/// TOVA (arXiv 2401.06104).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tova {
    /// What is kept.
    pub budget: Budget,
    /// First positions, which never leave.
    #[serde(default)]
    pub sinks: usize,
}

impl Ranking for Tova {
    fn evidence(&self) -> Evidence {
        Evidence::Weights
    }

    fn observe(&self, entries: &mut [EntryStats], weights: &[f32], _query: Query) {
        entries.iter_mut().zip(weights).for_each(|(entry, &weight)| entry.mass = weight);
    }

    fn worths(&self, entries: &[EntryStats]) -> Vec<f32> {
        entries.iter().map(|entry| entry.mass).collect()
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    fn with_budget(&self, budget: Budget) -> PolicyConfig {
        PolicyConfig::Tova(Self { budget, ..*self })
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
    fn only_the_newest_query_counts() {
        let policy = Tova { budget: Budget::Entries(2), sinks: 0 };
        let mut entries = fresh_entries(3);
        policy.observe(&mut entries, &[0.9, 0.1, 0.0], query(3, 3));
        policy.observe(&mut entries, &[0.1, 0.3, 0.6], query(4, 3));
        assert_eq!(kept(&policy, &entries, 0, 2), [1, 2]);
    }
}
