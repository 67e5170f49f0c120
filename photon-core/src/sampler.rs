//! From one row of logits to one token id: temperature, top-k, top-p, draw.
//!
//! Where the logits come from, and when to stop, is the caller's.

use std::cmp::Ordering;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// How a token is chosen from its logits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingConfig {
    /// Divides the logits; 0 is greedy: always the most likely token.
    pub temperature: f64,
    /// Keeps this many of the most likely tokens. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// Keeps the fewest most likely tokens that together have this probability. Absent: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Start of the random numbers; every row of a batch draws its own stream from it.
    pub seed: u64,
}

/// A rule that a [`SamplingConfig`] breaks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingConfigError {
    /// The temperature is negative, infinite or not a number.
    #[error("temperature = {0}: must be a finite number, 0 for greedy or above")]
    Temperature(f64),
    /// No token could ever be chosen.
    #[error("top_k = {0}: must be at least 1; leave the key out to keep all tokens")]
    TopK(usize),
    /// The share is no probability, or nothing.
    #[error("top_p = {0}: must be above 0 and at most 1; leave the key out to keep all tokens")]
    TopP(f64),
}

/// Logits that no token can be chosen from.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// A logit is not a number, or plus infinity.
    #[error("row {row}: the logit of token {token_id} is {value}, expected a finite number or -inf")]
    Logit {
        /// Row of the batch.
        row: u64,
        /// Position in the vocabulary.
        token_id: u32,
        /// The offending logit.
        value: f32,
    },
    /// Every logit is minus infinity, or there is none.
    #[error("row {row}: none of the {vocab_size} logits is above -inf, expected at least one")]
    NoCandidate {
        /// Row of the batch.
        row: u64,
        /// Logits looked at.
        vocab_size: usize,
    },
}

impl SamplingConfig {
    /// Checks every rule that the types cannot express.
    ///
    /// # Errors
    ///
    /// The first broken rule, naming the key, its value and the fix.
    pub fn validate(&self) -> Result<(), SamplingConfigError> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(SamplingConfigError::Temperature(self.temperature));
        }
        match (self.top_k, self.top_p) {
            (Some(top_k), _) if top_k < 1 => Err(SamplingConfigError::TopK(top_k)),
            (_, Some(top_p)) if !(top_p > 0.0 && top_p <= 1.0) => Err(SamplingConfigError::TopP(top_p)),
            _ => Ok(()),
        }
    }
}

/// Chooses the tokens of one row of a batch.
///
/// What a row draws depends on the seed, on its number and on its own logits, never on other rows. A clone
/// goes on from the same random number.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplingConfig,
    row: u64,
    rng: ChaCha8Rng,
    /// Storage kept from one call to the next; empty in between.
    candidates: Vec<Candidate>,
}

/// A token that may still be chosen.
#[derive(Clone, Debug)]
struct Candidate {
    token_id: u32,
    logit: f32,
    /// Probability up to a factor that all candidates share.
    weight: f64,
}

impl Sampler {
    /// The sampler of a row, at the start of its random numbers; `config` has passed
    /// [`SamplingConfig::validate`].
    pub fn new(config: SamplingConfig, row: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(config.seed);
        rng.set_stream(row);
        Self { config, row, rng, candidates: Vec::new() }
    }

    /// Chooses a token id by its logit. Among equal logits the lower id counts as the more likely token.
    ///
    /// Consumes one random number per token, none when greedy or on error.
    ///
    /// # Shapes
    ///
    /// `logits` is `[V]`.
    ///
    /// # Errors
    ///
    /// A logit is not a number or plus infinity, or all of them are minus infinity.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SamplerError> {
        let (likeliest, max_logit) = self.likeliest(logits)?;
        if self.config.temperature == 0.0 {
            return Ok(likeliest);
        }

