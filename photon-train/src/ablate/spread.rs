//! Means over seeds, how far they spread, and whether a difference is more than that.

use serde::Serialize;

/// A number over seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// Half of the distance between the smallest and the largest; none for one seed.
    pub half_range: Option<f64>,
    /// One for each seed.
    pub values: Vec<f64>,
}

/// The difference of two means, and what it is worth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The mean less that of the reference.
    pub difference: f64,
    /// What a difference must be larger than to be resolved; none where nobody knows the spread.
    pub margin: Option<f64>,
    /// Whether it is.
    pub is_resolved: bool,
    /// Where the margin comes from.
    pub rule: Rule,
}

/// How a difference is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// A side has one seed: unresolved.
    OneSeed,
    /// A side has two: the margin is the sum of both half ranges.
    HalfRanges,
    /// Both have three or more: the margin is half of Welch's 95 % interval.
    Welch,
}

/// Quantile 0.975 of Student's t for 1 to 30 degrees of freedom (any table; the last serves beyond, too wide by 4 %).
const T_975: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

impl Spread {
    /// Of one value for each seed; none of nothing.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.into_iter().collect();
        let (&first, n) = (values.first()?, values.len());
        let (low, high) = values.iter().fold((first, first), |(low, high), &v| (low.min(v), high.max(v)));
        let half_range = (n > 1).then_some((high - low) / 2.0);
        Some(Self { mean: values.iter().sum::<f64>() / n as f64, half_range, values })
    }

    /// Variance of the mean.
    fn mean_variance(&self) -> f64 {
        let n = self.values.len() as f64;
        self.values.iter().map(|value| (value - self.mean).powi(2)).sum::<f64>() / (n - 1.0) / n
    }

    /// How far the mean lies from that of a reference.
    pub fn difference_from(&self, reference: &Self) -> Difference {
        let difference = self.mean - reference.mean;
        let n_seeds = self.values.len().min(reference.values.len());
        let (margin, rule) = match (n_seeds, self.half_range, reference.half_range) {
            (2, Some(own), Some(other)) => (Some(own + other), Rule::HalfRanges),
            (3.., ..) => (Some(self.welch_margin(reference)), Rule::Welch),
            _ => (None, Rule::OneSeed),
        };
        let is_resolved = margin.is_some_and(|margin| difference.abs() > margin);
        Difference { difference, margin, is_resolved, rule }
    }

    fn welch_margin(&self, other: &Self) -> f64 {
        let [a, b] = [self, other].map(Self::mean_variance);
        let [n_a, n_b] = [self, other].map(|spread| spread.values.len() as f64);
        if a + b == 0.0 {
            return 0.0;
        }
        let freedom = (a + b).powi(2) / (a * a / (n_a - 1.0) + b * b / (n_b - 1.0));
        let index = (freedom as usize).clamp(1, T_975.len()) - 1;
        T_975[index] * (a + b).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(a: &[f64], b: &[f64]) -> Difference {
        let [a, b] = [a, b].map(|values| Spread::of(values.iter().copied()).unwrap());
        a.difference_from(&b)
    }

    #[test]
    fn two_seeds_must_differ_by_more_than_both_half_ranges() {
        let spread = Spread::of([2.0, 2.5]).unwrap();
        assert_eq!((spread.mean, spread.half_range), (2.25, Some(0.25)));
        let inside = difference(&[2.0, 2.5], &[1.5, 2.0]);
        assert_eq!((inside.difference, inside.margin, inside.is_resolved), (0.5, Some(0.5), false));
        assert!(difference(&[2.0, 2.5], &[1.25, 1.75]).is_resolved);
        // The side with fewer seeds decides.
        assert_eq!(difference(&[2.0, 2.5, 3.0], &[1.0, 1.5]).rule, Rule::HalfRanges);
    }

    #[test]
    fn one_seed_resolves_nothing() {
        let one = difference(&[2.0], &[1.0, 1.1]);
        assert_eq!((one.margin, one.is_resolved, one.rule), (None, false, Rule::OneSeed));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn three_seeds_take_welchs_interval() {
        // Means 2 and 5; variances 1 and 1, so of the means 1/3 each; 4 degrees of freedom.
        let found = difference(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]);
        let margin = 2.776 * (2.0_f64 / 3.0).sqrt();
        assert!((found.margin.unwrap() - margin).abs() < 1e-12 && found.is_resolved, "{found:?}");
        assert!(!difference(&[1.0, 2.0, 3.0], &[3.0, 4.0, 5.0]).is_resolved);
        // The same number each time is no difference.
        assert!(!difference(&[1.0; 3], &[1.0; 3]).is_resolved);
    }
}
