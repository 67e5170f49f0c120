//! How a head's stored keys are compared with a query, and its stored values weighed and summed.
//!
//! Everything here is inlined into the kernel that [`vectorized`](crate::cache::vectorized) runs. Sums are kept in
//! lanes, so that compilers may use vector instructions without changing the order of additions.

use burn::tensor::f16;

use crate::cache::half_float::Stored;

/// Sums side by side: one 512-bit or two 256-bit registers.
const LANES: usize = 16;
/// Only ever indexed by constants and full loops: then they stay in registers.
type Lanes = [f32; LANES];

/// One head's entries in one row of a batch.
pub(super) trait Rows: Copy {
    /// A query as [`Rows::dot`] wants it.
    type Query;
    /// A sum of values as [`Rows::add`] wants it.
    type Sum;

    /// Prepares a query.
    fn query(self, numbers: &[f32]) -> Self::Query;

    /// The product of a query and the key at `entry`.
    fn dot(self, query: &Self::Query, entry: usize) -> f32;

    /// An empty sum.
    fn sum(self) -> Self::Sum;

    /// Adds the value at `entry` times `weight`.
    fn add(self, sum: &mut Self::Sum, entry: usize, weight: f32);

    /// Adds the sum to `out` and empties it.
    fn flush(self, sum: &mut Self::Sum, out: &mut [f32]);
}

/// Where the lines of one head lie in a storage.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Where the first begins.
    pub(super) start: usize,
    /// From one to the next.
    pub(super) stride: usize,
    /// Length of a line.
    pub(super) len: usize,
}

impl Place {
    #[inline(always)]
    fn line<T>(self, storage: &[T], entry: usize) -> &[T] {
        &storage[self.start + entry * self.stride..][..self.len]
    }
}

/// Numbers.
#[derive(Clone, Copy)]
pub(super) struct Dense<'a, T> {
    pub(super) storage: &'a [T],
    pub(super) place: Place,
}

impl<T: Stored> Rows for Dense<'_, T> {
    type Query = Vec<f32>;
    type Sum = Vec<f32>;

    #[inline(always)]
    fn query(self, numbers: &[f32]) -> Vec<f32> {
        numbers.to_vec()
    }

    #[inline(always)]
    fn dot(self, query: &Vec<f32>, entry: usize) -> f32 {
        let mut lanes = [0.0; LANES];
        let rest = add_product(&mut lanes, 1.0, query, self.place.line(self.storage, entry), T::widen);
        add_up(lanes) + rest
    }

    #[inline(always)]
    fn sum(self) -> Vec<f32> {
        vec![0.0; self.place.len]
    }

    #[inline(always)]
    fn add(self, sum: &mut Vec<f32>, entry: usize, weight: f32) {
        add_scaled(sum, weight, self.place.line(self.storage, entry), T::widen);
    }

    #[inline(always)]
    fn flush(self, sum: &mut Vec<f32>, out: &mut [f32]) {
        add_scaled(out, 1.0, sum, f32::widen);
        sum.fill(0.0);
    }
}

/// Codes of [`Code::Int8`](crate::cache::entries::Code::Int8).
#[derive(Clone, Copy)]
pub(super) struct Int8<'a> {
    pub(super) codes: &'a [u8],
    pub(super) code_place: Place,
    pub(super) scales: &'a [f16],
    pub(super) scale_place: Place,
    pub(super) group: usize,
}

#[inline(always)]
fn signed(code: u8) -> f32 {
    f32::from(code.cast_signed())
}

impl Rows for Int8<'_> {
    type Query = Vec<f32>;
    type Sum = Vec<f32>;

    #[inline(always)]
    fn query(self, numbers: &[f32]) -> Vec<f32> {
        numbers.to_vec()
    }

    #[inline(always)]
    fn dot(self, query: &Vec<f32>, entry: usize) -> f32 {
        let codes = self.code_place.line(self.codes, entry);
        let scales = self.scale_place.line(self.scales, entry);
        let (mut lanes, mut rest) = ([0.0; LANES], 0.0);
        let groups = query.chunks_exact(self.group).zip(codes.chunks_exact(self.group));
        for ((query, codes), scale) in groups.zip(scales) {
            rest += add_product(&mut lanes, scale.widen(), query, codes, signed);
        }
        add_up(lanes) + rest
    }

    #[inline(always)]
    fn sum(self) -> Vec<f32> {
        vec![0.0; self.code_place.len]
    }

    #[inline(always)]
    fn add(self, sum: &mut Vec<f32>, entry: usize, weight: f32) {
        let codes = self.code_place.line(self.codes, entry);
        let scales = self.scale_place.line(self.scales, entry);
        let groups = sum.chunks_exact_mut(self.group).zip(codes.chunks_exact(self.group));
        for ((sum, codes), scale) in groups.zip(scales) {
            add_scaled(sum, weight * scale.widen(), codes, signed);
        }
    }

    #[inline(always)]
    fn flush(self, sum: &mut Vec<f32>, out: &mut [f32]) {
        add_scaled(out, 1.0, sum, f32::widen);
        sum.fill(0.0);
    }
}

