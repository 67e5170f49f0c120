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
}

impl Span {
    /// The oldest position that `query` sees.
    ///
    /// It never falls as `query` grows, so what one position cannot see no later one can either.
    pub fn first_visible(self, query: usize) -> usize {
        match self {
            Self::Full => 0,
            Self::Window { len } => (query + 1).saturating_sub(len),
            Self::Blocks { len, back } => (query / len).saturating_sub(back) * len,
        }
    }

    /// Whether `query` attends to `key`.
    pub fn sees(self, query: usize, key: usize) -> bool {
        key <= query && key >= self.first_visible(query)
    }

    /// The most entries that one position sees; `None` where that grows with the sequence.
    pub fn max_entries(self) -> Option<usize> {
        match self {
            Self::Full => None,
            Self::Window { len } => Some(len),
            Self::Blocks { len, back } => Some(len.saturating_mul(back + 1)),
        }
    }

    /// Entries that the position after `n_positions` positions can still see of them.
    pub fn live_entries(self, n_positions: usize) -> usize {
        n_positions - self.first_visible(n_positions).min(n_positions)
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

    #[test]
    fn spans_see_what_their_words_say() {
        let seen = |span: Span, query: usize| (0..10).filter(|&key| span.sees(query, key)).collect::<Vec<_>>();
        assert_eq!(seen(Span::Full, 3), [0, 1, 2, 3]);
        assert_eq!(seen(Span::Window { len: 3 }, 5), [3, 4, 5]);
        assert_eq!(seen(Span::Window { len: 3 }, 1), [0, 1]);
        assert_eq!(seen(Span::Blocks { len: 2, back: 0 }, 5), [4, 5]);
        assert_eq!(seen(Span::Blocks { len: 2, back: 0 }, 4), [4]);
        assert_eq!(seen(Span::Blocks { len: 2, back: 2 }, 7), [2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn first_visible_never_falls() {
        for span in [Span::Full, Span::Window { len: 4 }, Span::Blocks { len: 3, back: 1 }] {
            for query in 0..30 {
                assert!(span.first_visible(query) <= span.first_visible(query + 1));
            }
        }
    }

    #[test]
    fn visible_pairs_are_the_pairs_that_are_visible() {
        let blocks = [(3, 0), (3, 1), (2, 4)].map(|(len, back)| Span::Blocks { len, back });
        for span in [Span::Full, Span::Window { len: 4 }].into_iter().chain(blocks) {
            for n in 0..25 {
                let pairs = (0..n).flat_map(|q| (0..n).map(move |k| (q, k))).filter(|&(q, k)| span.sees(q, k)).count();
                assert_eq!(span.visible_pairs(n), pairs as u128, "{span:?}, {n} positions");
            }
        }
    }

    #[test]
    fn live_entries_are_what_the_next_position_sees_of_the_past() {
        for span in [Span::Full, Span::Window { len: 4 }, Span::Blocks { len: 3, back: 1 }] {
            for n_positions in 0..20 {
                let seen = (0..n_positions).filter(|&key| span.sees(n_positions, key)).count();
                assert_eq!(span.live_entries(n_positions), seen);
            }
        }
    }
}
