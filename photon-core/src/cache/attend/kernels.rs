//! Products, weighted sums and the softmax of one head, in vector registers.

use pulp::Simd;

use crate::cache::heads::Block;

/// Lines that are worked on at once: enough to hide how long one addition takes.
pub(super) const AT_ONCE: usize = 4;

/// `scores[i] = query · line i`.
#[inline(always)]
pub(super) fn scores<S: Simd>(simd: S, query: &[f32], keys: Block, scores: &mut [f32]) {
    let (fours, rest) = scores.as_chunks_mut::<AT_ONCE>();
    for (index, scores) in fours.iter_mut().enumerate() {
        let first = AT_ONCE * index;
        *scores = dots(simd, query, keys.lines(first));
    }
    for (index, score) in rest.iter_mut().enumerate() {
        [*score] = dots(simd, query, [keys.line(AT_ONCE * fours.len() + index)]);
    }
}

#[inline(always)]
pub(crate) fn dots<S: Simd, const N: usize>(simd: S, query: &[f32], lines: [&[f32]; N]) -> [f32; N] {
    let (query, query_rest) = S::as_simd_f32s(query);
    let mut sums = [simd.splat_f32s(0.0); N];
    for i in 0..N {
        let (line, line_rest) = S::as_simd_f32s(lines[i]);
        for (query, line) in query.iter().zip(line) {
            sums[i] = simd.mul_add_f32s(*query, *line, sums[i]);
        }
        if !query_rest.is_empty() {
            let (query, line) = (simd.partial_load_f32s(query_rest), simd.partial_load_f32s(line_rest));
            sums[i] = simd.mul_add_f32s(query, line, sums[i]);
        }
    }
    let mut dots = [0.0; N];
    for i in 0..N {
        dots[i] = simd.reduce_sum_f32s(sums[i]);
    }
    dots
}

/// `sum += Σ weights[i] * line i`.
#[inline(always)]
pub(super) fn add_weighted<S: Simd>(simd: S, weights: &[f32], values: Block, sum: &mut [f32]) {
    let (fours, rest) = weights.as_chunks::<AT_ONCE>();
    for (index, weights) in fours.iter().enumerate() {
        let first = AT_ONCE * index;
        add_lines(simd, *weights, values.lines(first), sum);
    }
    for (index, weight) in rest.iter().enumerate() {
        add_lines(simd, [*weight], [values.line(AT_ONCE * fours.len() + index)], sum);
    }
}

/// `sum += Σ weights[n] * lines[n]`.
#[inline(always)]
pub(super) fn add_lines<S: Simd, const N: usize>(simd: S, weights: [f32; N], lines: [&[f32]; N], sum: &mut [f32]) {
    let (sum, sum_rest) = S::as_mut_simd_f32s(sum);
    let (mut factors, mut vectors, mut rests) = ([simd.splat_f32s(0.0); N], [&[][..]; N], [&[][..]; N]);
    for n in 0..N {
        factors[n] = simd.splat_f32s(weights[n]);
        let (line, rest) = S::as_simd_f32s(lines[n]);
        // Cut to the length of the loop, so that no index needs a check in it.
        (vectors[n], rests[n]) = (&line[..sum.len()], rest);
    }
    for (i, sum) in sum.iter_mut().enumerate() {
        let mut total = *sum;
        for n in 0..N {
            total = simd.mul_add_f32s(factors[n], vectors[n][i], total);
        }
        *sum = total;
    }
    if !sum_rest.is_empty() {
        let mut total = simd.partial_load_f32s(sum_rest);
        for n in 0..N {
            total = simd.mul_add_f32s(factors[n], simd.partial_load_f32s(rests[n]), total);
        }
        simd.partial_store_f32s(sum_rest, total);
    }
}

/// Turns scores into weights, beside a sink, which may be minus infinity.
#[inline(always)]
pub(super) fn softmax<S: Simd>(simd: S, scores: &mut [f32], sink: f32) {
    let largest = largest(simd, scores).max(sink);
    for score in scores.iter_mut() {
        *score = exp_of_negative(*score - largest);
    }
    let share = 1.0 / (sum(simd, scores) + exp_of_negative(sink - largest));
    for weight in scores {
        *weight *= share;
    }
}

