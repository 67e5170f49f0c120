//! Which earlier positions a position may attend to.

/// The reach of causal attention, as a rule on absolute positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// Everything up to and including itself.
    Full,
    /// The newest `len` positions, itself included.
    Window {
        /// Positions in the window.
        len: usize,
    },
    /// The own block of `len` positions so far, and the `back` whole blocks before it.
    Blocks {
        /// Positions in a block.
        len: usize,
        /// Whole blocks seen before the own one.
        back: usize,
    },
    /// The newest `window` positions, itself included, the first `sinks`, and of earlier blocks of `block` positions
    /// the first, and every `every`-th after it.
    Strided {
        /// Positions in the window.
        window: usize,
        /// Positions at the beginning that all later ones see.
        sinks: usize,
        /// Positions in a block.
        block: usize,
        /// Of so many blocks one stays visible.
        every: usize,
    },
}

impl Span {
    /// The oldest position that `query` sees.
    ///
    /// It never falls as `query` grows. In all spans but the strided one, everything from it up to `query` is seen.
    pub fn first_visible(self, query: usize) -> usize {
        match self {
            Self::Full | Self::Strided { .. } => 0,
            Self::Window { len } => (query + 1).saturating_sub(len),
            Self::Blocks { len, back } => (query / len).saturating_sub(back) * len,
        }
    }

    /// Whether `query` attends to `key`.
    pub fn sees(self, query: usize, key: usize) -> bool {
        key <= query
            && match self {
                Self::Strided { window, .. } => query - key < window || self.is_lasting(key),
                _ => key >= self.first_visible(query),
            }
    }

    /// Whether `next_query` or any later position can still see the earlier position `key`.
    ///
    /// What one position cannot see no later one can either: a key that is no longer live never will be again.
    pub fn is_live(self, key: usize, next_query: usize) -> bool {
        self.sees(next_query, key)
    }

    /// Whether `key` is seen by all positions from itself on.
    pub fn is_lasting(self, key: usize) -> bool {
        match self {
            Self::Full => true,
            Self::Window { .. } | Self::Blocks { .. } => false,
            Self::Strided { sinks, block, every, .. } => key < sinks || (key / block).is_multiple_of(every),
        }
    }

    /// The positions below `n_positions` that are seen by all from themselves on.
    pub fn lasting(self, n_positions: usize) -> Vec<usize> {
        (0..n_positions).filter(|&key| self.is_lasting(key)).collect()
    }

    /// The most entries that one position sees; `None` where that grows with the sequence.
    pub fn max_entries(self) -> Option<usize> {
        match self {
            Self::Full | Self::Strided { .. } => None,
            Self::Window { len } => Some(len),
            Self::Blocks { len, back } => Some(len.saturating_mul(back + 1)),
        }
    }

    /// Where the entries grow with the sequence, one in so many is kept for good.
    pub fn kept_one_in(self) -> usize {
        match self {
            Self::Strided { every, .. } => every,
            _ => 1,
        }
    }

    /// Entries that the position after `n_positions` positions can still see of them.
    pub fn live_entries(self, n_positions: usize) -> usize {
        match self {
            Self::Strided { window, sinks, block, every } => {
                let n_before_window = (n_positions + 1).saturating_sub(window);
                let on_stride = |n: usize| {
                    let stride = block.saturating_mul(every);
                    n / stride * block + (n % stride).min(block)
                };
                let sinks = sinks.min(n_before_window);
                n_positions - n_before_window + on_stride(n_before_window) + sinks - on_stride(sinks)
            }
            _ => n_positions - self.first_visible(n_positions).min(n_positions),
        }
    }

    /// Pairs of query and visible key among `n_positions` positions.
    pub fn visible_pairs(self, n_positions: usize) -> u128 {
        let triangle = |n: usize| n as u128 * (n as u128 + 1) / 2;
        match self {
            Self::Full => triangle(n_positions),
            Self::Window { len } => {
                let growing = len.min(n_positions);
                triangle(growing) + (n_positions - growing) as u128 * len as u128
            }
            Self::Blocks { len, back } => {
                let (n_whole, rest) = (n_positions / len, n_positions % len);
                // Blocks before block b that are seen: min(b, back), summed over whole blocks.
                let growing = back.min(n_whole.saturating_sub(1));
                let n_earlier = triangle(growing) + (n_whole - n_whole.min(growing + 1)) as u128 * back as u128;
                let own = n_whole as u128 * triangle(len) + triangle(rest);
                own + (n_earlier * len as u128 + n_whole.min(back) as u128 * rest as u128) * len as u128
            }
            // Itself, and what it sees of those before.
            Self::Strided { .. } => (0..n_positions).map(|query| 1 + self.live_entries(query) as u128).sum(),
        }
    }

