//! Axes: from numbers to places on paper, and the numbers worth writing beside them.

/// One axis of a chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// What stands beside it, with the unit.
    pub label: String,
    /// How numbers lie on it.
    pub scale: Scale,
}

/// How numbers lie on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences are equally long.
    Linear,
    /// Equal ratios are equally long; numbers that are not above 0 have no place.
    Log,
}

impl Axis {
    /// A linear axis.
    pub fn linear(label: &str) -> Self {
        Self { label: label.into(), scale: Scale::Linear }
    }

    /// A logarithmic axis.
    pub fn log(label: &str) -> Self {
        Self { label: label.into(), scale: Scale::Log }
    }
}

/// An axis laid out for what it has to show.
pub(super) struct Layout {
    scale: Scale,
    /// The ends, scaled.
    low: f64,
    high: f64,
}

impl Scale {
    fn scaled(self, value: f64) -> f64 {
        match self {
            Self::Linear => value,
            Self::Log => value.log10(),
        }
    }

    /// Whether a number has a place.
    pub(super) fn holds(self, value: f64) -> bool {
        self.scaled(value).is_finite()
    }
}

impl Layout {
    /// From the smallest to the largest of the values that have a place; none if none has.
    pub(super) fn of(scale: Scale, values: impl Iterator<Item = f64>) -> Option<Self> {
        let scaled = values.map(|value| scale.scaled(value)).filter(|value| value.is_finite());
        let (low, high) =
            scaled.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > high {
            return None;
        }
        // A single value lies in the middle.
        let margin = if high > low { 0.0 } else { (0.5 * low.abs()).max(0.5) };
        Some(Self { scale, low: low - margin, high: high + margin })
    }

    /// The same with some room beyond both ends.
    pub(super) fn widened(self, share: f64) -> Self {
        let margin = share * (self.high - self.low);
        Self { low: self.low - margin, high: self.high + margin, ..self }
    }

    /// Where a value lies, from 0 to 1.
    pub(super) fn place(&self, value: f64) -> f64 {
        (self.scale.scaled(value) - self.low) / (self.high - self.low)
    }

    /// The numbers to write, and how they are written.
    pub(super) fn ticks(&self, at_most: usize) -> Vec<(f64, String)> {
        let values = match self.scale {
            Scale::Log if self.high - self.low >= 1.0 => {
                let every = ((self.high - self.low) / at_most as f64).ceil().max(1.0) as i32;
                let decades = (self.low.ceil() as i32..=self.high.floor() as i32).step_by(every as usize);
                decades.map(|decade| 10f64.powi(decade)).collect()
            }
            // Within a decade, as if it were linear.
            Scale::Log => round_values(10f64.powf(self.low), 10f64.powf(self.high), at_most),
            Scale::Linear => round_values(self.low, self.high, at_most),
        };
        values.into_iter().map(|value| (value, short(value))).collect()
    }
}

/// Multiples of 1, 2 or 5 times a power of ten from `low` to `high`.
fn round_values(low: f64, high: f64, at_most: usize) -> Vec<f64> {
    let rough = (high - low) / at_most as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|&step| step >= rough);
    let step = step.unwrap_or(10.0 * power);
    // An end that is round itself is one of them, however it was rounded.
    let (first, last) = ((low / step - 1e-9).ceil() as i64, (high / step + 1e-9).floor() as i64);
    (first..=last).map(|n| n as f64 * step).collect()
}

/// A number in few characters: `1.5M`, `20k`, `0.25`, `3e-5`.
pub fn short(value: f64) -> String {
    let trimmed = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    match value.abs() {
        0.0 => "0".into(),
        size if !(1e-3..1e15).contains(&size) => trimmed_mantissa(&format!("{value:.3e}")),
        size if size >= 999_950_000_000.0 => trimmed(format!("{:.2}", value / 1e12)) + "T",
        size if size >= 999_950_000.0 => trimmed(format!("{:.2}", value / 1e9)) + "G",
        size if size >= 999_950.0 => trimmed(format!("{:.2}", value / 1e6)) + "M",
        size if size >= 9_999.5 => trimmed(format!("{:.2}", value / 1e3)) + "k",
        size if size >= 100.0 => trimmed(format!("{value:.1}")),
        size if size >= 1.0 => trimmed(format!("{value:.3}")),
        _ => trimmed(format!("{value:.4}")),
    }
}

/// `3.000e-5` as `3e-5`.
fn trimmed_mantissa(text: &str) -> String {
    match text.split_once('e') {
        Some((mantissa, exponent)) => format!("{}e{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.')),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(scale: Scale, low: f64, high: f64) -> Vec<String> {
        let layout = Layout::of(scale, [low, high].into_iter()).unwrap();
        layout.ticks(5).into_iter().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round_numbers_within_the_ends() {
        assert_eq!(labels(Scale::Linear, 0.0, 2400.0), ["0", "500", "1000", "1500", "2000"]);
        assert_eq!(labels(Scale::Linear, 1.93, 2.51), ["2", "2.2", "2.4"]);
        assert_eq!(labels(Scale::Linear, 0.0, 3e7), ["0", "10M", "20M", "30M"]);
        assert_eq!(labels(Scale::Linear, 1e-4, 1e-3), ["2e-4", "4e-4", "6e-4", "8e-4", "0.001"]);
        assert_eq!(labels(Scale::Log, 0.02, 300.0), ["0.1", "1", "10", "100"]);
        assert_eq!(labels(Scale::Log, 1e-9, 1.0), ["1e-9", "1e-7", "1e-5", "0.001", "0.1"]);
        assert_eq!(labels(Scale::Log, 2.0, 4.4), ["2", "2.5", "3", "3.5", "4"]);
    }

    #[test]
    fn what_has_no_place_decides_no_end() {
        let layout = Layout::of(Scale::Log, [0.0, -1.0, f64::NAN, 1.0, 100.0].into_iter()).unwrap();
        assert_eq!([1.0, 10.0, 100.0].map(|value| layout.place(value)), [0.0, 0.5, 1.0]);
        assert!(Layout::of(Scale::Linear, [f64::NAN].into_iter()).is_none());
        assert_eq!(Layout::of(Scale::Linear, [3.0].into_iter()).unwrap().place(3.0), 0.5);
    }

    #[test]
    fn numbers_are_short() {
        let shorts = [0.0, 1_234_567.0, 12_345.0, 1234.5, 2.34567, 0.03456, 3e-5, -0.5, 2.5e9, 2e13].map(short);
        assert_eq!(shorts, ["0", "1.23M", "12.35k", "1234.5", "2.346", "0.0346", "3e-5", "-0.5", "2.5G", "20T"]);
    }
}
