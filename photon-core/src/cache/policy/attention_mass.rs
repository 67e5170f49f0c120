//! Keep the entries that hold the most accumulated attention (H2O), up to a budget or to a share of all mass.

use serde::{Deserialize, Serialize};

use super::{EntryStats, Evidence, PolicyConfig, Query, Ranking};
use crate::cache::config::Budget;

/// Heavy hitters.
///
/// # Source
///
/// H2O (arXiv 2306.14048) ranks by accumulated weights; `coverage` and `floor` are ours. A floor is relative to the
/// mean weight, because an absolute one evicts everything once the cache is long enough.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionMass {
    /// What is kept at most; all positions if absent.
    #[serde(default = "everything")]
    pub budget: Budget,
    /// Keep no more than the fewest entries that hold this share of the mass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<f64>,
    /// An entry whose mean weight lies below `floor / entries` leaves even where the budget has room.
    #[serde(default)]
    pub floor: f64,
    /// First positions, which never leave.
    #[serde(default)]
    pub sinks: usize,
    /// Newest positions, which never leave: mass favours what has been there for long, so H2O gives half of the budget
    /// to them.
    #[serde(default)]
    pub recent: usize,
}

fn everything() -> Budget {
    Budget::Share(1.0)
}

impl Ranking for AttentionMass {
    fn evidence(&self) -> Evidence {
        Evidence::Weights
    }

    fn observe(&self, entries: &mut [EntryStats], weights: &[f32], _query: Query) {
        for (entry, &weight) in entries.iter_mut().zip(weights) {
            entry.mass += weight;
            entry.n_queries += 1;
        }
    }

    fn worths(&self, entries: &[EntryStats]) -> Vec<f32> {
        entries.iter().map(|entry| entry.mass).collect()
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    fn with_budget(&self, budget: Budget) -> PolicyConfig {
        PolicyConfig::AttentionMass(Self { budget, ..*self })
    }

    fn sinks(&self) -> usize {
        self.sinks
    }

    fn recent(&self) -> usize {
        self.recent
    }

    fn wanted(&self, entries: &[EntryStats], worths: &[f32]) -> Vec<bool> {
        let floor = self.floor as f32 / entries.len() as f32;
        let mut wanted: Vec<bool> = entries.iter().map(|entry| entry.mass >= floor * entry.n_queries as f32).collect();
        if let Some(coverage) = self.coverage {
            let mut order: Vec<usize> = (0..entries.len()).collect();
            order.sort_by(|&a, &b| worths[b].total_cmp(&worths[a]));
            let enough = coverage as f32 * worths.iter().sum::<f32>();
            let mut covered = 0.0;
            for index in order {
                wanted[index] &= covered < enough;
                covered += worths[index];
            }
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::policy::{fresh_entries, kept, query};

    fn policy() -> AttentionMass {
        AttentionMass { budget: everything(), coverage: None, floor: 0.0, sinks: 0, recent: 0 }
    }

    #[test]
    fn mass_adds_up_over_queries() {
        let mut entries = fresh_entries(4);
        policy().observe(&mut entries, &[0.1, 0.6, 0.1, 0.2], query(3, 4));
        policy().observe(&mut entries, &[0.5, 0.1, 0.2, 0.2], query(4, 4));
        assert_eq!(kept(&policy(), &entries, 0, 2), [0, 1]);
    }

    #[test]
    fn coverage_keeps_the_fewest_that_hold_the_share() {
        let mut entries = fresh_entries(4);
        policy().observe(&mut entries, &[0.5, 0.0, 0.3, 0.2], query(3, 4));
        let covering = |coverage| AttentionMass { coverage: Some(coverage), ..policy() };
        assert_eq!(kept(&covering(0.5), &entries, 0, 4), [0]);
        assert_eq!(kept(&covering(0.75), &entries, 0, 4), [0, 2]);
        assert_eq!(kept(&covering(1.0), &entries, 0, 4), [0, 2, 3], "what holds nothing is not needed");
    }

    #[test]
    fn a_floor_keeps_all_of_a_uniform_attention() {
        let mut entries = fresh_entries(200);
        let with_floor = AttentionMass { floor: 0.5, ..policy() };
        with_floor.observe(&mut entries, &[0.005; 200], query(200, 200));
        assert_eq!(kept(&with_floor, &entries, 0, 200).len(), 200);
        with_floor.observe(&mut entries, &[[0.01; 100], [0.0; 100]].concat(), query(201, 200));
        assert_eq!(kept(&with_floor, &entries, 0, 200).len(), 200, "half of the mean weight is enough");
        with_floor.observe(&mut entries, &[[0.01; 100], [0.0; 100]].concat(), query(202, 200));
        assert_eq!(kept(&with_floor, &entries, 0, 200).len(), 100);
    }
}
