//! From a file to its documents, each in parts of bounded length.
//!
//! Line ends are made one: CRLF and a lone CR become LF. Nothing else of a text is changed, and it need not be UTF-8.
//! A text longer than [`PART_BYTES`] comes in parts, so that a file may be larger than memory; a line of a `.jsonl`
//! file and a row of a `.parquet` file are in memory whole for a moment.

use std::{io::BufReader, ops::ControlFlow};

use sha2::{Digest, Sha256};

use super::{
    DataError, TextFile,
    format::{self, Contents},
    json_lines, parquet, text,
};

/// A part is at most this long.
pub(super) const PART_BYTES: usize = 1 << 20;

/// SHA-256 of a document's text.
pub(super) type DocumentHash = [u8; 32];

/// A document's text, or a part of it.
#[derive(Debug)]
pub(super) struct Part<'a> {
    /// Number of the document within its file.
    pub(super) document: u64,
    /// Where the part begins within the document.
    pub(super) offset: u64,
    pub(super) text: &'a [u8],
    pub(super) ends_document: bool,
    /// Of the whole document; absent in files that are one document, which are not known whole.
    pub(super) hash: Option<DocumentHash>,
}

/// Takes parts in their order, or breaks off.
pub(super) type Visit<'a> = dyn FnMut(Part<'_>) -> ControlFlow<()> + 'a;

/// What was seen in a file beside its documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Notes {
    /// Lines and rows without text; 1 for a text file without any.
    pub(super) empty: u64,
    /// Offset in the unpacked file of the first byte that is not UTF-8; only of text files, others are errors.
    pub(super) not_utf8_at: Option<u64>,
}

/// Reads a file's documents from first to last.
///
/// # Errors
/// Names the file that is binary, malformed, cut short or without the field, and the line or row.
pub(super) fn read_parts(file: &TextFile, text_field: &str, visit: &mut Visit) -> Result<Notes, DataError> {
    let open = || format::open(&file.path, file.format.packed).map_err(|error| DataError::unpack(file, 0, error));
    match file.format.contents {
        Contents::Text => text::read(file, open()?, visit),
        Contents::JsonLines => json_lines::read(file, BufReader::new(open()?), text_field, visit),
        Contents::Parquet => parquet::read(file, text_field, visit),
    }
}

/// Visits a text that is in memory whole.
pub(super) fn visit_document(document: u64, text: &[u8], visit: &mut Visit) -> ControlFlow<()> {
    let hash = Some(Sha256::digest(text).into());
    let mut offset = 0;
    while text.len() - offset > PART_BYTES {
        let cut = offset + part_end(&text[offset..]);
        visit(Part { document, offset: offset as u64, text: &text[offset..cut], ends_document: false, hash })?;
        offset = cut;
    }
    visit(Part { document, offset: offset as u64, text: &text[offset..], ends_document: true, hash })
}

