//! Watches over updates: one that would ruin the weights is skipped, and a run that only skips is ended.
//!
//! An update is skipped if the loss or a gradient is not finite, or if the norm of the gradients is many times the
//! usual one. Weights and the optimiser's memory stay as they are, and the batch is not seen again.

use std::collections::VecDeque;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::step::Update;

/// When an update is skipped, and how often that may happen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GuardConfig {
    /// A gradient norm above so many times its running mean is a spike; `inf` lets all pass.
    ///
    /// Clipping bounds what a spike can do, and a large gradient may be the way back from a bad update: where it is
    /// skipped, the next is as large. So this is for what clipping does not mend, far above what a warm-up shows.
    pub spike_factor: f64,
    /// Updates skipped in a row that end the run.
    pub max_skips_in_a_row: u64,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self { spike_factor: 100.0, max_skips_in_a_row: 10 }
    }
}

/// Decay of the running mean: it looks back over some fifty updates.
const NORM_DECAY: f64 = 0.98;

/// Updates before the mean is trusted: norms change fast in the beginning.
const MIN_UPDATES: u64 = 20;

/// Steps that a report shows.
const N_RECENT: usize = 16;

/// What is remembered of the updates so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Guard {
    /// Sum of the norms of updates made, each decayed by its age.
    norm_sum: f64,
    /// The same sum for norms of 1.
    weight_sum: f64,
    updates: u64,
    /// Updates skipped since the last that was made.
    pub skipped_in_a_row: u64,
    /// Updates skipped in all.
    pub skipped: u64,
    /// The newest steps, oldest first.
    recent: VecDeque<Recent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Recent {
    step: u64,
    loss_nats: f64,
    gradient_norm: f64,
}

/// Why an update is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// The loss is no number or infinite.
    LossNotFinite,
    /// A gradient is no number or infinite, or too large to be squared.
    GradientNotFinite,
    /// The norm of the gradients is far above the usual.
    GradientSpike,
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LossNotFinite => "the loss is not finite",
            Self::GradientNotFinite => "the gradient is not finite",
            Self::GradientSpike => "the gradient is far larger than usual",
        })
    }
}

impl Guard {
    /// Judges the update of `step` and remembers it; none if it may be made.
    pub fn judge(&mut self, config: &GuardConfig, step: u64, update: &Update) -> Option<SkipReason> {
        let Update { cross_entropy_nats: loss_nats, gradient_norm, .. } = *update;
        self.recent.push_back(Recent { step, loss_nats, gradient_norm });
        if self.recent.len() > N_RECENT {
            self.recent.pop_front();
        }
        let is_spike = self.usual_norm().is_some_and(|usual| gradient_norm > config.spike_factor * usual);
        let reason = match () {
            () if !loss_nats.is_finite() => Some(SkipReason::LossNotFinite),
            () if !gradient_norm.is_finite() => Some(SkipReason::GradientNotFinite),
            () if is_spike => Some(SkipReason::GradientSpike),
            () => None,
        };
        match reason {
            Some(_) => {
                self.skipped += 1;
                self.skipped_in_a_row += 1;
            }
            None => {
                self.skipped_in_a_row = 0;
                self.updates += 1;
                self.norm_sum = NORM_DECAY * self.norm_sum + gradient_norm;
                self.weight_sum = NORM_DECAY * self.weight_sum + 1.0;
            }
        }
        reason
    }

    /// Running mean of the norms of the updates made, once there are enough.
    pub fn usual_norm(&self) -> Option<f64> {
        (self.updates >= MIN_UPDATES).then(|| self.norm_sum / self.weight_sum)
    }

    /// The newest steps as lines of a report.
    pub fn recent_lines(&self) -> String {
        let line = |Recent { step, loss_nats, gradient_norm }: &Recent| {
            format!("  step {step}: loss {loss_nats:.4} nats, gradient norm {gradient_norm:.4}")
        };
        self.recent.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(loss_nats: f64, gradient_norm: f64) -> Update {
        Update { cross_entropy_nats: loss_nats, reconstruction: 0.0, z: 0.0, gradient_norm }
    }

    /// A guard after as many updates of norm 2 as it takes to know what is usual.
    fn experienced() -> Guard {
        let mut guard = Guard::default();
        for step in 0..MIN_UPDATES {
            assert_eq!(guard.judge(&GuardConfig::default(), step, &update(3.0, 2.0)), None);
        }
        assert!((guard.usual_norm().unwrap() - 2.0).abs() < 1e-12);
        guard
    }

    #[test]
    fn what_is_not_finite_or_far_too_large_is_skipped_and_not_averaged() {
        let config = GuardConfig { spike_factor: 10.0, ..Default::default() };
        let mut guard = experienced();
        for (update, reason) in [
            (update(f64::NAN, 2.0), SkipReason::LossNotFinite),
            (update(f64::INFINITY, 2.0), SkipReason::LossNotFinite),
            (update(3.0, f64::NAN), SkipReason::GradientNotFinite),
            (update(3.0, f64::INFINITY), SkipReason::GradientNotFinite),
            (update(3.0, 20.1), SkipReason::GradientSpike),
        ] {
            assert_eq!(guard.judge(&config, 50, &update), Some(reason));
        }
        assert_eq!((guard.skipped, guard.skipped_in_a_row), (5, 5));
        assert!((guard.usual_norm().unwrap() - 2.0).abs() < 1e-12);
        assert_eq!(guard.judge(&config, 51, &update(3.0, 19.9)), None);
        assert_eq!((guard.skipped, guard.skipped_in_a_row), (5, 0));
        assert!(guard.recent_lines().ends_with("step 51: loss 3.0000 nats, gradient norm 19.9000"));
    }

    #[test]
    fn nothing_is_a_spike_before_the_usual_is_known_or_when_told_so() {
        assert_eq!(Guard::default().judge(&GuardConfig::default(), 0, &update(3.0, 1e9)), None);
        let config = GuardConfig { spike_factor: f64::INFINITY, ..Default::default() };
        assert_eq!(experienced().judge(&config, 50, &update(3.0, 1e9)), None);
    }

    #[test]
    fn it_is_kept_to_the_bit() {
        let mut guard = experienced();
        guard.judge(&GuardConfig::default(), 50, &update(f64::NAN, 1.0 / 3.0));
        guard.judge(&GuardConfig::default(), 51, &update(0.1, 1.0 / 3.0));
        let text = toml::to_string(&guard).unwrap();
        assert_eq!(toml::to_string(&toml::from_str::<Guard>(&text).unwrap()).unwrap(), text);
        let read: Guard = toml::from_str(&text).unwrap();
        assert_eq!(read.norm_sum.to_bits(), guard.norm_sum.to_bits());
    }
}
