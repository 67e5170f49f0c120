//! Keep the keys of smallest norm.

use serde::{Deserialize, Serialize};

use super::{EntryStats, Evidence, PolicyConfig, Ranking};
use crate::cache::config::Budget;

/// Keys of small norm draw attention, so those of large norm leave.
///
/// # Source
///
/// arXiv 2406.11430.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KNorm {
    /// What is kept.
    pub budget: Budget,
    /// First positions, which never leave.
    #[serde(default)]
    pub sinks: usize,
}

impl Ranking for KNorm {
    fn evidence(&self) -> Evidence {
        Evidence::KeyNorms
    }

    fn worths(&self, entries: &[EntryStats]) -> Vec<f32> {
        entries.iter().map(|entry| -entry.key_norm).collect()
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    fn with_budget(&self, budget: Budget) -> PolicyConfig {
        PolicyConfig::KNorm(Self { budget, ..*self })
    }

    fn sinks(&self) -> usize {
        self.sinks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::{fresh_entries, kept};

    #[test]
    fn large_keys_leave() {
        let policy = KNorm { budget: Budget::Entries(2), sinks: 0 };
        let mut entries = fresh_entries(3);
        [3.0, 1.0, 2.0].into_iter().zip(&mut entries).for_each(|(norm, entry)| entry.key_norm = norm);
        assert_eq!(kept(&policy, &entries, 0, 2), [1, 2]);
    }
}
