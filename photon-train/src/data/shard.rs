//! A run of token ids in a file, read through memory mapping.
//!
//! The file is a header of 112 bytes, the ids, then the ends of the documents; every number is little-endian:
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `PHOTOKEN` |
//! | 8..12 | format version |
//! | 12..16 | bytes per id: 2, or 4 when the vocabulary needs it |
//! | 16..24 | `vocab_size` |
//! | 24..32 | number of ids |
//! | 32..40 | number of documents that end here |
//! | 40..48 | bytes of their text |
//! | 48..80 | SHA-256 of the tokenizer |
//! | 80..112 | SHA-256 of what follows the header |
//!
//! Documents follow each other, each ended by the tokenizer's end-of-document token if it has one. An end is the number
//! of ids in this shard before the next document, as eight bytes. A document may go on in the next shard.

use std::{
    fs::File,
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use memmap2::Mmap;
use photon_core::{hex, tokenizer::Tokenizer};
use sha2::{Digest, Sha256};

use super::DataError;

const MAGIC: [u8; 8] = *b"PHOTOKEN";
pub(super) const HEADER_BYTES: usize = 112;
const END_BYTES: usize = 8;

/// Version of the file format.
pub(super) const FORMAT_VERSION: u32 = 2;

/// What the header of a shard says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    id_bytes: u32,
    vocab_size: u64,
    pub(super) n_tokens: u64,
    pub(super) n_documents: u64,
    pub(super) text_bytes: u64,
    fingerprint: [u8; 32],
    pub(super) sha256: [u8; 32],
}

/// Bytes of an id in this tokenizer's shards.
pub(super) fn id_bytes(tokenizer: &Tokenizer) -> usize {
    if tokenizer.vocab_size() <= 1 << 16 { 2 } else { 4 }
}

impl Header {
    fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            id_bytes: id_bytes(tokenizer) as u32,
            vocab_size: tokenizer.vocab_size() as u64,
            n_tokens: 0,
            n_documents: 0,
            text_bytes: 0,
            fingerprint: hex::decode(tokenizer.fingerprint()).expect("a fingerprint is 64 digits"),
            sha256: [0; 32],
        }
    }

    fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let fields: [&[u8]; 9] = [
            &MAGIC,
            &FORMAT_VERSION.to_le_bytes(),
            &self.id_bytes.to_le_bytes(),
            &self.vocab_size.to_le_bytes(),
            &self.n_tokens.to_le_bytes(),
            &self.n_documents.to_le_bytes(),
            &self.text_bytes.to_le_bytes(),
            &self.fingerprint,
            &self.sha256,
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
            sha256: take(&mut rest),
        };
        (magic, version, header)
    }

    fn file_bytes(&self) -> Option<u64> {
        let ids = self.n_tokens.checked_mul(u64::from(self.id_bytes))?;
        let ends = self.n_documents.checked_mul(END_BYTES as u64)?;
        ids.checked_add(ends)?.checked_add(HEADER_BYTES as u64)
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (field, after) = rest.split_first_chunk().expect("the fields add up to the header's bytes");
    *rest = after;
    *field
}

/// A memory-mapped shard.
#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    map: Mmap,
    header: Header,
}

impl Shard {
    /// Opens a shard made with `tokenizer`, checking its header and length but not its contents.
    ///
    /// # Errors
    /// When the file is no shard, of another version, cut short, or made with another tokenizer.
    pub(super) fn open(path: &Path, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let read_error = |source| DataError::read(path, source);
        let mut file = File::open(path).map_err(read_error)?;
        let file_bytes = file.metadata().map_err(read_error)?.len();
        let wrong = |what, found: String, expected: String| {
            Err(DataError::Shard { path: path.to_owned(), what, found, expected })
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
            return wrong("tokenizer", hex::encode(&header.fingerprint), tokenizer.fingerprint().to_owned());
        }
        if (header.id_bytes, header.vocab_size) != (expected.id_bytes, expected.vocab_size) {
            let describe = |header: &Header| format!("{} in {} bytes each", header.vocab_size, header.id_bytes);
            return wrong("vocabulary", describe(&header), describe(&expected));
        }
        if header.file_bytes() != Some(file_bytes) {
            let Header { id_bytes, n_tokens, n_documents, .. } = header;
            let parts = format!("{HEADER_BYTES}, {id_bytes} for each of {n_tokens} tokens");
            return wrong(
                "length in bytes",
                file_bytes.to_string(),
                format!("{parts}, 8 for each of {n_documents} documents"),
            );
        }
        #[expect(unsafe_code, reason = "shards are put in place whole by a rename and never written to again")]
        let map = unsafe { Mmap::map(&file) }.map_err(read_error)?;
        Ok(Self { path: path.to_owned(), map, header })
    }

