//! Context use: what a model loses when everything older than so many tokens is other text.
//!
//! The last tokens of a window are scored. In the row of depth d, what lies more than d tokens before the first of them
//! is replaced, token for token, by what stands at the same places of another window of the same text:
//!
//! ```text
//! whole    . . . . . . . . . . . . . . S C O R E D
//! depth 4  x x x x x x x x x x . . . . S C O R E D
//! ```
//!
//! Replaced and not cut off, because a cut moves every token: positions and the places in chunks would change with the
//! context, and a context shorter than any in training is new to a model for that alone. Here nothing moves, and the row
//! still reads like text. The scored tokens are whole meta-chunks from a border on, so that each slot of a chunk counts
//! alike, and a d that is a multiple of the meta-chunk is a border of chunks at every level; at another d the chunk with
//! the seam holds some of both. A scored token has d true tokens before it and the scored ones between.

use photon_core::score::ScoreRow;
use rand::RngExt;
use serde::{Deserialize, Serialize};

use super::{Estimate, ProbeError, Setup, windows};

const PROBE: &str = "context";
const STREAM: u64 = 1;

/// Tokens that are scored in a window, at most a quarter of it, and in whole meta-chunks: as many for most models.
const SCORED_TOKENS: usize = 64;

/// What context is worth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ContextUse {
    /// Windows looked at.
    pub n_windows: usize,
    /// Tokens scored in each.
    pub scored_tokens: usize,
    /// Tokens before the first of them.
    pub context_tokens: usize,
    /// With the whole context.
    pub nats_per_byte: Estimate,
    /// With less.
    pub depths: Vec<Depth>,
}

/// One depth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Depth {
    /// True tokens before the first that is scored.
    pub depth_tokens: usize,
    /// With other text before those.
    pub nats_per_byte: Estimate,
    /// By how much that is more than with the whole context, window by window.
    pub lost_nats_per_byte: Estimate,
}

/// Measures every depth.
///
/// # Errors
///
/// A text of fewer than two rows, rows without context, or a depth that is the whole context or more.
pub fn context(setup: &Setup, depths: &[usize]) -> Result<ContextUse, ProbeError> {
    let &Setup { store, seq_len, .. } = setup;
    let (scored_tokens, first) = (scored_tokens(setup), context_tokens(setup)?);
    if let Some(&value) = depths.iter().find(|&&depth| depth >= first) {
        let reason = format!("must be less than the context of {first} tokens before those that are scored");
        return Err(ProbeError::Value { probe: PROBE, name: "depth", value, reason });
    }
    let mut rng = setup.rng(STREAM);
    let starts = windows::starts(store.len(), seq_len, setup.n_windows.max(2), &mut rng);
    if starts.len() < 2 {
        let fix = "one window borrows from another: give more text, or a shorter --seq-len";
        return Err(ProbeError::TextTooShort { probe: PROBE, found: store.len(), needed: 2 * seq_len, fix });
    }
    let apart = rng.random_range(1..starts.len());
    let pairs: Vec<[usize; 2]> =
        (0..starts.len()).map(|index| [starts[index], starts[(index + apart) % starts.len()]]).collect();
    let scored = setup.score(&pairs, |&[start, other]| {
        let whole = store.read(start..start + first + scored_tokens);
        let other = store.read(other..other + first);
        let replaced = depths.iter().map(|depth| {
            let mut token_ids = whole.clone();
            token_ids[..first - depth].copy_from_slice(&other[..first - depth]);
            ScoreRow { token_ids, first }
        });
        std::iter::once(ScoreRow { token_ids: whole.clone(), first }).chain(replaced).collect()
    });
    let whole: Vec<[f64; 2]> = scored.iter().map(|rows| rows[0].all()).collect();
    let depth = |(index, &depth_tokens): (usize, &usize)| {
        let replaced: Vec<[f64; 2]> = scored.iter().map(|rows| rows[1 + index].all()).collect();
        let lost = replaced.iter().zip(&whole).map(|([replaced, bytes], [whole, _])| [replaced - whole, *bytes]);
        Depth {
            depth_tokens,
            nats_per_byte: Estimate::per_byte(&replaced),
            lost_nats_per_byte: Estimate::per_byte(&lost.collect::<Vec<_>>()),
        }
    };
    Ok(ContextUse {
        n_windows: scored.len(),
        scored_tokens,
        context_tokens: first,
        nats_per_byte: Estimate::per_byte(&whole),
        depths: depths.iter().enumerate().map(depth).collect(),
    })
}

/// Powers of two below the context of a row.
///
/// # Errors
///
/// Rows without context.
pub fn default_depths(setup: &Setup) -> Result<Vec<usize>, ProbeError> {
    let n_context = context_tokens(setup)?;
    Ok((0..).map(|power| 1 << power).take_while(|&depth| depth < n_context).collect())
}

fn scored_tokens(setup: &Setup) -> usize {
    SCORED_TOKENS.min(setup.seq_len / 4).max(1).next_multiple_of(setup.meta_chunk())
}

/// Tokens of a row before those that are scored: whole meta-chunks.
fn context_tokens(setup: &Setup) -> Result<usize, ProbeError> {
    let (seq_len, meta_chunk, scored_tokens) = (setup.seq_len, setup.meta_chunk(), scored_tokens(setup));
    match seq_len.saturating_sub(scored_tokens) / meta_chunk * meta_chunk {
        0 => {
            let what = "the scored tokens and a meta-chunk before them";
            Err(ProbeError::RowTooShort { probe: PROBE, seq_len, needed: scored_tokens + meta_chunk, what })
        }
        n_context => Ok(n_context),
    }
}