        let temperature = self.config.temperature;
        self.candidates.extend((0..).zip(logits).map(|(token_id, &logit)| Candidate {
            token_id,
            logit,
            // Relative to the greatest logit nothing overflows, however low the temperature.
            weight: ((f64::from(logit) - f64::from(max_logit)) / temperature).exp(),
        }));
        if let Some(top_k) = self.config.top_k {
            keep_top_k(&mut self.candidates, top_k);
        }
        if let Some(top_p) = self.config.top_p {
            keep_top_p(&mut self.candidates, top_p);
        }
        // In one order whatever was cut, so that a cut which removes nothing changes no draw.
        self.candidates.sort_unstable_by_key(|candidate| candidate.token_id);

        let threshold = self.rng.random::<f64>() * total_weight(&self.candidates);
        let mut cumulative = 0.0;
        let drawn = self.candidates.drain(..).find(|candidate| {
            cumulative += candidate.weight;
            cumulative > threshold
        });
        // The sum ends at the total, and the threshold lies below it: there always is a draw.
        Ok(drawn.map_or(likeliest, |candidate| candidate.token_id))
    }

    /// The lowest of the token ids with the greatest logit, and that logit.
    fn likeliest(&self, logits: &[f32]) -> Result<(u32, f32), SamplerError> {
        let mut best = None;
        let mut max_logit = f32::NEG_INFINITY;
        for (token_id, &value) in (0..).zip(logits) {
            if value.is_nan() || value == f32::INFINITY {
                return Err(SamplerError::Logit { row: self.row, token_id, value });
            }
            if value > max_logit {
                best = Some(token_id);
                max_logit = value;
            }
        }
        match best {
            Some(token_id) => Ok((token_id, max_logit)),
            None => Err(SamplerError::NoCandidate { row: self.row, vocab_size: logits.len() }),
        }
    }
}

/// Most likely first, the lower id first among equal logits.
fn by_likelihood(a: &Candidate, b: &Candidate) -> Ordering {
    // Candidates are never NaN; `total_cmp` would tell -0.0 from 0.0.
    let by_logit = b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal);
    by_logit.then(a.token_id.cmp(&b.token_id))
}

