//! The shards of a text as one sequence of token ids, and where its documents end.

use std::{ops::Range, path::Path, sync::Arc};

use photon_core::tokenizer::Tokenizer;
use rayon::prelude::*;

use super::{
    DataError,
    manifest::ShardEntry,
    places::{Places, Row},
    shard::Shard,
};

/// A memory-mapped sequence of token ids, in one or more files.
#[derive(Clone, Debug)]
pub struct TokenStore {
    shards: Vec<Arc<Shard>>,
    /// Tokens before each shard, and in all.
    token_starts: Vec<usize>,
    /// Documents that end before each shard, and in all.
    document_starts: Vec<usize>,
    places: Arc<Places>,
    has_document_mask: bool,
}

impl TokenStore {
    /// Opens the shards of `folder`, checking their headers and lengths.
    ///
    /// # Errors
    /// Names the shard that is missing, of another version or tokenizer, cut short, or not the one that was written.
    pub(super) fn open(folder: &Path, entries: &[ShardEntry], tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let open = |entry: &ShardEntry| {
            let shard = Shard::open(&folder.join(&entry.file), tokenizer)?;
            entry.check(&shard)?;
            Ok(Arc::new(shard))
        };
        Ok(Self::new(entries.iter().map(open).collect::<Result<_, DataError>>()?))
    }

