//! A shuffle without a table: where the index goes is computed, whatever the number of things shuffled.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const ROUNDS: usize = 8;

/// A permutation of `0..len`, drawn by a seed.
///
/// A Feistel network permutes the smallest square power of two that holds `len`; results outside are sent through
/// again until they fall inside (at most four times on average).
///
/// # Source
/// Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002: the generalised Feistel and cycle walking.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    len: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// # Panics
    /// When `len` is 0.
    pub(super) fn new(len: u64, rng: &mut ChaCha8Rng) -> Self {
        assert!(len > 0, "nothing to permute");
        let bits = u64::BITS - (len - 1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2).max(1), keys: std::array::from_fn(|_| rng.next_u64()) }
    }

    /// Where `index` goes.
    pub(super) fn apply(&self, index: u64) -> u64 {
        assert!(index < self.len, "index {index} of {}", self.len);
        let mut place = self.round_trip(index);
        while place >= self.len {
            place = self.round_trip(place);
        }
        place
    }

    fn round_trip(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (left, right) = self.keys.iter().fold((value >> self.half_bits, value & mask), |(left, right), key| {
            (right, left ^ (mix(right ^ key) & mask))
        });
        left << self.half_bits | right
    }
}

/// The random numbers of one epoch of one source.
pub(super) fn epoch_rng(seed: u64, source: u64, epoch: u64) -> ChaCha8Rng {
    let mut key = *b"........................ batches";
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    key[16..24].copy_from_slice(&source.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// Spreads the bits of a number over all others (the last step of SplitMix64).
pub(super) fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permutation(len: u64, epoch: u64) -> Permutation {
        Permutation::new(len, &mut epoch_rng(5, 0, epoch))
    }

    #[test]
    fn every_place_is_taken_once() {
        for len in (1..70).chain([255, 256, 257, 1000, 4097]) {
            let permutation = permutation(len, 0);
            let mut places: Vec<u64> = (0..len).map(|index| permutation.apply(index)).collect();
            places.sort_unstable();
            assert!(places.into_iter().eq(0..len), "{len}");
        }
    }

    #[test]
    fn large_domains_stay_inside_and_do_not_collide() {
        let len = (1 << 40) + 12_345;
        let permutation = permutation(len, 0);
        let mut places: Vec<u64> = (0..20_000).map(|i| permutation.apply(len - 1 - i * 1_000_003)).collect();
        assert!(places.iter().all(|&place| place < len));
        // Neighbours do not stay neighbours: about half lie in the upper half.
        let upper = places.iter().filter(|&&place| place > len / 2).count();
        assert!((9_500..10_500).contains(&upper), "{upper}");
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), 20_000);
    }

    #[test]
    fn epochs_are_unlike() {
        let order = |epoch| (0..100).map(|index| permutation(100, epoch).apply(index)).collect::<Vec<_>>();
        assert_ne!(order(0), order(1));
        // Of a random permutation one index stays in its place on average.
        let fixed: usize = (0..50).map(|epoch| (0..).zip(order(epoch)).filter(|(from, to)| from == to).count()).sum();
        assert!((15..110).contains(&fixed), "{fixed} of 50 expected");
    }
}
