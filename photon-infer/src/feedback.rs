//! Whether a generated token reaches what is generated later: change one, and see whether later logits move.
//!
//! "Later" is past what decoders see by themselves. With chunks of four tokens and a token decoder that looks back one
//! chunk (`x` is changed, `.` may move in any case, `?` is what is asked about):
//!
//! ```text
//! prompt      | . . x . | . . . . | ? ? ? ? | ...
//! ```

use photon_core::config::{DecoderAttention, ModelConfig};
use photon_core::infer_config::InferPlan;
use photon_core::model::Model;
use serde::Serialize;

use crate::generate::rows_of;
use crate::session::Session;

/// Logits that differ by more than this share of the largest have moved; less is rounding.
const MOVED: f32 = 1e-5;

/// The outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Feedback {
    /// Later logits move.
    Yes,
    /// They do not.
    No,
    /// The window ends before "later" begins.
    WindowTooShort,
}

/// The token to change, and the first position whose logits are asked about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    changed: usize,
    later: usize,
}

/// Tries it on a window of text whose first `n_prompt` tokens are the prompt.
pub fn feedback(model: &Model, window: &[u32], n_prompt: usize, plan: &InferPlan) -> Feedback {
    let config = model.config();
    let Place { changed, later } = place(&config, n_prompt);
    if later >= window.len() {
        return Feedback::WindowTooShort;
    }
    let prompt = window[..n_prompt].to_vec();
    let (mut session, _) = Session::begin(model, plan, &[prompt]).expect("no memory budget is set");
    let step = |session: &mut Session, token_id| {
        rows_of(session.extend(&[0], &[vec![token_id]]).expect("no memory budget is set")).remove(0)
    };
    for &token_id in &window[n_prompt..changed] {
        step(&mut session, token_id);
    }
    let mut other = session.clone();
    for (position, &token_id) in window.iter().enumerate().take(window.len() - 1).skip(changed) {
        let other_id = if position == changed { (token_id + 1) % config.vocab_size() as u32 } else { token_id };
        let (logits, other_logits) = (step(&mut session, token_id), step(&mut other, other_id));
        if position + 1 >= later && have_moved(&logits, &other_logits) {
            return Feedback::Yes;
        }
    }
    Feedback::No
}

fn have_moved(a: &[f32], b: &[f32]) -> bool {
    let largest = a.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
    a.iter().zip(b).any(|(a, b)| (a - b).abs() > MOVED * largest)
}

/// The middle of the first chunk after the prompt, and the first chunk that the token decoder does not see from there.
fn place(config: &ModelConfig, n_prompt: usize) -> Place {
    let ModelConfig::Photon(config) = config else {
        return Place { changed: n_prompt, later: n_prompt + 2 };
    };
    let level = &config.levels[0];
    let chunk = n_prompt.div_ceil(level.chunk_len);
    let n_layers = level.decoder.n_layers;
    // Each layer carries what it sees a reach further.
    let chunks_seen = match level.decoder.attention {
        DecoderAttention::Chunk => 0,
        DecoderAttention::Lookback { chunks } => n_layers * chunks,
        DecoderAttention::Stream { window } => (n_layers * (window - 1)).div_ceil(config.group_len(1)),
    };
    Place { changed: chunk * level.chunk_len + level.chunk_len / 2, later: (chunk + 1 + chunks_seen) * level.chunk_len }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use photon_core::config_file::parse_model;
    use photon_core::infer_config::InferConfig;

    const FLAT: &str = "architecture = 'flat'\nvocab_size = 11\nd_model = 8\nstack = { n_layers = 1, n_heads = 1, \
                        d_ff = 8, attention = ATTENTION }\n";
    const TWO_LEVELS: &str = "architecture = 'photon'\nvocab_size = 11\nd_model = 8\n\
        [[levels]]\nchunk_len = 4\nd_model = 8\nconverter = { prefix_len = 1 }\n\
        encoder = { n_layers = 1, n_heads = 1, d_ff = 8 }\n\
        decoder = { n_layers = 2, n_heads = 1, d_ff = 8, attention = ATTENTION }\n\
        [[levels]]\nchunk_len = 2\nd_model = 8\nconverter = { prefix_len = 1 }\n\
        encoder = { n_layers = 1, n_heads = 1, d_ff = 8 }\ndecoder = { n_layers = 1, n_heads = 1, d_ff = 8 }\n";

    fn config(toml: &str, attention: &str) -> ModelConfig {
        let table = toml.replace("ATTENTION", attention).parse().unwrap();
        parse_model(table, "test.toml".as_ref()).unwrap_or_else(|error| panic!("{error}"))
    }

    fn outcome(config: &ModelConfig, infer: &str, n_tokens: usize) -> Feedback {
        let infer: InferConfig = infer.parse::<toml::Table>().unwrap().try_into().unwrap();
        let window: Vec<u32> = (0..n_tokens as u32).map(|index| index * 7 % 11).collect();
        feedback(&Model::new(config, 1, &Device::flex()), &window, 6, &infer.plan(config).unwrap())
    }

    #[test]
    fn the_place_lies_past_what_decoders_see() {
        for (attention, later) in
            [("'chunk'", 12), ("{ lookback = { chunks = 1 } }", 20), ("{ stream = { window = 6 } }", 20)]
        {
            let place = place(&config(TWO_LEVELS, attention), 6);
            assert_eq!(place, Place { changed: 10, later }, "{attention}");
        }
        assert_eq!(place(&config(FLAT, "'full'"), 6), Place { changed: 6, later: 8 });
    }

    #[test]
    fn tokens_go_up_under_the_exact_rule_only() {
        for attention in ["'chunk'", "{ lookback = { chunks = 1 } }", "{ stream = { window = 6 } }"] {
            let config = config(TWO_LEVELS, attention);
            assert_eq!(outcome(&config, "", 40), Feedback::Yes, "{attention}");
            assert_eq!(outcome(&config, "advance = 'chunk'", 40), Feedback::Yes, "{attention}");
            assert_eq!(outcome(&config, "advance = 'recursive'", 40), Feedback::No, "{attention}");
        }
        assert_eq!(outcome(&config(TWO_LEVELS, "'chunk'"), "", 12), Feedback::WindowTooShort);
    }

    #[test]
    fn a_flat_model_feeds_back_as_far_as_it_sees() {
        assert_eq!(outcome(&config(FLAT, "'full'"), "", 20), Feedback::Yes);
        assert_eq!(outcome(&config(FLAT, "{ window = { units = 1 } }"), "", 20), Feedback::No);
    }
}