    /// The stores one after the other.
    pub(super) fn chain<'a>(stores: impl IntoIterator<Item = &'a Self>) -> Self {
        Self::new(stores.into_iter().flat_map(|store| store.shards.clone()).collect())
    }

    fn new(shards: Vec<Arc<Shard>>) -> Self {
        let sums = |len: &dyn Fn(&Shard) -> usize| {
            let mut sums = vec![0];
            for shard in &shards {
                sums.push(sums[sums.len() - 1] + len(shard));
            }
            sums
        };
        Self {
            token_starts: sums(&Shard::len),
            document_starts: sums(&Shard::n_ends),
            shards,
            places: Arc::new(Places::Stream),
            has_document_mask: false,
        }
    }

    /// The same tokens in places where each document begins at a multiple of `align`; what that leaves is padding.
    ///
    /// # Panics
    /// When `align` is 0.
    pub fn aligned(self, align: usize) -> Self {
        let places = Places::aligned(align, self.document_ends());
        Self { places: Arc::new(places), ..self }
    }

    /// The same tokens in rows whose documents are kept apart by the model too.
    #[must_use]
    pub fn with_document_mask(self) -> Self {
        Self { has_document_mask: true, ..self }
    }

    /// Whether models keep the documents of a row apart.
    pub fn has_document_mask(&self) -> bool {
        self.has_document_mask
    }

    /// Reads all shards once to check that they are as they were written.
    ///
    /// # Errors
    /// Names the damaged shard and what to do.
    pub fn verify(&self) -> Result<(), DataError> {
        self.shards.par_iter().try_for_each(|shard| shard.verify())
    }

    /// Number of tokens, end-of-document tokens included.
    pub fn len(&self) -> usize {
        self.token_starts[self.shards.len()]
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of documents.
    pub fn n_documents(&self) -> usize {
        self.document_starts[self.shards.len()]
    }

    /// Number of files.
    pub fn n_shards(&self) -> usize {
        self.shards.len()
    }

    /// Bytes of the files.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.file_bytes()).sum()
    }

    /// Bytes of the documents' text: the denominator of bits per byte over the whole store.
    pub fn text_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.header().text_bytes).sum()
    }

    /// The hashes of the shards, in order.
    pub(super) fn hashes(&self) -> impl Iterator<Item = [u8; 32]> {
        self.shards.iter().map(|shard| shard.header().sha256)
    }

    /// The ids at these positions.
    ///
    /// # Panics
    /// When the range reaches past the end.
    pub fn read(&self, range: Range<usize>) -> Vec<u32> {
        let mut token_ids = Vec::with_capacity(range.len());
        self.read_into(range, &mut token_ids);
        token_ids
    }

    pub(super) fn read_into(&self, range: Range<usize>, token_ids: &mut Vec<u32>) {
        assert!(range.end <= self.len(), "tokens {range:?} of a store of {}", self.len());
        let mut shard = self.token_starts.partition_point(|&start| start <= range.start) - 1;
        let mut token = range.start;
        while token < range.end {
            let (start, end) = (self.token_starts[shard], self.token_starts[shard + 1].min(range.end));
            token_ids.extend(self.shards[shard].ids(token - start..end - start));
            token = end;
            shard += 1;
        }
    }

    /// Where document `index` ends, its end-of-document token included.
    ///
    /// # Panics
    /// When there is no such document.
    pub fn document_end(&self, index: usize) -> usize {
        let shard = self.document_starts.partition_point(|&start| start <= index) - 1;
        self.token_starts[shard] + self.shards[shard].end(index - self.document_starts[shard])
    }

    /// The document that a token belongs to.
    ///
    /// # Panics
    /// When there is no such token.
    pub fn document_at(&self, token: usize) -> usize {
        assert!(token < self.len(), "token {token} of a store of {}", self.len());
        let shard = self.token_starts.partition_point(|&start| start <= token) - 1;
        self.document_starts[shard] + self.shards[shard].n_ends_before(token - self.token_starts[shard])
    }

    fn document_ends(&self) -> impl Iterator<Item = usize> {
        self.shards
            .iter()
            .zip(&self.token_starts)
            .flat_map(|(shard, start)| (0..shard.n_ends()).map(move |index| start + shard.end(index)))
    }

    /// Number of places of a row that the tokens take, padding included.
    pub fn n_places(&self) -> usize {
        self.places.len(self)
    }

    /// Rows are cut at multiples of this.
    pub fn alignment(&self) -> usize {
        self.places.alignment()
    }

    /// What stands at these places.
    pub(super) fn row(&self, places: Range<usize>) -> Row {
        self.places.row(self, places)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{prepare::tokenise_texts, *};

    /// A store of the given texts, each a document, by bytes.
    pub(crate) fn store_of(folder: &tempfile::TempDir, texts: &[&str]) -> TokenStore {
        let lines: String = texts.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect();
        let path = folder.path().join("texts.jsonl");
        std::fs::write(&path, lines).unwrap();
        let paths = [path.display().to_string()];
        let tokenizer = photon_core::tokenizer::Tokenizer::bytes();
        tokenise_texts(&paths, "text", &tokenizer, &folder.path().join("tokens"), &|_| {}).unwrap().0
    }

    #[test]
    fn documents_come_back_each_with_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["ab", "鯨"]);
        assert_eq!(store.read(0..store.len()), [97, 98, 256, 0xE9, 0xAF, 0xA8, 256]);
        assert_eq!(store.read(1..3), [98, 256]);
        assert_eq!((store.n_documents(), store.text_bytes()), (2, 5));
        assert_eq!([0, 1].map(|index| store.document_end(index)), [3, 7]);
        assert_eq!([0, 2, 3, 6].map(|token| store.document_at(token)), [0, 0, 1, 1]);
    }

    #[test]
    fn a_chain_of_stores_is_one_sequence() {
        let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
        let stores =
            [store_of(&folders[0], &["ab"]), store_of(&folders[1], &["c", "d"]), store_of(&folders[2], &["e"])];
        let chain = TokenStore::chain(&stores);
        assert_eq!(chain.read(0..chain.len()), [97, 98, 256, 99, 256, 100, 256, 101, 256]);
        assert_eq!(chain.read(2..8), [256, 99, 256, 100, 256, 101]);
        assert_eq!((0..4).map(|index| chain.document_end(index)).collect::<Vec<_>>(), [3, 5, 7, 9]);
        assert_eq!([2, 3, 5, 7].map(|token| chain.document_at(token)), [0, 1, 2, 3]);
        assert_eq!((chain.n_documents(), chain.text_bytes(), chain.n_shards()), (4, 5, 3));
    }
}
