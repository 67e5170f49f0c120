//! Kernels that graphics devices are asked to run, counted while some work is done: what bounds a decode step there.

use std::collections::BTreeMap;

/// What work gives, and how often it launched each kernel, by Burn's names.
///
/// Everything that the process launches meanwhile is counted, by other threads too. The CPU launches none.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
pub fn counted<T>(work: impl FnOnce() -> T) -> (T, BTreeMap<&'static str, usize>) {
    use std::sync::{Arc, Mutex, PoisonError};

    use cubecl::logging::{LaunchObservation, LaunchObserver};

    #[derive(Default)]
    struct Counts(Mutex<BTreeMap<&'static str, usize>>);

    impl LaunchObserver for Counts {
        fn launched(&self, kernel: &'static str) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(kernel).or_default() += 1;
        }
    }

    let counts = Arc::new(Counts::default());
    let observation = LaunchObservation::new(counts.clone());
    let given = work();
    drop(observation);
    let counts = std::mem::take(&mut *counts.0.lock().unwrap_or_else(PoisonError::into_inner));
    (given, counts)
}

/// What work gives, and how often it launched each kernel: never, for the CPU has none.
#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
pub fn counted<T>(work: impl FnOnce() -> T) -> (T, BTreeMap<&'static str, usize>) {
    (work(), BTreeMap::new())
}
