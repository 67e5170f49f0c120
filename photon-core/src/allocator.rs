//! The C allocator, set for tensors.
//!
//! The CPU backend allocates every result anew. glibc serves blocks of that size from fresh pages and returns
//! them at once, so each operation pays a page fault per 4 KiB; keeping the pages makes training a third faster.

/// Tells glibc to keep freed memory. Call it first in `main`; on other platforms it does nothing.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const ONE_GIB: libc::c_int = 1 << 30;
        #[expect(unsafe_code, reason = "mallopt is a C function; it takes two integers and touches no Rust memory")]
        // SAFETY: called before threads start; mallopt has no other precondition.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, ONE_GIB);
            libc::mallopt(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
            libc::mallopt(libc::M_TOP_PAD, 64 << 20);
            // Arenas of other threads are cut into heaps of 64 MiB and give memory back whatever the thresholds say.
            libc::mallopt(libc::M_ARENA_MAX, 1);
        }
    }
}
