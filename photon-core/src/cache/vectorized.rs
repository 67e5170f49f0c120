//! Runs a kernel with the widest vector instructions of the processor, found at run time.

use pulp::{Arch, WithSimd};

/// Runs `kernel`. All of its loops must be in functions marked `#[inline(always)]`: what is not inlined is compiled for
/// the oldest processor.
pub(crate) fn vectorized<K: WithSimd>(kernel: K) -> K::Output {
    let arch = Arch::new();
    // With the features that Burn asks of `pulp`, `Arch` knows AVX-512 but not AVX2.
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    if let (Arch::Scalar, Some(avx2)) = (arch, pulp::x86::V3::try_new()) {
        return pulp::Simd::vectorize(avx2, kernel);
    }
    arch.dispatch(kernel)
}
