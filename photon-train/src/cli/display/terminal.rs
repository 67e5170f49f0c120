//! Who has the terminal. Whatever ends the program, the terminal is given back as it was.

use std::io::{self, BufWriter, IsTerminal, Stderr};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};

/// Whether a dashboard has the terminal. Locked while it draws.
static IS_HELD: Mutex<bool> = Mutex::new(false);

/// A screen on stderr.
pub(super) type Screen = Terminal<CrosstermBackend<BufWriter<Stderr>>>;

/// Whether somebody watches: stdout and stderr are a terminal that can be drawn on, and its keys are ours.
pub(super) fn is_watched() -> bool {
    let can_draw = std::env::var_os("TERM").is_none_or(|name| name != "dumb");
    io::stdout().is_terminal() && io::stderr().is_terminal() && can_draw && is_in_foreground()
}

/// A job in the background would be stopped by the system if it changed the terminal.
fn is_in_foreground() -> bool {
    // Elsewhere than on Linux this is not known.
    std::fs::read_to_string("/proc/self/stat").is_ok_and(|stat| owns_terminal(&stat)) || !cfg!(target_os = "linux")
}

/// Whether `/proc/self/stat` says that the process belongs to the group to which the terminal listens.
fn owns_terminal(stat: &str) -> bool {
    // The name of the program, which may hold anything, ends at the last bracket; then: state, parent, group, session,
    // terminal, the terminal's group.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    fields.len() > 5 && fields[2] == fields[5]
}

/// Takes the terminal: a screen of its own, keys without echo.
pub(super) fn take() -> io::Result<Screen> {
    enable_raw_mode()?;
    *lock() = true;
    give_back_on_panic();
    // What is blank is not drawn, so all must be at first.
    let screen = execute!(io::stderr(), EnterAlternateScreen, Clear(ClearType::All))
        .and_then(|()| Terminal::new(CrosstermBackend::new(BufWriter::new(io::stderr()))));
    if screen.is_err() {
        give_back();
    }
    screen
}

/// Does something with the terminal while nobody can give it back; none where that has happened.
pub(super) fn while_held<T>(work: impl FnOnce() -> T) -> Option<T> {
    let is_held = lock();
    is_held.then(work)
}

/// Whether a dashboard has the terminal.
pub(in super::super) fn is_held() -> bool {
    *lock()
}

/// Gives the terminal back, if it is held.
pub(in super::super) fn give_back() {
    const TRIES: usize = 20;
    for _ in 0..TRIES {
        match IS_HELD.try_lock() {
            Ok(mut is_held) => return give_back_held(&mut is_held),
            Err(TryLockError::Poisoned(poisoned)) => return give_back_held(&mut poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(5)),
        }
    }
    // Whoever draws does not come to an end, for it is the one that panics.
    give_back_held(&mut true);
}

fn give_back_held(is_held: &mut bool) {
    if std::mem::replace(is_held, false) {
        // Where there is no terminal any more nothing has to be given back.
        let _ = disable_raw_mode();
        let _ = execute!(io::stderr(), LeaveAlternateScreen, Show);
    }
}

fn give_back_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        give_back();
        before(panic);
    }));
}

fn lock() -> MutexGuard<'static, bool> {
    IS_HELD.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::owns_terminal;

    #[test]
    fn the_terminal_belongs_to_the_group_in_the_foreground() {
        assert!(owns_terminal("7 (a (b) c) S 1 7 7 34816 7 4194304"));
        assert!(!owns_terminal("7 (photon-train) S 1 7 5 34816 5 4194304"));
        assert!(!owns_terminal("7 (photon-train) S 1 7 7 0 -1 4194304"));
        assert!(!owns_terminal(""));
    }
}
