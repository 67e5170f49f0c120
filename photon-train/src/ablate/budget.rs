//! How long an arm trains, and the schedule that goes with it.
//!
//! What a run config counts in steps is a share of its `steps`: where an arm trains for other steps, the warm-up, the decay of
//! `wsd`, the stages of a curriculum, and the steps between evaluations and checkpoints are scaled with them. So the
//! learning rates of two arms are equal at equal shares of their training, and both are evaluated equally often.

use photon_core::accounting::model_cost;

use crate::config::{RunConfig, TrainConfig};
use crate::schedule::Schedule;

/// The run with `steps` updates in place of its own, and all else that it counts in steps scaled with them.
pub(super) fn with_steps(config: &RunConfig, steps: u64) -> RunConfig {
    let before = config.train.steps;
    let scaled = |n: u64| ((u128::from(n) * u128::from(steps) + u128::from(before) / 2) / u128::from(before)) as u64;
    let every = |n: u64| scaled(n).max(1);
    let mut config = config.clone();
    let train = &mut config.train;
    train.steps = steps;
    train.optimizer.warmup_steps = scaled(train.optimizer.warmup_steps);
    if let Schedule::Wsd(decay) = &mut train.optimizer.schedule {
        decay.decay_steps = scaled(decay.decay_steps);
    }
    train.eval.every_steps = every(train.eval.every_steps);
    train.checkpoint_every_steps = every(train.checkpoint_every_steps);
    let mut earliest = 1;
    for stage in &mut train.curriculum {
        stage.until_step = scaled(stage.until_step).max(earliest);
        earliest = stage.until_step + 1;
    }
    config
}

/// Tokens of all updates.
pub fn planned_tokens(train: &TrainConfig) -> f64 {
    rows(train).into_iter().map(|(n_rows, seq_len)| (n_rows * seq_len as u64) as f64).sum()
}

/// FLOPs of all updates.
pub fn planned_flops(config: &RunConfig) -> f64 {
    let of = |(n_rows, seq_len): (u64, usize)| {
        n_rows as f64 * seq_len as f64 * model_cost(&config.model, seq_len).training_flops_per_token()
    };
    rows(&config.train).into_iter().map(of).sum()
}

/// Rows of each length.
fn rows(train: &TrainConfig) -> Vec<(u64, usize)> {
    let shapes = train.row_shapes();
    let ends = shapes.iter().skip(1).map(|shape| shape.from_step).chain([train.steps]);
    let rows = shapes.iter().zip(ends).map(|(shape, end)| {
        let n_steps = end.min(train.steps).saturating_sub(shape.from_step);
        (n_steps * shape.batch_size as u64, shape.seq_len)
    });
    rows.collect()
}

/// The run whose `amount` is nearest to `target`; amounts grow with steps.
pub(super) fn steps_for(config: &RunConfig, target: f64, amount: &dyn Fn(&RunConfig) -> f64) -> RunConfig {
    let of = |steps: u64| amount(&with_steps(config, steps));
    let (mut low, mut high) = (1, 2);
    while of(high) < target && high < 1 << 40 {
        high *= 2;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match of(middle) < target {
            true => low = middle,
            false => high = middle,
        }
    }
    let is_low = (of(low) - target).abs() <= (of(high) - target).abs();
    with_steps(config, if is_low { low } else { high })
}

#[cfg(test)]
mod tests {
    use super::super::test_data::run;
    use super::*;
    use crate::schedule::learning_rate;

    #[test]
    fn what_is_counted_in_steps_keeps_its_share() {
        let run = run("optimizer.schedule.wsd.decay_steps = 20\ncurriculum = [{ until_step = 50, seq_len = 32 }]");
        let longer = with_steps(&run, 250);
        let train = &longer.train;
        assert_eq!((train.steps, train.optimizer.warmup_steps, train.eval.every_steps), (250, 25, 63));
        assert_eq!(train.curriculum[0].until_step, 125);
        let rate = |run: &RunConfig, step: u64| learning_rate(&run.train.optimizer, step, run.train.steps);
        for (short, long) in [(9, 24), (50, 125), (89, 224), (99, 249)] {
            assert!((rate(&run, short) - rate(&longer, long)).abs() < 1e-4, "{short} {long}");
        }
        assert_eq!(with_steps(&run, 100), run);
    }

    #[test]
    fn tokens_and_flops_are_those_of_every_row() {
        let run = run("curriculum = [{ until_step = 50, seq_len = 32 }]");
        // Short rows are twice as many, so that an update keeps its 128 tokens.
        assert_eq!(planned_tokens(&run.train), 100.0 * 128.0);
        let of = |seq_len: usize| 50.0 * 128.0 * model_cost(&run.model, seq_len).training_flops_per_token();
        assert_eq!(planned_flops(&run), of(32) + of(64));
    }

    #[test]
    fn steps_are_those_that_come_nearest() {
        let run = run("");
        let steps = |tokens: f64| steps_for(&run, tokens, &|run| planned_tokens(&run.train)).train.steps;
        assert_eq!([1.0, 128.0, 191.0, 193.0, 1280.0, 1e9].map(steps), [1, 1, 1, 2, 10, 7_812_500]);
    }
}
