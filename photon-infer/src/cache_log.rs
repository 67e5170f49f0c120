//! What caches came to over a generation, in which rows leave and batches follow each other.

use photon_core::cache::offload::OffloadUse;
use photon_core::state::CacheUse;

use crate::session::{Relief, Session, SessionError};

/// The largest sizes seen, and the counters of every batch added up.
#[derive(Debug, Default)]
pub(crate) struct CacheLog {
    pub(crate) stages: Vec<CacheUse>,
    /// What gave way for want of memory.
    pub(crate) reliefs: Vec<Relief>,
    /// Why a batch ended before its time.
    pub(crate) refusal: Option<SessionError>,
}

impl CacheLog {
    /// Takes note of the sizes of a batch under way.
    pub(crate) fn note(&mut self, now: &[CacheUse]) {
        if self.stages.is_empty() {
            let uncounted = |stage: &CacheUse| CacheUse {
                written_entries: 0,
                evicted_entries: 0,
                storing_secs: 0.0,
                offload: stage.offload.map(|_| OffloadUse::default()),
                ..stage.clone()
            };
            self.stages = now.iter().map(uncounted).collect();
        }
        for (largest, now) in self.stages.iter_mut().zip(now) {
            largest.entries = largest.entries.max(now.entries);
            largest.used_bytes = largest.used_bytes.max(now.used_bytes);
            largest.allocated_bytes = largest.allocated_bytes.max(now.allocated_bytes);
            largest.shared_bytes = largest.shared_bytes.max(now.shared_bytes);
            largest.unfinished_bytes = largest.unfinished_bytes.max(now.unfinished_bytes);
            largest.notes_bytes = largest.notes_bytes.max(now.notes_bytes);
            if let (Some(largest), Some(now)) = (&mut largest.offload, now.offload) {
                largest.host_bytes = largest.host_bytes.max(now.host_bytes);
            }
        }
    }

    /// Takes note of the sizes of a batch at its end, and counts what its caches did.
    pub(crate) fn close(&mut self, session: &Session) {
        self.reliefs.extend_from_slice(session.reliefs());
        self.count(&session.cache_use());
    }

    /// Takes over what a batch that has ended came to.
    pub(crate) fn add(&mut self, batch: Self) {
        self.reliefs.extend(batch.reliefs);
        self.refusal = batch.refusal.or(self.refusal.take());
        self.count(&batch.stages);
    }

    fn count(&mut self, last: &[CacheUse]) {
        self.note(last);
        for (sum, last) in self.stages.iter_mut().zip(last) {
            sum.written_entries += last.written_entries;
            sum.evicted_entries += last.evicted_entries;
            sum.storing_secs += last.storing_secs;
            if let (Some(sum), Some(last)) = (&mut sum.offload, last.offload) {
                *sum = OffloadUse { host_bytes: 0, ..last } + *sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(used_bytes: usize, written_entries: usize) -> CacheUse {
        CacheUse {
            stage: "stack".into(),
            entries: used_bytes,
            used_bytes,
            allocated_bytes: used_bytes,
            shared_bytes: 0,
            unfinished_bytes: 0,
            notes_bytes: 0,
            written_entries,
            evicted_entries: written_entries,
            storing_secs: 1.0,
            offload: Some(OffloadUse { host_bytes: used_bytes, hits: written_entries, ..OffloadUse::default() }),
        }
    }

    #[test]
    fn sizes_are_the_largest_and_counters_the_sums_over_batches() {
        let mut log = CacheLog::default();
        log.note(&[stage(8, 1)]);
        log.count(&[stage(4, 3)]);
        log.count(&[stage(6, 2)]);
        let expected = CacheUse { storing_secs: 2.0, ..stage(8, 5) };
        assert_eq!(log.stages, [expected]);
    }
}