    /// Reads the shard once to check its hash and every number in it.
    ///
    /// # Errors
    /// When it is not as it was written.
    pub(super) fn verify(&self) -> Result<(), DataError> {
        let wrong = |what, found: String, expected: String| {
            Err(DataError::Shard { path: self.path.clone(), what, found, expected })
        };
        let sha256: [u8; 32] = Sha256::digest(&self.map[HEADER_BYTES..]).into();
        if sha256 != self.header.sha256 {
            return wrong("hash of the contents", hex::encode(&sha256), hex::encode(&self.header.sha256));
        }
        let vocab_size = self.header.vocab_size;
        if let Some(position) = self.ids(0..self.len()).position(|id| u64::from(id) >= vocab_size) {
            let id = self.ids(position..position + 1).next().unwrap_or_default();
            return wrong(
                "a token id",
                format!("{id} (token {position})"),
                format!("below the vocabulary's {vocab_size}"),
            );
        }
        Ok(())
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.header.n_tokens as usize
    }

    /// Number of documents that end here.
    pub(super) fn n_ends(&self) -> usize {
        self.header.n_documents as usize
    }

    /// Bytes of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// The ids at these positions.
    pub(super) fn ids(&self, range: Range<usize>) -> impl Iterator<Item = u32> {
        assert!(range.start <= range.end && range.end <= self.len(), "tokens {range:?} of a shard of {}", self.len());
        let id_bytes = self.header.id_bytes as usize;
        let bytes = &self.map[HEADER_BYTES..][range.start * id_bytes..range.end * id_bytes];
        bytes.chunks_exact(id_bytes).map(|id| match *id {
            [a, b] => u32::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
            _ => unreachable!("ids have 2 or 4 bytes"),
        })
    }

    /// Where document `index` of those that end here ends.
    pub(super) fn end(&self, index: usize) -> usize {
        let ends = &self.map[HEADER_BYTES + self.len() * self.header.id_bytes as usize..];
        let (end, _) = ends[index * END_BYTES..].split_first_chunk().expect("the index lies in the shard");
        u64::from_le_bytes(*end) as usize
    }

    /// How many documents end at or before this token.
    pub(super) fn n_ends_before(&self, token: usize) -> usize {
        let (mut low, mut high) = (0, self.n_ends());
        while low < high {
            let middle = low.midpoint(high);
            match self.end(middle) <= token {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }
}

/// A shard that is being written.
pub(super) struct ShardWriter<W: Write + Seek> {
    out: BufWriter<W>,
    header: Header,
    hash: Sha256,
    ends: Vec<u64>,
}

impl<W: Write + Seek> ShardWriter<W> {
    /// Begins a shard in an empty file.
    pub(super) fn new(file: W, tokenizer: &Tokenizer) -> io::Result<Self> {
        let header = Header::new(tokenizer);
        let mut out = BufWriter::with_capacity(1 << 18, file);
        out.write_all(&header.to_bytes())?;
        Ok(Self { out, header, hash: Sha256::new(), ends: Vec::new() })
    }

    /// Adds ids, as little-endian bytes, that stand for so many bytes of text.
    pub(super) fn push(&mut self, ids: &[u8], text_bytes: u64) -> io::Result<()> {
        self.hash.update(ids);
        self.out.write_all(ids)?;
        self.header.n_tokens += ids.len() as u64 / u64::from(self.header.id_bytes);
        self.header.text_bytes += text_bytes;
        Ok(())
    }

    /// Ends a document here.
    pub(super) fn end_document(&mut self) {
        self.ends.push(self.header.n_tokens);
        self.header.n_documents += 1;
    }

    pub(super) fn n_tokens(&self) -> u64 {
        self.header.n_tokens
    }

    /// Writes the ends and, now that all is known, the header again.
    pub(super) fn finish(mut self) -> io::Result<(W, Header)> {
        for end in &self.ends {
            let end = end.to_le_bytes();
            self.hash.update(end);
            self.out.write_all(&end)?;
        }
        self.header.sha256 = self.hash.finalize().into();
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&self.header.to_bytes())?;
        let file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok((file, self.header))
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Cursor};

    use photon_core::tokenizer::train_bpe;

    use super::*;

    /// A shard of "abc" and "d", by bytes.
    fn shard_bytes() -> Vec<u8> {
        let tokenizer = Tokenizer::bytes();
        let mut writer = ShardWriter::new(Cursor::new(Vec::new()), &tokenizer).unwrap();
        for ids in [&[97, 98, 99, 256][..], &[100, 256]] {
            let ids: Vec<u8> = ids.iter().flat_map(|id: &u16| id.to_le_bytes()).collect();
            writer.push(&ids, ids.len() as u64 / 2 - 1).unwrap();
            writer.end_document();
        }
        writer.finish().unwrap().0.into_inner()
    }

    fn open(bytes: &[u8]) -> Result<Shard, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.tokens");
        fs::write(&path, bytes).unwrap();
        Shard::open(&path, &Tokenizer::bytes())
    }

