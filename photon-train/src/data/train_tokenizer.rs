//! Trains a tokenizer on a corpus, for the `tokenizer` command.

use std::{
    ops::ControlFlow,
    path::Path,
    sync::mpsc::{SyncSender, sync_channel},
    thread,
};

use photon_core::tokenizer::{Tokenizer, train_bpe};

use super::{
    DataError, Skipped, TextFile,
    documents::{Notes, read_parts},
    files::list_files,
};

/// Texts that wait to be counted, at most.
const QUEUE: usize = 8;

/// What a tokenizer was trained on.
#[derive(Clone, Debug)]
pub struct TokenizerSummary {
    /// The tokenizer, also written to the file.
    pub tokenizer: Tokenizer,
    /// Documents read.
    pub n_documents: u64,
    /// Bytes of their text.
    pub text_bytes: u64,
    /// Files passed over.
    pub skipped: Skipped,
}

/// Trains a byte-level BPE tokenizer on the corpus and writes it to `out_path`.
///
/// All text given is used: leave held-out files out of `paths` when the comparison must be strict. The text goes through
/// in pieces; memory is taken by its different words.
///
/// # Errors
/// As [`train_bpe`], when a file cannot be read, a text is not UTF-8 (with its file and offset), and when the tokenizer
/// cannot be written.
pub fn train_tokenizer(
    paths: &[String],
    vocab_size: usize,
    out_path: &Path,
    text_field: &str,
) -> Result<TokenizerSummary, DataError> {
    let listing = list_files(paths)?;
    let (sender, texts) = sync_channel(QUEUE);
    let (read, trained) = thread::scope(|scope| {
        let files = &listing.files;
        let reader = scope.spawn(move || Reader { text_field, texts: sender, read: Read::default() }.read_all(files));
        let trained = train_bpe(texts.into_iter(), vocab_size);
        (reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), trained)
    });
    // A training that failed ends the reading too, and says why.
    let tokenizer = trained?;
    let read = read?;
    let skipped = listing.skipped.plus(read.skipped);
    if read.n_documents == 0 {
        return Err(DataError::NoText { path: paths.join(", "), skipped });
    }
    tokenizer.save(out_path)?;
    Ok(TokenizerSummary { tokenizer, n_documents: read.n_documents, text_bytes: read.text_bytes, skipped })
}

#[derive(Default)]
struct Read {
    n_documents: u64,
    text_bytes: u64,
    skipped: Skipped,
}

struct Reader<'a> {
    text_field: &'a str,
    texts: SyncSender<String>,
    read: Read,
}

impl Reader<'_> {
    fn read_all(mut self, files: &[TextFile]) -> Result<Read, DataError> {
        for file in files {
            let n_before = self.read.n_documents;
            match self.read_file(file) {
                Ok(notes) => self.read.skipped.empty += notes.empty,
                Err(DataError::Binary { .. }) if !file.is_named => self.read.skipped.binary += 1,
                Err(error) => return Err(error),
            }
            if file.is_named && self.read.n_documents == n_before {
                return Err(DataError::EmptyFile { path: file.path.clone() });
            }
        }
        Ok(self.read)
    }

    fn read_file(&mut self, file: &TextFile) -> Result<Notes, DataError> {
        let notes = read_parts(file, self.text_field, &mut |part| {
            // What is not UTF-8 is noted by the reading, and is an error below.
            let Ok(text) = str::from_utf8(part.text) else { return ControlFlow::Continue(()) };
            self.read.n_documents += u64::from(part.ends_document);
            self.read.text_bytes += part.text.len() as u64;
            match self.texts.send(text.to_owned()) {
                Ok(()) => ControlFlow::Continue(()),
                // The training failed, and says why.
                Err(_) => ControlFlow::Break(()),
            }
        })?;
        match notes.not_utf8_at {
            Some(offset) => Err(DataError::NotUtf8 { name: file.path.display().to_string(), offset }),
            None => Ok(notes),
        }
    }
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
