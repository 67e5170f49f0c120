//! The loss and its gradients, against slower ways to get them.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use photon_core::loss::{self, Objective};
use photon_core::model::Model;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{Case, flat_cases, ids, max_difference, parse, photon_case, random_rows, shaken};

fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = vec![
        photon_case(3, "{ window = { units = 2 } }", "{ stream = { window = 5 } }"),
        photon_case(2, "\"block\"", "{ lookback = { chunks = 1 } }"),
        photon_case(3, "\"full\"", "\"chunk\""),
    ];
    cases.extend(flat_cases());
    cases
}

fn loss(model: &Model, rows: &[Vec<u32>], [alpha, z_loss]: [f64; 2]) -> Tensor<1> {
    let row_tokens = vec![rows[0].len(); rows.len()];
    let objective = Objective::new(&model.config(), alpha, &row_tokens).with_z_loss(z_loss);
    objective.loss(model, ids(rows, &model.device()), &row_tokens).total
}

/// Gradients of every parameter in visiting order, flattened.
pub(crate) fn gradients(model: &Model, loss: Tensor<1>) -> Vec<(String, Vec<f32>)> {
    struct Read<'a> {
        grads: &'a burn::tensor::Gradients,
        path: Vec<String>,
        found: Vec<(String, Vec<f32>)>,
    }
    impl ModuleVisitor for Read<'_> {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _: &str, _: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().grad(self.grads).map(|grad| grad.try_to_vec_as().unwrap());
            self.found.push((self.path.join("."), values.unwrap_or_default()));
        }
    }
    let grads = loss.backward();
    let mut read = Read { grads: &grads, path: Vec::new(), found: Vec::new() };
    model.visit(&mut read);
    read.found
}

#[test]
fn every_parameter_learns_from_the_first_step() {
    for case in cases() {
        let model = Model::new(&case.config, 3, &Device::flex().autodiff());
        for alpha in [0.0, 0.3] {
            let rows = random_rows(2, 3 * case.config.meta_chunk_tokens().max(4), 21);
            for (path, gradient) in gradients(&model, loss(&model, &rows, [alpha, 0.0])) {
                assert!(gradient.iter().all(|g| g.is_finite()), "{}: {path} at alpha {alpha}", case.name);
                assert!(gradient.iter().any(|&g| g != 0.0), "{}: {path} gets none at alpha {alpha}", case.name);
            }
        }
    }
}

#[test]
fn running_blocks_again_gives_the_same_gradients() {
    for case in cases() {
        let rows = random_rows(2, 3 * case.config.meta_chunk_tokens().max(4), 24);
        let of = |device: Device| {
            let model = shaken(&case.config, &device);
            gradients(&model, loss(&model, &rows, [0.3, 0.0]))
        };
        let kept = of(Device::flex().autodiff());
        let again = of(Device::flex().autodiff().gradient_checkpointing());
        for ((path, kept), (_, again)) in kept.iter().zip(&again) {
            let size = kept.iter().fold(0.0f32, |size, g| size.max(g.abs()));
            assert!(size > 0.0, "{}: {path} has no gradient", case.name);
            let difference = max_difference(kept, again);
            assert!(difference <= 1e-5 * size, "{}: {path}: {difference} of {size}", case.name);
        }
    }
}

/// Nudges one parameter, counted in visiting order, by one number.
struct Nudge {
    countdown: usize,
    element: usize,
    by: f32,
}

impl burn::module::ModuleMapper for Nudge {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_it = self.countdown == 0;
        self.countdown = self.countdown.wrapping_sub(1);
        if !is_it {
            return param;
        }
        param.map(|tensor| {
            let (shape, device) = (tensor.dims(), tensor.device());
            let mut values: Vec<f32> = tensor.try_to_vec_as().unwrap();
            values[self.element] += self.by;
            Tensor::from_data(burn::tensor::TensorData::new(values, shape), &device).require_grad()
        })
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    // Small, so that no choice of blocks turns over: the loss jumps there.
    const STEP: f32 = 2e-3;
    let weights = [[0.0, 0.1], [0.3, 0.0]];
    for (case, weights) in cases().into_iter().flat_map(|case| weights.map(|weights| (case.config.clone(), weights))) {
        let model = shaken(&case, &Device::flex().autodiff());
        let rows = random_rows(2, 13, 22);
        let analytic = gradients(&model, loss(&model, &rows, weights));
        for (index, (path, gradient)) in analytic.iter().enumerate() {
            // The steepest element: its difference stands out of rounding.
            let steepest =
                (0..gradient.len()).max_by(|&a, &b| gradient[a].abs().total_cmp(&gradient[b].abs())).unwrap();
            // The stop-gradient of the reconstruction's target is no derivative of its value.
            if weights[0] > 0.0 && path.contains("encoder") {
                continue;
            }
            let at = |by: f32| -> f32 {
                let nudged = model.clone().map(&mut Nudge { countdown: index, element: steepest, by });
                loss(&nudged, &rows, weights).into_scalar()
            };
            let numeric = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let error = (numeric - gradient[steepest]).abs();
            let allowed = 0.03 * gradient[steepest].abs() + 1e-3;
            assert!(error <= allowed, "{path}: numeric {numeric}, analytic {}", gradient[steepest]);
        }
    }
}

