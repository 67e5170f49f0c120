//! A file that is one document, read in parts.

use std::{
    io::{ErrorKind, Read},
    ops::ControlFlow,
};

use photon_core::unix_lines::UnixLines;

use super::{
    DataError, TextFile,
    documents::{Notes, PART_BYTES, Part, Visit, part_end},
};

const READ_BYTES: usize = 256 << 10;

/// Reads `bytes`, the unpacked contents of `file`, as one document.
pub(super) fn read(file: &TextFile, mut bytes: impl Read, visit: &mut Visit) -> Result<Notes, DataError> {
    let mut lines = UnixLines::default();
    let mut utf8 = Utf8Check::default();
    let mut chunk = vec![0; READ_BYTES];
    let (mut text, mut offset, mut n_read) = (Vec::with_capacity(PART_BYTES + READ_BYTES), 0, 0);
    loop {
        let raw = match bytes.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => &chunk[..n],
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(DataError::unpack(file, n_read, error)),
        };
        if let Some(at) = raw.contains(&0).then(|| raw.iter().position(|&byte| byte == 0)).flatten() {
            return Err(DataError::Binary { path: file.path.clone(), offset: n_read + at as u64 });
        }
        n_read += raw.len() as u64;
        utf8.push(raw);
        lines.push(raw, &mut text);
        while text.len() > PART_BYTES {
            let end = part_end(&text);
            let part = Part { document: 0, offset, text: &text[..end], ends_document: false, hash: None };
            if visit(part) == ControlFlow::Break(()) {
                return Ok(Notes::default());
            }
            text.drain(..end);
            offset += end as u64;
        }
    }
    if !text.is_empty() {
        let _ = visit(Part { document: 0, offset, text: &text, ends_document: true, hash: None });
    }
    Ok(Notes { empty: u64::from(n_read == 0), not_utf8_at: utf8.finish() })
}

/// Finds the first byte that is not UTF-8, across pieces of a text.
#[derive(Default)]
struct Utf8Check {
    n_good: u64,
    /// The beginning of a character whose end is still to come.
    begun: Vec<u8>,
    bad_at: Option<u64>,
}

impl Utf8Check {
    fn push(&mut self, mut raw: &[u8]) {
        while self.bad_at.is_none() && !self.begun.is_empty() {
            let Some((&byte, rest)) = raw.split_first() else { return };
            raw = rest;
            let mut begun = std::mem::take(&mut self.begun);
            begun.push(byte);
            self.check(&begun);
        }
        if self.bad_at.is_none() {
            self.check(raw);
        }
    }

    fn check(&mut self, raw: &[u8]) {
        let Err(error) = str::from_utf8(raw) else {
            self.n_good += raw.len() as u64;
            return;
        };
        self.n_good += error.valid_up_to() as u64;
        match error.error_len() {
            Some(_) => self.bad_at = Some(self.n_good),
            None => self.begun = raw[error.valid_up_to()..].to_vec(),
        }
    }

    fn finish(self) -> Option<u64> {
        self.bad_at.or((!self.begun.is_empty()).then_some(self.n_good))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives out a text in small pieces, as a pipe may.
    struct Drops<'a>(&'a [u8], usize);

    impl Read for Drops<'_> {
        fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
            let n = self.1.min(self.0.len());
            out[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    fn file() -> TextFile {
        let path = std::path::PathBuf::from("x.txt");
        TextFile { format: super::super::format::Format::of(&path), path, is_named: true, bytes: 0, modified_ns: 0 }
    }

    fn read_in_drops(raw: &[u8], drop_bytes: usize) -> (Vec<u8>, Notes) {
        let mut text = Vec::new();
        let notes = read(&file(), Drops(raw, drop_bytes), &mut |part| {
            text.extend_from_slice(part.text);
            ControlFlow::Continue(())
        });
        (text, notes.unwrap())
    }

    #[test]
    fn line_ends_become_lf_wherever_a_read_ends() {
        for (raw, text) in [
            ("a\r\nb", "a\nb"),
            ("a\rb\r", "a\nb\n"),
            ("a\n\r\nb", "a\n\nb"),
            ("a\r\r\nb", "a\n\nb"),
            ("\n", "\n"),
            ("a\nb", "a\nb"),
        ] {
            for drop_bytes in 1..5 {
                assert_eq!(read_in_drops(raw.as_bytes(), drop_bytes).0, text.as_bytes(), "{raw:?} by {drop_bytes}");
            }
        }
    }

    #[test]
    fn the_first_byte_that_is_not_utf8_is_found_wherever_a_read_ends() {
        for (raw, bad_at) in [
            (&b"a\r\nb\xff"[..], Some(4)),
            (b"\xe9\xaf\xa8\xe9\xaf", Some(3)),
            (b"\xe9\xaf\xa8\xe9\xafx", Some(3)),
            ("a鯨é".as_bytes(), None),
            (b"ab\xc3(c\xff", Some(2)),
        ] {
            for drop_bytes in 1..6 {
                let notes = read_in_drops(raw, drop_bytes).1;
                assert_eq!(notes, Notes { empty: 0, not_utf8_at: bad_at }, "{raw:?} by {drop_bytes}");
            }
        }
    }

    #[test]
    fn a_nul_byte_is_no_text() {
        let error = read(&file(), Drops(b"abcd\0", 3), &mut |_| ControlFlow::Continue(())).unwrap_err();
        assert!(matches!(error, DataError::Binary { offset: 4, .. }), "{error}");
    }

    #[test]
    fn long_texts_come_in_parts() {
        let raw = "a line of some length\r\n".repeat(PART_BYTES / 8);
        let mut sizes = Vec::new();
        let mut text = Vec::new();
        read(&file(), raw.as_bytes(), &mut |part| {
            assert_eq!(part.offset, text.len() as u64);
            sizes.push((part.text.len(), part.ends_document));
            text.extend_from_slice(part.text);
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(text, raw.replace("\r\n", "\n").as_bytes());
        assert!(sizes.len() > 2 && sizes.iter().all(|(bytes, _)| *bytes <= PART_BYTES), "{sizes:?}");
        assert!(sizes.iter().rev().map(|(_, ends)| *ends).eq((0..sizes.len()).map(|i| i == 0)));
    }
}