    /// What opening, else verifying says after the file's bytes were changed.
    fn message_after(change: impl FnOnce(&mut Vec<u8>)) -> String {
        let mut bytes = shard_bytes();
        change(&mut bytes);
        open(&bytes).and_then(|shard| shard.verify()).unwrap_err().to_string()
    }

    #[test]
    fn ids_and_ends_come_back() {
        let shard = open(&shard_bytes()).unwrap();
        shard.verify().unwrap();
        assert_eq!(shard.ids(0..6).collect::<Vec<_>>(), [97, 98, 99, 256, 100, 256]);
        assert_eq!((shard.len(), shard.n_ends(), shard.header().text_bytes), (6, 2, 4));
        assert_eq!([0, 1].map(|index| shard.end(index)), [4, 6]);
        assert_eq!([0, 3, 4, 5, 6].map(|token| shard.n_ends_before(token)), [0, 0, 1, 1, 2]);
        assert_eq!(shard_bytes().len(), 112 + 6 * 2 + 2 * 8);
    }

    #[test]
    fn changed_files_are_refused_by_name_and_with_what_to_do() {
        assert!(message_after(|bytes| bytes.truncate(bytes.len() - 1)).contains("length in bytes is 139"));
        assert!(message_after(|bytes| bytes.push(0)).contains("length in bytes is 141"));
        assert!(message_after(|bytes| bytes.truncate(10)).contains("length in bytes is 10, expected at least 112"));
        assert!(message_after(|bytes| bytes.clear()).contains("length in bytes is 0"));
        assert!(message_after(|bytes| bytes[0] = b'X').contains("start is XHOTOKEN, expected PHOTOKEN"));
        assert!(message_after(|bytes| bytes[8] = 9).contains("format version is 9, expected 2"));
        assert!(message_after(|bytes| bytes[12] = 4).contains("vocabulary is 257 in 4 bytes each"));
        // A count whose bytes overflow is no count.
        assert!(message_after(|bytes| bytes[24..32].fill(0xFF)).contains("length in bytes is 140"));
        let message = message_after(|bytes| bytes[115] ^= 1);
        assert!(message.contains("s.tokens: hash of the contents is"), "{message}");
        assert!(message.contains("delete the file, it is made again"), "{message}");
        // A hash that was made anew does not make an id of another vocabulary right.
        let message = message_after(|bytes| {
            bytes[114..116].copy_from_slice(&257u16.to_le_bytes());
            let sha256 = Sha256::digest(&bytes[112..]);
            bytes[80..112].copy_from_slice(&sha256);
        });
        assert!(message.contains("a token id is 257 (token 1), expected below the vocabulary's 257"), "{message}");
    }

    #[test]
    fn another_tokenizer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.tokens");
        fs::write(&path, shard_bytes()).unwrap();
        let other = train_bpe(["abc".to_owned()].into_iter(), 257).unwrap();
        let message = Shard::open(&path, &other).unwrap_err().to_string();
        assert!(message.contains(Tokenizer::bytes().fingerprint()), "{message}");
        assert!(message.contains(other.fingerprint()), "{message}");
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
    fn a_full_disk_is_noticed_at_every_byte() {
        let write = |room| -> io::Result<()> {
            let mut writer = ShardWriter::new(FullDisk(room), &Tokenizer::bytes())?;
            writer.push(&[97, 0, 0, 1], 1)?;
            writer.end_document();
            writer.finish().map(|_| ())
        };
        write(112 + 4 + 8 + 112).unwrap();
        for room in [0, 112, 112 + 4, 112 + 4 + 8] {
            assert_eq!(write(room).unwrap_err().kind(), io::ErrorKind::StorageFull, "{room}");
        }
    }
}
