//! Cuts a token store into rows, and gives each training step its rows.
//!
//! A row is a run of at most `seq_len` neighbouring tokens; which of them are predicted from which
//! is the model's to say.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::TokenStore;

/// Fills a row past its length; it may be a token of the vocabulary, so `lens` decides.
pub const PAD_ID: u32 = 0;

/// A shorter window than this has nothing to predict.
const MIN_WINDOW_TOKENS: usize = 2;

/// Rows of token ids, right-padded to one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// `rows * seq_len` ids, row after row.
    pub token_ids: Vec<u32>,
    /// Tokens of each row that are real, the others being [`PAD_ID`].
    pub lens: Vec<usize>,
    seq_len: usize,
}

impl Batch {
    /// Reads one row per window.
    ///
    /// # Panics
    /// When a window is longer than `seq_len` or reaches past the store.
    pub fn read(store: &TokenStore, windows: &[Range<usize>], seq_len: usize) -> Self {
        let mut token_ids = Vec::with_capacity(windows.len() * seq_len);
        for (row, window) in windows.iter().enumerate() {
            assert!(window.len() <= seq_len, "a window of {} tokens in a row of {seq_len}", window.len());
            token_ids.extend(store.read(window.clone()));
            token_ids.resize((row + 1) * seq_len, PAD_ID);
        }
        Self { token_ids, lens: windows.iter().map(Range::len).collect(), seq_len }
    }

    /// Rows without padding.
    ///
    /// # Panics
    /// When the ids do not fill whole rows.
    pub fn full(token_ids: Vec<u32>, seq_len: usize) -> Self {
        assert!(token_ids.len().is_multiple_of(seq_len), "{} ids in rows of {seq_len}", token_ids.len());
        Self { lens: vec![seq_len; token_ids.len() / seq_len], token_ids, seq_len }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.lens.len()
    }

    /// Length that rows are padded to.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Real tokens, padding left out.
    pub fn n_tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    /// The same rows in batches of `micro_batch_rows`, the last of which may be smaller.
    ///
    /// # Panics
    /// When `micro_batch_rows` is 0.
    pub fn split(&self, micro_batch_rows: usize) -> Vec<Self> {
        self.token_ids
            .chunks(micro_batch_rows * self.seq_len)
            .zip(self.lens.chunks(micro_batch_rows))
            .map(|(token_ids, lens)| Self { token_ids: token_ids.to_vec(), lens: lens.to_vec(), seq_len: self.seq_len })
            .collect()
    }
}

/// The training batches: a pure function of the seed and the step.
///
/// Each epoch cuts the store into windows of `seq_len`, from an offset of its own, and shuffles them:
///
/// ```text
/// 11 tokens, seq_len 4:   offset 3   [0 1 2] [3 4 5 6] [7 8 9 10]
///                         offset 0   [0 1 2 3] [4 5 6 7] [8 9 10]
///                         offset 2   [0 1] [2 3 4 5] [6 7 8 9] [10]      not used
/// ```
///
/// The part before the offset and the last window may be shorter. Offsets are drawn from those that
/// leave no window of a single token, which could not be trained on, and among them from the larger
/// group that gives one number of windows. So every epoch has as many windows as every other, sees
/// each token once, and row `r` of a step is window `n % windows_per_epoch` of epoch
/// `n / windows_per_epoch`, where `n = step * batch_size + r`.
pub struct BatchSource {
    store: Arc<TokenStore>,
    seq_len: usize,
    batch_size: usize,
    seed: u64,
    offsets: Vec<usize>,
    windows_per_epoch: usize,
    /// The epoch asked for last: steps come in order, and a shuffle takes a while.
    cached: Mutex<Option<Arc<Epoch>>>,
}

/// One pass over the store.
struct Epoch {
    number: u64,
    /// In the order of training.
    windows: Vec<Range<usize>>,
}

