//! Which stacks multiply in fewer bits.

use burn::tensor::Device;
use photon_core::config::{ConfigError, ModelConfig};
use photon_core::infer_config::{Stage, Stages};
use photon_core::nn::compute::Compute;
use serde::{Deserialize, Serialize};

use super::rule;

/// Gradients in f16 are made with the loss times this: what is below 6e-8 would be zero.
const F16_LOSS_SCALE: f64 = 1024.0;

/// The number format of the matrix products of each stack. Weights, optimiser, norms, attention and the loss are f32.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionConfig {
    /// Where no rule says otherwise.
    pub default: Compute,
    /// Rules; where several fit a stage, the last wins.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<PrecisionRule>,
    /// The loss is multiplied with it before the backward pass and gradients divided by it after, which matters to f16
    /// alone. Absent: 1024 where a stage computes in f16, else 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
}

/// The format of some stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrecisionRule {
    /// Which.
    pub stages: Stages,
    /// In what they multiply.
    pub compute: Compute,
}

impl PrecisionConfig {
    /// The format of a stage in a model of so many levels.
    pub fn compute(&self, stage: Stage, n_levels: usize) -> Compute {
        self.rule_of(stage, n_levels).1
    }

    /// What the loss is multiplied with before the backward pass.
    pub fn loss_scale(&self, model: &ModelConfig) -> f64 {
        let stages = Stage::all_of(model);
        let is_f16 = stages.iter().any(|&stage| self.compute(stage, model.n_levels()) == Compute::F16);
        self.loss_scale.unwrap_or(if is_f16 { F16_LOSS_SCALE } else { 1.0 })
    }

    /// Whether the device has the formats that the stages of the model ask for.
    ///
    /// # Errors
    ///
    /// If not, with the key, the stage and the way out.
    pub fn check(&self, model: &ModelConfig, device: &Device, device_name: &str) -> Result<(), ConfigError> {
        self.check_with(model, device_name, |compute| device.supports_dtype(compute.dtype()))
    }

    fn check_with(
        &self,
        model: &ModelConfig,
        device_name: &str,
        is_there: impl Fn(Compute) -> bool,
    ) -> Result<(), ConfigError> {
        for stage in Stage::all_of(model) {
            let (key, compute) = self.rule_of(stage, model.n_levels());
            if !is_there(compute) {
                let others: Vec<String> = [Compute::F32, Compute::F16, Compute::Bf16]
                    .into_iter()
                    .filter(|&other| is_there(other))
                    .map(|other| format!("\"{other}\""))
                    .collect();
                let fix = format!(
                    "{stage} cannot compute in {compute} on {device_name}, which has no such arithmetic: use {} here, or \
                     another --device",
                    others.join(" or ")
                );
                return rule(key, compute, fix);
            }
        }
        Ok(())
    }

    /// The key that decides for a stage, and what it says.
    fn rule_of(&self, stage: Stage, n_levels: usize) -> (String, Compute) {
        let found = self.stages.iter().enumerate().rev().find(|(_, rule)| rule.stages.contains(stage, n_levels));
        match found {
            Some((index, rule)) => (format!("precision.stages.{index}.compute"), rule.compute),
            None => ("precision.default".into(), self.default),
        }
    }

    pub(super) fn validate(&self, model: &ModelConfig) -> Result<(), ConfigError> {
        let stages = Stage::all_of(model);
        for (index, precision) in self.stages.iter().enumerate() {
            if !stages.iter().any(|&stage| precision.stages.contains(stage, model.n_levels())) {
                let found: Vec<String> = stages.iter().map(Stage::to_string).collect();
                let fix = format!("this model has {}", found.join(", "));
                return rule(format!("precision.stages.{index}.stages"), precision.stages, fix);
            }
        }
        match self.loss_scale {
            Some(scale) if !(scale > 0.0 && scale.is_finite()) => {
                rule("precision.loss_scale", scale, "must be above 0, best a power of two")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::tests::model_config;

    fn config(toml: &str) -> PrecisionConfig {
        toml::from_str(toml).unwrap()
    }

    const MIXED: &str = "default = \"f16\"\n[[stages]]\nstages = \"encoders\"\ncompute = \"bf16\"\n\
                         [[stages]]\nstages = \"encoder 1\"\ncompute = \"f32\"\n";

    #[test]
    fn the_last_rule_wins_and_f16_scales_the_loss() {
        let (config, model) = (config(MIXED), model_config(2));
        let stages = Stage::all_of(&model);
        let found: Vec<String> = stages.iter().map(|&stage| config.compute(stage, 2).to_string()).collect();
        assert_eq!(found, ["f32", "bf16", "f16", "f16"]);
        assert_eq!(config.loss_scale(&model), 1024.0);
        assert_eq!(PrecisionConfig { loss_scale: Some(2.0), ..config }.loss_scale(&model), 2.0);
        assert_eq!(self::config("default = \"bf16\"").loss_scale(&model), 1.0);
    }

    #[test]
    fn a_device_without_the_format_is_refused_with_the_way_out() {
        let (config, model) = (config(MIXED), model_config(2));
        let refused = |missing: Compute| {
            config.check_with(&model, "wgpu", |compute| compute != missing).map_err(|error| error.to_string())
        };
        assert_eq!(
            refused(Compute::Bf16).unwrap_err(),
            "precision.stages.0.compute = bf16: encoder 2 cannot compute in bf16 on wgpu, which has no such arithmetic: use \
             \"f32\" or \"f16\" here, or another --device"
        );
        assert!(refused(Compute::F16).unwrap_err().starts_with("precision.default = f16: decoder 1 cannot"));
        // The CPU has all of them.
        config.check(&model, &Device::flex(), "cpu").unwrap();
    }
}
