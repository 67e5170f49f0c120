//! Chooses the held-out text.
//!
//! Text is held out by whole documents, by the end of the corpus, or as files of its own; never by
//! lines taken here and there, whose neighbours the model would have seen.

use std::collections::{BTreeSet, HashSet};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{DataError, Document, Skipped, read_corpus};

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
}

impl Default for HeldOut {
    fn default() -> Self {
        Self::Documents { fraction: 0.05 }
    }
}

/// The two sides of a corpus.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// Documents to train on.
    pub train: Vec<Document>,
    /// Documents held out.
    pub valid: Vec<Document>,
    /// What was passed over while reading held-out files.
    pub skipped: Skipped,
    /// Training documents taken out because the held-out files hold the same text.
    pub n_equal: usize,
}

impl HeldOut {
    pub(super) fn validate(&self) -> Result<(), DataError> {
        let (key, fraction) = match self {
            Self::Documents { fraction } => ("held_out.documents.fraction", *fraction),
            Self::Tail { fraction } => ("held_out.tail.fraction", *fraction),
            Self::Paths { paths } if paths.is_empty() => {
                return Err(DataError::config("held_out.paths.paths", "[]", "at least one file, folder or pattern"));
            }
            Self::Paths { .. } => return Ok(()),
        };
        if fraction > 0.0 && fraction <= 0.5 {
            return Ok(());
        }
        Err(DataError::config(key, fraction, "a number above 0 and at most 0.5"))
    }

    /// Divides the documents; `text_field` is for held-out `.jsonl` files.
    ///
    /// # Errors
    /// When a side would be empty, or held-out files cannot be read.
    pub fn split(&self, documents: Vec<Document>, text_field: &str) -> Result<Split, DataError> {
        let split = match self {
            Self::Documents { fraction } => by_documents(documents, *fraction)?,
            Self::Tail { fraction } => by_tail(documents, *fraction)?,
            Self::Paths { paths } => by_paths(documents, paths, text_field)?,
        };
        assert!(!split.train.is_empty() && !split.valid.is_empty(), "each way to split checks its sides");
        Ok(split)
    }
}

fn by_documents(documents: Vec<Document>, fraction: f64) -> Result<Split, DataError> {
    let hashes: Vec<[u8; 32]> = documents.iter().map(text_hash).collect();
    let distinct: BTreeSet<[u8; 32]> = hashes.iter().copied().collect();
    let (Some(lowest), Some(highest)) = (distinct.first(), distinct.last()) else {
        return Err(DataError::Split { found: "the corpus is empty".to_owned(), fix: "add text" });
    };
    if lowest == highest {
        return Err(DataError::Split {
            found: format!("the corpus is one document ({})", documents[0].name),
            fix: "use `held_out = { tail = { fraction = 0.05 } }`, or add documents",
        });
    }
    // However few documents, each side gets one.
    let is_held_out = |hash: &[u8; 32]| hash == lowest || (hash != highest && unit_interval(hash) < fraction);
    let (valid, train): (Vec<_>, Vec<_>) = documents.into_iter().zip(hashes).partition(|(_, hash)| is_held_out(hash));
    let documents_of = |side: Vec<(Document, _)>| side.into_iter().map(|(document, _)| document).collect();
    Ok(Split { train: documents_of(train), valid: documents_of(valid), skipped: Skipped::default(), n_equal: 0 })
}

