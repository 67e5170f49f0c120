//! Gives each training step its rows.

use std::{ops::Range, sync::Arc};

use rand::RngExt;
use serde::Serialize;

use super::{
    Batch, Mixture,
    permutation::{Permutation, epoch_rng},
    windows::{Windows, usable_offsets},
};

/// The training batches: a pure function of the mixture, `seq_len`, `batch_size`, the seed and the step.
///
/// Row `r` of a step is row `n = step * batch_size + r` of the run. The mixture says which source it comes from and
/// how many rows came from there before. Each epoch of a source cuts it into windows of `seq_len`, from an offset of its
/// own, and shuffles the windows of the whole source; no table is kept, so that its size does not matter.
pub struct BatchSource {
    mixture: Arc<Mixture>,
    seq_len: usize,
    batch_size: usize,
    seed: u64,
    cuts: Vec<Cut>,
}

/// How a source may be cut.
struct Cut {
    windows_per_epoch: usize,
    offsets: Vec<usize>,
}

/// How far a run has gone through a source.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceProgress {
    /// The source.
    pub name: String,
    /// Rows that came from it.
    pub rows: u64,
    /// The same as passes over the source.
    pub epochs: f64,
}

impl BatchSource {
    /// Batches of `batch_size` rows of at most `seq_len` tokens.
    ///
    /// # Panics
    /// When a source or `seq_len` is below 2 tokens, `seq_len` is no multiple of the alignment, or `batch_size` is 0.
    pub fn new(mixture: Arc<Mixture>, seq_len: usize, batch_size: usize, seed: u64) -> Self {
        assert!(batch_size > 0, "a batch needs rows");
        let cut = |store: &super::TokenStore| {
            let align = store.alignment();
            assert!(seq_len.is_multiple_of(align), "rows of {seq_len} places for documents at multiples of {align}");
            let (windows_per_epoch, offsets) = usable_offsets(store.n_places(), seq_len, align);
            Cut { windows_per_epoch, offsets }
        };
        let cuts = mixture.sources().iter().map(|source| cut(&source.store)).collect();
        Self { mixture, seq_len, batch_size, seed, cuts }
    }

    /// Rows that make one pass over each source.
    pub fn windows_per_epoch(&self) -> Vec<usize> {
        self.cuts.iter().map(|cut| cut.windows_per_epoch).collect()
    }

    /// The rows of this step, counted from 0.
    pub fn batch(&self, step: u64) -> Batch {
        let first = step * self.batch_size as u64;
        let rows = (first..first + self.batch_size as u64).map(|n| {
            let (source, before) = self.mixture.source_of_row(n);
            (&self.mixture.sources()[source].store, self.window(source, before))
        });
        Batch::of_windows(rows, self.seq_len)
    }

    /// How far each source is gone through after so many steps.
    pub fn progress(&self, steps: u64) -> Vec<SourceProgress> {
        let rows = self.mixture.rows_of_sources(steps * self.batch_size as u64);
        let sources = self.mixture.sources().iter().zip(&self.cuts).zip(rows);
        let of = |((source, cut), rows): ((&super::MixtureSource, &Cut), u64)| SourceProgress {
            name: source.name.clone(),
            rows,
            epochs: rows as f64 / cut.windows_per_epoch as f64,
        };
        sources.map(of).collect()
    }

