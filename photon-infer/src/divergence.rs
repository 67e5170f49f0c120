//! How far two predictions of the same token lie apart.

/// Two predictions of one token, and what they made of the token that came.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergence {
    /// `KL(reference || other)` in nats.
    pub kl_nats: f64,
    /// Whether both find the same token likeliest.
    pub agrees: bool,
    /// `-ln p` of the token that came, by the reference.
    pub reference_nats: f64,
    /// The same by the other.
    pub other_nats: f64,
}

/// Mean and tail of divergences.
#[derive(Clone, Debug, Default)]
pub struct Divergences {
    kls: Vec<f64>,
    n_agreeing: usize,
    reference_nats: f64,
    other_nats: f64,
}

impl Divergence {
    /// Compares logits; `token_id` is the token that came.
    ///
    /// # Panics
    ///
    /// If the lists are of unequal length, or the token is none of theirs.
    pub fn of(reference: &[f32], other: &[f32], token_id: u32) -> Self {
        assert_eq!(reference.len(), other.len(), "logits of one vocabulary");
        let (reference_ln, other_ln) = (log_sum_exp(reference), log_sum_exp(other));
        let ln_p = |logit: f32, log_sum: f64| f64::from(logit) - log_sum;
        let kl: f64 = reference
            .iter()
            .zip(other)
            .map(|(&a, &b)| {
                let ln_a = ln_p(a, reference_ln);
                ln_a.exp() * (ln_a - ln_p(b, other_ln))
            })
            .sum();
        let token = token_id as usize;
        Self {
            // A sum of both signs can end a rounding error below zero.
            kl_nats: kl.max(0.0),
            agrees: likeliest(reference) == likeliest(other),
            reference_nats: -ln_p(reference[token], reference_ln),
            other_nats: -ln_p(other[token], other_ln),
        }
    }
}

impl Divergences {
    /// One more.
    pub fn add(&mut self, one: Divergence) {
        self.kls.push(one.kl_nats);
        self.n_agreeing += usize::from(one.agrees);
        self.reference_nats += one.reference_nats;
        self.other_nats += one.other_nats;
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.kls.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.kls.is_empty()
    }

    /// Mean of `KL(reference || other)`, in nats.
    pub fn mean_kl_nats(&self) -> f64 {
        self.kls.iter().sum::<f64>() / self.len() as f64
    }

    /// The smallest divergence that a share of all does not pass, in nats.
    ///
    /// # Panics
    ///
    /// If there is none.
    pub fn kl_quantile_nats(&self, share: f64) -> f64 {
        let mut sorted = self.kls.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (share * sorted.len() as f64).ceil() as usize;
        sorted[rank.clamp(1, sorted.len()) - 1]
    }

    /// Share of predictions whose likeliest token is the same.
    pub fn agreement(&self) -> f64 {
        self.n_agreeing as f64 / self.len() as f64
    }

    /// `-ln p` of all tokens that came, by the reference and by the other.
    pub fn nats(&self) -> [f64; 2] {
        [self.reference_nats, self.other_nats]
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(max)).exp()).sum();
    f64::from(max) + sum.ln()
}

/// The first of the largest.
pub(crate) fn likeliest(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, index| if logits[index] > logits[best] { index } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(probabilities: &[f64]) -> Vec<f32> {
        // A constant added to all logits changes nothing.
        probabilities.iter().map(|p| (p.ln() + 7.0) as f32).collect()
    }

    #[test]
    fn divergence_of_known_distributions() {
        let (a, b) = (logits(&[0.5, 0.25, 0.25]), logits(&[0.25, 0.5, 0.25]));
        let found = Divergence::of(&a, &b, 1);
        let expected = 0.5 * 2f64.ln() + 0.25 * 0.5f64.ln();
        assert!((found.kl_nats - expected).abs() < 1e-6, "{found:?}");
        assert!((found.reference_nats - 4f64.ln()).abs() < 1e-6 && (found.other_nats - 2f64.ln()).abs() < 1e-6);
        assert!(!found.agrees);
        // It is no distance: the other way round it differs.
        let (a, b) = (logits(&[0.9, 0.1]), logits(&[0.5, 0.5]));
        let forth = Divergence::of(&a, &b, 0).kl_nats;
        assert!((forth - (0.9 * 1.8f64.ln() + 0.1 * 0.2f64.ln())).abs() < 1e-6);
        assert!((forth - Divergence::of(&b, &a, 0).kl_nats).abs() > 0.1);
    }

    #[test]
    fn equal_predictions_do_not_diverge_however_large() {
        let a = [300.0, -300.0, 299.0];
        let found = Divergence::of(&a, &a.map(|x| x + 50.0), 0);
        assert!(found.kl_nats < 1e-12 && found.agrees, "{found:?}");
    }

    #[test]
    fn many_are_summed_up() {
        let mut all = Divergences::default();
        for index in 0..100 {
            let agrees = index % 4 != 0;
            all.add(Divergence { kl_nats: f64::from(index), agrees, reference_nats: 1.0, other_nats: 2.0 });
        }
        assert_eq!((all.len(), all.mean_kl_nats(), all.agreement()), (100, 49.5, 0.75));
        assert_eq!([0.985, 1.0, 0.5, 0.0].map(|share| all.kl_quantile_nats(share)), [98.0, 99.0, 49.0, 0.0]);
        assert_eq!(all.nats(), [100.0, 200.0]);
    }
}
