//! Keep any entries: the control that every other policy has to beat.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{EntryStats, Evidence, PolicyConfig, Ranking};
use crate::cache::config::Budget;

/// A worth drawn from the seed and the position alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Random {
    /// What is kept.
    pub budget: Budget,
    /// Decides which.
    #[serde(default)]
    pub seed: u64,
    /// First positions, which never leave.
    #[serde(default)]
    pub sinks: usize,
}

impl Ranking for Random {
    fn evidence(&self) -> Evidence {
        Evidence::Positions
    }

    fn worths(&self, entries: &[EntryStats]) -> Vec<f32> {
        let draw = |entry: &EntryStats| {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            rng.set_stream(entry.position as u64);
            rng.random()
        };
        entries.iter().map(draw).collect()
    }

    fn budget(&self) -> Budget {
        self.budget
    }

    fn with_budget(&self, budget: Budget) -> PolicyConfig {
        PolicyConfig::Random(Self { budget, ..*self })
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
    fn the_seed_decides_and_old_draws_stay() {
        let policy = |seed| Random { budget: Budget::Entries(8), seed, sinks: 0 };
        let of = |seed, n| kept(&policy(seed), &fresh_entries(n), 0, 8);
        assert_eq!(of(1, 40), of(1, 40));
        assert_ne!(of(1, 40), of(2, 40));
        assert!(of(1, 40).iter().filter(|&&index| index < 20).all(|index| of(1, 20).contains(index)));
    }
}
