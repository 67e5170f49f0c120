//! Makes batches ahead of the training loop, in threads of their own.

use std::{
    panic,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{Batch, BatchSource};

/// Batches that each thread makes ahead, at most.
const AHEAD: usize = 2;

/// The batches of a [`BatchSource`] in the order of the steps.
///
/// However many threads there are, the batches are the same: each thread makes every n-th, and they are taken in turn.
pub struct BatchLoader {
    workers: Vec<(Receiver<Batch>, JoinHandle<()>)>,
    n_taken: usize,
    started: Instant,
    waited: Duration,
}

impl BatchLoader {
    /// Starts to make the batches from `first_step` on.
    ///
    /// # Panics
    /// When there is no thread.
    pub fn start(source: &Arc<BatchSource>, first_step: u64, n_threads: usize) -> Self {
        assert!(n_threads > 0, "a loader needs a thread");
        let worker = |thread: usize| {
            let source = Arc::clone(source);
            let (sender, receiver) = sync_channel(AHEAD);
            let mut steps = (first_step + thread as u64..).step_by(n_threads);
            let handle = thread::spawn(move || {
                // The loader ends its threads by no longer listening.
                while steps.next().is_some_and(|step| sender.send(source.batch(step)).is_ok()) {}
            });
            (receiver, handle)
        };
        let workers = (0..n_threads).map(worker).collect();
        Self { workers, n_taken: 0, started: Instant::now(), waited: Duration::ZERO }
    }

    /// The next step's batch; waits until it is made.
    ///
    /// # Panics
    /// With the panic of the thread that makes it.
    pub fn next_batch(&mut self) -> Batch {
        let worker = self.n_taken % self.workers.len();
        self.n_taken += 1;
        let started = Instant::now();
        let received = self.workers[worker].0.recv();
        self.waited += started.elapsed();
        match received {
            Ok(batch) => batch,
            Err(_) => match self.workers.swap_remove(worker).1.join() {
                Err(reason) => panic::resume_unwind(reason),
                Ok(()) => unreachable!("a thread ends when the loader is gone"),
            },
        }
    }

    /// Time spent waiting in [`Self::next_batch`] since the loader was started.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// The same as a share of the time since the loader was started, from 0 to 1.
    pub fn wait_share(&self) -> f64 {
        self.waited.as_secs_f64() / self.started.elapsed().as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

impl Drop for BatchLoader {
    fn drop(&mut self) {
        for (receiver, handle) in self.workers.drain(..) {
            drop(receiver);
            // A thread that panicked has said so already.
            let _ = handle.join();
        }
    }
}
