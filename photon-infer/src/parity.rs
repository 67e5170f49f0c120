//! Whether two devices compute the same: part by part through the training forward, and token by token through the
//! caches.
//!
//! Every part of the forward is compared twice. *Alone* it reads what the parts before it gave on the reference device,
//! so that the difference is its own; *along* it reads what they gave on its own device, so that differences add up. A
//! divergence begins where the difference alone is large.

use burn::tensor::{Tensor, TensorData};
use photon_core::infer_config::InferPlan;
use photon_core::model::Model;
use photon_core::watch::{Output, Watch};
use serde::Serialize;

use crate::divergence::{Divergence, Divergences, likeliest};
use crate::generate::{ids_of, rows_of};
use crate::session::Session;

/// A device beside the reference device.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Parity {
    /// From the tokens up and down again; the head last.
    pub parts: Vec<PartParity>,
    /// The training forward first, then the caches of each preset.
    pub predictions: Vec<PredictionParity>,
}

/// One part of the training forward on two devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PartParity {
    /// `embedding`, `encoder 1`, `decoder 2`, `stack`, `head`, ...
    pub part: String,
    /// The largest absolute value on the reference device.
    pub largest: f64,
    /// The largest difference, given the reference's input.
    pub alone: f64,
    /// The largest difference, given the device's own input.
    pub along: f64,
}

/// Predictions of the same tokens on two devices.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PredictionParity {
    /// `training forward`, or the preset of the caches.
    pub path: String,
    /// The largest difference of a logit.
    pub logit_difference: f64,
    /// Mean of `KL(reference || device)`, in nats.
    pub kl_mean_nats: f64,
    /// The largest, in nats.
    pub kl_max_nats: f64,
    /// Share of predictions with the same likeliest token.
    pub top1_agreement: f64,
    /// Tokens that both choose alike, always the likeliest, after the prompt; none for the training forward.
    pub greedy_tokens: Option<usize>,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ParityConfig {
    /// Tokens of a window that are its prompt, fewer than all.
    pub prompt_tokens: usize,
    /// Tokens that are chosen after the prompt of the first window.
    pub greedy_tokens: usize,
}

impl Parity {
    /// The first part of the training forward that differs by more than a share of its largest value, given the
    /// reference's input; where only the sum of many small differences does, the first part that shows it.
    pub fn begins_to_differ(&self, tolerance: f64) -> Option<&str> {
        let first = |difference: fn(&PartParity) -> f64| {
            // What is no number is not within.
            let is_within = |part: &PartParity| difference(part) <= tolerance * part.largest;
            self.parts.iter().find(|part| !is_within(part)).map(|part| part.part.as_str())
        };
        first(|part| part.alone).or_else(|| first(|part| part.along))
    }
}

/// The outputs of a forward, in order.
struct Record(Vec<(Output, Tensor<3>)>);

impl Watch for Record {
    fn see(&mut self, output: Output, values: Tensor<3>) -> Tensor<3> {
        self.0.push((output, values.clone()));
        values
    }
}

/// Compares outputs with those of a reference.
struct Compare<'a> {
    reference: &'a [(Output, Tensor<3>)],
    /// Whether parts read what the reference gave.
    hands_on_reference: bool,
    differences: Vec<f64>,
}

impl Watch for Compare<'_> {
    fn see(&mut self, output: Output, values: Tensor<3>) -> Tensor<3> {
        let (expected_output, expected) = &self.reference[self.differences.len()];
        assert_eq!(output, *expected_output, "one model gives its outputs in one order");
        let (shape, device) = (expected.shape(), values.device());
        let expected = numbers(expected.clone());
        self.differences.push(largest_difference(&expected, &numbers(values.clone())));
        match self.hands_on_reference {
            true => Tensor::from_data(TensorData::new(expected, shape), &device),
            false => values,
        }
    }
}

