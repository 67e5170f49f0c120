//! Copy and retrieval: what a model gains where a span has stood in the text before.
//!
//! A window is held-out text; its last `span` tokens are scored. In the planted row the same tokens also stand `distance`
//! tokens earlier, in place of what stood there, so that nothing moves:
//!
//! ```text
//! plain    . . . . . . . . . . . . s p a n
//! planted  . . s p a n . . . . . . s p a n
//!              |<--- distance --->|
//! ```
//!
//! The gain is the nats of the scored tokens in the plain row less those in the planted one. Spans end at a random place of
//! a meta-chunk, the same for all spans and distances of a window: a hierarchical model sees the two occurrences cut into
//! chunks alike where the distance is a multiple of the meta-chunk, and otherwise not.

use photon_core::score::ScoreRow;
use rand::RngExt;
use serde::{Deserialize, Serialize};

use super::{Estimate, ProbeError, Setup, windows};

const PROBE: &str = "copy";
const STREAM: u64 = 0;

/// Spans that are planted where none are named, if they fit.
const DEFAULT_SPANS: [usize; 2] = [16, 64];

/// One span length at one distance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Copy {
    /// Tokens of the span.
    pub span_tokens: usize,
    /// Tokens from the beginning of the plant to that of its repetition.
    pub distance_tokens: usize,
    /// Windows looked at.
    pub n_windows: usize,
    /// Of the span as it stands in the text.
    pub plain_nats_per_byte: Estimate,
    /// Of the span where it stood before.
    pub planted_nats_per_byte: Estimate,
    /// The difference, window by window.
    pub gained_nats_per_byte: Estimate,
}

/// Measures every span at every distance that is no less than it, so that plant and repetition do not overlap.
///
/// # Errors
///
/// A text without a whole row, or a distance that does not fit into a row.
pub fn copy(setup: &Setup, spans: &[usize], distances: &[usize]) -> Result<Vec<Copy>, ProbeError> {
    let &Setup { store, seq_len, .. } = setup;
    let pairs = pairs(setup, spans, distances)?;
    let longest = pairs.iter().map(|&(span, _)| span).max().unwrap_or(0);
    let mut rng = setup.rng(STREAM);
    let starts = windows::starts(store.len(), seq_len, setup.n_windows, &mut rng);
    if starts.is_empty() {
        let fix = "give more text, or a shorter --seq-len";
        return Err(ProbeError::TextTooShort { probe: PROBE, found: store.len(), needed: seq_len, fix });
    }
    let meta_chunk = setup.meta_chunk();
    let windows: Vec<_> =
        starts.into_iter().map(|start| start..start + seq_len - rng.random_range(0..meta_chunk)).collect();
    let scored = setup.score(&windows, |window| {
        let plain = store.read(window.clone());
        let first = |span: usize| plain.len() - span;
        let planted = pairs.iter().map(|&(span, distance)| {
            let mut token_ids = plain.clone();
            token_ids.copy_within(first(span).., first(span) - distance);
            ScoreRow { token_ids, first: first(span) }
        });
        let plain = ScoreRow { token_ids: plain.clone(), first: first(longest) };
        std::iter::once(plain).chain(planted).collect()
    });
    let line = |(index, &(span_tokens, distance_tokens)): (usize, &(usize, usize))| {
        let plain: Vec<[f64; 2]> = scored.iter().map(|rows| rows[0].last(span_tokens)).collect();
        let planted: Vec<[f64; 2]> = scored.iter().map(|rows| rows[1 + index].all()).collect();
        let gained = plain.iter().zip(&planted).map(|([plain, bytes], [planted, _])| [plain - planted, *bytes]);
        Copy {
            span_tokens,
            distance_tokens,
            n_windows: scored.len(),
            plain_nats_per_byte: Estimate::per_byte(&plain),
            planted_nats_per_byte: Estimate::per_byte(&planted),
            gained_nats_per_byte: Estimate::per_byte(&gained.collect::<Vec<_>>()),
        }
    };
    Ok(pairs.iter().enumerate().map(line).collect())
}

/// 16 and 64 tokens where a row holds them twice, or else a quarter of it.
pub fn default_spans(setup: &Setup) -> Vec<usize> {
    let room = room(setup);
    let mut spans: Vec<usize> = DEFAULT_SPANS.into_iter().filter(|span| 2 * span <= room).collect();
    if spans.is_empty() {
        spans.push((room / 4).max(1));
    }
    spans
}

/// Powers of two that fit into a row with one of the spans.
pub fn default_distances(setup: &Setup, spans: &[usize]) -> Vec<usize> {
    let shortest = spans.iter().copied().min().unwrap_or(1);
    let fits = |distance: &usize| distance + shortest <= room(setup);
    (0..).map(|power| 1 << power).skip_while(|&distance: &usize| distance < shortest).take_while(fits).collect()
}

/// What span and distance may come to: windows are shorter than a row by less than a meta-chunk.
fn room(setup: &Setup) -> usize {
    (setup.seq_len + 1).saturating_sub(setup.meta_chunk())
}

/// Spans with distances.
fn pairs(setup: &Setup, spans: &[usize], distances: &[usize]) -> Result<Vec<(usize, usize)>, ProbeError> {
    let room = room(setup);
    let value = |name, value, reason| Err(ProbeError::Value { probe: PROBE, name, value, reason });
    let shortest = spans.iter().copied().min().unwrap_or(0);
    if shortest == 0 {
        return value("span", 0, "must have at least 1 token".to_owned());
    }
    if 2 * shortest > room {
        let reason = format!("a window of {room} tokens does not hold it twice; the longest that fits is {}", room / 2);
        return value("span", shortest, reason);
    }
    if let Some(&distance) = distances.iter().find(|&&distance| distance < shortest || distance + shortest > room) {
        let reason = format!("must be from {shortest} (the span) to {} (in a window of {room})", room - shortest);
        return value("distance", distance, reason);
    }
    let fits = |&(span, distance): &(usize, usize)| span <= distance && span + distance <= room;
    Ok(spans.iter().flat_map(|&span| distances.iter().map(move |&distance| (span, distance))).filter(fits).collect())
}
