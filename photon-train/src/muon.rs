//! Muon for matrices of `[d_in, d_out]`.

use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdjustLrFn, Muon, MuonConfig, MuonState, Optimizer};
use burn::tensor::{Device, Tensor};

use crate::config::{self, Adjust};

/// Burn's Muon, whose rule for the size of an update takes matrices to be `[d_out, d_in]`, as PyTorch has them.
#[derive(Clone)]
pub(crate) struct HiddenMuon {
    stock: Muon,
    adjust: Adjust,
    weight_decay: f32,
}

impl HiddenMuon {
    pub(crate) fn new(config: &config::MuonConfig, weight_decay: f32) -> Self {
        let momentum = MomentumConfig { momentum: config.momentum, dampening: 0.0, nesterov: config.nesterov };
        let stock = MuonConfig::new().with_momentum(momentum).with_ns_steps(config.ns_steps);
        // Its other rule is the same whichever way the matrix stands.
        let stock = stock.with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW).build();
        Self { stock, adjust: config.adjust, weight_decay }
    }
}

impl Optimizer for HiddenMuon {
    type State<const D: usize> = MuonState<D>;

    fn step<const D: usize>(
        &self,
        learning_rate: f64,
        matrix: Tensor<D>,
        gradient: Tensor<D>,
        state: Option<MuonState<D>>,
    ) -> (Tensor<D>, Option<MuonState<D>>) {
        let (d_in, d_out) = (matrix.dims()[0] as f64, matrix.dims()[1] as f64);
        let kept = 1.0 - learning_rate * f64::from(self.weight_decay);
        let rate = match self.adjust {
            Adjust::MatchRmsAdamW => learning_rate,
            Adjust::Original => learning_rate * (d_out / d_in).max(1.0).sqrt() / (0.2 * d_in.max(d_out).sqrt()),
        };
        self.stock.step(rate, matrix * kept, gradient, state)
    }

