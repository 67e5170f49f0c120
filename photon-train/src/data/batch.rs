//! Rows of token ids, with what is known of each token.

use std::ops::Range;

use photon_core::documents::Documents;

use super::{NO_DOCUMENT, TokenStore, windows::Windows};

/// Fills places without a token; it may be a token of the vocabulary, so [`Batch::is_real`] decides.
pub const PAD_ID: u32 = 0;

/// Rows of token ids, padded to one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// `rows * seq_len` ids, row after row.
    pub token_ids: Vec<u32>,
    /// Places of each row up to its last token.
    pub lens: Vec<usize>,
    /// Number of the document within the row for each of `token_ids`, or [`NO_DOCUMENT`] for padding.
    pub documents: Vec<u32>,
    /// What the model keeps apart: the documents of rows with a document mask, and otherwise rows alone.
    pub apart: Documents,
    seq_len: usize,
}

impl Batch {
    /// Reads one row per window of places.
    ///
    /// # Panics
    /// When a window is longer than `seq_len` or reaches past the store.
    pub fn read(store: &TokenStore, windows: &[Range<usize>], seq_len: usize) -> Self {
        Self::of_windows(windows.iter().map(|window| (store, window.clone())), seq_len)
    }

    /// Reads one row per window, of any stores.
    pub(super) fn of_windows<'a>(
        windows: impl IntoIterator<Item = (&'a TokenStore, Range<usize>)>,
        seq_len: usize,
    ) -> Self {
        let (mut token_ids, mut lens, mut documents, mut starts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (store, window) in windows {
            assert!(window.len() <= seq_len, "a window of {} places in a row of {seq_len}", window.len());
            let row = store.row(window);
            let is_real = |&document: &u32| document != NO_DOCUMENT;
            lens.push(row.documents.iter().rposition(is_real).map_or(0, |last| last + 1));
            starts.push(if store.has_document_mask() { row.starts() } else { vec![0] });
            token_ids.extend(row.token_ids);
            documents.extend(row.documents);
            token_ids.resize(lens.len() * seq_len, PAD_ID);
            documents.resize(lens.len() * seq_len, NO_DOCUMENT);
        }
        Self { token_ids, lens, documents, apart: Documents::new(starts), seq_len }
    }

    /// Rows without padding, each of one document.
    ///
    /// # Panics
    /// When the ids do not fill whole rows.
    pub fn full(token_ids: Vec<u32>, seq_len: usize) -> Self {
        assert!(token_ids.len().is_multiple_of(seq_len), "{} ids in rows of {seq_len}", token_ids.len());
        let n_rows = token_ids.len() / seq_len;
        Self {
            lens: vec![seq_len; n_rows],
            documents: vec![0; token_ids.len()],
            apart: Documents::whole_rows(n_rows),
            token_ids,
            seq_len,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.lens.len()
    }

    /// Length that rows are padded to.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Whether each of `token_ids` is a token; the others are padding and no target.
    pub fn is_real(&self) -> Vec<bool> {
        let place = |(place, &document): (usize, &u32)| {
            document != NO_DOCUMENT && place % self.seq_len < self.lens[place / self.seq_len]
        };
        self.documents.iter().enumerate().map(place).collect()
    }

    /// Real tokens, padding left out.
    pub fn n_tokens(&self) -> usize {
        self.is_real().into_iter().filter(|&is_real| is_real).count()
    }

    /// Some of the rows.
    ///
    /// # Panics
    /// When there are fewer rows.
    pub fn part(&self, rows: Range<usize>) -> Self {
        let places = rows.start * self.seq_len..rows.end * self.seq_len;
        Self {
            token_ids: self.token_ids[places.clone()].to_vec(),
            lens: self.lens[rows.clone()].to_vec(),
            apart: self.apart.rows(rows),
            documents: self.documents[places].to_vec(),
            seq_len: self.seq_len,
        }
    }

    /// The same rows in batches of `micro_batch_rows`, the last of which may be smaller.
    ///
    /// # Panics
    /// When `micro_batch_rows` is 0.
    pub fn split(&self, micro_batch_rows: usize) -> Vec<Self> {
        let firsts = (0..self.rows()).step_by(micro_batch_rows);
        firsts.map(|first| self.part(first..(first + micro_batch_rows).min(self.rows()))).collect()
    }
}

/// Windows for evaluation: side by side from the start to the end of the store or, when that is more
/// than `max_tokens`, evenly spaced ones of them.
///
/// A last window of one place is left out; there is always at least one window.
///
/// # Panics
/// When the store or `seq_len` is below 2 tokens.
pub fn eval_windows(store: &TokenStore, seq_len: usize, max_tokens: usize) -> Vec<Range<usize>> {
    let all = Windows::new(store.n_places(), seq_len, 0);
    let n_kept = match store.n_places() <= max_tokens {
        true => all.len(),
        false => (max_tokens / seq_len).clamp(1, all.len()),
    };
    (0..n_kept).map(|i| all.get(i * all.len() / n_kept)).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::store::tests::store_of, *};

    #[test]
    fn short_rows_are_padded_and_counted() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["abcd"]);
        let batch = Batch::read(&store, &[0..3, 3..5], 3);
        assert_eq!(batch.token_ids, [97, 98, 99, 100, 256, PAD_ID]);
        assert_eq!(batch.documents, [0, 0, 0, 0, 0, NO_DOCUMENT]);
        assert_eq!((batch.rows(), batch.seq_len(), batch.n_tokens()), (2, 3, 5));
        assert_eq!(batch.lens, [3, 2]);
        assert_eq!(batch.is_real(), [true, true, true, true, true, false]);
    }

    #[test]
    fn padding_between_documents_is_not_real() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["ab", "c"]).aligned(4);
        let batch = Batch::read(&store, std::slice::from_ref(&(0..8)), 8);
        assert_eq!(batch.lens, [6]);
        assert_eq!(batch.is_real(), [true, true, true, false, true, true, false, false]);
        assert_eq!(batch.n_tokens(), 5);
    }

    #[test]
    fn documents_are_apart_where_the_store_has_a_mask() {
        let folder = tempfile::tempdir().unwrap();
        // With their ends: 3, 2 and 10 tokens.
        let stream = store_of(&folder, &["ab", "c", "defghijkl"]);
        let apart = |store: &TokenStore, windows: &[Range<usize>], seq_len| Batch::read(store, windows, seq_len).apart;
        assert_eq!(apart(&stream, &[0..8, 4..10], 8), Documents::whole_rows(2));
        let masked = stream.clone().with_document_mask();
        assert_eq!(apart(&masked, &[0..8, 4..10], 8), Documents::new(vec![vec![0, 3, 5], vec![0, 1]]));
        // Padding goes with the document before it; one that goes on from the row before starts with the row.
        let aligned = stream.aligned(4).with_document_mask();
        let batch = Batch::read(&aligned, &[0..12, 4..16, 16..20], 12);
        assert_eq!(batch.apart, Documents::new(vec![vec![0, 4, 8], vec![0, 4], vec![0]]));
        let parts = batch.split(2);
        assert_eq!(parts[0].apart, Documents::new(vec![vec![0, 4, 8], vec![0, 4]]));
        assert_eq!(parts[1].apart, Documents::whole_rows(1));
    }

    #[test]
    fn micro_batches_are_the_rows_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["abcdefgh", "ijklmnopq"]).with_document_mask();
        let windows: Vec<Range<usize>> = (0..5).map(|i| 3 * i..3 * i + 4).collect();
        let batch = Batch::read(&store, &windows, 4);
        let parts = batch.split(2);
        assert_eq!(parts.iter().map(Batch::rows).collect::<Vec<_>>(), [2, 2, 1]);
        for (part, windows) in parts.iter().zip(windows.chunks(2)) {
            assert_eq!(*part, Batch::read(&store, windows, 4));
        }
        for rows_of_all in [5, 9] {
            assert_eq!(batch.split(rows_of_all), std::slice::from_ref(&batch));
        }
    }

    #[test]
    fn evaluation_covers_the_store_or_an_even_part_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["x".repeat(40).as_str()]);
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