/// Compares a model on two devices, on windows of a text of equal lengths, with the caches of each plan.
///
/// # Panics
///
/// If there is no window, the prompt is not shorter than a window, or a plan is for another model or has a memory budget.
pub fn parity(
    reference: &Model,
    other: &Model,
    windows: &[Vec<u32>],
    config: &ParityConfig,
    plans: &[(String, InferPlan)],
) -> Parity {
    assert!(!windows.is_empty() && config.prompt_tokens < windows[0].len(), "nothing to compare");
    let mut record = Record(Vec::new());
    let hidden = reference.hidden_watched(ids_of(windows, reference), &mut record).tokens;
    let compare = |hands_on_reference| {
        let mut compare = Compare { reference: &record.0, hands_on_reference, differences: Vec::new() };
        let hidden = other.hidden_watched(ids_of(windows, other), &mut compare).tokens;
        (compare.differences, numbers(other.head().forward(hidden)))
    };
    let (mut alone, logits_alone) = compare(true);
    let (mut along, logits) = compare(false);
    let expected = numbers(reference.head().forward(hidden));
    alone.push(largest_difference(&expected, &logits_alone));
    along.push(largest_difference(&expected, &logits));

    let mut largest: Vec<(String, f64)> =
        record.0.into_iter().map(|(output, values)| (output.to_string(), largest(&numbers(values)))).collect();
    largest.push(("head".into(), self::largest(&expected)));
    let differences = alone.into_iter().zip(along);
    let parts = largest.into_iter().zip(differences);
    let parts = parts.map(|((part, largest), (alone, along))| PartParity { part, largest, alone, along }).collect();

    let vocab_size = expected.len() / (windows.len() * windows[0].len());
    let by_position = |logits: Vec<f32>| logits.chunks(vocab_size).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let all: Vec<u32> = windows.concat();
    let mut predictions =
        vec![compare_predictions("training forward", &by_position(expected), &by_position(logits), &all, None)];
    for (name, plan) in plans {
        let n_prompt = config.prompt_tokens;
        let came: Vec<u32> = windows.iter().flat_map(|window| window[n_prompt..].to_vec()).collect();
        let [expected, found] = [reference, other].map(|model| cached_logits(model, plan, windows, n_prompt));
        let prompt = &windows[0][..n_prompt];
        let [expected_ids, found_ids] =
            [reference, other].map(|model| likeliest_tokens(model, plan, prompt, config.greedy_tokens));
        let equal = expected_ids.iter().zip(&found_ids).take_while(|(a, b)| a == b).count();
        predictions.push(compare_predictions(name, &expected, &found, &came, Some(equal)));
    }
    Parity { parts, predictions }
}

fn compare_predictions(
    path: &str,
    expected: &[Vec<f32>],
    found: &[Vec<f32>],
    came: &[u32],
    greedy_tokens: Option<usize>,
) -> PredictionParity {
    let mut divergences = Divergences::default();
    let mut logit_difference = 0.0f64;
    for ((expected, found), &token_id) in expected.iter().zip(found).zip(came) {
        divergences.add(Divergence::of(expected, found, token_id));
        logit_difference = logit_difference.max(largest_difference(expected, found));
    }
    PredictionParity {
        path: path.to_owned(),
        logit_difference,
        kl_mean_nats: divergences.mean_kl_nats(),
        kl_max_nats: divergences.kl_quantile_nats(1.0),
        top1_agreement: divergences.agreement(),
        greedy_tokens,
    }
}

/// Predictions of the tokens after the prompts, which are taken up one by one; window by window.
fn cached_logits(model: &Model, plan: &InferPlan, windows: &[Vec<u32>], n_prompt: usize) -> Vec<Vec<f32>> {
    let all: Vec<usize> = (0..windows.len()).collect();
    let prompts: Vec<Vec<u32>> = windows.iter().map(|window| window[..n_prompt].to_vec()).collect();
    let (mut session, logits) = Session::begin(model, plan, &prompts).expect("no memory budget is set");
    let mut steps = vec![rows_of(logits)];
    for position in n_prompt..windows[0].len() - 1 {
        let newest: Vec<Vec<u32>> = windows.iter().map(|window| vec![window[position]]).collect();
        steps.push(rows_of(session.extend(&all, &newest).expect("no memory budget is set")));
    }
    all.iter().flat_map(|&row| steps.iter().map(move |step| step[row].clone())).collect()
}

/// The likeliest continuation of a prompt, token by token.
fn likeliest_tokens(model: &Model, plan: &InferPlan, prompt: &[u32], n_tokens: usize) -> Vec<u32> {
    let (mut session, logits) = Session::begin(model, plan, &[prompt.to_vec()]).expect("no memory budget is set");
    let mut logits = rows_of(logits);
    let mut token_ids = Vec::with_capacity(n_tokens);
    while token_ids.len() < n_tokens {
        let token_id = likeliest(&logits[0]) as u32;
        token_ids.push(token_id);
        logits = rows_of(session.extend(&[0], &[vec![token_id]]).expect("no memory budget is set"));
    }
    token_ids
}

