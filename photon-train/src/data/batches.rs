//! Gives each training step its rows.

use std::{ops::Range, sync::Arc};

use rand::RngExt;
use serde::Serialize;

use super::{
    Batch, Mixture,
    permutation::{Permutation, epoch_rng},
    windows::{Windows, usable_offsets},
};

/// The training batches: a pure function of the mixture, the shapes of rows, the seed and the step.
///
/// Row `r` of a step is row `n = step * batch_size + r` of the run. The mixture says which source it comes from and
/// how many rows came from there before. Each epoch of a source cuts it into windows of `seq_len`, from an offset of its
/// own, and shuffles the windows of the whole source; no table is kept, so that its size does not matter.
///
/// Where rows change their shape along the run, steps and rows are counted anew: rows of another length are cut and
/// shuffled in another way, so what was seen at one length may be seen again at the next.
pub struct BatchSource {
    mixture: Arc<Mixture>,
    seed: u64,
    /// In the order of their first steps, the first of which is 0.
    stages: Vec<Stage>,
}

/// The shape of the rows from a step on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// The first step of this shape, counted from 0.
    pub from_step: u64,
    /// Tokens of a row, at most.
    pub seq_len: usize,
    /// Rows of a step.
    pub batch_size: usize,
}

/// Rows of one shape, and how each source is cut for them.
struct Stage {
    shape: RowShape,
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
        Self::staged(mixture, &[RowShape { from_step: 0, seq_len, batch_size }], seed)
    }

    /// Batches whose rows change their shape along the run.
    ///
    /// # Panics
    /// As [`Self::new`], and when the first shape is not from step 0 on or the steps do not rise.
    pub fn staged(mixture: Arc<Mixture>, shapes: &[RowShape], seed: u64) -> Self {
        assert_eq!(shapes.first().map(|shape| shape.from_step), Some(0), "a run begins with rows of some shape");
        assert!(shapes.is_sorted_by(|a, b| a.from_step < b.from_step), "{shapes:?}");
        let stage = |&shape: &RowShape| {
            let RowShape { seq_len, batch_size, .. } = shape;
            assert!(batch_size > 0, "a batch needs rows");
            let cut = |store: &super::TokenStore| {
                let align = store.alignment();
                assert!(
                    seq_len.is_multiple_of(align),
                    "rows of {seq_len} places for documents at multiples of {align}"
                );
                let (windows_per_epoch, offsets) = usable_offsets(store.n_places(), seq_len, align);
                Cut { windows_per_epoch, offsets }
            };
            Stage { shape, cuts: mixture.sources().iter().map(|source| cut(&source.store)).collect() }
        };
        let stages = shapes.iter().map(stage).collect();
        Self { mixture, seed, stages }
    }

    /// The shape of the rows of this step, counted from 0.
    pub fn shape(&self, step: u64) -> RowShape {
        self.stage(step).shape
    }

    fn stage(&self, step: u64) -> &Stage {
        let next = self.stages.partition_point(|stage| stage.shape.from_step <= step);
        &self.stages[next - 1]
    }

    /// The rows of this step, counted from 0.
    pub fn batch(&self, step: u64) -> Batch {
        let stage = self.stage(step);
        let RowShape { from_step, seq_len, batch_size } = stage.shape;
        let first = (step - from_step) * batch_size as u64;
        let rows = (first..first + batch_size as u64).map(|n| {
            let (source, before) = self.mixture.source_of_row(n);
            (&self.mixture.sources()[source].store, self.window(stage, source, before))
        });
        Batch::of_windows(rows, seq_len)
    }

    /// How far each source is gone through after so many steps.
    pub fn progress(&self, steps: u64) -> Vec<SourceProgress> {
        let source = |source: &super::MixtureSource| SourceProgress { name: source.name.clone(), rows: 0, epochs: 0.0 };
        let mut sources: Vec<SourceProgress> = self.mixture.sources().iter().map(source).collect();
        let ends = self.stages[1..].iter().map(|stage| stage.shape.from_step).chain([u64::MAX]);
        for (stage, end) in self.stages.iter().zip(ends) {
            let n_steps = steps.min(end).saturating_sub(stage.shape.from_step);
            let rows = self.mixture.rows_of_sources(n_steps * stage.shape.batch_size as u64);
            for ((source, cut), rows) in sources.iter_mut().zip(&stage.cuts).zip(rows) {
                source.rows += rows;
                source.epochs += rows as f64 / cut.windows_per_epoch as f64;
            }
        }
        sources
    }

    /// The window of row `n` of those of a stage that come from a source.
    fn window(&self, stage: &Stage, source: usize, n: u64) -> Range<usize> {
        let cut = &stage.cuts[source];
        let per_epoch = cut.windows_per_epoch as u64;
        let mut rng = epoch_rng(self.seed, source as u64, n / per_epoch);
        let offset = cut.offsets[rng.random_range(0..cut.offsets.len())];
        let order = Permutation::new(per_epoch, &mut rng);
        let windows = Windows::new(self.mixture.sources()[source].store.n_places(), stage.shape.seq_len, offset);
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

    fn windows_per_epoch(source: &BatchSource) -> usize {
        source.stages[0].cuts[0].windows_per_epoch
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
        let per_epoch = windows_per_epoch(&source);
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
        let per_epoch = windows_per_epoch(&source) as u64;
        let cuts: BTreeSet<Vec<usize>> = (0..20)
            .map(|epoch| {
                let windows =
                    (0..per_epoch).map(|index| source.window(&source.stages[0], 0, epoch * per_epoch + index));
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
        let starts: Vec<usize> = (0..10).map(|n| source.window(&source.stages[0], 0, n).start).collect();
        assert_eq!(starts, [14, 22, 30, 6, 0, 28, 0, 12, 20, 4]);
    }

    #[test]
    fn a_source_shorter_than_a_row_is_one_row() {
        let folder = tempfile::tempdir().unwrap();
        let source = BatchSource::new(counting(&folder, 6), 16, 4, 0);
        assert_eq!(windows_per_epoch(&source), 1);
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
        assert_eq!(second.epochs, 24.0 / source.stages[0].cuts[1].windows_per_epoch as f64);
    }

    #[test]
    fn rows_grow_at_the_given_steps() {
        let folder = tempfile::tempdir().unwrap();
        let mixture = counting(&folder, 101);
        let shapes = [(0, 4, 6), (5, 8, 3), (9, 16, 2)].map(|(from_step, seq_len, batch_size)| RowShape {
            from_step,
            seq_len,
            batch_size,
        });
        let source = BatchSource::staged(Arc::clone(&mixture), &shapes, 7);
        for step in 0..20 {
            // Every stage is as a run of its own.
            let shape = if step < 5 {
                shapes[0]
            } else if step < 9 {
                shapes[1]
            } else {
                shapes[2]
            };
            assert_eq!(source.shape(step), shape);
            let alone = BatchSource::new(Arc::clone(&mixture), shape.seq_len, shape.batch_size, 7);
            assert_eq!(source.batch(step), alone.batch(step - shape.from_step), "step {step}");
        }
        let rows: Vec<u64> = [0, 4, 5, 7, 9, 12].iter().map(|&steps| source.progress(steps)[0].rows).collect();
        assert_eq!(rows, [0, 24, 30, 36, 42, 48]);
        let passes: f64 = [(30, 4), (12, 8), (6, 16)]
            .map(|(rows, seq_len)| {
                rows as f64 / windows_per_epoch(&BatchSource::new(Arc::clone(&mixture), seq_len, 1, 7)) as f64
            })
            .iter()
            .sum();
        assert!((source.progress(12)[0].epochs - passes).abs() < 1e-12);
    }

    #[test]
    fn aligned_rows_begin_with_a_chunk() {
        let folder = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (1..40).map(|n| "x".repeat(n)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mixture = mixture_of(&folder, &[(1.0, &texts)]).map_stores(|store| store.aligned(4));
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
