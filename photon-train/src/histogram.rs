//! How the weights or gradients of each stage are spread.

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use photon_core::model::Model;

use crate::parameters::{ParameterPath, SeeParameters, see_parameters};

/// Buckets of a histogram.
const N_BUCKETS: usize = 32;

/// Counts of numbers in buckets of equal width.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// How many.
    pub count: usize,
    /// Their sum.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_squares: f64,
    /// From `min` to `max`; one bucket where those are equal.
    pub buckets: Vec<usize>,
}

impl Histogram {
    /// Of the finite ones among `values`; none if there are none.
    pub fn of(values: &[f32]) -> Option<Self> {
        let finite = || values.iter().filter(|value| value.is_finite()).map(|&value| f64::from(value));
        let (mut min, mut max) = (f64::INFINITY, f64::NEG_INFINITY);
        let (mut count, mut sum, mut sum_squares) = (0, 0.0, 0.0);
        for value in finite() {
            (min, max) = (min.min(value), max.max(value));
            (count, sum, sum_squares) = (count + 1, sum + value, sum_squares + value * value);
        }
        if count == 0 {
            return None;
        }
        let mut buckets = vec![0; if min < max { N_BUCKETS } else { 1 }];
        let (per_unit, last) = (buckets.len() as f64 / (max - min), buckets.len() - 1);
        for value in finite() {
            // Where all are equal this is no number, which becomes 0.
            buckets[(((value - min) * per_unit) as usize).min(last)] += 1;
        }
        Some(Self { min, max, count, sum, sum_squares, buckets })
    }

    /// The upper end of each bucket.
    pub fn limits(&self) -> impl Iterator<Item = f64> {
        let n = self.buckets.len();
        (1..=n).map(move |i| if i == n { self.max } else { self.min + (self.max - self.min) * i as f64 / n as f64 })
    }
}

/// Which numbers of a parameter are looked at.
#[derive(Clone, Copy)]
pub enum Spread<'a> {
    /// The parameter itself.
    Weights,
    /// Its gradient.
    Gradients(&'a GradientsParams),
}

/// A histogram of each stage, in the order of the model. All numbers are read from the device.
pub fn stage_histograms(model: &Model, spread: Spread) -> Vec<(String, Histogram)> {
    struct Collect<'a> {
        spread: Spread<'a>,
        /// Of the stage that is under way.
        values: Vec<f32>,
        stage: String,
        found: Vec<(String, Histogram)>,
    }
    impl Collect<'_> {
        fn finish_stage(&mut self) {
            let values = std::mem::take(&mut self.values);
            let stage = std::mem::take(&mut self.stage);
            self.found.extend(Histogram::of(&values).map(|histogram| (stage, histogram)));
        }
    }
    impl SeeParameters for Collect<'_> {
        fn see<const D: usize>(&mut self, path: &ParameterPath, param: &Param<Tensor<D>>) {
            let tensor = match self.spread {
                Spread::Weights => param.val(),
                Spread::Gradients(grads) => match grads.get::<D>(param.id) {
                    Some(grad) => grad,
                    None => return,
                },
            };
            let stage = path.stage();
            if stage != self.stage {
                self.finish_stage();
                self.stage = stage;
            }
            self.values.extend(tensor.try_into_vec_as::<f32>().expect("parameters are floats"));
        }
    }
    let mut collect = Collect { spread, values: Vec::new(), stage: String::new(), found: Vec::new() };
    see_parameters(model, &mut collect);
    collect.finish_stage();
    collect.found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_finite_number_is_in_the_bucket_that_holds_it() {
        let values: Vec<f32> = (0..=640).map(|i| i as f32 / 10.0 - 32.0).chain([f32::NAN, f32::INFINITY]).collect();
        let histogram = Histogram::of(&values).unwrap();
        assert_eq!((histogram.min, histogram.max, histogram.count), (-32.0, 32.0, 641));
        assert_eq!(histogram.buckets.iter().sum::<usize>(), 641);
        assert_eq!((histogram.buckets[0], histogram.buckets[31]), (20, 21));
        let limits: Vec<f64> = histogram.limits().collect();
        assert_eq!((limits[0], limits[30], limits[31]), (-30.0, 30.0, 32.0));
        assert!(histogram.sum.abs() < 1e-3);
        let squares: f64 = values[..641].iter().map(|&value| f64::from(value).powi(2)).sum();
        assert!((histogram.sum_squares - squares).abs() < 1e-9 * squares);
    }

    #[test]
    fn equal_numbers_are_one_bucket_and_none_are_nothing() {
        let histogram = Histogram::of(&[1.5; 7]).unwrap();
        assert_eq!((histogram.buckets.as_slice(), histogram.limits().next()), (&[7][..], Some(1.5)));
        assert_eq!(Histogram::of(&[f32::NAN]), None);
    }
}
