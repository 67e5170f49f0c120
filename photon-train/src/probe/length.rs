//! Length generalisation: bits per byte past the length that was trained on.
//!
//! The same tokens are scored at the end of rows of 1, 2, 4, ... times the training length; longer rows reach further back
//! into the text. So positions do not mix with the difficulty of texts: what changes from one length to the next is
//! only where the tokens stand, and how much lies before them.
//!
//! ```text
//! 1 x                          . . . S C O R E D
//! 2 x          . . . . . . . . . . . S C O R E D
//! ```
//!
//! Rows and scored tokens are whole meta-chunks, so that each slot of a chunk counts alike.

use photon_core::score::ScoreRow;
use serde::{Deserialize, Serialize};

use super::{Estimate, ProbeError, Setup, windows};

const PROBE: &str = "length";
const STREAM: u64 = 2;

/// The share of a training row that is scored is one in so many.
const ROW_OVER_SCORED: usize = 4;

/// Multiples of the training length that are tried where none are named.
pub const DEFAULT_FACTORS: [usize; 5] = [1, 2, 4, 8, 16];

/// How prediction holds up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LengthUse {
    /// Windows looked at.
    pub n_windows: usize,
    /// Tokens scored in each, the last of its rows.
    pub scored_tokens: usize,
    /// Shortest first.
    pub lengths: Vec<Length>,
}

/// One length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Length {
    /// Multiple of the training length.
    pub factor: usize,
    /// Tokens of a row, and so the place of the last token that is scored.
    pub row_tokens: usize,
    /// Of the scored tokens.
    pub bits_per_byte: Estimate,
    /// By how much that is more than in the shortest rows, window by window.
    pub change_bits_per_byte: Estimate,
}

/// Measures every factor.
///
/// # Errors
///
/// A text without a row of the largest factor, or rows shorter than a meta-chunk.
pub fn length(setup: &Setup, factors: &[usize]) -> Result<LengthUse, ProbeError> {
    let mut factors = factors.to_vec();
    factors.sort_unstable();
    factors.dedup();
    let (Some(&smallest), Some(&largest)) = (factors.first(), factors.last()) else {
        return Ok(LengthUse { n_windows: 0, scored_tokens: 0, lengths: Vec::new() });
    };
    if smallest == 0 {
        let reason = "a row has at least one token".to_owned();
        return Err(ProbeError::Value { probe: PROBE, name: "factor", value: smallest, reason });
    }
    let (scored_tokens, longest) = (scored_tokens(setup)?, row_tokens(setup, largest));
    let row_lens: Vec<usize> = factors.iter().map(|&factor| row_tokens(setup, factor)).collect();
    let store = setup.store;
    if store.len() < longest {
        let fix = "a row reaches back so far: give more text, or smaller --factors";
        return Err(ProbeError::TextTooShort { probe: PROBE, found: store.len(), needed: longest, fix });
    }
    // What is scored lies apart; what lies before may be shared.
    let before = longest - scored_tokens;
    let starts = windows::starts(store.len() - before, scored_tokens, setup.n_windows, &mut setup.rng(STREAM));
    let scored = setup.score(&starts, |start| {
        let longest = store.read(*start..start + longest);
        let row = |&row_len: &usize| ScoreRow {
            token_ids: longest[longest.len() - row_len..].to_vec(),
            first: row_len - scored_tokens,
        };
        row_lens.iter().map(row).collect()
    });
    let in_bits = |windows: &[[f64; 2]]| Estimate::per_byte(windows).times(1.0 / std::f64::consts::LN_2);
    let line = |(index, &factor): (usize, &usize)| {
        let nats: Vec<[f64; 2]> = scored.iter().map(|rows| rows[index].all()).collect();
        let change = scored.iter().zip(&nats).map(|(rows, [nats, bytes])| [nats - rows[0].all()[0], *bytes]);
        Length {
            factor,
            row_tokens: row_lens[index],
            bits_per_byte: in_bits(&nats),
            change_bits_per_byte: in_bits(&change.collect::<Vec<_>>()),
        }
    };
    let lengths = factors.iter().enumerate().map(line).collect();
    Ok(LengthUse { n_windows: scored.len(), scored_tokens, lengths })
}

/// The default factors that the text is long enough for, with at least two windows; the first in any case.
pub fn default_factors(setup: &Setup) -> Vec<usize> {
    let fits = |&factor: &usize| row_tokens(setup, factor) + setup.seq_len <= setup.store.len();
    let fitting = DEFAULT_FACTORS.into_iter().take_while(fits).count();
    DEFAULT_FACTORS[..fitting.max(1)].to_vec()
}

/// Tokens of a row, in whole meta-chunks.
fn row_tokens(setup: &Setup, factor: usize) -> usize {
    let meta_chunk = setup.meta_chunk();
    factor * setup.seq_len / meta_chunk * meta_chunk
}

fn scored_tokens(setup: &Setup) -> Result<usize, ProbeError> {
    let (seq_len, meta_chunk) = (setup.seq_len, setup.meta_chunk());
    if seq_len < meta_chunk {
        return Err(ProbeError::RowTooShort { probe: PROBE, seq_len, needed: meta_chunk, what: "a meta-chunk" });
    }
    Ok((seq_len / ROW_OVER_SCORED).next_multiple_of(meta_chunk).max(meta_chunk).min(row_tokens(setup, 1)))
}
