//! A mean over windows and how sure it is.

use serde::{Deserialize, Serialize};

/// An average per byte of text, estimated from windows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The sum over all windows, for each byte of all windows.
    pub mean: f64,
    /// Its standard error, from how much windows differ; absent for a single one.
    pub standard_error: Option<f64>,
}

impl Estimate {
    /// The ratio of two sums, of which each window gives a term: an amount, and the bytes it is for.
    ///
    /// # Source
    ///
    /// The ratio estimator of survey sampling (Cochran, Sampling Techniques, 1977, section 6.4): the error is that of the
    /// residuals `amount - mean * bytes`. Where all windows have as many bytes it is the plain error of a mean.
    pub fn per_byte(windows: &[[f64; 2]]) -> Self {
        let sum = |index: usize| windows.iter().map(|window| window[index]).sum::<f64>();
        let n_bytes = sum(1);
        let mean = sum(0) / n_bytes;
        let n = windows.len() as f64;
        let squares: f64 = windows.iter().map(|[amount, bytes]| (amount - mean * bytes).powi(2)).sum();
        let standard_error = (windows.len() > 1).then(|| (squares * n / (n - 1.0)).sqrt() / n_bytes);
        Self { mean, standard_error }
    }

    /// The same in another unit.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self { mean: self.mean * factor, standard_error: self.standard_error.map(|error| error * factor) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_equal_size_give_mean_and_error_of_the_mean() {
        let estimate = Estimate::per_byte(&[[2.0, 2.0], [4.0, 2.0], [12.0, 2.0]]);
        // 1, 2 and 6 a byte: mean 3, variance (4 + 1 + 9) / 2.
        assert!((estimate.mean - 3.0).abs() < 1e-12);
        assert!((estimate.standard_error.unwrap() - (7.0_f64 / 3.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn windows_of_one_rate_leave_no_doubt_however_long_they_are() {
        let estimate = Estimate::per_byte(&[[1.0, 2.0], [2.0, 4.0], [0.5, 1.0]]);
        assert_eq!(estimate, Estimate { mean: 0.5, standard_error: Some(0.0) });
        assert_eq!(Estimate::per_byte(&[[1.0, 2.0]]), Estimate { mean: 0.5, standard_error: None });
    }
}
