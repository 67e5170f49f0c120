//! The learning rate as a pure function of the config, the step and the number of steps.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::config::OptimizerConfig;

/// How the rate goes on after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// Along a cosine, down to `final_share` at the last step.
    #[default]
    Cosine,
    /// Along a line, down to `final_share` at the last step.
    Linear,
    /// It stays; `final_share` has no meaning.
    Constant,
    /// Warm-up, stable, decay: it stays, and falls over the last steps.
    Wsd(Decay),
}

/// The end of a run whose rate is stable before.
///
/// Until then the rate does not depend on the number of steps, so that a run may be made longer, or branch off for a
/// decay of its own, from any checkpoint before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decay {
    /// Updates over which the rate falls, the last ones of the run.
    pub decay_steps: u64,
    /// Along which curve.
    #[serde(default)]
    pub shape: DecayShape,
}

/// A curve from 1 to 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayShape {
    /// `1 - t`
    #[default]
    Linear,
    /// `(1 + cos(π t)) / 2`
    Cosine,
    /// `1 - √t` (Hägele et al., arXiv 2405.18392): it falls fast first.
    OneMinusSqrt,
}

impl DecayShape {
    fn at(self, progress: f64) -> f64 {
        match self {
            Self::Linear => 1.0 - progress,
            Self::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            Self::OneMinusSqrt => 1.0 - progress.sqrt(),
        }
    }
}

/// Rises linearly over the warm-up, then follows the schedule.
///
/// `step` counts from 0; the first update already has a rate above zero, and the last one has the final rate.
pub fn learning_rate(config: &OptimizerConfig, step: u64, steps: u64) -> f64 {
    let warmup = config.warmup_steps.min(steps);
    if step < warmup {
        return config.learning_rate * (step + 1) as f64 / warmup as f64;
    }
    let after_warmup = (steps - warmup).saturating_sub(1).max(1) as f64;
    let progress = ((step - warmup) as f64 / after_warmup).min(1.0);
    let height = match config.schedule {
        Schedule::Cosine => DecayShape::Cosine.at(progress),
        Schedule::Linear => DecayShape::Linear.at(progress),
        Schedule::Constant => return config.learning_rate,
        Schedule::Wsd(decay) => {
            let decay_steps = decay.decay_steps.min(steps - warmup);
            match (step + 1).saturating_sub(steps - decay_steps) {
                0 => return config.learning_rate,
                gone => decay.shape.at((gone as f64 / decay_steps as f64).min(1.0)),
            }
        }
    };
    config.learning_rate * (config.final_share + (1.0 - config.final_share) * height)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, steps: u64) -> Vec<f64> {
        let config =
            OptimizerConfig { learning_rate: 1.0, final_share: 0.1, warmup_steps: 4, schedule, ..Default::default() };
        (0..steps).map(|step| learning_rate(&config, step, steps)).collect()
    }

    #[test]
    fn rises_then_falls_to_the_final_share() {
        for schedule in [Schedule::Cosine, Schedule::Linear] {
            let rates = rates(schedule, 12);
            assert_eq!(rates[..5], [0.25, 0.5, 0.75, 1.0, 1.0]);
            assert!(rates[4..].windows(2).all(|pair| pair[1] < pair[0]));
            assert!((rates[11] - 0.1).abs() < 1e-12);
        }
    }

    #[test]
    fn curves_are_their_formulas() {
        // Half of the way from step 4 to step 12: the line and the cosine meet there, and differ before.
        let [cosine, linear] = [Schedule::Cosine, Schedule::Linear].map(|schedule| rates(schedule, 13));
        assert!((cosine[8] - 0.55).abs() < 1e-12 && (linear[8] - 0.55).abs() < 1e-12);
        assert!((linear[6] - (0.1 + 0.9 * 0.75)).abs() < 1e-12);
        assert!((cosine[6] - (0.1 + 0.9 * 0.5 * (1.0 + (PI / 4.0).cos()))).abs() < 1e-12);
        assert_eq!(rates(Schedule::Constant, 13)[4..], [1.0; 9]);
    }

    #[test]
    fn a_stable_phase_does_not_depend_on_the_number_of_steps() {
        for shape in [DecayShape::Linear, DecayShape::Cosine, DecayShape::OneMinusSqrt] {
            let schedule = Schedule::Wsd(Decay { decay_steps: 4, shape });
            let (short, long) = (rates(schedule, 20), rates(schedule, 40));
            assert_eq!(short[..16], long[..16]);
            assert_eq!(short[4..16], [1.0; 12]);
            assert_eq!(short[16..], long[36..]);
            assert!(short[15..].windows(2).all(|pair| pair[1] < pair[0]), "{short:?}");
            assert!((short[19] - 0.1).abs() < 1e-12);
        }
        let linear = rates(Schedule::Wsd(Decay { decay_steps: 4, shape: DecayShape::Linear }), 20);
        assert!((linear[16] - (0.1 + 0.9 * 0.75)).abs() < 1e-12);
        let root = rates(Schedule::Wsd(Decay { decay_steps: 4, shape: DecayShape::OneMinusSqrt }), 20);
        assert!((root[16] - (0.1 + 0.9 * 0.5)).abs() < 1e-12);
        // A trunk: no decay at all.
        assert_eq!(rates(Schedule::Wsd(Decay { decay_steps: 0, shape: DecayShape::Linear }), 8)[4..], [1.0; 4]);
    }

    #[test]
    fn a_run_shorter_than_its_warmup_stays_finite() {
        let decay = Decay { decay_steps: 50, shape: DecayShape::Linear };
        for schedule in [Schedule::Cosine, Schedule::Linear, Schedule::Constant, Schedule::Wsd(decay)] {
            let config = OptimizerConfig { warmup_steps: 100, schedule, ..Default::default() };
            assert!((0..5).all(|step| learning_rate(&config, step, 3).is_finite()));
        }
    }
}