#[test]
fn the_chunked_loss_equals_the_plain_one() {
    let device = Device::flex().autodiff();
    // Three pieces: the loss holds about a million logits at once.
    let (n_positions, d_model, vocab_size) = (70, 5, 40_000);
    // Seeded, for the tolerance is near what rounding makes of a few hundred thousand sums.
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut numbers = |n: usize, from: f32| -> Vec<f32> { (0..n).map(|_| rng.random_range(from..1.0)).collect() };
    let mut matrix = |rows: usize, columns: usize| {
        let data = TensorData::new(numbers(rows * columns, -1.0), [rows, columns]);
        Tensor::<2>::from_data(data, &device).require_grad()
    };
    let (hidden, head) = (matrix(n_positions, d_model), matrix(d_model, vocab_size));
    let targets = Tensor::<1, Int>::arange(0..n_positions as i64, &device) * 571;
    let weights = Tensor::<1>::from_data(TensorData::new(numbers(n_positions, 0.0), [n_positions]), &device);

    for z_loss in [0.0, 0.02] {
        let chunked =
            loss::token_losses(hidden.clone(), std::slice::from_ref(&head), targets.clone(), weights.clone(), z_loss);
        let logits = hidden.clone().matmul(head.clone());
        let log_probs = log_softmax(logits.clone(), 1);
        let plain = -(log_probs.gather(1, targets.clone().unsqueeze_dim(1)).squeeze_dim(1) * weights.clone()).sum();
        let z = (logits.exp().sum_dim(1).log().square().squeeze_dim(1) * weights.clone()).sum();
        let plain_total = plain.clone() + z.clone() * z_loss;
        let [inner_hidden, inner_head] = [&hidden, &head].map(|x| x.clone().inner());
        let inner =
            loss::token_losses(inner_hidden, &[inner_head], targets.clone().inner(), weights.clone().inner(), z_loss);
        let pieces = [0..13_000, 13_000..vocab_size].map(|piece| head.clone().slice([0..d_model, piece]));
        let in_pieces = loss::token_losses(hidden.clone(), &pieces, targets.clone(), weights.clone(), z_loss);

        let value = |x: &Tensor<1>| x.clone().into_scalar::<f32>();
        for losses in [&chunked, &inner, &in_pieces] {
            let pairs = [(&losses.total, &plain_total), (&losses.cross_entropy, &plain), (&losses.z, &z)];
            for (index, (found, expected)) in
                pairs.map(|(found, expected)| (value(found), value(expected))).iter().enumerate()
            {
                // Without a weight the squares are left out.
                let is_left_out = index == 2 && z_loss == 0.0 && losses.z.is_autodiff();
                let expected = if is_left_out { 0.0 } else { *expected };
                assert!(
                    (found - expected).abs() <= 1e-5 * expected.abs(),
                    "z_loss {z_loss}, {index}: {found}, {expected}"
                );
            }
        }
        // An upstream factor must reach the gradients.
        let [chunked, in_pieces, plain] =
            [chunked.total, in_pieces.total, plain_total].map(|total| (total * 3.0).backward());
        for tensor in [&hidden, &head] {
            for found in [&chunked, &in_pieces] {
                let difference = tensor.grad(found).unwrap() - tensor.grad(&plain).unwrap();
                let difference: f32 = difference.abs().max().into_scalar();
                assert!(difference < 2e-5, "z_loss {z_loss}: {difference}");
            }
        }
    }
}