/// Codes of [`Code::Int4`](crate::cache::entries::Code::Int4), in groups of even length.
#[derive(Clone, Copy)]
pub(super) struct Int4<'a> {
    pub(super) codes: &'a [u8],
    pub(super) code_place: Place,
    pub(super) params: &'a [f16],
    pub(super) param_place: Place,
    pub(super) group: usize,
}

/// Numbers of a head as a byte holds them: those of its lower halves, those of its upper halves, and a number for each
/// group that goes with the minimum.
pub(super) struct Halves {
    lower: Vec<f32>,
    upper: Vec<f32>,
    of_minima: Vec<f32>,
}

#[inline(always)]
fn lower(byte: u8) -> f32 {
    f32::from(byte & 15)
}

#[inline(always)]
fn upper(byte: u8) -> f32 {
    f32::from(byte >> 4)
}

impl Rows for Int4<'_> {
    type Query = Halves;
    type Sum = Halves;

    #[inline(always)]
    fn query(self, numbers: &[f32]) -> Halves {
        Halves {
            lower: numbers.iter().step_by(2).copied().collect(),
            upper: numbers.iter().skip(1).step_by(2).copied().collect(),
            of_minima: numbers.chunks_exact(self.group).map(|group| group.iter().sum()).collect(),
        }
    }

    #[inline(always)]
    fn dot(self, query: &Halves, entry: usize) -> f32 {
        let codes = self.code_place.line(self.codes, entry);
        let params = self.param_place.line(self.params, entry).as_chunks::<2>().0;
        let half = self.group / 2;
        let (mut lanes, mut rest) = ([0.0; LANES], 0.0);
        let halves = query.lower.chunks_exact(half).zip(query.upper.chunks_exact(half));
        let groups = halves.zip(codes.chunks_exact(half)).zip(params).zip(&query.of_minima);
        for ((((lower_query, upper_query), codes), [scale, minimum]), sum) in groups {
            let scale = scale.widen();
            rest += add_product(&mut lanes, scale, lower_query, codes, lower);
            rest += add_product(&mut lanes, scale, upper_query, codes, upper);
            rest += minimum.widen() * sum;
        }
        add_up(lanes) + rest
    }

    #[inline(always)]
    fn sum(self) -> Halves {
        let n_groups = self.param_place.len / 2;
        let half = vec![0.0; n_groups * self.group / 2];
        Halves { lower: half.clone(), upper: half, of_minima: vec![0.0; n_groups] }
    }

    #[inline(always)]
    fn add(self, sum: &mut Halves, entry: usize, weight: f32) {
        let codes = self.code_place.line(self.codes, entry);
        let params = self.param_place.line(self.params, entry).as_chunks::<2>().0;
        let half = self.group / 2;
        let halves = sum.lower.chunks_exact_mut(half).zip(sum.upper.chunks_exact_mut(half));
        let groups = halves.zip(codes.chunks_exact(half)).zip(params).zip(&mut sum.of_minima);
        for ((((lower_sum, upper_sum), codes), [scale, minimum]), of_minima) in groups {
            let step = weight * scale.widen();
            add_scaled(lower_sum, step, codes, lower);
            add_scaled(upper_sum, step, codes, upper);
            *of_minima += weight * minimum.widen();
        }
    }

    #[inline(always)]
    fn flush(self, sum: &mut Halves, out: &mut [f32]) {
        let halves = sum.lower.iter().zip(&sum.upper);
        for (i, (out, (lower, upper))) in out.as_chunks_mut::<2>().0.iter_mut().zip(halves).enumerate() {
            let of_minimum = sum.of_minima[2 * i / self.group];
            out[0] += lower + of_minimum;
            out[1] += upper + of_minimum;
        }
        for sums in [&mut sum.lower, &mut sum.upper, &mut sum.of_minima] {
            sums.fill(0.0);
        }
    }
}

/// Adds `scale` times the product of `a` and `b` to `sums`, and returns what does not fill the lanes.
#[inline(always)]
fn add_product<T: Copy>(sums: &mut Lanes, scale: f32, a: &[f32], b: &[T], widen: impl Fn(T) -> f32) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut product = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            product[i] += a[i] * widen(b[i]);
        }
    }
    for i in 0..LANES {
        sums[i] += scale * product[i];
    }
    let mut rest = 0.0;
    for (a, b) in a_rest.iter().zip(b_rest) {
        rest += a * widen(*b);
    }
    scale * rest
}

/// `sum += scale * numbers`.
#[inline(always)]
fn add_scaled<T: Copy>(sum: &mut [f32], scale: f32, numbers: &[T], widen: impl Fn(T) -> f32) {
    for (sum, number) in sum.iter_mut().zip(numbers) {
        *sum += scale * widen(*number);
    }
}

/// The sum of all lanes, by halves.
#[inline(always)]
fn add_up(lanes: Lanes) -> f32 {
    let mut lanes = lanes;
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lanes[i] += lanes[i + n];
        }
        n /= 2;
    }
    lanes[0]
}
