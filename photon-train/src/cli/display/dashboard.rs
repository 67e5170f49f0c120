//! A run as a screen that a thread of its own draws a few times a second, so that training waits for nothing.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use photon_train::report::{EvalReport, Observer, SkipReport, StepReport};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::super::log;
use super::draw::draw;
use super::terminal::{self, Screen};
use super::view::View;

const BETWEEN_DRAWINGS: Duration = Duration::from_millis(250);

/// The screen; dropped, it gives the terminal back and leaves the newest numbers and all notices as lines.
pub(super) struct Dashboard {
    view: Arc<Mutex<View>>,
    is_over: Arc<AtomicBool>,
    drawer: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Draws from now on.
    pub(super) fn start(screen: Screen, view: View, stop: Arc<AtomicBool>) -> io::Result<Self> {
        let (view, is_over) = (Arc::new(Mutex::new(view)), Arc::new(AtomicBool::new(false)));
        let drawing = Drawing { view: view.clone(), is_over: is_over.clone(), stop, screen };
        let drawer = thread::Builder::new().name("dashboard".into()).spawn(|| drawing.run());
        let drawer = drawer.inspect_err(|_| terminal::give_back())?;
        Ok(Self { view, is_over, drawer: Some(drawer) })
    }

    fn view(&self) -> MutexGuard<'_, View> {
        lock(&self.view)
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(drawer) = self.drawer.take() {
            // If it panicked, that has been said.
            let _ = drawer.join();
        }
        terminal::give_back();
        let view = self.view();
        view.notices.iter().for_each(log);
        view.step_line().into_iter().chain(view.evaluation_line()).for_each(log);
    }
}

impl Observer for Dashboard {
    fn step(&mut self, report: &StepReport) {
        self.view().step(report);
    }

    fn evaluation(&mut self, report: &EvalReport) {
        self.view().evaluation(report);
    }

    fn skip(&mut self, report: &SkipReport) {
        self.view().skip(report);
    }

    fn notice(&mut self, text: &str) {
        self.view().notice(text);
    }
}

fn lock(view: &Mutex<View>) -> MutexGuard<'_, View> {
    view.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// What the thread has.
struct Drawing {
    view: Arc<Mutex<View>>,
    is_over: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    screen: Screen,
}

impl Drawing {
    fn run(mut self) {
        while !self.is_over.load(Ordering::Relaxed) {
            let is_stopping = self.stop.load(Ordering::Relaxed);
            let drawn = terminal::while_held(|| {
                self.screen.draw(|frame| draw(frame, &lock(&self.view), is_stopping)).map(|_| ())
            });
            // A terminal that is gone is no reason to end the run.
            if !matches!(drawn, Some(Ok(()))) {
                return;
            }
            self.take_keys(Instant::now() + BETWEEN_DRAWINGS);
        }
    }

    fn take_keys(&self, until: Instant) {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match event::poll(left) {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => return thread::sleep(left),
            }
            let is_news = match event::read() {
                Ok(Event::Key(key)) if key.kind == KeyEventKind::Press => self.take_key(key),
                Ok(Event::Resize(..)) => true,
                _ => false,
            };
            if is_news {
                return;
            }
        }
    }

    /// Whether there is something new to draw.
    fn take_key(&self, key: KeyEvent) -> bool {
        let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        if !is_interrupt && key.code != KeyCode::Char('q') {
            return false;
        }
        let was_stopping = self.stop.swap(true, Ordering::Relaxed);
        if is_interrupt && was_stopping {
            terminal::give_back();
            std::process::exit(130);
        }
        true
    }
}
