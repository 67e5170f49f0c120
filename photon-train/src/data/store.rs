//! Token ids in a file, read through memory mapping.
//!
//! The file is a header of 80 bytes, then the ids; every number is little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `PHOTOKEN` |
//! | 8..12 | format version |
//! | 12..16 | bytes per id: 2, or 4 when the vocabulary needs it |
//! | 16..24 | `vocab_size` |
//! | 24..32 | number of ids |
//! | 32..40 | number of documents |
//! | 40..48 | bytes of their text |
//! | 48..80 | SHA-256 of the tokenizer |
//!
//! Documents follow each other, each ended by the tokenizer's end-of-document token if it has one.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::Mmap;
use photon_core::atomic_file;
use photon_core::tokenizer::Tokenizer;
use rayon::prelude::*;

use super::{DataError, Document};

const MAGIC: [u8; 8] = *b"PHOTOKEN";
const HEADER_BYTES: usize = 80;
/// Text tokenised at once, in parallel.
const GROUP_BYTES: usize = 8 << 20;

/// Version of the file format; part of the name of cached stores.
pub(super) const FORMAT_VERSION: u32 = 1;

/// A memory-mapped sequence of token ids.
#[derive(Debug)]
pub struct TokenStore {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

#[derive(Clone, Debug, PartialEq)]
struct Header {
    id_bytes: u32,
    vocab_size: u64,
    n_tokens: u64,
    n_documents: u64,
    text_bytes: u64,
    fingerprint: [u8; 32],
}

impl Header {
    fn new(tokenizer: &Tokenizer) -> Self {
        let vocab_size = tokenizer.vocab_size() as u64;
        let fits_u16 = vocab_size <= 1 << 16;
        Self {
            id_bytes: if fits_u16 { 2 } else { 4 },
            vocab_size,
            n_tokens: 0,
            n_documents: 0,
            text_bytes: 0,
            fingerprint: fingerprint_bytes(tokenizer),
        }
    }

    fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let fields: [&[u8]; 8] = [
            &MAGIC,
            &FORMAT_VERSION.to_le_bytes(),
            &self.id_bytes.to_le_bytes(),
            &self.vocab_size.to_le_bytes(),
            &self.n_tokens.to_le_bytes(),
            &self.n_documents.to_le_bytes(),
            &self.text_bytes.to_le_bytes(),
            &self.fingerprint,
        ];
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(&fields.concat());
        bytes
    }

    /// The header and the two fields that say whether it is one: magic and version.
    fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> ([u8; 8], u32, Self) {
        let mut rest = bytes.as_slice();
        let magic = take(&mut rest);
        let version = u32::from_le_bytes(take(&mut rest));
        let header = Self {
            id_bytes: u32::from_le_bytes(take(&mut rest)),
            vocab_size: u64::from_le_bytes(take(&mut rest)),
            n_tokens: u64::from_le_bytes(take(&mut rest)),
            n_documents: u64::from_le_bytes(take(&mut rest)),
            text_bytes: u64::from_le_bytes(take(&mut rest)),
            fingerprint: take(&mut rest),
        };
        (magic, version, header)
    }

