//! Chooses the held-out text.
//!
//! Text is held out by whole documents, by the end of the corpus, or as files of its own; never by
//! lines taken here and there, whose neighbours the model would have seen.

use std::{collections::HashSet, ops::ControlFlow};

use serde::{Deserialize, Serialize};

use super::{
    DataError, TextFile,
    documents::{DocumentHash, Part, read_parts},
    scan::FileScan,
};

/// How the held-out text is chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum HeldOut {
    /// About this fraction of the documents, chosen by a hash of their text: equal documents fall
    /// on one side, and a document stays on its side when others are added.
    Documents {
        /// Above 0, at most 0.5.
        fraction: f64,
    },
    /// The end of the corpus, for one or few long documents. The border is moved to the nearest
    /// line end of the document it falls in.
    Tail {
        /// Fraction of the corpus's bytes, above 0, at most 0.5.
        fraction: f64,
    },
    /// Files of their own, given as in `DataConfig::paths`. Documents of the same text are taken
    /// out of the training side.
    Paths {
        /// Files, folders or patterns.
        paths: Vec<String>,
    },
    /// Nothing, for a source of a mixture whose other sources hold out text.
    Nothing,
}

impl Default for HeldOut {
    fn default() -> Self {
        Self::Documents { fraction: 0.05 }
    }
}

impl HeldOut {
    pub(super) fn validate(&self) -> Result<(), DataError> {
        let (key, fraction) = match self {
            Self::Documents { fraction } => ("held_out.documents.fraction", *fraction),
            Self::Tail { fraction } => ("held_out.tail.fraction", *fraction),
            Self::Paths { paths } if paths.is_empty() => {
                return Err(DataError::config("held_out.paths.paths", "[]", "at least one file, folder or pattern"));
            }
            Self::Paths { .. } | Self::Nothing => return Ok(()),
        };
        if fraction > 0.0 && fraction <= 0.5 {
            return Ok(());
        }
        Err(DataError::config(key, fraction, "a number above 0 and at most 0.5"))
    }
}

/// A side of the split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// To train on.
    Train,
    /// Held out.
    Valid,
}

/// A place in the corpus: text before it comes earlier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Position {
    /// Index in the list of files.
    pub(super) file: u64,
    /// Document within the file.
    pub(super) document: u64,
    /// Byte within the document's text.
    pub(super) offset: u64,
}

/// Which text goes where, decided before the text comes.
#[derive(Debug)]
pub(super) enum Rule {
    /// Hashes from `lowest` up to this share of all hashes are held out; `highest` never is.
    Documents { fraction: f64, lowest: DocumentHash, highest: DocumentHash },
    /// What comes at or after this place is held out.
    Tail(Position),
    /// Files from `first_file` on are held out, and documents before that equal theirs left out.
    Paths { first_file: u64, held_out: HashSet<DocumentHash> },
    /// Nothing is held out.
    AllTrain,
}

impl Rule {
    /// The rule for `files`, of which those from `first_held_out` on are given as held out.
    ///
    /// # Errors
    /// When a side would be empty, or a file cannot be read.
    pub(super) fn new(
        held_out: &HeldOut,
        files: &[TextFile],
        scans: &[FileScan],
        first_held_out: usize,
        text_field: &str,
    ) -> Result<Self, DataError> {
        if scans[..first_held_out].iter().all(|scan| scan.n_documents == 0) {
            return Err(DataError::Split { found: "the corpus is empty".to_owned(), fix: "add text" });
        }
        match held_out {
            HeldOut::Documents { fraction } => Self::by_documents(files, scans, *fraction),
            HeldOut::Tail { fraction } => Self::by_tail(files, scans, *fraction, text_field),
            HeldOut::Paths { .. } => {
                let held_out = hashes(&files[first_held_out..], &scans[first_held_out..], text_field)?;
                Ok(Self::Paths { first_file: first_held_out as u64, held_out })
            }
            HeldOut::Nothing => Ok(Self::AllTrain),
        }
    }

    fn by_documents(files: &[TextFile], scans: &[FileScan], fraction: f64) -> Result<Self, DataError> {
        let with_text = || scans.iter().filter(|scan| scan.n_documents > 0);
        let lowest = with_text().map(|scan| scan.lowest).min().unwrap_or_default();
        let highest = with_text().map(|scan| scan.highest).max().unwrap_or_default();
        if lowest != highest {
            return Ok(Self::Documents { fraction, lowest, highest });
        }
        let first = files.iter().zip(scans).find(|(_, scan)| scan.n_documents > 0);
        let name = first.map(|(file, _)| file.path.display().to_string()).unwrap_or_default();
        Err(DataError::Split {
            found: format!("the corpus is one document ({name})"),
            fix: "use `held_out = { tail = { fraction = 0.05 } }`, or add documents",
        })
    }