fn by_tail(documents: Vec<Document>, fraction: f64) -> Result<Split, DataError> {
    let total_bytes: usize = documents.iter().map(|document| document.text.len()).sum();
    let held_out_bytes = ((total_bytes as f64 * fraction).round() as usize).max(1);
    let mut to_train_bytes = total_bytes.saturating_sub(held_out_bytes);

    let (mut train, mut valid) = (Vec::new(), Vec::new());
    for document in documents {
        let len = document.text.len();
        if to_train_bytes >= len {
            train.push(document);
        } else if let Some(cut) = line_cut(&document.text, to_train_bytes) {
            let (head, tail) = document.text.split_at(cut);
            let part = |name: String, text: &[u8]| Document { name, text: text.to_vec(), ..document.clone() };
            train.push(part(format!("{}[..{cut}]", document.name), head));
            valid.push(part(format!("{}[{cut}..]", document.name), tail));
        } else {
            valid.push(document);
        }
        to_train_bytes = to_train_bytes.saturating_sub(len);
    }
    if train.is_empty() || valid.is_empty() {
        return Err(DataError::Split { found: format!("the corpus is {total_bytes} bytes"), fix: "add text" });
    }
    Ok(Split { train, valid, skipped: Skipped::default(), n_equal: 0 })
}

fn by_paths(documents: Vec<Document>, paths: &[String], text_field: &str) -> Result<Split, DataError> {
    let held_out = read_corpus(paths, text_field)?;
    let held_out_hashes: HashSet<[u8; 32]> = held_out.documents.iter().map(text_hash).collect();
    let n_before = documents.len();
    let train: Vec<Document> =
        documents.into_iter().filter(|document| !held_out_hashes.contains(&text_hash(document))).collect();
    if train.is_empty() {
        return Err(DataError::Split {
            found: "every training document is also in `held_out.paths.paths`".to_owned(),
            fix: "hold out other files, or add documents",
        });
    }
    let n_equal = n_before - train.len();
    Ok(Split { train, valid: held_out.documents, skipped: held_out.skipped, n_equal })
}

fn text_hash(document: &Document) -> [u8; 32] {
    Sha256::digest(&document.text).into()
}

/// The hash as a number in [0, 1).
fn unit_interval(hash: &[u8; 32]) -> f64 {
    let [a, b, c, d, e, f, ..] = *hash;
    let high_bits = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
    high_bits as f64 / (1u64 << 48) as f64
}

