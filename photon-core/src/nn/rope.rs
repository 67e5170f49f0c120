//! Rotary position embedding in the half-split convention of Llama: coordinate `k` turns with `k + K/2`.
//!
//! Burn's own rotates interleaved pairs and counts positions by itself; caches need positions passed in.

use burn::tensor::{Device, Tensor, TensorData};

use super::fused::rotate;
use crate::cache::row_store::indices;

/// Cosines and sines for the positions of one call, each `[B or 1, N, 1, K/2]`.
#[derive(Clone, Debug)]
pub struct Rotation {
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Rotation {
    /// The rotation of `positions`, one list a row, or a single list shared by all rows.
    ///
    /// # Panics
    ///
    /// If the lists differ in length or `head_dim` is odd.
    pub fn new(positions: &[Vec<usize>], head_dim: usize, theta: f64, device: &Device) -> Self {
        assert!(head_dim.is_multiple_of(2), "rope rotates pairs, head_dim = {head_dim}");
        let n_positions = positions[0].len();
        assert!(positions.iter().all(|row| row.len() == n_positions), "rows of one call have one length");
        let half = head_dim / 2;
        let frequencies: Vec<f64> = (0..half).map(|k| theta.powf(-2.0 * k as f64 / head_dim as f64)).collect();
        let angles: Vec<f64> = positions
            .iter()
            .flatten()
            .flat_map(|&position| frequencies.iter().map(move |frequency| position as f64 * frequency))
            .collect();
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|&angle| f(angle) as f32).collect();
            Tensor::from_data(TensorData::new(values, [positions.len(), n_positions, 1, half]), device)
        };
        Self { cos: table(f64::cos), sin: table(f64::sin) }
    }

    /// Of the rotation of one list, what belongs to `places` in it, one list a row.
    ///
    /// # Panics
    ///
    /// If the lists differ in length.
    pub fn at(&self, places: &[Vec<usize>]) -> Self {
        let [_, _, _, half] = self.cos.dims();
        let (n_rows, n_positions) = (places.len(), places[0].len());
        let places = indices(&places.concat(), &self.cos.device());
        let rows = |table: &Tensor<4>| table.clone().select(1, places.clone()).reshape([n_rows, n_positions, 1, half]);
        Self { cos: rows(&self.cos), sin: rows(&self.sin) }
    }

    /// The same for tensors without gradients.
    pub fn inner(self) -> Self {
        Self { cos: self.cos.inner(), sin: self.sin.inner() }
    }

    /// Turns queries or keys.
    ///
    /// # Shapes
    ///
    /// `[B, N, H, K] -> [B, N, H, K]`
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        rotate(x, self.cos.clone(), self.sin.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_a_list_are_turned_as_positions_are() {
        let device = Device::flex();
        let places = [vec![0, 1, 2, 0], vec![0, 0, 1, 2]];
        let picked = Rotation::new(&[vec![5, 3, 8, 13]], 4, 100.0, &device).at(&places);
        let whole =
            Rotation::new(&places.map(|row| row.iter().map(|&place| [5, 3, 8][place]).collect()), 4, 100.0, &device);
        for (picked, whole) in [(picked.cos, whole.cos), (picked.sin, whole.sin)] {
            assert_eq!(picked.dims(), [2, 4, 1, 2]);
            picked.into_data().assert_eq(&whole.into_data(), true);
        }
    }

    #[test]
    fn scores_depend_on_the_offset_alone() {
        let device = Device::flex();
        let q = Tensor::<4>::from_floats([[[[0.3, -1.0, 0.5, 0.7]]]], &device);
        let k = Tensor::<4>::from_floats([[[[1.1, 0.2, -0.4, 0.9]]]], &device);
        let score = |query: usize, key: usize| -> f32 {
            let q = Rotation::new(&[vec![query]], 4, 100.0, &device).apply(q.clone());
            let k = Rotation::new(&[vec![key]], 4, 100.0, &device).apply(k.clone());
            (q * k).sum().into_scalar()
        };
        assert!((score(5, 2) - score(1005, 1002)).abs() < 1e-4);
        assert!((score(5, 2) - score(5, 3)).abs() > 1e-2);
    }
}