fn total_weight(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

fn keep_top_k(candidates: &mut Vec<Candidate>, top_k: usize) {
    if top_k < candidates.len() {
        candidates.select_nth_unstable_by(top_k, by_likelihood);
        candidates.truncate(top_k);
    }
}

fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f64) {
    // Rounding lets the sum reach the total before the last tokens: a share of 1 keeps them all the same.
    if top_p >= 1.0 {
        return;
    }
    candidates.sort_unstable_by(by_likelihood);
    let threshold = top_p * total_weight(candidates);
    let mut cumulative = 0.0;
    let reached = candidates.iter().position(|candidate| {
        cumulative += candidate.weight;
        cumulative >= threshold
    });
    if let Some(last_kept) = reached {
        candidates.truncate(last_kept + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: SamplingConfig = SamplingConfig { temperature: 1.0, top_k: None, top_p: None, seed: 7 };

    fn logits_of(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    /// How often each token comes in `n_draws`.
    fn counts(config: SamplingConfig, logits: &[f32], n_draws: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(config, 0);
        let mut counts = vec![0; logits.len()];
        for _ in 0..n_draws {
            counts[sampler.sample(logits).unwrap() as usize] += 1;
        }
        counts
    }

    /// The tokens that come at all in 500 draws.
    fn support(config: SamplingConfig, logits: &[f32]) -> Vec<usize> {
        let counts = counts(config, logits, 500);
        (0..logits.len()).filter(|&token_id| counts[token_id] > 0).collect()
    }

    fn draws(sampler: &mut Sampler, logits: &[f32], n_draws: usize) -> Vec<u32> {
        (0..n_draws).map(|_| sampler.sample(logits).unwrap()).collect()
    }

    #[test]
    fn greedy_picks_the_lowest_of_equal_maxima() {
        let mut sampler = Sampler::new(SamplingConfig { temperature: 0.0, ..PLAIN }, 0);
        assert_eq!(sampler.sample(&[0.0, 3.0, -1.0, 3.0]), Ok(1));
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY, -0.0, 0.0]), Ok(1));
    }

    #[test]
    fn one_random_number_per_token_none_when_greedy_or_on_error() {
        // An f64 takes two words of the generator.
        for (temperature, words_per_token) in [(0.0, 0), (0.5, 2)] {
            for top_k in [None, Some(1)] {
                let mut sampler = Sampler::new(SamplingConfig { temperature, top_k, ..PLAIN }, 3);
                for n_tokens in 1..=5 {
                    sampler.sample(&[0.0, 1.0, 2.0]).unwrap();
                    sampler.sample(&[f32::NAN]).unwrap_err();
                    assert_eq!(sampler.rng.get_word_pos(), n_tokens * words_per_token);
                }
            }
        }
    }

    #[test]
    fn frequencies_follow_the_softmax_at_the_temperature() {
        let n_draws = 20_000;
        for (temperature, power) in [(1.0, 1), (0.5, 2)] {
            let probabilities = [0.1_f32, 0.4, 0.0, 0.2, 0.3];
            let total: f64 = probabilities.iter().map(|p| f64::from(p.powi(power))).sum();
            let counts = counts(SamplingConfig { temperature, ..PLAIN }, &logits_of(&probabilities), n_draws);
            for (p, count) in probabilities.iter().zip(counts) {
                let expected = f64::from(p.powi(power)) / total;
                // Four standard deviations of a frequency.
                let tolerance = 4.0 * (expected * (1.0 - expected) / n_draws as f64).sqrt();
                assert!((count as f64 / n_draws as f64 - expected).abs() <= tolerance, "{count} {expected}");
            }
        }
    }

    #[test]
    fn top_k_keeps_the_lower_index_at_a_tie() {
        let logits = [1.0, 0.0, 2.0, 1.0, 1.0];
        for (top_k, kept) in [(1, vec![2]), (2, vec![0, 2]), (3, vec![0, 2, 3]), (9, vec![0, 1, 2, 3, 4])] {
            assert_eq!(support(SamplingConfig { top_k: Some(top_k), ..PLAIN }, &logits), kept);
        }
        let zeros = [-0.0, 0.0, 0.0];
        assert_eq!(support(SamplingConfig { top_k: Some(1), ..PLAIN }, &zeros), [0]);
    }

    #[test]
    fn top_p_keeps_the_fewest_tokens_that_reach_it() {
        let logits = logits_of(&[0.2, 0.5, 0.3]);
        for (top_p, kept) in [(0.01, vec![1]), (0.49, vec![1]), (0.51, vec![1, 2]), (0.81, vec![0, 1, 2])] {
            assert_eq!(support(SamplingConfig { top_p: Some(top_p), ..PLAIN }, &logits), kept);
        }
    }

    #[test]
    fn top_p_sees_the_softmax_after_temperature_and_top_k() {
        let logits = logits_of(&[0.4, 0.3, 0.2, 0.1]);
        let top_p = Some(0.5);
        assert_eq!(support(SamplingConfig { top_p, ..PLAIN }, &logits), [0, 1]);
        assert_eq!(support(SamplingConfig { top_p, top_k: Some(2), ..PLAIN }, &logits), [0]);
        assert_eq!(support(SamplingConfig { top_p, temperature: 0.5, ..PLAIN }, &logits), [0]);
    }

    #[test]
    fn cuts_that_remove_nothing_change_no_draw() {
        let logits = [0.3, 1.2, -0.5, 1.2, 0.0, -9.0];
        let uncut = draws(&mut Sampler::new(PLAIN, 0), &logits, 200);
        for (top_k, top_p) in [(Some(6), None), (None, Some(1.0)), (Some(9), Some(0.999_999_999))] {
            let cut = SamplingConfig { top_k, top_p, ..PLAIN };
            assert_eq!(draws(&mut Sampler::new(cut, 0), &logits, 200), uncut);
        }
        let far_apart = [(0, 1.0), (1, 1e-30)];
        let mut candidates = far_apart.map(|(token_id, weight)| Candidate { token_id, logit: 0.0, weight }).to_vec();
        keep_top_p(&mut candidates, 1.0);
        assert_eq!(candidates.len(), far_apart.len());
    }

    #[test]
    fn every_row_and_seed_has_its_own_stream() {
        let logits = [0.0; 50];
        let row = |seed, row| draws(&mut Sampler::new(SamplingConfig { seed, ..PLAIN }, row), &logits, 20);
        assert_eq!(row(7, 3), row(7, 3));
        assert_ne!(row(7, 3), row(7, 4));
        assert_ne!(row(7, 3), row(8, 3));
    }

    #[test]
    fn a_clone_goes_on_from_the_same_random_number() {
        let logits = [0.0; 50];
        let mut sampler = Sampler::new(PLAIN, 0);
        draws(&mut sampler, &logits, 13);
        let mut clone = sampler.clone();
        assert_eq!(draws(&mut clone, &logits, 20), draws(&mut sampler, &logits, 20));
    }

    #[test]
    fn extreme_temperatures_and_logits_still_draw() {
        let logits = [f32::MIN, f32::MAX, f32::NEG_INFINITY];
        assert_eq!(support(SamplingConfig { temperature: 1e-320, ..PLAIN }, &logits), [1]);
        assert_eq!(support(SamplingConfig { temperature: f64::MAX, ..PLAIN }, &logits), [0, 1]);
        // Whose exponentials overflow and underflow.
        assert_eq!(support(PLAIN, &[1000.0, 0.0, 1000.0]), [0, 2]);
        assert_eq!(support(PLAIN, &[-1000.0, -1000.0]), [0, 1]);
    }

    #[test]
    fn unusable_logits_are_errors_that_name_the_position() {
        for temperature in [0.0, 1.0] {
            let mut sampler = Sampler::new(SamplingConfig { temperature, ..PLAIN }, 5);
            let error = sampler.sample(&[0.0, 1.0, f32::NAN]).unwrap_err().to_string();
            assert_eq!(error, "row 5: the logit of token 2 is NaN, expected a finite number or -inf");
            let infinite = SamplerError::Logit { row: 5, token_id: 1, value: f32::INFINITY };
            assert_eq!(sampler.sample(&[0.0, f32::INFINITY]), Err(infinite));
            for logits in [vec![], vec![f32::NEG_INFINITY; 4]] {
                let none = SamplerError::NoCandidate { row: 5, vocab_size: logits.len() };
                assert_eq!(sampler.sample(&logits), Err(none));
            }
        }
    }

    #[test]
    fn configs_that_break_a_rule_name_key_and_value() {
        let full = SamplingConfig { temperature: 0.0, top_k: Some(1), top_p: Some(1.0), seed: 0 };
        assert_eq!(PLAIN.validate().and(full.validate()), Ok(()));
        for temperature in [-0.1, f64::INFINITY, f64::NAN] {
            let error = SamplingConfig { temperature, ..full }.validate().unwrap_err().to_string();
            assert!(error.starts_with(&format!("temperature = {temperature}: must")), "{error}");
        }
        let error = SamplingConfig { top_k: Some(0), ..full }.validate().unwrap_err().to_string();
        assert!(error.starts_with("top_k = 0: must"), "{error}");
        for top_p in [0.0, 1.1, f64::NAN] {
            let error = SamplingConfig { top_p: Some(top_p), ..full }.validate().unwrap_err().to_string();
            assert!(error.starts_with(&format!("top_p = {top_p}: must")), "{error}");
        }
    }

    #[test]
    fn config_files_may_leave_cuts_out_and_have_no_unknown_keys() {
        assert_eq!(toml::from_str("temperature = 1.0\nseed = 7"), Ok(PLAIN));
        assert!(toml::from_str::<SamplingConfig>("temperature = 1.0\nseed = 7\ntop_q = 0.5").is_err());
    }
}