    fn to_device<const D: usize>(state: MuonState<D>, device: &Device) -> MuonState<D> {
        Muon::to_device(state, device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::optim::{RecordState, StateSink};
    use burn::tensor::TensorData;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn random(shape: [usize; 2]) -> Tensor<2> {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let values = (0..shape[0] * shape[1]).map(|_| rng.random_range(-1e-3..1e-3)).collect();
        Tensor::from_data(TensorData::new::<f32, _>(values, shape), &Device::flex())
    }

    /// What one step of rate 1 takes away, without decay.
    fn update(adjust: Adjust, shape: [usize; 2]) -> Tensor<2> {
        let config = config::MuonConfig { adjust, ..Default::default() };
        let gradient = random(shape);
        -HiddenMuon::new(&config, 0.0).step(1.0, gradient.zeros_like(), gradient, None).0
    }

    /// Squares of the singular values: the eigenvalues of `x xᵀ` by Jacobi's rotations.
    fn squared_singular_values(x: Tensor<2>) -> Vec<f64> {
        let [rows, columns] = x.dims();
        let x = if rows > columns { x.transpose() } else { x };
        let n = rows.min(columns);
        let values: Vec<f32> = x.clone().matmul(x.transpose()).try_to_vec_as().unwrap();
        let mut a: Vec<Vec<f64>> = values.chunks(n).map(|row| row.iter().copied().map(f64::from).collect()).collect();
        for _ in 0..30 {
            for p in 0..n {
                for q in p + 1..n {
                    let angle = 0.5 * (2.0 * a[p][q]).atan2(a[q][q] - a[p][p]);
                    let (sin, cos) = angle.sin_cos();
                    for row in a.iter_mut() {
                        (row[p], row[q]) = (cos * row[p] - sin * row[q], sin * row[p] + cos * row[q]);
                    }
                    let turn = |(p, q): (&f64, &f64)| (cos * p - sin * q, sin * p + cos * q);
                    (a[p], a[q]) = a[p].iter().zip(&a[q]).map(turn).unzip();
                }
            }
        }
        (0..n).map(|i| a[i][i]).collect()
    }

    #[test]
    fn an_update_has_singular_values_near_one_times_its_size() {
        for shape in [[16, 16], [16, 64], [64, 16]] {
            let [d_in, d_out] = shape.map(|n| n as f64);
            for (adjust, size) in [
                (Adjust::MatchRmsAdamW, 0.2 * d_in.max(d_out).sqrt()),
                // A matrix to a wider space takes larger updates, one to a narrower space does not.
                (Adjust::Original, (d_out / d_in).max(1.0).sqrt()),
            ] {
                let values = squared_singular_values(update(adjust, shape));
                assert_eq!(values.len(), 16);
                // Five Newton-Schulz steps of Muon's coefficients end between 0.7 and 1.2; the smallest singular value of a
                // square random matrix may be so small that it is still on its way.
                let singular: Vec<f64> = values.iter().map(|square| square.max(0.0).sqrt() / size).collect();
                let n_near = singular.iter().filter(|value| (0.65..1.25).contains(*value)).count();
                assert!(n_near >= 15, "{shape:?} {adjust:?}: {singular:?}");
                assert!(singular.iter().all(|&value| value < 1.25), "{shape:?} {adjust:?}: {singular:?}");
            }
        }
    }

    #[test]
    fn burns_own_rule_takes_matrices_the_other_way_round() {
        // Why there is a rule here: Burn's `Original` gives a matrix from 16 to 64, which stands as [16, 64], no factor.
        let stock = MuonConfig::new().build();
        let step = |shape: [usize; 2]| -> f64 {
            let gradient = random(shape);
            let values = squared_singular_values(stock.step(1.0, gradient.zeros_like(), gradient, None).0);
            values.iter().sum::<f64>() / values.len() as f64
        };
        assert!(step([16, 64]) < 1.5 && step([64, 16]) > 2.5, "{} {}", step([16, 64]), step([64, 16]));
    }

    #[test]
    fn decay_shrinks_by_the_plain_rate() {
        let config = config::MuonConfig::default();
        let matrix = Tensor::<2>::ones([4, 8], &Device::flex());
        let moved = HiddenMuon::new(&config, 0.5).step(0.1, matrix.clone(), matrix.zeros_like(), None).0;
        let difference: f32 = (moved - 0.95).abs().max().into_scalar();
        assert!(difference < 1e-6, "{difference}");
    }

    #[test]
    fn momentum_adds_up_and_nesterov_looks_ahead() {
        // Gradients along two axes: what comes out tells in what shares they went in. One Newton-Schulz step hides little.
        let device = Device::flex();
        let first = Tensor::<2>::from_floats([[1.0, 0.0], [0.0, 0.0]], &device);
        let second = Tensor::<2>::from_floats([[0.0, 0.0], [0.0, 1.0]], &device);
        let run = |nesterov| {
            let config = config::MuonConfig { momentum: 0.5, nesterov, ns_steps: 1, ..Default::default() };
            let muon = HiddenMuon::new(&config, 0.0);
            let (matrix, state) = muon.step(0.0, first.zeros_like(), first.clone(), None);
            let (matrix, state) = muon.step(1.0, matrix, second.clone(), state);
            let mut sink = StateSink::default();
            state.unwrap().state_flatten("", &mut sink);
            (sink.tensors.remove(0).1.try_into_vec::<f32>().unwrap(), matrix.into_data().try_into_vec::<f32>().unwrap())
        };
        let ((plain_velocity, plain), (velocity, ahead)) = (run(false), run(true));
        assert_eq!(plain_velocity, [0.5, 0.0, 0.0, 1.0]);
        assert_eq!(velocity, plain_velocity);
        // Ahead of it the older gradient counts for a sixth, not for half.
        assert!(ahead[0] / ahead[3] < 0.6 * plain[0] / plain[3], "{ahead:?} {plain:?}");
    }
}
