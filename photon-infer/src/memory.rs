//! The memory of this process, where the system tells it.

/// The most memory that this process has held at once, in bytes: a program's weights, caches and scratch space alike.
///
/// Absent outside Linux.
pub fn peak_memory_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    peak_of(&status)
}

/// From a line like `VmHWM:    1234 kB`.
fn peak_of(status: &str) -> Option<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_in_bytes() {
        assert_eq!(peak_of("VmPeak:\t  9000 kB\nVmHWM:\t  1234 kB\nVmRSS:\t 7 kB\n"), Some(1234 * 1024));
        assert_eq!(peak_of("VmPeak:\t  9000 kB\n"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_peak_of_this_process_grows_with_what_it_holds() {
        const BYTES: usize = 64 << 20;
        let before = peak_memory_bytes().unwrap();
        let held = vec![1u8; before + BYTES];
        assert!(std::hint::black_box(&held).len() > before);
        assert!(peak_memory_bytes().unwrap() >= before + BYTES);
    }
}