    /// The position as a rotary embedding should count it.
    ///
    /// Isolated blocks count from their own start, so that offsets stay small whatever the sequence length.
    pub fn rope_position(self, position: usize) -> usize {
        match self {
            Self::Blocks { len, back: 0 } => position % len,
            _ => position,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans() -> impl Iterator<Item = Span> {
        let blocks = [(3, 0), (3, 1), (2, 4)].map(|(len, back)| Span::Blocks { len, back });
        let strided = [(1, 0, 1, 2), (4, 3, 2, 3), (2, 5, 3, 2), (3, 1, 2, 1), (50, 1, 2, 2)]
            .map(|(window, sinks, block, every)| Span::Strided { window, sinks, block, every });
        [Span::Full, Span::Window { len: 4 }].into_iter().chain(blocks).chain(strided)
    }

    #[test]
    fn spans_see_what_their_words_say() {
        let seen = |span: Span, query: usize| (0..10).filter(|&key| span.sees(query, key)).collect::<Vec<_>>();
        assert_eq!(seen(Span::Full, 3), [0, 1, 2, 3]);
        assert_eq!(seen(Span::Window { len: 3 }, 5), [3, 4, 5]);
        assert_eq!(seen(Span::Window { len: 3 }, 1), [0, 1]);
        assert_eq!(seen(Span::Blocks { len: 2, back: 0 }, 5), [4, 5]);
        assert_eq!(seen(Span::Blocks { len: 2, back: 0 }, 4), [4]);
        assert_eq!(seen(Span::Blocks { len: 2, back: 2 }, 7), [2, 3, 4, 5, 6, 7]);
        assert_eq!(seen(Span::Strided { window: 2, sinks: 0, block: 2, every: 2 }, 9), [0, 1, 4, 5, 8, 9]);
        assert_eq!(seen(Span::Strided { window: 1, sinks: 2, block: 1, every: 4 }, 6), [0, 1, 4, 6]);
        assert_eq!(seen(Span::Strided { window: 3, sinks: 1, block: 9, every: 2 }, 9), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn what_one_position_cannot_see_no_later_one_can() {
        for span in spans() {
            for query in 0..30 {
                assert!(span.first_visible(query) <= span.first_visible(query + 1));
                for key in 0..=query {
                    assert!(key >= span.first_visible(query) || !span.sees(query, key), "{span:?}: {query}, {key}");
                    let is_seen_later = (query + 1..60).any(|later| span.sees(later, key));
                    assert!(span.sees(query, key) || !is_seen_later, "{span:?}: {key} comes back after {query}");
                    assert_eq!(span.is_live(key, query + 1), is_seen_later, "{span:?}: {query}, {key}");
                    let is_always_seen = (key..60).all(|query| span.sees(query, key));
                    assert!(span.is_lasting(key) <= is_always_seen, "{span:?}: {key}");
                }
            }
        }
    }

    #[test]
    fn visible_pairs_are_the_pairs_that_are_visible() {
        for span in spans() {
            for n in 0..40 {
                let pairs = (0..n).flat_map(|q| (0..n).map(move |k| (q, k))).filter(|&(q, k)| span.sees(q, k)).count();
                assert_eq!(span.visible_pairs(n), pairs as u128, "{span:?}, {n} positions");
            }
        }
    }

    #[test]
    fn live_entries_are_what_the_next_position_sees_of_the_past() {
        for span in spans() {
            for n_positions in 0..40 {
                let seen = (0..n_positions).filter(|&key| span.sees(n_positions, key)).count();
                assert_eq!(span.live_entries(n_positions), seen, "{span:?}, {n_positions} positions");
            }
        }
    }

    #[test]
    fn one_entry_in_so_many_stays() {
        for span in spans().filter(|span| span.max_entries().is_none()) {
            // A multiple of every stride above.
            let n = 24 * span.kept_one_in();
            assert_eq!(span.live_entries(100 + n) - span.live_entries(100), 24, "{span:?}");
        }
    }
}