#[test]
fn accumulation_is_the_mean_over_tokens_however_the_batch_is_cut() {
    for alpha in [0.0, 0.3] {
        let case = photon_case(3, "{ window = { units = 2 } }", "{ stream = { window = 5 } }");
        let model = shaken(&case.config, &Device::flex().autodiff());
        let rows = random_rows(8, 24, 23);
        let row_tokens = [24, 3, 24, 17, 9, 24, 1, 12];
        let objective = Objective::new(&case.config, alpha, &row_tokens).with_z_loss(0.01);
        let summed = |micro_batch: usize| {
            let mut value = 0.0;
            let mut sums: Vec<(String, Vec<f32>)> = Vec::new();
            for (rows, row_tokens) in rows.chunks(micro_batch).zip(row_tokens.chunks(micro_batch)) {
                let loss = objective.loss(&model, ids(rows, &model.device()), row_tokens).total;
                value += loss.clone().into_scalar::<f32>();
                let gradients = gradients(&model, loss);
                match sums.is_empty() {
                    true => sums = gradients,
                    false => sums.iter_mut().zip(gradients).for_each(|((_, sum), (_, more))| {
                        sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
                    }),
                }
            }
            (value, sums)
        };
        let (value, whole) = summed(8);
        for micro_batch in [4, 1] {
            let (cut_value, cut) = summed(micro_batch);
            assert!((value - cut_value).abs() < 1e-5, "loss {value} against {cut_value}");
            for ((path, whole), (_, cut)) in whole.iter().zip(&cut) {
                let difference = crate::support::max_difference(whole, cut);
                assert!(difference < 1e-5, "{path} with micro-batches of {micro_batch}: {difference}");
            }
        }
    }
}

#[test]
fn padding_weighs_nothing() {
    let case = photon_case(2, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let mut rows = random_rows(1, 12, 24);
    let row_tokens = [7];
    let objective = Objective::new(&case.config, 0.3, &row_tokens);
    let value = |rows: &[Vec<u32>]| -> f32 {
        objective.loss(&model, ids(rows, &model.device()), &row_tokens).total.into_scalar()
    };
    let before = value(&rows);
    rows[0][7..].iter_mut().for_each(|id| *id = 0);
    assert_eq!(before, value(&rows));
}

#[test]
fn only_real_places_weigh_wherever_the_padding_stands() {
    let case = photon_case(2, "\"full\"", "\"chunk\"");
    let model = shaken(&case.config, &Device::flex());
    let rows = random_rows(2, 24, 25);
    let token_ids = || ids(&rows, &model.device());
    let value = |objective: &Objective, is_real: &[bool]| {
        let parts = objective.loss_of_places(&model, token_ids(), is_real);
        [parts.cross_entropy, parts.reconstruction].map(Tensor::into_scalar::<f32>)
    };
    // Documents that end in the middle of a chunk.
    let is_real: Vec<bool> = (0..48).map(|place| !matches!(place, 5 | 10..=12 | 30 | 44..)).collect();
    let hidden = model.hidden(token_ids()).tokens;
    let d_model = hidden.dims()[2];
    let nats = loss::token_nats(hidden.reshape([48, d_model]), &model.head().weights(), token_ids().reshape([48]));
    let nats: Vec<f32> = nats.try_into_vec_as().unwrap();
    let real: Vec<f32> = nats.iter().zip(&is_real).filter_map(|(&nats, &is_real)| is_real.then_some(nats)).collect();
    let expected = real.iter().sum::<f32>() / real.len() as f32;
    let objective = Objective::of_places(&case.config, 0.3, &is_real, 2);
    let [cross_entropy, reconstruction] = value(&objective, &is_real);
    assert!((cross_entropy - expected).abs() < 1e-5, "{cross_entropy} against {expected}");
    // The units that padding breaks weigh nothing, so the term is another.
    let whole = [true; 48];
    let [_, of_all] = value(&Objective::of_places(&case.config, 0.3, &whole, 2), &whole);
    assert!((reconstruction - of_all).abs() > 1e-4 && reconstruction > 0.0, "{reconstruction} and {of_all}");
    // Padding at the end is what `new` and `loss` know.
    let row_tokens = [17, 24];
    let at_end: Vec<bool> = (0..48).map(|place| place % 24 < row_tokens[place / 24]).collect();
    let by_lens = Objective::new(&case.config, 0.3, &row_tokens);
    assert_eq!(by_lens, Objective::of_places(&case.config, 0.3, &at_end, 2));
    let by_lens: f32 = by_lens.loss(&model, token_ids(), &row_tokens).cross_entropy.into_scalar();
    assert_eq!(by_lens, value(&Objective::of_places(&case.config, 0.3, &at_end, 2), &at_end)[0]);
}

#[test]
fn a_fresh_model_knows_nothing() {
    let config = parse(include_str!("../../configs/model/photon-3l-tiny.toml"));
    let model = Model::new(&config, 0, &Device::flex());
    let row: Vec<u32> = (0..64).map(|i| (i * 37) % 256).collect();
    let nats: f32 = loss(&model, &[row], [0.0; 2]).into_scalar();
    let uniform = (config.vocab_size() as f32).ln();
    assert!((nats - uniform).abs() < 0.1, "{nats} nats at the start, uniform is {uniform}");
}
