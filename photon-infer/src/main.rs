//! The command `photon-infer`.

mod cli;

use std::io::Write;
use std::process::ExitCode;

use photon_core::error_text::error_text;

fn main() -> ExitCode {
    photon_core::allocator::keep_freed_memory();
    match cli::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {}", error_text(&*error));
            ExitCode::FAILURE
        }
    }
}