    fn file_bytes(&self) -> Option<u64> {
        self.n_tokens.checked_mul(u64::from(self.id_bytes))?.checked_add(HEADER_BYTES as u64)
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (field, after) = rest.split_first_chunk().expect("the fields add up to the header's bytes");
    *rest = after;
    *field
}

impl TokenStore {
    /// Opens a store made with `tokenizer`, and reads it once to check every id.
    ///
    /// # Errors
    /// When the file is no store, of another version, cut short, made with another tokenizer, or
    /// holds an id outside the vocabulary.
    pub fn open(path: &Path, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let read_error = |source| DataError::Read { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(read_error)?;
        let file_bytes = file.metadata().map_err(read_error)?.len();
        let wrong = |what, found: String, expected: String| {
            Err(DataError::Store { path: path.to_owned(), what, found, expected })
        };

        let mut bytes = [0; HEADER_BYTES];
        match file.read_exact(&mut bytes) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return wrong("length in bytes", file_bytes.to_string(), format!("at least {HEADER_BYTES}"));
            }
            Err(error) => return Err(read_error(error)),
        }
        let (magic, version, header) = Header::from_bytes(&bytes);
        let expected = Header::new(tokenizer);
        if magic != MAGIC {
            let printable = |magic: &[u8]| magic.escape_ascii().to_string();
            return wrong("start", printable(&magic), printable(&MAGIC));
        }
        if version != FORMAT_VERSION {
            return wrong("format version", version.to_string(), FORMAT_VERSION.to_string());
        }
        if header.fingerprint != expected.fingerprint {
            return wrong("tokenizer", hex(&header.fingerprint), tokenizer.fingerprint().to_owned());
        }
        if (header.id_bytes, header.vocab_size) != (expected.id_bytes, expected.vocab_size) {
            let describe = |header: &Header| format!("{} in {} bytes each", header.vocab_size, header.id_bytes);
            return wrong("vocabulary", describe(&header), describe(&expected));
        }
        if header.file_bytes() != Some(file_bytes) {
            let expected = format!("{HEADER_BYTES} and {} for each of {} tokens", header.id_bytes, header.n_tokens);
            return wrong("length in bytes", file_bytes.to_string(), expected);
        }

        #[expect(unsafe_code, reason = "stores are put in place whole by a rename and never written to again")]
        let map = unsafe { Mmap::map(&file) }.map_err(read_error)?;
        let store = Self { path: path.to_owned(), map, header };
        store.validate()?;
        Ok(store)
    }

    fn validate(&self) -> Result<(), DataError> {
        let vocab_size = self.header.vocab_size;
        match self.ids(0..self.len()).position(|id| u64::from(id) >= vocab_size) {
            None => Ok(()),
            Some(position) => Err(DataError::Store {
                path: self.path.clone(),
                what: "a token id",
                found: format!("{} (token {position})", self.read(position..position + 1)[0]),
                expected: format!("below the vocabulary's {vocab_size}"),
            }),
        }
    }

