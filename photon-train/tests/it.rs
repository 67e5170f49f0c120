//! The program starts and names its commands.
//!
//! Cargo builds a program before the integration tests of its own package only: this file is also why
//! `cargo test --workspace` leaves a fresh `photon-train` for the tests of whole commands, in `tests/it`.

use std::process::Command;

#[test]
fn help_names_every_command() {
    let output = Command::new(env!("CARGO_BIN_EXE_photon-train")).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for command in ["run", "prepare", "eval", "bench", "info", "tokenizer", "import-llama"] {
        assert!(help.contains(&format!("\n  {command} ")), "{command} is not in:\n{help}");
        assert!(help.contains(&format!("\n  photon-train {command} ")), "no example of {command} in:\n{help}");
    }
}
