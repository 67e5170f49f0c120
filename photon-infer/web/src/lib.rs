//! The program behind the page: a checkpoint in a browser, text as it is generated.
//!
//! ```text
//! page/index.html    what a visitor sees
//! page/page.js       reads the folder, shows text, speed and caches
//! page/worker.js     holds the checkpoint, so that the page never stands still
//!   browser            what the worker calls: files -> checkpoint, request -> text, piece by piece
//!     runner             the same for any program that must not wait for its device
//! ```

#[cfg(target_family = "wasm")]
mod browser;
pub mod runner;
