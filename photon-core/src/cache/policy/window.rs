//! The first and the newest entries (StreamingLLM): a rule on positions, so nothing is ranked.

use serde::{Deserialize, Serialize};

/// Keep the first `sinks` and the newest `recent` positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Newest positions, the query's own included.
    pub recent: usize,
    /// First positions.
    #[serde(default)]
    pub sinks: usize,
}

impl Window {
    /// Whether a query sees an earlier or its own position.
    pub fn sees(self, query: usize, key: usize) -> bool {
        key < self.sinks || query - key < self.recent
    }

    /// The most entries that one position sees.
    pub fn max_entries(self) -> usize {
        self.sinks.saturating_add(self.recent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_newest_are_seen() {
        let window = Window { recent: 3, sinks: 2 };
        let seen = |query: usize| (0..=query).filter(|&key| window.sees(query, key)).collect::<Vec<_>>();
        assert_eq!(seen(8), [0, 1, 6, 7, 8]);
        assert_eq!(seen(3), [0, 1, 2, 3]);
    }
}
