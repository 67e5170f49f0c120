//! What a run tells, as points of named curves.

use crate::eval::Evaluation;
use crate::report::{EvalReport, StepReport};

/// Of an update.
pub(crate) fn of_step(report: &StepReport) -> Vec<(String, f64)> {
    let mut curves = vec![
        ("train/loss_nats".to_owned(), report.loss_nats),
        ("train/bits_per_byte".to_owned(), report.bits_per_byte),
        ("train/gradient_norm".to_owned(), report.gradient_norm),
        ("train/learning_rate".to_owned(), report.learning_rate),
        ("train/tokens_per_sec".to_owned(), report.tokens_per_sec),
    ];
    let memory = &report.memory;
    let known = [
        ("train/share_of_peak", report.share_of_peak),
        ("memory/resident_mib", memory.resident_bytes.map(|bytes| mib(bytes as f64))),
        ("memory/device_mib", memory.device_bytes.map(|bytes| mib(bytes as f64))),
    ];
    curves.extend(known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    curves.extend(report.stage_gradient_norms.iter().map(|(stage, norm)| (format!("gradient_norm/{stage}"), *norm)));
    curves
}

/// Of an evaluation.
pub(crate) fn of_evaluation(report: &EvalReport) -> Vec<(String, f64)> {
    let mut curves = vec![
        ("held_out/bits_per_byte".to_owned(), report.held_out.bits_per_byte),
        ("held_out/loss_nats".to_owned(), report.held_out.nats_per_token),
    ];
    let of_source =
        |(name, held_out): &(String, Evaluation)| (format!("held_out_bits_per_byte/{name}"), held_out.bits_per_byte);
    curves.extend(report.sources.iter().map(of_source));
    curves
}

fn mib(bytes: f64) -> f64 {
    bytes / f64::from(1 << 20)
}
