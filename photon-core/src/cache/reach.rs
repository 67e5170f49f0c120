//! Which cached entries a query sees: what attention was trained to see, narrowed by a window that a policy sets.

use super::policy::{PolicyConfig, Window};
use crate::nn::span::Span;

/// A rule on absolute positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reach {
    span: Span,
    window: Option<Window>,
}

impl Reach {
    pub(super) fn new(span: Span, policy: &PolicyConfig) -> Self {
        let window = match policy {
            PolicyConfig::Window(window) => Some(*window),
            _ => None,
        };
        Self { span, window }
    }

    pub(super) fn sees(self, query: usize, key: usize) -> bool {
        self.span.sees(query, key) && self.window.is_none_or(|window| window.sees(query, key))
    }

    /// Whether any query from `next` on sees an earlier key. What one query cannot see no later one can.
    pub(super) fn is_live(self, key: usize, next: usize) -> bool {
        self.span.is_live(key, next) && self.window.is_none_or(|window| window.sees(next, key))
    }

    /// Whether everything is seen.
    pub(super) fn is_full(self) -> bool {
        self.span == Span::Full && self.window.is_none()
    }

    /// The most entries that one position sees; `None` where that grows with the sequence.
    pub(super) fn max_entries(self) -> Option<usize> {
        let window = self.window.map(Window::max_entries);
        match (self.span.max_entries(), window) {
            (Some(span), Some(window)) => Some(span.min(window)),
            (span, window) => span.or(window),
        }
    }
}