impl BatchSource {
    /// Batches of `batch_size` rows of at most `seq_len` tokens.
    ///
    /// # Panics
    /// When the store or `seq_len` is below 2 tokens, or `batch_size` is 0.
    pub fn new(store: Arc<TokenStore>, seq_len: usize, batch_size: usize, seed: u64) -> Self {
        assert!(batch_size > 0, "a batch needs rows");
        let (windows_per_epoch, offsets) = usable_offsets(store.len(), seq_len);
        Self { store, seq_len, batch_size, seed, offsets, windows_per_epoch, cached: Mutex::new(None) }
    }

    /// Rows that make one pass over the store.
    pub fn windows_per_epoch(&self) -> usize {
        self.windows_per_epoch
    }

    /// The rows of this step, counted from 0.
    pub fn batch(&self, step: u64) -> Batch {
        let first = step * self.batch_size as u64;
        let windows: Vec<Range<usize>> = (first..first + self.batch_size as u64).map(|n| self.window(n)).collect();
        Batch::read(&self.store, &windows, self.seq_len)
    }

    /// Window `n` of the whole training run.
    fn window(&self, n: u64) -> Range<usize> {
        let per_epoch = self.windows_per_epoch as u64;
        let epoch = self.epoch(n / per_epoch);
        epoch.windows[(n % per_epoch) as usize].clone()
    }

    fn epoch(&self, number: u64) -> Arc<Epoch> {
        // A thread that panicked left an epoch or none, both of which serve.
        let mut cached = self.cached.lock().unwrap_or_else(PoisonError::into_inner);
        match &*cached {
            Some(epoch) if epoch.number == number => Arc::clone(epoch),
            _ => Arc::clone(cached.insert(Arc::new(self.shuffled_epoch(number)))),
        }
    }

    fn shuffled_epoch(&self, number: u64) -> Epoch {
        let mut rng = epoch_rng(self.seed, number);
        let offset = self.offsets[rng.random_range(0..self.offsets.len())];
        let mut windows: Vec<Range<usize>> = windows_from(offset, self.store.len(), self.seq_len).collect();
        assert_eq!(windows.len(), self.windows_per_epoch, "offset {offset} is not among the usable ones");
        windows.shuffle(&mut rng);
        Epoch { number, windows }
    }
}

fn epoch_rng(seed: u64, epoch: u64) -> ChaCha8Rng {
    let mut key = *b"................photon batches..";
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    ChaCha8Rng::from_seed(key)
}

/// The windows of an epoch with this offset, in the order of the store.
fn windows_from(offset: usize, n_tokens: usize, seq_len: usize) -> impl Iterator<Item = Range<usize>> {
    let head = 0..offset.min(n_tokens);
    let later = (head.end..n_tokens).step_by(seq_len).map(move |start| start..n_tokens.min(start + seq_len));
    [head].into_iter().chain(later).filter(|window| window.len() >= MIN_WINDOW_TOKENS)
}

/// The number of windows of every epoch, and the offsets below `seq_len` that give it.
fn usable_offsets(n_tokens: usize, seq_len: usize) -> (usize, Vec<usize>) {
    assert!(
        seq_len >= MIN_WINDOW_TOKENS && n_tokens >= MIN_WINDOW_TOKENS,
        "rows of {seq_len} tokens from a store of {n_tokens}"
    );
    let mut groups: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for offset in 0..seq_len {
        let head = offset.min(n_tokens);
        let (n_full, last) = ((n_tokens - head) / seq_len, (n_tokens - head) % seq_len);
        let n_windows = n_full + [head, last].iter().filter(|&&len| len >= MIN_WINDOW_TOKENS).count();
        let n_lost = [head, last].iter().filter(|&&len| len == 1).count();
        groups.entry((n_lost, n_windows)).or_default().push(offset);
    }
    // When every offset loses a token, as with `seq_len` 2 and an odd number, the fewest are lost.
    let best = groups.into_iter().max_by_key(|((n_lost, _), offsets)| (Reverse(*n_lost), offsets.len()));
    let ((_, n_windows), offsets) = best.expect("offset 0 is in a group");
    (n_windows, offsets)
}

