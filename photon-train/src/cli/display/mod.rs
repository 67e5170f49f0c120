//! What is seen of a run under way: a dashboard where somebody watches, lines for a log elsewhere.
//!
//! ```text
//! view       what there is to show, kept up by what the run tells
//! plain      lines
//! dashboard  a screen drawn a few times a second, and its keys
//! draw       the view on that screen
//! terminal   who has the terminal, and how it is given back
//! ```

mod dashboard;
mod draw;
mod plain;
pub(super) mod terminal;
mod view;

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use photon_train::plot::RunMetrics;
use photon_train::report::Observer;

use dashboard::Dashboard;
use plain::Plain;
use view::View;

/// How a run is shown.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DisplayChoice {
    /// The dashboard where stdout and stderr are a terminal, else plain.
    Auto,
    /// A screen with curves, drawn on stderr; q or Ctrl-C stops the run and saves.
    Dashboard,
    /// Lines on stderr.
    Plain,
}

impl DisplayChoice {
    /// Whether it can be had: a check to make before long work.
    pub(super) fn check(self) -> Result<()> {
        let can_draw = self != Self::Dashboard || std::io::stderr().is_terminal();
        ensure!(can_draw, "--display dashboard: stderr is no terminal; --display plain writes lines");
        Ok(())
    }
}

/// What is known of a run before its next step.
pub(super) struct RunFacts {
    /// Its folder.
    pub(super) folder: String,
    /// What it runs on.
    pub(super) device: String,
    /// Numbers that learn.
    pub(super) parameters: usize,
    /// Steps when it is done.
    pub(super) steps: u64,
    /// What it told before, where it goes on.
    pub(super) before: Option<RunMetrics>,
}

/// Shows a run until it is dropped. `stop` ends the run after the step at hand.
pub(super) fn open(
    choice: DisplayChoice,
    facts: RunFacts,
    log_every_steps: Option<u64>,
    stop: Arc<AtomicBool>,
) -> Result<Box<dyn Observer>> {
    let view = View::new(facts);
    let screen = match choice {
        // Where it cannot be drawn the run goes on without.
        DisplayChoice::Auto => terminal::is_watched().then(terminal::take).and_then(Result::ok),
        DisplayChoice::Dashboard => Some(terminal::take().context("no dashboard can be drawn: try --display plain")?),
        DisplayChoice::Plain => None,
    };
    Ok(match screen {
        Some(screen) => Box::new(Dashboard::start(screen, view, stop)?),
        None => Box::new(Plain::new(view, log_every_steps)),
    })
}