/// The line end nearest to byte `near`, else the next start of a character; both parts have text.
fn line_cut(text: &[u8], near: usize) -> Option<usize> {
    if near == 0 {
        return None;
    }
    let is_inside = |cut: &usize| *cut > 0 && *cut < text.len();
    let before = text[..near].iter().rposition(|&byte| byte == b'\n').map(|at| at + 1);
    let after = text[near..].iter().position(|&byte| byte == b'\n').map(|at| near + at + 1);
    let is_char_start = |at: &usize| text[*at] & 0b1100_0000 != 0b1000_0000;
    [before, after]
        .into_iter()
        .flatten()
        .filter(is_inside)
        .min_by_key(|cut| cut.abs_diff(near))
        .or_else(|| (near..text.len()).find(is_char_start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn documents(texts: &[&str]) -> Vec<Document> {
        texts.iter().enumerate().map(|(i, text)| Document::new(format!("d{i}"), text.as_bytes().to_vec())).collect()
    }

    fn numbered(n: usize) -> Vec<Document> {
        (0..n).map(|i| Document::new(format!("d{i}"), format!("text {i}").into_bytes())).collect()
    }

    fn texts(side: &[Document]) -> Vec<&str> {
        side.iter().map(|document| str::from_utf8(&document.text).unwrap()).collect()
    }

    fn split(documents: Vec<Document>, held_out: HeldOut) -> Result<Split, DataError> {
        held_out.split(documents, "text")
    }

    #[test]
    fn equal_documents_fall_on_one_side() {
        let twice: Vec<Document> = numbered(60).into_iter().chain(numbered(60)).collect();
        let Split { train, valid, .. } = split(twice, HeldOut::Documents { fraction: 0.3 }).unwrap();
        let train: HashSet<_> = texts(&train).into_iter().map(str::to_owned).collect();
        let held_out: HashSet<_> = texts(&valid).into_iter().map(str::to_owned).collect();
        assert!(train.is_disjoint(&held_out));
        assert_eq!(train.len() + held_out.len(), 60);
        assert_eq!(valid.len(), 2 * held_out.len());
    }

    #[test]
    fn the_fraction_is_about_kept_and_documents_keep_their_side() {
        let held_out = HeldOut::Documents { fraction: 0.2 };
        let few = split(numbered(1000), held_out.clone()).unwrap();
        // A binomial of 1000 draws at 0.2 has a standard deviation of 12.6: five of them.
        assert!((140..260).contains(&few.valid.len()), "{}", few.valid.len());
        let more = split(numbered(1500), held_out).unwrap();
        assert!(few.valid.iter().all(|document| more.valid.contains(document)));
    }

    #[test]
    fn two_documents_give_one_to_each_side() {
        for fraction in [1e-9, 0.5] {
            for i in 0..20 {
                let pair = documents(&[&format!("a{i}"), &format!("b{i}")]);
                let split = split(pair, HeldOut::Documents { fraction }).unwrap();
                assert_eq!((split.train.len(), split.valid.len()), (1, 1));
            }
        }
    }

    #[test]
    fn one_document_is_told_to_use_its_tail() {
        for single in [documents(&["a"]), documents(&["a", "a"])] {
            let error = split(single, HeldOut::default()).unwrap_err();
            assert!(matches!(error, DataError::Split { .. }));
            assert!(error.to_string().contains("tail"));
        }
    }

    #[test]
    fn the_tail_is_cut_at_the_nearest_line_end() {
        let one = documents(&["aaaa\nbbbb\ncccc\ndddd\n"]);
        let Split { train, valid, .. } = split(one, HeldOut::Tail { fraction: 0.3 }).unwrap();
        assert_eq!(texts(&train), ["aaaa\nbbbb\ncccc\n"]);
        assert_eq!(texts(&valid), ["dddd\n"]);
        assert_eq!((train[0].name.as_str(), valid[0].name.as_str()), ("d0[..15]", "d0[15..]"));
    }

    #[test]
    fn the_tail_takes_whole_documents_after_the_border() {
        let four = documents(&["aaaa\naaaa\n", "bbbb\nbbbb\n", "cccc\n", "dddd\n"]);
        let half = split(four.clone(), HeldOut::Tail { fraction: 0.5 }).unwrap();
        assert_eq!(texts(&half.train), ["aaaa\naaaa\n", "bbbb\n"]);
        assert_eq!(texts(&half.valid), ["bbbb\n", "cccc\n", "dddd\n"]);
        let third = split(four, HeldOut::Tail { fraction: 1.0 / 3.0 }).unwrap();
        assert_eq!(texts(&third.train), ["aaaa\naaaa\n", "bbbb\nbbbb\n"]);
        assert_eq!(texts(&third.valid), ["cccc\n", "dddd\n"]);
    }

    #[test]
    fn the_tail_of_one_long_line_starts_with_a_whole_character() {
        let line = documents(&["鯨鯨鯨鯨鯨"]);
        let Split { train, valid, .. } = split(line, HeldOut::Tail { fraction: 0.5 }).unwrap();
        assert_eq!(texts(&train), ["鯨鯨鯨"]);
        assert_eq!(texts(&valid), ["鯨鯨"]);
        assert!(matches!(split(documents(&["a"]), HeldOut::Tail { fraction: 0.5 }), Err(DataError::Split { .. })));
    }

    #[test]
    fn held_out_files_leave_the_training_side() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.txt"), "a").unwrap();
        std::fs::write(folder.path().join("b.txt"), "b").unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let all = read_corpus(&[path("")], "text").unwrap().documents;
        let held_out = HeldOut::Paths { paths: vec![path("b.txt")] };
        let split = held_out.split(all, "text").unwrap();
        assert_eq!((texts(&split.train), texts(&split.valid)), (vec!["a"], vec!["b"]));
        assert_eq!(split.n_equal, 1);
        assert!(matches!(held_out.split(documents(&["b"]), "text"), Err(DataError::Split { .. })));
    }
}
