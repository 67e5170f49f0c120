//! Where tokens stand when they are laid into rows.
//!
//! Rows are windows over *places*. In a stream every token is a place. Where documents are kept apart, each begins at
//! a multiple of the alignment and the places up to there are padding:
//!
//! ```text
//! documents abc, de, fghij; alignment 4:   a b c - | d e - - | f g h i | j - - -
//! ```

use std::ops::Range;

use super::TokenStore;

/// The document of a place that holds no token.
pub const NO_DOCUMENT: u32 = u32::MAX;

/// Documents between two entries of the table.
const STRIDE: usize = 256;

/// How tokens are given places.
#[derive(Debug)]
pub(super) enum Places {
    /// In order, without a gap.
    Stream,
    /// Documents begin at multiples of `align`.
    Aligned {
        align: usize,
        /// Places before every [`STRIDE`]th document: the one thing that grows with the text, by 8 bytes for each.
        starts: Vec<usize>,
        n_places: usize,
    },
}

/// Token ids with the number of the document within the row for each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) token_ids: Vec<u32>,
    pub(super) documents: Vec<u32>,
}

impl Row {
    /// Where documents start, the one that goes on from before the row with the row itself.
    pub(super) fn starts(&self) -> Vec<usize> {
        let mut starts = vec![0];
        let mut document = self.documents.first();
        for (place, number) in self.documents.iter().enumerate().filter(|(_, number)| **number != NO_DOCUMENT) {
            if document != Some(number) {
                starts.push(place);
                document = Some(number);
            }
        }
        starts
    }

    /// Adds tokens of a document, and padding up to `places`.
    fn push(&mut self, store: &TokenStore, tokens: Range<usize>, document: u32, places: usize) {
        let end = self.token_ids.len() + places;
        store.read_into(tokens, &mut self.token_ids);
        self.documents.resize(self.token_ids.len(), document);
        self.token_ids.resize(end, super::PAD_ID);
        self.documents.resize(end, NO_DOCUMENT);
    }
}

impl Places {
    /// Places for documents that end at these tokens.
    pub(super) fn aligned(align: usize, ends: impl Iterator<Item = usize>) -> Self {
        assert!(align > 0, "an alignment of 0");
        let (mut starts, mut n_places, mut before) = (Vec::new(), 0, 0);
        for (document, end) in ends.enumerate() {
            if document % STRIDE == 0 {
                starts.push(n_places);
            }
            n_places += (end - before).next_multiple_of(align);
            before = end;
        }
        Self::Aligned { align, starts, n_places }
    }

    pub(super) fn len(&self, store: &TokenStore) -> usize {
        match self {
            Self::Stream => store.len(),
            Self::Aligned { n_places, .. } => *n_places,
        }
    }

    pub(super) fn alignment(&self) -> usize {
        match self {
            Self::Stream => 1,
            Self::Aligned { align, .. } => *align,
        }
    }

    /// What stands at these places.
    pub(super) fn row(&self, store: &TokenStore, places: Range<usize>) -> Row {
        assert!(places.end <= self.len(store), "places {places:?} of {}", self.len(store));
        let mut row = Row::default();
        if places.is_empty() {
            return row;
        }
        let (mut document, mut start) = self.document_at(store, places.start);
        for number in 0.. {
            let tokens = document_tokens(store, document);
            let end = start + tokens.len().next_multiple_of(self.alignment());
            let (from, to) = (start.max(places.start), end.min(places.end));
            let token_at = |place: usize| (tokens.start + (place - start)).min(tokens.end);
            row.push(store, token_at(from)..token_at(to), number, to - from);
            if end >= places.end {
                break;
            }
            (document, start) = (document + 1, end);
        }
        row
    }

    /// The document at a place, and where it starts.
    fn document_at(&self, store: &TokenStore, place: usize) -> (usize, usize) {
        let Self::Aligned { align, starts, .. } = self else {
            let document = store.document_at(place);
            return (document, document_tokens(store, document).start);
        };
        let entry = starts.partition_point(|&start| start <= place) - 1;
        let (mut document, mut start) = (entry * STRIDE, starts[entry]);
        loop {
            let end = start + document_tokens(store, document).len().next_multiple_of(*align);
            if place < end {
                return (document, start);
            }
            (document, start) = (document + 1, end);
        }
    }
}

fn document_tokens(store: &TokenStore, document: usize) -> Range<usize> {
    let start = document.checked_sub(1).map_or(0, |before| store.document_end(before));
    start..store.document_end(document)
}

#[cfg(test)]
mod tests {
    use super::{super::store::tests::store_of, *};

    const N: u32 = NO_DOCUMENT;
    const PAD: u32 = super::super::PAD_ID;

    #[test]
    fn a_stream_counts_the_documents_of_a_row() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["ab", "c", "de"]);
        assert_eq!(store.n_places(), 8);
        assert_eq!(store.row(0..8).documents, [0, 0, 0, 1, 1, 2, 2, 2]);
        let row = store.row(2..6);
        assert_eq!((row.token_ids, row.documents), (vec![256, 99, 256, 100], vec![0, 1, 1, 2]));
    }

    #[test]
    fn aligned_documents_begin_at_multiples_and_are_padded() {
        let folder = tempfile::tempdir().unwrap();
        // With their ends: 3, 2 and 5 tokens.
        let store = store_of(&folder, &["ab", "c", "defg"]).aligned(4);
        assert_eq!((store.n_places(), store.alignment()), (16, 4));
        let row = store.row(0..16);
        assert_eq!(row.token_ids, [97, 98, 256, PAD, 99, 256, PAD, PAD, 100, 101, 102, 103, 256, PAD, PAD, PAD]);
        assert_eq!(row.documents, [0, 0, 0, N, 1, 1, N, N, 2, 2, 2, 2, 2, N, N, N]);
        let later = store.row(4..12);
        assert_eq!(later.token_ids, row.token_ids[4..12]);
        assert_eq!(later.documents, [0, 0, N, N, 1, 1, 1, 1]);
        assert_eq!(store.row(12..16).documents, [0, N, N, N]);
    }

    #[test]
    fn every_row_of_many_documents_is_a_part_of_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (0..3 * STRIDE).map(|i| "x".repeat(1 + i * 7 % 11)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let store = store_of(&folder, &texts).aligned(4);
        let whole = store.row(0..store.n_places());
        assert!(whole.documents.iter().step_by(4).all(|&document| document != N), "a block of padding alone");
        for start in (0..store.n_places() - 64).step_by(52) {
            let row = store.row(start..start + 64);
            assert_eq!(row.token_ids, whole.token_ids[start..start + 64]);
            let numbers = |documents: &[u32]| -> Vec<Option<u32>> {
                let first = documents[0];
                documents.iter().map(|&document| (document != N).then(|| document - first)).collect()
            };
            assert_eq!(numbers(&row.documents), numbers(&whole.documents[start..start + 64]));
        }
    }
}