#[inline(always)]
fn largest<S: Simd>(simd: S, numbers: &[f32]) -> f32 {
    let (vectors, rest) = S::as_simd_f32s(numbers);
    let mut largest = simd.splat_f32s(f32::NEG_INFINITY);
    for vector in vectors {
        largest = simd.max_f32s(largest, *vector);
    }
    rest.iter().fold(simd.reduce_max_f32s(largest), |largest, x| largest.max(*x))
}

#[inline(always)]
fn sum<S: Simd>(simd: S, numbers: &[f32]) -> f32 {
    let (vectors, rest) = S::as_simd_f32s(numbers);
    let mut sum = simd.splat_f32s(0.0);
    for vector in vectors {
        sum = simd.add_f32s(sum, *vector);
    }
    rest.iter().fold(simd.reduce_sum_f32s(sum), |sum, x| sum + x)
}

/// `exp(x)` for `x <= 0`, to two units in the last place; zero where the result is no normal number.
///
/// Arithmetic without branches, which compilers turn into vector instructions. `x = n ln 2 + r` with a whole `n` and a
/// small `r`, whose exponential is a polynomial.
#[inline(always)]
pub(crate) fn exp_of_negative(x: f32) -> f32 {
    /// Adding it leaves the nearest whole number in the lowest bits.
    const ROUNDER: f32 = 1.5 * (1 << 23) as f32;
    /// `ln 2` in two parts: products of the first with small whole numbers are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const SMALLEST: f32 = -87.0;
    let shifted = x.max(SMALLEST) * std::f32::consts::LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let r = x.max(SMALLEST) - n * LN_2[0] - n * LN_2[1];
    // Coefficients of the Cephes library's expf.
    let mut series = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        series = series * r + coefficient;
    }
    let power_of_two = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    let exp = (series * r * r + r + 1.0) * power_of_two;
    if x < SMALLEST { 0.0 } else { exp }
}

#[cfg(test)]
mod tests {
    use pulp::{Arch, Scalar, WithSimd};

    use super::*;

    struct Check;

    impl WithSimd for Check {
        type Output = ();

        fn with_simd<S: Simd>(self, simd: S) {
            for (n_lines, head_dim) in [(1, 1), (3, 7), (4, 16), (9, 52), (70, 64), (5, 129)] {
                let wave = |n: usize, step: f32| -> Vec<f32> { (0..n).map(|i| (step * i as f32).sin()).collect() };
                let stride = head_dim + 3;
                let (numbers, query, weights) = (wave(n_lines * stride, 0.7), wave(head_dim, 1.3), wave(n_lines, 0.3));
                let lines = Block::new(&numbers, stride, head_dim);

                let mut products = vec![0.0; n_lines];
                scores(simd, &query, lines, &mut products);
                let mut sum = vec![1.0; head_dim];
                add_weighted(simd, &weights, lines, &mut sum);
                let mut shares = weights.clone();
                softmax(simd, &mut shares, 0.5);

                let exact = |f: &dyn Fn(usize) -> f64, n: usize| (0..n).map(f).sum::<f64>();
                let total = exact(&|i| f64::from(weights[i]).exp(), n_lines) + 0.5f64.exp();
                for i in 0..n_lines {
                    let product = exact(&|k| f64::from(query[k]) * f64::from(numbers[i * stride + k]), head_dim);
                    assert!((f64::from(products[i]) - product).abs() < 1e-5);
                    assert!((f64::from(shares[i]) - f64::from(weights[i]).exp() / total).abs() < 1e-6);
                }
                for (k, sum) in sum.iter().enumerate() {
                    let expected = exact(&|i| f64::from(weights[i]) * f64::from(numbers[i * stride + k]), n_lines);
                    assert!((f64::from(*sum) - 1.0 - expected).abs() < 1e-5);
                }
            }
        }
    }

    #[test]
    fn kernels_are_right_on_every_processor() {
        Simd::vectorize(Scalar, Check);
        Arch::new().dispatch(Check);
        #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
        if let Some(avx2) = pulp::x86::V3::try_new() {
            Simd::vectorize(avx2, Check);
        }
    }

    #[test]
    fn exp_is_right_to_the_last_digits() {
        for step in 0..870_000 {
            let x = -1e-4 * step as f32;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp_of_negative(x)) - expected).abs() / expected;
            assert!(error < 2.5e-7, "exp({x}) is wrong by {error}");
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!(exp_of_negative(-1e30), 0.0);
        assert_eq!(exp_of_negative(f32::NEG_INFINITY), 0.0);
    }
}
