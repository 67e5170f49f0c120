//! The learning rate as a pure function of the step.

use crate::config::OptimizerConfig;

/// Rises linearly over the warm-up, then falls along a cosine to `final_share` at the last step.
///
/// `step` counts from 0; the first update already has a rate above zero.
pub fn learning_rate(config: &OptimizerConfig, step: u64, steps: u64) -> f64 {
    let warmup = config.warmup_steps.min(steps);
    if step < warmup {
        return config.learning_rate * (step + 1) as f64 / warmup as f64;
    }
    let after_warmup = (steps - warmup).saturating_sub(1).max(1) as f64;
    let progress = ((step - warmup) as f64 / after_warmup).min(1.0);
    let cosine = 0.5 * (1.0 + (std::f64::consts::PI * progress).cos());
    config.learning_rate * (config.final_share + (1.0 - config.final_share) * cosine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_then_falls_to_the_final_share() {
        let config = OptimizerConfig { learning_rate: 1.0, final_share: 0.1, warmup_steps: 4, ..Default::default() };
        let rates: Vec<f64> = (0..12).map(|step| learning_rate(&config, step, 12)).collect();
        assert_eq!(rates[..5], [0.25, 0.5, 0.75, 1.0, 1.0]);
        assert!(rates[4..].windows(2).all(|pair| pair[1] < pair[0]));
        assert!((rates[11] - 0.1).abs() < 1e-12);
    }

    #[test]
    fn a_run_shorter_than_its_warmup_stays_finite() {
        let config = OptimizerConfig { warmup_steps: 100, ..Default::default() };
        assert!((0..3).all(|step| learning_rate(&config, step, 3).is_finite()));
    }
}