    /// Where the store lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of tokens, end-of-document tokens included.
    pub fn len(&self) -> usize {
        (self.map.len() - HEADER_BYTES) / self.header.id_bytes as usize
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of documents.
    pub fn n_documents(&self) -> u64 {
        self.header.n_documents
    }

    /// Bytes of the documents' text: the denominator of bits per byte over the whole store.
    pub fn text_bytes(&self) -> u64 {
        self.header.text_bytes
    }

    /// The ids at these positions.
    ///
    /// # Panics
    /// When the range reaches past the end.
    pub fn read(&self, range: Range<usize>) -> Vec<u32> {
        self.ids(range).collect()
    }

    fn ids(&self, range: Range<usize>) -> impl Iterator<Item = u32> {
        assert!(range.start <= range.end && range.end <= self.len(), "tokens {range:?} of a store of {}", self.len());
        let id_bytes = self.header.id_bytes as usize;
        let bytes = &self.map[HEADER_BYTES..][range.start * id_bytes..range.end * id_bytes];
        bytes.chunks_exact(id_bytes).map(|id| match *id {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            _ => unreachable!("ids have 2 or 4 bytes"),
        })
    }
}

/// Tokenises `documents` into a new store at `path`, in their order, on all threads.
///
/// The file appears whole or not at all. `progress` is told the bytes of text done and in all.
///
/// # Errors
/// When a text cannot be tokenised, or the file cannot be written.
pub fn build_store(
    documents: &[Document],
    tokenizer: &Tokenizer,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<TokenStore, DataError> {
    let write_error = |source| DataError::Write { path: path.to_owned(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = fs::create_dir_all(folder).and_then(|()| atomic_file::beside(path)).map_err(write_error)?;
    write_store(documents, tokenizer, &mut file, path, progress)?;
    atomic_file::finish(file, path).map_err(write_error)?;
    TokenStore::open(path, tokenizer)
}

/// `path` only names the file in errors.
fn write_store(
    documents: &[Document],
    tokenizer: &Tokenizer,
    file: impl Write + Seek,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), DataError> {
    let write_error = |source| DataError::Write { path: path.to_owned(), source };
    if tokenizer.needs_utf8() {
        documents.iter().try_for_each(Document::check_utf8)?;
    }
    let total_bytes = text_bytes(documents);
    let mut header = Header::new(tokenizer);
    let mut out = BufWriter::new(file);
    out.write_all(&header.to_bytes()).map_err(write_error)?;
    for group in groups(documents) {
        let encoded: Vec<Vec<u32>> = group
            .par_iter()
            .map(|document| tokenizer.encode(&document.text, &document.name))
            .collect::<Result<_, _>>()?;
        for id in encoded.into_iter().flat_map(|token_ids| token_ids.into_iter().chain(tokenizer.eos_id())) {
            let id_bytes = id.to_le_bytes();
            out.write_all(&id_bytes[..header.id_bytes as usize]).map_err(write_error)?;
            header.n_tokens += 1;
        }
        header.n_documents += group.len() as u64;
        header.text_bytes += text_bytes(group);
        progress(header.text_bytes, total_bytes);
    }
    // The header again, now that the tokens are counted.
    out.seek(SeekFrom::Start(0))
        .and_then(|_| out.write_all(&header.to_bytes()))
        .and_then(|()| out.flush())
        .map_err(write_error)
}

/// Runs of documents of some [`GROUP_BYTES`] together.
fn groups(documents: &[Document]) -> impl Iterator<Item = &[Document]> {
    let mut group_bytes = 0;
    documents.chunk_by(move |document, _| {
        group_bytes += document.text.len();
        let goes_on = group_bytes < GROUP_BYTES;
        if !goes_on {
            group_bytes = 0;
        }
        goes_on
    })
}

pub(super) fn text_bytes(documents: &[Document]) -> u64 {
    documents.iter().map(|document| document.text.len() as u64).sum()
}

fn fingerprint_bytes(tokenizer: &Tokenizer) -> [u8; 32] {
    let hex = tokenizer.fingerprint();
    std::array::from_fn(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("a fingerprint is hex"))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use photon_core::tokenizer::train_bpe;

    use super::*;

    /// A store of the given texts, by bytes.
    pub(crate) fn store_of(folder: &tempfile::TempDir, texts: &[&str]) -> TokenStore {
        build_store(&documents(texts), &Tokenizer::bytes(), &folder.path().join("t.tokens"), &mut |_, _| {}).unwrap()
    }

    fn documents(texts: &[&str]) -> Vec<Document> {
        texts.iter().map(|text| Document::new(*text, text.as_bytes().to_vec())).collect()
    }

    /// What opening says after the file's bytes were changed.
    fn message_after(change: impl FnOnce(&mut Vec<u8>)) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = store_of(&folder, &["abc"]).path().to_owned();
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        TokenStore::open(&path, &Tokenizer::bytes()).unwrap_err().to_string()
    }

    #[test]
    fn documents_come_back_each_with_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["ab", "鯨"]);
        assert_eq!(store.read(0..store.len()), [97, 98, 256, 0xE9, 0xAF, 0xA8, 256]);
        assert_eq!(store.read(1..3), [98, 256]);
        assert_eq!((store.n_documents(), store.text_bytes()), (2, 5));
        let again = TokenStore::open(store.path(), &Tokenizer::bytes()).unwrap();
        assert_eq!(again.header, store.header);
        assert_eq!(fs::metadata(store.path()).unwrap().len(), 80 + 2 * 7);
    }

    #[test]
    fn order_survives_the_threads_and_progress_ends_at_the_total() {
        let folder = tempfile::tempdir().unwrap();
        let texts: Vec<String> = (0..500).map(|i| format!("text {i}")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let mut last = (0, 0);
        let path = folder.path().join("t.tokens");
        let store =
            build_store(&documents(&texts), &Tokenizer::bytes(), &path, &mut |done, all| last = (done, all)).unwrap();
        let joined = texts.concat();
        assert_eq!(last, (joined.len() as u64, joined.len() as u64));
        let read: Vec<u8> = store.read(0..store.len()).iter().filter_map(|&id| u8::try_from(id).ok()).collect();
        assert_eq!(read, joined.as_bytes());
    }

    #[test]
    fn groups_hold_every_document_once() {
        let big = "x".repeat(GROUP_BYTES / 2 + 1);
        let documents = documents(&["a", "b", &big, &big, &big, "c"]);
        let sizes: Vec<usize> = groups(&documents).map(<[Document]>::len).collect();
        assert_eq!(sizes, [4, 2]);
    }

    #[test]
    fn a_large_vocabulary_takes_four_bytes() {
        let words: String = (0..70_000).map(|i| format!("\"w{i}\":{i},")).collect();
        let json = format!(
            r#"{{"version":"1.0","added_tokens":[],"pre_tokenizer":{{"type":"WhitespaceSplit"}},
            "model":{{"type":"WordLevel","vocab":{{{words}"?":70000}},"unk_token":"?"}}}}"#
        );
        let tokenizer = Tokenizer::from_bytes(json.as_bytes(), "words").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.tokens");
        let store = build_store(&documents(&["w69999 w1"]), &tokenizer, &path, &mut |_, _| {}).unwrap();
        assert_eq!(store.read(0..2), [69_999, 1]);
        assert_eq!(store.header.id_bytes, 4);
    }

