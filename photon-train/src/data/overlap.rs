//! Held-out text that is also trained on: equal documents, and runs of tokens in common.
//!
//! Runs of a fixed length at every token of the held-out text (or, of a large one, those whose hash ends in enough
//! zeros, which are then the same runs in every text) are looked for in all the training text. The memory that takes is
//! bounded by [`MAX_RUNS`] and does not grow with the training text.
//!
//! Limits: a run that differs in one token is not found; short runs in common (licences, headings, idioms) are found and
//! are no leak; runs do not cross documents, so that documents shorter than a run count only as equal or not; a run
//! that a subword tokenizer cut differently is missed; of more than [`MAX_RUNS`] held-out documents a sample is looked for.

use std::{
    collections::HashMap,
    fmt, fs,
    ops::Range,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use photon_core::{atomic_file, tokenizer::Tokenizer};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{DataError, Progress, Stage, TokenStore, permutation::mix};

/// Runs, and documents, that are looked for at most.
const MAX_RUNS: usize = 1 << 20;
/// Tokens of a run: a sentence or two.
const RUN_BYTES: usize = 64;
const RUN_TOKENS: usize = 13;
/// From this share on the report warns.
const WARN_SHARE: f64 = 0.01;
/// Tokens that one thread goes through at a time.
const STRETCH: usize = 1 << 20;
/// Bits of the filter before the table, a power of two.
const FILTER_BITS: usize = 1 << 24;

/// How much of the held-out text is also in the training text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OverlapReport {
    /// Tokens of a run.
    pub run_tokens: usize,
    /// One of so many held-out runs was looked for.
    pub one_run_in: u64,
    /// Held-out runs looked for.
    pub n_runs: u64,
    /// Those found in the training text.
    pub n_found: u64,
    /// Held-out documents looked for.
    pub n_documents: u64,
    /// Those of which the training text has an equal one.
    pub n_equal_documents: u64,
}

impl OverlapReport {
    /// Share of the held-out text, from 0 to 1, that lies in runs which are also trained on.
    pub fn share(&self) -> f64 {
        self.n_found as f64 / self.n_runs.max(1) as f64
    }

    /// Whether the held-out loss will look better than it is.
    pub fn is_large(&self) -> bool {
        self.share() > WARN_SHARE || self.n_equal_documents as f64 > WARN_SHARE * self.n_documents as f64
    }
}

impl fmt::Display for OverlapReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run_tokens, n_documents, n_equal_documents, .. } = self;
        if self.is_large() {
            write!(f, "warning: held-out text is also trained on, its loss will look better than it is: ")?;
        }
        let percent = 100.0 * self.share();
        write!(
            f,
            "overlap: {percent:.2} % of the held-out text is in runs of {run_tokens} tokens that are also trained on"
        )?;
        write!(f, ", {n_equal_documents} of {n_documents} held-out documents are equal to a training document")
    }
}