    /// The window of row `n` of those that come from a source.
    fn window(&self, source: usize, n: u64) -> Range<usize> {
        let cut = &self.cuts[source];
        let per_epoch = cut.windows_per_epoch as u64;
        let mut rng = epoch_rng(self.seed, source as u64, n / per_epoch);
        let offset = cut.offsets[rng.random_range(0..cut.offsets.len())];
        let order = Permutation::new(per_epoch, &mut rng);
        let windows = Windows::new(self.mixture.sources()[source].store.n_places(), self.seq_len, offset);
        windows.get(order.apply(n % per_epoch) as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{
        super::{BatchLoader, mixture::tests::mixture_of},
        *,
    };

    /// A source whose tokens are 0, 1, 2, ... (but 10 for 13, a CR) and the end-of-document token.
    fn counting(folder: &tempfile::TempDir, n_tokens: usize) -> Arc<Mixture> {
        assert!((2..=129).contains(&n_tokens));
        let text: String = (0..n_tokens as u8 - 1).map(char::from).collect();
        let mixture = mixture_of(folder, &[(1.0, &[&text])]);
        assert_eq!(mixture.len(), n_tokens);
        Arc::new(mixture)
    }

    fn rows(batch: &Batch) -> Vec<Vec<u32>> {
        let row = |(ids, &len): (&[u32], &usize)| ids[..len].to_vec();
        batch.token_ids.chunks(batch.seq_len()).zip(&batch.lens).map(row).collect()
    }

    #[test]
    fn the_batches_of_an_epoch_hold_the_source() {
        let folder = tempfile::tempdir().unwrap();
        let mixture = counting(&folder, 101);
        let source = BatchSource::new(Arc::clone(&mixture), 8, 3, 7);
        let per_epoch = source.windows_per_epoch()[0];
        // Batches straddle epochs: three epochs are a whole number of batches of three rows.
        let all_rows: Vec<Vec<u32>> = (0..per_epoch as u64).flat_map(|step| rows(&source.batch(step))).collect();
        let mut expected = mixture.sources()[0].store.read(0..101);
        expected.sort_unstable();
        let epochs: Vec<&[Vec<u32>]> = all_rows.chunks(per_epoch).collect();
        assert_eq!(epochs.len(), 3);
        for epoch in &epochs {
            let mut tokens = epoch.concat();
            tokens.sort_unstable();
            assert_eq!(tokens, expected);
        }
        assert_ne!(epochs[0], epochs[1]);
        assert_eq!(
            source.progress(per_epoch as u64)[0],
            SourceProgress { name: "s0".to_owned(), rows: 3 * per_epoch as u64, epochs: 3.0 }
        );
    }

    #[test]
    fn epochs_differ_in_offset_and_order() {
        let folder = tempfile::tempdir().unwrap();
        let source = BatchSource::new(counting(&folder, 101), 8, 1, 7);
        let per_epoch = source.windows_per_epoch()[0] as u64;
        let cuts: BTreeSet<Vec<usize>> = (0..20)
            .map(|epoch| {
                let windows = (0..per_epoch).map(|index| source.window(0, epoch * per_epoch + index));
                let mut starts: Vec<usize> = windows.map(|window| window.start).collect();
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
        let mixture = counting(&folder, 101);
        let source = |seed| BatchSource::new(Arc::clone(&mixture), 8, 3, seed);
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
        let source = BatchSource::new(counting(&folder, 33), 8, 5, 1);
        let starts: Vec<usize> = (0..10).map(|n| source.window(0, n).start).collect();
        assert_eq!(starts, [14, 22, 30, 6, 0, 28, 0, 12, 20, 4]);
    }

    #[test]
    fn a_source_shorter_than_a_row_is_one_row() {
        let folder = tempfile::tempdir().unwrap();
        let source = BatchSource::new(counting(&folder, 6), 16, 4, 0);
        assert_eq!(source.windows_per_epoch(), [1]);
        assert_eq!(source.batch(0).lens, [6; 4]);
    }

    #[test]
    fn rows_of_a_mixture_hold_their_source_and_all_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let texts = ["a".repeat(64), "b".repeat(30)];
        let mixture = mixture_of(&folder, &[(1.0, &[&texts[0]]), (3.0, &[&texts[1]])]);
        let source = BatchSource::new(Arc::new(mixture), 8, 4, 3);
        for step in 0..50 {
            let sources: Vec<bool> = rows(&source.batch(step)).iter().map(|row| row.contains(&98)).collect();
            assert_eq!(sources.iter().filter(|&&is_second| is_second).count(), 3, "step {step}");
        }
        let [first, second] = source.progress(8).try_into().unwrap();
        assert_eq!((first.rows, second.rows), (8, 24));
        assert_eq!(second.epochs, 24.0 / source.windows_per_epoch()[1] as f64);
    }

    #[test]
    fn aligned_rows_begin_with_a_chunk() {
        let folder = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (1..40).map(|n| "x".repeat(n)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mixture = mixture_of(&folder, &[(1.0, &texts)]).aligned(4);
        let source = BatchSource::new(Arc::new(mixture), 16, 2, 3);
        for step in 0..60 {
            let batch = source.batch(step);
            for chunk in batch.documents.chunks(4) {
                // One document, then padding.
                assert!(chunk.iter().all(|document| [chunk[0], super::super::NO_DOCUMENT].contains(document)));
                assert!(chunk.is_sorted());
            }
        }
    }

    #[test]
    fn batches_do_not_depend_on_the_number_of_loader_threads() {
        let folder = tempfile::tempdir().unwrap();
        let source = Arc::new(BatchSource::new(counting(&folder, 101), 8, 3, 7));
        for n_threads in 1..=4 {
            let mut loader = BatchLoader::start(&source, 5, n_threads);
            for step in 5..40 {
                assert_eq!(loader.next_batch(), source.batch(step), "{n_threads} threads, step {step}");
            }
            assert!(loader.wait_share() >= 0.0 && loader.wait_share() <= 1.0);
        }
    }
}