    fn by_tail(files: &[TextFile], scans: &[FileScan], fraction: f64, text_field: &str) -> Result<Self, DataError> {
        let total_bytes: u64 = scans.iter().map(|scan| scan.text_bytes).sum();
        let held_out_bytes = ((total_bytes as f64 * fraction).round() as u64).max(1);
        let to_train_bytes = total_bytes.saturating_sub(held_out_bytes);
        let mut before = 0;
        for (index, (file, scan)) in files.iter().zip(scans).enumerate() {
            if before + scan.text_bytes <= to_train_bytes {
                before += scan.text_bytes;
                continue;
            }
            let border = find_border(file, text_field, to_train_bytes - before)?;
            let cut = Position { file: index as u64, ..border };
            let is_first = before == 0 && (border.document, border.offset) == (0, 0);
            if !is_first {
                return Ok(Self::Tail(cut));
            }
            break;
        }
        Err(DataError::Split { found: format!("the corpus is {total_bytes} bytes"), fix: "add text" })
    }

    /// The side of a document's part; none for a training document that is also held out. `hash` is the document's.
    pub(super) fn side(&self, position: Position, hash: &DocumentHash) -> Option<Side> {
        let held_out = match self {
            Self::Documents { fraction, lowest, highest } => {
                // However few documents, each side gets one.
                hash == lowest || (hash != highest && unit_interval(hash) < *fraction)
            }
            Self::Tail(cut) => position >= *cut,
            Self::Paths { first_file, .. } if position.file >= *first_file => true,
            Self::Paths { held_out, .. } if held_out.contains(hash) => return None,
            Self::Paths { .. } | Self::AllTrain => false,
        };
        Some(if held_out { Side::Valid } else { Side::Train })
    }

    /// How much of this part belongs to a document that the border ends, the rest being the other side's.
    pub(super) fn cut_within(&self, position: Position, len: usize) -> Option<usize> {
        match self {
            Self::Tail(cut) if (cut.file, cut.document) == (position.file, position.document) => {
                let at = cut.offset.checked_sub(position.offset)? as usize;
                (at > 0 && at <= len).then_some(at)
            }
            _ => None,
        }
    }
}

/// The hashes of all documents of these files.
fn hashes(files: &[TextFile], scans: &[FileScan], text_field: &str) -> Result<HashSet<DocumentHash>, DataError> {
    let mut hashes = HashSet::new();
    for (file, scan) in files.iter().zip(scans).filter(|(_, scan)| scan.n_documents > 0) {
        if scan.n_documents == 1 {
            hashes.insert(scan.lowest);
            continue;
        }
        read_parts(file, text_field, &mut |part| {
            hashes.extend(part.hash);
            ControlFlow::Continue(())
        })?;
    }
    Ok(hashes)
}

/// The hash as a number in [0, 1).
fn unit_interval(hash: &DocumentHash) -> f64 {
    let [a, b, c, d, e, f, ..] = *hash;
    let high_bits = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
    high_bits as f64 / (1u64 << 48) as f64
}

/// Where to cut a file near this byte of its text: at a line end of the document there, or before the document where
/// it cannot be cut.
fn find_border(file: &TextFile, text_field: &str, near: u64) -> Result<Position, DataError> {
    let mut border = None;
    let mut before_document = 0;
    let mut search = CutSearch::new(near);
    read_parts(file, text_field, &mut |part| {
        search.push(&part);
        if !part.ends_document {
            return ControlFlow::Continue(());
        }
        let len = part.offset + part.text.len() as u64;
        if before_document + len > near {
            border = Some(Position { file: 0, document: part.document, offset: search.best(len).unwrap_or(0) });
            return ControlFlow::Break(());
        }
        before_document += len;
        search = CutSearch::new(near - before_document);
        ControlFlow::Continue(())
    })?;
    border.ok_or_else(|| DataError::Changed { path: file.path.clone() })
}

/// Looks for the line end nearest to byte `near` of a document, else the next start of a character.
struct CutSearch {
    near: u64,
    before: Option<u64>,
    after: Option<u64>,
    char_start: Option<u64>,
}

impl CutSearch {
    fn new(near: u64) -> Self {
        Self { near, before: None, after: None, char_start: None }
    }

    fn push(&mut self, part: &Part) {
        let near = usize::try_from(self.near.saturating_sub(part.offset)).unwrap_or(usize::MAX).min(part.text.len());
        let (head, rest) = part.text.split_at(near);
        let of_rest = part.offset + near as u64;
        if let Some(at) = head.iter().rposition(|&byte| byte == b'\n') {
            self.before = Some(part.offset + at as u64 + 1);
        }
        if self.after.is_none() {
            self.after = rest.iter().position(|&byte| byte == b'\n').map(|at| of_rest + at as u64 + 1);
        }
        if self.char_start.is_none() {
            let is_char_start = |byte: &u8| byte & 0b1100_0000 != 0b1000_0000;
            self.char_start = rest.iter().position(is_char_start).map(|at| of_rest + at as u64);
        }
    }

    /// The cut of a document of `len` bytes; both parts have text.
    fn best(&self, len: u64) -> Option<u64> {
        if self.near == 0 {
            return None;
        }
        let is_inside = |cut: &u64| *cut > 0 && *cut < len;
        let line_ends = [self.before, self.after].into_iter().flatten().filter(is_inside);
        line_ends.min_by_key(|cut| cut.abs_diff(self.near)).or(self.char_start)
    }
}
