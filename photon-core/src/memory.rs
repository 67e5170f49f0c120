//! The memory of this process, where the system tells it: on Linux.

/// The most memory that this process has held at once, in bytes: a program's weights, caches and scratch space alike.
///
/// Absent outside Linux.
pub fn peak_memory_bytes() -> Option<usize> {
    bytes_of(&status()?, "VmHWM:")
}

/// The memory that this process holds now, in bytes.
///
/// Absent outside Linux.
pub fn resident_memory_bytes() -> Option<usize> {
    bytes_of(&status()?, "VmRSS:")
}

fn status() -> Option<String> {
    std::fs::read_to_string("/proc/self/status").ok()
}

/// From a line like `VmHWM:    1234 kB`.
fn bytes_of(status: &str, name: &str) -> Option<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let status = "VmPeak:\t  9000 kB\nVmHWM:\t  1234 kB\nVmRSS:\t 7 kB\n";
        assert_eq!(bytes_of(status, "VmHWM:"), Some(1234 * 1024));
        assert_eq!(bytes_of(status, "VmRSS:"), Some(7 * 1024));
        assert_eq!(bytes_of("VmPeak:\t  9000 kB\n", "VmHWM:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_grows_with_what_is_held() {
        const BYTES: usize = 64 << 20;
        let before = peak_memory_bytes().unwrap();
        let held = vec![1u8; before + BYTES];
        assert!(std::hint::black_box(&held).len() > before);
        assert!(resident_memory_bytes().unwrap() >= before + BYTES);
        assert!(peak_memory_bytes().unwrap() >= before + BYTES);
    }
}