    #[test]
    fn changed_files_are_refused() {
        assert!(message_after(|bytes| bytes.truncate(bytes.len() - 1)).contains("length in bytes is 87"));
        assert!(message_after(|bytes| bytes.push(0)).contains("length in bytes is 89"));
        assert!(message_after(|bytes| bytes.truncate(10)).contains("length in bytes is 10, expected at least 80"));
        assert!(message_after(|bytes| bytes.clear()).contains("length in bytes is 0"));
        assert!(message_after(|bytes| bytes[0] = b'X').contains("start is XHOTOKEN, expected PHOTOKEN"));
        assert!(message_after(|bytes| bytes[8] = 9).contains("format version is 9, expected 1"));
        assert!(message_after(|bytes| bytes[12] = 4).contains("vocabulary is 257 in 4 bytes each"));
        // A count whose bytes overflow is no count.
        assert!(message_after(|bytes| bytes[24..32].fill(0xFF)).contains("length in bytes is 88"));
        let message = message_after(|bytes| bytes[82..84].copy_from_slice(&257u16.to_le_bytes()));
        assert!(message.contains("a token id is 257 (token 1), expected below the vocabulary's 257"));
    }

    #[test]
    fn another_tokenizer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let store = store_of(&folder, &["abc"]);
        let other = train_bpe(["abc".to_owned()].into_iter(), 257).unwrap();
        let message = TokenStore::open(store.path(), &other).unwrap_err().to_string();
        assert!(message.contains(Tokenizer::bytes().fingerprint()), "{message}");
        assert!(message.contains(other.fingerprint()), "{message}");
    }

    #[test]
    fn text_that_is_not_utf8_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let bpe = train_bpe(["abc".to_owned()].into_iter(), 257).unwrap();
        let document = Document::new("moby.txt", b"abc\r\n\xff".to_vec());
        let error = build_store(&[document], &bpe, &folder.path().join("t"), &mut |_, _| {}).unwrap_err();
        assert!(matches!(error, DataError::NotUtf8 { ref name, offset: 5 } if name == "moby.txt"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    /// A disk with room for so many bytes.
    struct FullDisk(usize);

    impl Write for FullDisk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let left = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
            self.0 = left;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for FullDisk {
        fn seek(&mut self, _: SeekFrom) -> io::Result<u64> {
            Ok(0)
        }
    }

    #[test]
    fn a_full_disk_is_reported_with_the_path() {
        let documents = documents(&["abc"]);
        let write =
            |room| write_store(&documents, &Tokenizer::bytes(), FullDisk(room), Path::new("x.tokens"), &mut |_, _| {});
        write(80 + 8 + 80).unwrap();
        for room in [0, 80, 80 + 8] {
            let error = write(room).unwrap_err();
            assert!(matches!(&error, DataError::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull));
            assert!(error.to_string().contains("x.tokens") && error.to_string().contains("free space"));
        }
    }
}