/// Windows for evaluation: side by side from the start to the end of the store or, when that is more
/// than `max_tokens`, evenly spaced ones of them.
///
/// A last window of one token is left out; there is always at least one window.
///
/// # Panics
/// When the store or `seq_len` is below 2 tokens.
pub fn eval_windows(store: &TokenStore, seq_len: usize, max_tokens: usize) -> Vec<Range<usize>> {
    assert!(
        seq_len >= MIN_WINDOW_TOKENS && store.len() >= MIN_WINDOW_TOKENS,
        "rows of {seq_len} tokens from a store of {}",
        store.len()
    );
    let all: Vec<Range<usize>> = windows_from(0, store.len(), seq_len).collect();
    if store.len() <= max_tokens {
        return all;
    }
    let n_kept = (max_tokens / seq_len).clamp(1, all.len());
    (0..n_kept).map(|i| all[i * all.len() / n_kept].clone()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{super::store::tests::store_of, *};

    /// A store whose tokens are 0, 1, 2, ... (but 10 for 13, a CR) and the end-of-document token.
    fn counting_store(folder: &tempfile::TempDir, n_tokens: usize) -> Arc<TokenStore> {
        assert!((2..=129).contains(&n_tokens));
        let text: String = (0..n_tokens as u8 - 1).map(char::from).collect();
        let store = store_of(folder, &[&text]);
        assert_eq!(store.len(), n_tokens);
        Arc::new(store)
    }

    fn rows(batch: &Batch) -> Vec<Vec<u32>> {
        let row = |(ids, &len): (&[u32], &usize)| ids[..len].to_vec();
        batch.token_ids.chunks(batch.seq_len()).zip(&batch.lens).map(row).collect()
    }

    #[test]
    fn each_epoch_sees_every_token_once() {
        for n_tokens in 4..60 {
            for seq_len in 3..20 {
                let (windows_per_epoch, offsets) = usable_offsets(n_tokens, seq_len);
                for offset in offsets {
                    let windows: Vec<_> = windows_from(offset, n_tokens, seq_len).collect();
                    assert_eq!(windows.len(), windows_per_epoch, "{n_tokens} {seq_len} {offset}");
                    assert!(windows.iter().all(|window| (2..=seq_len).contains(&window.len())));
                    let positions: Vec<usize> = windows.into_iter().flatten().collect();
                    assert!(positions.into_iter().eq(0..n_tokens), "{n_tokens} {seq_len} {offset}");
                }
            }
        }
    }

    #[test]
    fn the_batches_of_an_epoch_hold_the_store() {
        let folder = tempfile::tempdir().unwrap();
        let store = counting_store(&folder, 101);
        let source = BatchSource::new(Arc::clone(&store), 8, 3, 7);
        let per_epoch = source.windows_per_epoch();
        // Batches straddle epochs: three epochs are a whole number of batches of three rows.
        let all_rows: Vec<Vec<u32>> = (0..per_epoch as u64).flat_map(|step| rows(&source.batch(step))).collect();
        let mut expected = store.read(0..store.len());
        expected.sort_unstable();
        let epochs: Vec<&[Vec<u32>]> = all_rows.chunks(per_epoch).collect();
        assert_eq!(epochs.len(), 3);
        for epoch in &epochs {
            let mut tokens = epoch.concat();
            tokens.sort_unstable();
            assert_eq!(tokens, expected);
        }
        assert_ne!(epochs[0], epochs[1]);
    }

    #[test]
    fn epochs_differ_in_offset_and_order() {
        let folder = tempfile::tempdir().unwrap();
        let source = BatchSource::new(counting_store(&folder, 101), 8, 1, 7);
        let epochs: Vec<Vec<Range<usize>>> = (0..20).map(|number| source.shuffled_epoch(number).windows).collect();
        let cuts: BTreeSet<Vec<usize>> = epochs
            .iter()
            .map(|windows| {
                let mut starts: Vec<usize> = windows.iter().map(|window| window.start).collect();
                assert!(!starts.is_sorted());
                starts.sort_unstable();
                starts
            })
            .collect();
        assert!(cuts.len() > 2, "{} cuts", cuts.len());
    }

    #[test]
    fn a_batch_depends_on_seed_and_step_alone() {
        let folder = tempfile::tempdir().unwrap();
        let store = counting_store(&folder, 101);
        let source = |seed| BatchSource::new(Arc::clone(&store), 8, 3, seed);
        let forward = source(7);
        let in_order: Vec<Batch> = (0..30).map(|step| forward.batch(step)).collect();
        let backward = source(7);
        let reversed: Vec<Batch> = (0..30).rev().map(|step| backward.batch(step)).collect();
        assert!(in_order.iter().eq(reversed.iter().rev()));
        assert_eq!(source(7).batch(29), in_order[29]);
        assert_ne!(source(8).batch(0), in_order[0]);
    }

    #[test]
    fn the_order_of_a_seed_does_not_change_between_releases() {
        // Made by this code with rand 0.10.4 and rand_chacha 0.10.0: a resumed run relies on it.
        let folder = tempfile::tempdir().unwrap();
        let source = BatchSource::new(counting_store(&folder, 33), 8, 5, 1);
        let starts: Vec<usize> = source.epoch(0).windows.iter().map(|window| window.start).collect();
        assert_eq!(starts, [6, 30, 22, 14, 0]);
    }

    #[test]
    fn short_rows_are_padded_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["abcd"]);
        let batch = Batch::read(&store, &[0..3, 3..5], 3);
        assert_eq!(batch.token_ids, [97, 98, 99, 100, 256, PAD_ID]);
        assert_eq!((batch.rows(), batch.seq_len(), batch.n_tokens()), (2, 3, 5));
        assert_eq!(batch.lens, [3, 2]);
    }

    #[test]
    fn micro_batches_are_the_rows_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let batch = BatchSource::new(counting_store(&folder, 50), 4, 5, 0).batch(3);
        let parts = batch.split(2);
        assert_eq!(parts.iter().map(Batch::rows).collect::<Vec<_>>(), [2, 2, 1]);
        assert_eq!(parts.iter().flat_map(rows).collect::<Vec<_>>(), rows(&batch));
        for rows_of_all in [5, 9] {
            assert_eq!(batch.split(rows_of_all), std::slice::from_ref(&batch));
        }
    }

    #[test]
    fn a_store_shorter_than_a_row_is_one_row() {
        let folder = tempfile::tempdir().unwrap();
        let store = counting_store(&folder, 6);
        let source = BatchSource::new(Arc::clone(&store), 16, 4, 0);
        assert_eq!(source.windows_per_epoch(), 1);
        assert_eq!(source.batch(0).lens, [6; 4]);
    }

    #[test]
    fn evaluation_covers_the_store_or_an_even_part_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let store = counting_store(&folder, 41);
        let all = eval_windows(&store, 4, usize::MAX);
        // The last token alone predicts nothing.
        assert!(all.iter().cloned().flatten().eq(0..40));
        assert_eq!(eval_windows(&store, 4, 41), all);
        assert_eq!(eval_windows(&store, 4, 12), [0..4, 12..16, 24..28]);
        assert_eq!(eval_windows(&store, 4, 8), [0..4, 20..24]);
        let single = |seq_len, max_tokens| {
            let windows = eval_windows(&store, seq_len, max_tokens);
            assert_eq!(windows.len(), 1);
            windows[0].clone()
        };
        assert_eq!(single(4, 1), 0..4);
        assert_eq!(single(64, 8), 0..41);
    }
}