/// The overlap of `valid` with all of `trains`, kept in `cache_dir` under `content_hash`.
pub(super) fn find_overlap(
    trains: &[&TokenStore],
    valid: &TokenStore,
    tokenizer: &Tokenizer,
    content_hash: &str,
    cache_dir: &Path,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<OverlapReport, DataError> {
    let path = cache_dir.join(format!("overlap-{}.json", &content_hash[..32]));
    // A report that is missing or damaged is made again.
    if let Some(report) = fs::read(&path).ok().and_then(|json| serde_json::from_slice(&json).ok()) {
        return Ok(report);
    }
    let run_tokens = if tokenizer.name() == "bytes" { RUN_BYTES } else { RUN_TOKENS };
    let report = overlap(trains, valid, run_tokens, MAX_RUNS, progress);
    let json = serde_json::to_vec_pretty(&report).expect("a report is plain data");
    atomic_file::write(&path, &json).map_err(|source| DataError::Write { path, source })?;
    Ok(report)
}

fn overlap(
    trains: &[&TokenStore],
    valid: &TokenStore,
    run_tokens: usize,
    max_runs: usize,
    progress: &(dyn Fn(Progress) + Sync),
) -> OverlapReport {
    let one_in = |n: usize| (n.div_ceil(max_runs).max(1) as u64).next_power_of_two();
    let (one_run_in, one_document_in) = (one_in(valid.len()), one_in(valid.n_documents()));
    let mut runs = Wanted::default();
    stretches(valid.len())
        .for_each(|stretch| for_each_run(valid, stretch, run_tokens, one_run_in, |run| runs.want(run)));
    let mut documents = Wanted::default();
    stretches(valid.n_documents())
        .for_each(|some| for_each_document(valid, some, one_document_in, |hash| documents.want(hash)));
    let (runs, documents) = (runs.ready(), documents.ready());

    let total: usize = trains.iter().map(|train| train.len() + train.n_documents()).sum();
    let done = AtomicU64::new(0);
    let tell = |n: usize| {
        let done_bytes = done.fetch_add(n as u64, Ordering::Relaxed) + n as u64;
        progress(Progress { stage: Stage::Comparing, done_bytes, total_bytes: total as u64 });
    };
    for train in trains {
        stretches(train.len()).collect::<Vec<_>>().into_par_iter().for_each(|stretch| {
            let n = stretch.len();
            for_each_run(train, stretch, run_tokens, one_run_in, |run| runs.find(run));
            tell(n);
        });
        stretches(train.n_documents()).collect::<Vec<_>>().into_par_iter().for_each(|some| {
            let n = some.len();
            for_each_document(train, some, one_document_in, |hash| documents.find(hash));
            tell(n);
        });
    }
    let (n_runs, n_found) = runs.counts();
    let (n_documents, n_equal_documents) = documents.counts();
    OverlapReport { run_tokens, one_run_in, n_runs, n_found, n_documents, n_equal_documents }
}

fn stretches(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(STRETCH).map(move |start| start..len.min(start + STRETCH))
}

/// Hashes of the runs that begin in a stretch of tokens, one in `one_in` of them.
fn for_each_run(store: &TokenStore, stretch: Range<usize>, run_tokens: usize, one_in: u64, mut visit: impl FnMut(u64)) {
    let token_ids = store.read(stretch.start..store.len().min(stretch.end + run_tokens - 1));
    // A polynomial in the ids: one step adds a token at the front and takes one off the back.
    let highest = (1..run_tokens).fold(1u64, |power, _| power.wrapping_mul(BASE));
    let mut document = store.document_at(stretch.start);
    let (mut hash, mut n_tokens) = (0u64, 0);
    let mut document_end = store.document_end(document);
    for (index, &id) in token_ids.iter().enumerate() {
        let token = stretch.start + index;
        if token >= document_end {
            document = store.document_at(token);
            document_end = store.document_end(document);
            (hash, n_tokens) = (0, 0);
        }
        if n_tokens == run_tokens {
            let oldest = value(token_ids[index - run_tokens]);
            hash = hash.wrapping_sub(oldest.wrapping_mul(highest));
        } else {
            n_tokens += 1;
        }
        hash = hash.wrapping_mul(BASE).wrapping_add(value(id));
        if n_tokens == run_tokens {
            let run = mix(hash);
            if run & (one_in - 1) == 0 {
                visit(run);
            }
        }
    }
}

const BASE: u64 = 0x9E37_79B9_7F4A_7C15;

fn value(id: u32) -> u64 {
    mix(u64::from(id) + 1)
}

/// Hashes of documents, one in `one_in` of them.
fn for_each_document(store: &TokenStore, documents: Range<usize>, one_in: u64, mut visit: impl FnMut(u64)) {
    let mut start = documents.start.checked_sub(1).map_or(0, |before| store.document_end(before));
    for document in documents {
        let end = store.document_end(document);
        let mut hash = 0u64;
        for part in (start..end).step_by(STRETCH) {
            let ids = store.read(part..end.min(part + STRETCH));
            hash = ids.into_iter().fold(hash, |hash, id| hash.wrapping_mul(BASE).wrapping_add(value(id)));
        }
        start = end;
        let hash = mix(hash);
        if hash & (one_in - 1) == 0 {
            visit(hash);
        }
    }
}

/// Hashes that are looked for, with how often each is wanted.
#[derive(Default)]
struct Wanted(HashMap<u64, u64>);

/// The same, ready to be looked for by all threads.
struct Search {
    wanted: HashMap<u64, (u64, AtomicBool)>,
    /// Most hashes are not wanted; this says so without a look into the table.
    filter: Vec<u64>,
}

impl Wanted {
    fn want(&mut self, hash: u64) {
        *self.0.entry(hash).or_default() += 1;
    }

    fn ready(self) -> Search {
        let mut filter = vec![0; FILTER_BITS / 64];
        for &hash in self.0.keys() {
            let (word, bit) = filter_place(hash);
            filter[word] |= bit;
        }
        let wanted = self.0.into_iter().map(|(hash, count)| (hash, (count, AtomicBool::new(false)))).collect();
        Search { wanted, filter }
    }
}

impl Search {
    fn find(&self, hash: u64) {
        let (word, bit) = filter_place(hash);
        if self.filter[word] & bit != 0
            && let Some((_, is_found)) = self.wanted.get(&hash)
        {
            is_found.store(true, Ordering::Relaxed);
        }
    }

    /// How many were wanted, and how many of them found.
    fn counts(&self) -> (u64, u64) {
        self.wanted.values().fold((0, 0), |(all, found), (count, is_found)| {
            (all + count, found + if is_found.load(Ordering::Relaxed) { *count } else { 0 })
        })
    }
}

/// A word and a bit of the filter, by the high bits: the low ones choose the sample.
fn filter_place(hash: u64) -> (usize, u64) {
    let place = (hash >> 32) as usize & (FILTER_BITS - 1);
    (place / 64, 1 << (place % 64))
}

#[cfg(test)]
mod tests {
    use super::{super::store::tests::store_of, *};

    /// Text of which no two stretches are alike.
    fn noise(seed: u64, n: usize) -> String {
        (0..n as u64).map(|i| char::from(b'a' + (mix(seed << 32 | i) % 26) as u8)).collect()
    }

    fn overlap_of(train: &[&str], valid: &[&str], max_runs: usize) -> OverlapReport {
        let folder = tempfile::tempdir().unwrap();
        let (train, valid) = (store_of(&folder, train), store_of(&folder, valid));
        overlap(&[&train], &valid, 16, max_runs, &|_| {})
    }

    #[test]
    fn the_share_in_common_is_found() {
        let (train, valid) = (noise(1, 5000), noise(2, 4000));
        let none = overlap_of(&[&train], &[&valid], 1 << 20);
        assert_eq!((none.n_found, none.n_equal_documents, none.is_large()), (0, 0, false));
        // With the end of the document there are 4001 tokens, so 3986 runs of 16.
        assert_eq!((none.n_runs, none.one_run_in, none.n_documents), (3986, 1, 1));
        let leaky = format!("{}{}{}", noise(3, 777), &valid[1000..2000], noise(4, 500));
        let some = overlap_of(&[&train, &leaky], &[&valid], 1 << 20);
        assert_eq!(some.n_found, 1000 - 15);
        assert!(some.is_large() && some.to_string().starts_with("warning: "), "{some}");
    }

    #[test]
    fn a_sample_finds_about_the_same_share() {
        let valid = noise(2, 60_000);
        let leaky = format!("{}{}", noise(3, 777), &valid[20_000..35_000]);
        let report = overlap_of(&[&leaky], &[&valid], 8_000);
        assert_eq!(report.one_run_in, 8);
        // Some 7500 runs, a quarter of which is found: a standard deviation of half a percent.
        assert!((report.share() - 0.25).abs() < 0.03, "{report:?}");
    }

    #[test]
    fn equal_documents_are_found_however_short() {
        let report = overlap_of(&["one", "two", "three"], &["two", "four", "two"], 1 << 20);
        assert_eq!((report.n_documents, report.n_equal_documents, report.n_runs), (3, 2, 0));
    }

    #[test]
    fn runs_do_not_cross_documents_and_stretches_do_not_matter() {
        let text = noise(5, 40);
        let report = overlap_of(&[&text[..20], &text[20..]], &[&text], 1 << 20);
        // Runs of 16 within the first 20, and within the last 20 with the end.
        assert_eq!((report.n_runs, report.n_found), (26, 5 + 6));
        // The other way round, 5 + 6 runs are looked for, and all are found but the one with the first end.
        let report = overlap_of(&[&text], &[&text[..20], &text[20..]], 1 << 20);
        assert_eq!((report.n_runs, report.n_found), (6 + 6, 5 + 6));
        let long = noise(6, STRETCH + 300);
        let report = overlap_of(&[&noise(7, 9), &long], &[&long[STRETCH - 200..STRETCH + 200]], 1 << 20);
        assert_eq!(report.n_found, 400 - 15);
    }
}
