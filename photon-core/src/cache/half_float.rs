//! 16-bit floats to 32-bit ones by arithmetic that compilers turn into vector instructions.

use burn::tensor::{bf16, f16};

/// A number that is stored in 16 or 32 bits.
pub(super) trait Stored: Copy + Sync {
    /// The same number in 32 bits.
    fn widen(self) -> f32;
}

impl Stored for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Stored for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        // Exponents of f16 count from -15, those of f32 from -127; the product also normalises what is subnormal.
        const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
        const FIRST_SPECIAL: u32 = 0x7c00;
        let bits = u32::from(self.to_bits());
        let magnitude = bits & 0x7fff;
        let finite = (f32::from_bits(magnitude << 13) * REBIAS).to_bits();
        let finite_or_special = if magnitude < FIRST_SPECIAL { finite } else { finite | 0x7f80_0000 };
        f32::from_bits(finite_or_special | (bits & 0x8000) << 16)
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_float_keeps_its_value() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(same(half.widen(), half.to_f32()), "f16 {bits:#x}");
            assert!(same(brain.widen(), brain.to_f32()), "bf16 {bits:#x}");
        }
    }
}
