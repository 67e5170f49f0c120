//! Trains a tokenizer on a corpus, for the `tokenizer` command.

use std::path::Path;

use photon_core::tokenizer::{Tokenizer, train_bpe};

use super::{DataError, Document, Skipped, read_corpus, store::text_bytes};

/// What a tokenizer was trained on.
#[derive(Clone, Debug)]
pub struct TokenizerSummary {
    /// The tokenizer, also written to the file.
    pub tokenizer: Tokenizer,
    /// Documents read.
    pub n_documents: usize,
    /// Bytes of their text.
    pub text_bytes: u64,
    /// Files passed over.
    pub skipped: Skipped,
}

/// Trains a byte-level BPE tokenizer on the corpus and writes it to `out_path`.
///
/// All text given is used: leave held-out files out of `paths` when the comparison must be strict.
///
/// # Errors
/// As [`read_corpus`] and [`train_bpe`], when a text is not UTF-8 (with its file and offset), and when
/// the file cannot be written.
pub fn train_tokenizer(
    paths: &[String],
    vocab_size: usize,
    out_path: &Path,
    text_field: &str,
) -> Result<TokenizerSummary, DataError> {
    let corpus = read_corpus(paths, text_field)?;
    corpus.documents.iter().try_for_each(Document::check_utf8)?;
    let n_documents = corpus.documents.len();
    let text_bytes = text_bytes(&corpus.documents);
    let texts = corpus.documents.into_iter().map(|Document { text, .. }| {
        String::from_utf8(text).expect("checked above, and line ends are made one within ASCII")
    });
    let tokenizer = train_bpe(texts, vocab_size)?;
    tokenizer.save(out_path)?;
    Ok(TokenizerSummary { tokenizer, n_documents, text_bytes, skipped: corpus.skipped })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_file_written_is_the_tokenizer_returned() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("a.txt"), "the whale\r\nthe whale\n").unwrap();
        let out_path = folder.path().join("tokenizer.json");
        let summary = train_tokenizer(&[path("a.txt")], 262, &out_path, "text").unwrap();
        assert_eq!((summary.n_documents, summary.text_bytes), (1, 20));
        assert_eq!(summary.tokenizer.vocab_size(), 262);
        let loaded = Tokenizer::load(&out_path).unwrap();
        assert_eq!(loaded.fingerprint(), summary.tokenizer.fingerprint());
    }

    #[test]
    fn text_that_is_not_utf8_names_its_file_and_offset() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("good.txt"), "fine").unwrap();
        fs::write(folder.path().join("latin1.txt"), b"na\xefve").unwrap();
        let paths = [folder.path().display().to_string()];
        let error = train_tokenizer(&paths, 300, &folder.path().join("t.json"), "text").unwrap_err();
        assert!(matches!(error, DataError::NotUtf8 { ref name, offset: 2 } if name.ends_with("latin1.txt")));
        assert!(!folder.path().join("t.json").exists());
    }
}