fn numbers(values: Tensor<3>) -> Vec<f32> {
    values.try_into_vec_as().expect("outputs are f32")
}

fn largest(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(value.abs())).fold(0.0, f64::max)
}

/// Not a number where any value is none.
fn largest_difference(expected: &[f32], found: &[f32]) -> f64 {
    assert_eq!(expected.len(), found.len(), "outputs of one model");
    let differences = expected.iter().zip(found).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs());
    differences.fold(0.0, |largest, difference| if difference.is_nan() { difference } else { largest.max(difference) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::module::{Module, ModuleMapper, Param};
    use burn::tensor::Device;
    use photon_core::config_file;
    use photon_core::infer_config::InferConfig;

    fn model() -> Model {
        let level = "[[levels]]\nchunk_len = 2\nd_model = 8\n\
                     encoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\nconverter = { prefix_len = 2 }\n\
                     decoder = { n_layers = 1, n_heads = 2, d_ff = 8 }\n";
        let toml = format!("architecture = \"photon\"\nvocab_size = 11\nd_model = 8\n{}", level.repeat(2));
        let config = config_file::parse_model(toml.parse().unwrap(), "test.toml".as_ref()).unwrap();
        Model::new(&config, 1, &Device::flex())
    }

    /// Adds to the parameters of one part.
    struct Nudge {
        part: &'static [&'static str],
        by: f64,
        path: Vec<String>,
    }

    impl ModuleMapper for Nudge {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.to_owned());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }

        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let is_there = self.path.windows(self.part.len()).any(|names| names == self.part);
            if is_there { param.map(|values| values + self.by) } else { param }
        }
    }

    fn compare(part: &'static [&'static str], by: f64) -> Parity {
        let model = model();
        let other = model.clone().map(&mut Nudge { part, by, path: Vec::new() });
        let windows: Vec<Vec<u32>> = (0..2).map(|row| (0..16).map(|index| (index * 7 + row) % 11).collect()).collect();
        let plan = InferConfig::default().plan(&model.config()).unwrap();
        let config = ParityConfig { prompt_tokens: 5, greedy_tokens: 6 };
        parity(&model, &other, &windows, &config, &[("exact".into(), plan)])
    }

    #[test]
    fn a_divergence_is_found_where_it_starts() {
        let names: [(&[&str], &str); 5] = [
            (&["encoder_embedding"], "embedding"),
            (&["encoders", "1", "chunker"], "chunker 2"),
            (&["encoders", "0", "stack"], "encoder 1"),
            (&["decoders", "1", "converter"], "converter 2"),
            (&["head"], "head"),
        ];
        for (part, name) in names {
            let found = compare(part, 0.01);
            assert_eq!(found.begins_to_differ(1e-6), Some(name), "{found:#?}");
            let differing: Vec<&str> =
                found.parts.iter().filter(|part| part.alone > 0.0).map(|part| part.part.as_str()).collect();
            assert_eq!(differing, [name]);
            let last = found.parts.last().unwrap();
            assert!(last.along > 0.0 && found.predictions.iter().all(|path| path.logit_difference > 0.0), "{found:#?}");
        }
        // What is no number is never within a tolerance.
        assert_eq!(compare(&["decoders", "0", "stack"], f64::NAN).begins_to_differ(1e-1), Some("decoder 1"));
    }

    #[test]
    fn a_device_is_its_own_equal() {
        let found = compare(&["nothing"], 1.0);
        assert_eq!(found.begins_to_differ(0.0), None);
        let names: Vec<&str> = found.parts.iter().map(|part| part.part.as_str()).collect();
        assert_eq!(
            names,
            [
                "decoder embedding",
                "embedding",
                "chunker 1",
                "encoder 1",
                "chunker 2",
                "encoder 2",
                "converter 2",
                "decoder 2",
                "converter 1",
                "decoder 1",
                "head"
            ]
        );
        let paths =
            found.predictions.iter().map(|path| (path.path.as_str(), path.logit_difference, path.greedy_tokens));
        assert_eq!(paths.collect::<Vec<_>>(), [("training forward", 0.0, None), ("exact", 0.0, Some(6))]);
        assert!(found.predictions.iter().all(|path| path.top1_agreement == 1.0 && path.kl_max_nats < 1e-12));
    }
}