/// Where the first part of a text longer than [`PART_BYTES`] ends: in its second half, at a line end if there is one.
///
/// A lone line end before a letter is best: most tokenizers end a token there, so that the tokens are those of the
/// whole text.
pub(super) fn part_end(text: &[u8]) -> usize {
    let ends_line = |end: &usize| text[end - 1] == b'\n';
    let is_lone = |end: &usize| !text[end - 2].is_ascii_whitespace() && text[*end].is_ascii_alphabetic();
    let is_char_start = |end: &usize| text[*end] & 0b1100_0000 != 0b1000_0000;
    let ends = || (PART_BYTES / 2..=PART_BYTES).rev();
    ends()
        .find(|end| ends_line(end) && is_lone(end))
        .or_else(|| ends().find(ends_line))
        .or_else(|| ends().find(is_char_start))
        .unwrap_or(PART_BYTES)
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use flate2::write::GzEncoder;

    use super::{
        super::files::{list_files, tests::folder_of},
        *,
    };

    /// The documents of the files at these paths.
    pub(crate) fn documents_of(paths: &[String], text_field: &str) -> Result<Vec<Vec<u8>>, DataError> {
        let mut documents = Vec::new();
        for file in &list_files(paths)?.files {
            let mut text = Vec::new();
            read_parts(file, text_field, &mut |part| {
                assert_eq!(part.offset, text.len() as u64);
                text.extend_from_slice(part.text);
                if part.ends_document {
                    documents.push(std::mem::take(&mut text));
                }
                ControlFlow::Continue(())
            })?;
            assert!(text.is_empty(), "a document without an end");
        }
        Ok(documents)
    }

    #[test]
    fn a_part_ends_at_a_lone_line_end_before_a_letter() {
        let mut text = vec![b'x'; PART_BYTES + 10];
        assert_eq!(part_end(&text), PART_BYTES);
        text[PART_BYTES - 100] = b'\n';
        text[PART_BYTES - 99] = b'\n';
        assert_eq!(part_end(&text), PART_BYTES - 98);
        text[PART_BYTES - 1000] = b'\n';
        assert_eq!(part_end(&text), PART_BYTES - 999);
    }

    #[test]
    fn a_part_without_a_line_end_ends_with_a_whole_character() {
        let text = "鯨".repeat(PART_BYTES / 3 + 10);
        let end = part_end(text.as_bytes());
        assert!(text.is_char_boundary(end) && end <= PART_BYTES, "{end}");
    }

    #[test]
    fn parts_together_are_the_document() {
        let text = "one line\n".repeat(PART_BYTES / 4);
        let mut seen = Vec::new();
        let mut n_ends = 0;
        let _ = visit_document(3, text.as_bytes(), &mut |part| {
            assert_eq!((part.document, part.offset), (3, seen.len() as u64));
            assert!(part.text.len() <= PART_BYTES && !part.text.is_empty());
            seen.extend_from_slice(part.text);
            n_ends += usize::from(part.ends_document);
            ControlFlow::Continue(())
        });
        assert_eq!((seen.as_slice(), n_ends), (text.as_bytes(), 1));
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut packed = GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text).unwrap();
        packed.finish().unwrap()
    }

    fn read(name: &str, contents: &[u8]) -> Result<Vec<Vec<u8>>, DataError> {
        let folder = folder_of(&[(name, contents)]);
        documents_of(&[folder.path().join(name).display().to_string()], "text")
    }

    #[test]
    fn packed_files_are_read_as_what_they_hold() {
        let lines = b"{\"text\":\"one\"}\n{\"text\":\"two\"}\n";
        let zstd = |text: &[u8]| zstd::encode_all(text, 1).unwrap();
        assert_eq!(read("a.txt.gz", &gzip(b"one\r\ntwo")).unwrap(), [b"one\ntwo"]);
        assert_eq!(read("a.txt.zst", &zstd(b"one\r\ntwo")).unwrap(), [b"one\ntwo"]);
        assert_eq!(read("a.jsonl.gz", &gzip(lines)).unwrap(), [b"one", b"two"]);
        assert_eq!(read("a.jsonl.zst", &zstd(lines)).unwrap(), [b"one", b"two"]);
        // Several members one after the other, as parallel packers write them.
        assert_eq!(read("a.txt.gz", &[gzip(b"one "), gzip(b"two")].concat()).unwrap(), [b"one two"]);
        assert_eq!(read("a.txt.zst", &[zstd(b"one "), zstd(b"two")].concat()).unwrap(), [b"one two"]);
    }

    #[test]
    fn damaged_packed_files_are_named_with_how_far_they_go() {
        // Too random to be packed small, so that a part of the file is a part of the text.
        let text: Vec<u8> = (0..3_000_000u64).map(|i| b'a' + (super::super::permutation::mix(i) % 26) as u8).collect();
        for (name, packed) in [("a.txt.gz", gzip(&text)), ("a.txt.zst", zstd::encode_all(&text[..], 1).unwrap())] {
            let error = read(name, &packed[..packed.len() / 2]).unwrap_err();
            let DataError::Packed { n_bytes, .. } = error else { panic!("{error}") };
            assert!((1_000_000..2_000_000).contains(&n_bytes), "{name}: {n_bytes}");
            assert!(error.to_string().contains(name) && error.to_string().contains("fetch or pack the file again"));
            let error = read(name, b"this was never packed").unwrap_err();
            assert!(matches!(error, DataError::Packed { n_bytes: 0, .. }), "{name}: {error}");
        }
        let error = read("a.jsonl.gz", &gzip(b"{\"text\":\"one\"}\n")[..20]).unwrap_err();
        assert!(matches!(error, DataError::Packed { packed: "gzip", .. }), "{error}");
    }
}
