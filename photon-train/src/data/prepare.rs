//! From the data config to the two token stores, once per corpus, split and tokenizer.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use photon_core::tokenizer::Tokenizer;
use sha2::{Digest, Sha256};

use super::{
    DataConfig, DataError, Skipped, Split, TokenStore, build_store, read_corpus,
    store::{FORMAT_VERSION, hex, text_bytes},
};

/// Token stores of a corpus, ready to train on.
#[derive(Debug)]
pub struct Prepared {
    /// Tokens to train on.
    pub train: TokenStore,
    /// Tokens held out.
    pub valid: TokenStore,
    /// Tells texts, split and tokenizer from any others.
    pub fingerprint: String,
    /// What was read and done.
    pub report: PrepareReport,
}

/// What [`prepare`] read and did, for the log.
#[derive(Clone, Debug, PartialEq)]
pub struct PrepareReport {
    /// The training side.
    pub train: SideReport,
    /// The held-out side.
    pub valid: SideReport,
    /// Files passed over on both sides.
    pub skipped: Skipped,
    /// Training documents left out because held-out files hold the same text.
    pub n_equal: usize,
    /// Whether the stores were there already.
    pub origin: StoreOrigin,
}

/// One side of the split in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideReport {
    /// Documents.
    pub n_documents: u64,
    /// Bytes of their text.
    pub text_bytes: u64,
    /// Tokens, end-of-document tokens included.
    pub n_tokens: usize,
    /// The store.
    pub path: PathBuf,
}

/// Where the stores came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOrigin {
    /// Tokenised by this call.
    Built,
    /// Found from an earlier call with the same texts, split and tokenizer.
    Reused,
}

/// Three lines for the log.
impl fmt::Display for PrepareReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, side) in [("train", &self.train), ("held out", &self.valid)] {
            let SideReport { n_documents, text_bytes, n_tokens, .. } = side;
            writeln!(f, "{name}: {n_tokens} tokens of {text_bytes} bytes in {n_documents} documents")?;
        }
        let origin = match self.origin {
            StoreOrigin::Built => "tokenised",
            StoreOrigin::Reused => "tokens reused",
        };
        write!(f, "{origin}; {}", self.skipped)?;
        if self.n_equal > 0 {
            write!(f, "; left out {} training documents that are also held out", self.n_equal)?;
        }
        Ok(())
    }
}

/// Reads, splits and tokenises the corpus into `cache_dir`, or finds the stores there.
///
/// Stores are named by a hash of the texts on each side, the tokenizer and the format, so a change of
/// any of them makes new ones, and a corpus that only moved finds its own. A store that is damaged is
/// made again. `progress` is told
/// the bytes of text done and in all. Each side must have `min_tokens`, one full row.
///
/// # Errors
/// As [`read_corpus`], `HeldOut::split` and [`build_store`], and when a side is too small.
pub fn prepare(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    cache_dir: &Path,
    min_tokens: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Prepared, DataError> {
    config.validate()?;
    let corpus = read_corpus(&config.paths, &config.text_field)?;
    let split = config.held_out.split(corpus.documents, &config.text_field)?;
    let key = content_key(&split, tokenizer);
    let path_of = |side: &str| cache_dir.join(format!("{key}.{side}.tokens"));
    let (train_path, valid_path) = (path_of("train"), path_of("valid"));

    let found = TokenStore::open(&train_path, tokenizer).and_then(|train| {
        let valid = TokenStore::open(&valid_path, tokenizer)?;
        Ok((train, valid))
    });
    let (train, valid, origin) = match found {
        Ok((train, valid)) => (train, valid, StoreOrigin::Reused),
        // Missing or damaged: both are made again, and writing them reports what cannot be mended.
        Err(_) => {
            let (train_bytes, valid_bytes) = (text_bytes(&split.train), text_bytes(&split.valid));
            let total_bytes = train_bytes + valid_bytes;
            let train = build_store(&split.train, tokenizer, &train_path, &mut |done, _| progress(done, total_bytes))?;
            let valid = build_store(&split.valid, tokenizer, &valid_path, &mut |done, _| {
                progress(train_bytes + done, total_bytes);
            })?;
            (train, valid, StoreOrigin::Built)
        }
    };
    check_size("training", &train, min_tokens, "add text, or choose a shorter `seq_len`")?;
    check_size("held-out", &valid, min_tokens, "hold out more, add text, or choose a shorter `seq_len`")?;

    let mut skipped = corpus.skipped;
    skipped.add(&split.skipped);
    let report = PrepareReport {
        train: side_report(&train),
        valid: side_report(&valid),
        skipped,
        n_equal: split.n_equal,
        origin,
    };
    Ok(Prepared { train, valid, fingerprint: key, report })
}

fn check_size(side: &'static str, store: &TokenStore, expected: usize, fix: &'static str) -> Result<(), DataError> {
    let found = store.len();
    if found < expected {
        return Err(DataError::TooFewTokens { side, found, expected, fix });
    }
    Ok(())
}

fn side_report(store: &TokenStore) -> SideReport {
    SideReport {
        n_documents: store.n_documents(),
        text_bytes: store.text_bytes(),
        n_tokens: store.len(),
        path: store.path().to_owned(),
    }
}

/// What the stores depend on, as 32 hexadecimal digits.
fn content_key(split: &Split, tokenizer: &Tokenizer) -> String {
    let mut hash = Sha256::new();
    // Each part with its length before it, so that no two lists of parts run together.
    let mut add = |part: &[u8]| {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(&FORMAT_VERSION.to_le_bytes());
    add(tokenizer.fingerprint().as_bytes());
    for side in [&split.train, &split.valid] {
        add(&(side.len() as u64).to_le_bytes());
        side.iter().for_each(|document| add(&document.text));
    }
    hex(&hash.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use photon_core::tokenizer::train_bpe;

    use super::{super::HeldOut, *};

    struct Example {
        folder: tempfile::TempDir,
        config: DataConfig,
    }

    impl Example {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("a.txt"), "one line\n".repeat(20)).unwrap();
            let paths = vec![folder.path().join("a.txt").display().to_string()];
            let held_out = HeldOut::Tail { fraction: 0.25 };
            Self { config: DataConfig { paths, text_field: "text".to_owned(), held_out }, folder }
        }

        fn cache_dir(&self) -> PathBuf {
            self.folder.path().join("cache").join("deep")
        }

        fn prepare(&self, min_tokens: usize) -> Result<Prepared, DataError> {
            prepare(&self.config, &Tokenizer::bytes(), &self.cache_dir(), min_tokens, &mut |_, _| {})
        }
    }

    #[test]
    fn a_second_call_reuses_the_stores() {
        let example = Example::new();
        let first = example.prepare(8).unwrap();
        assert_eq!(first.report.origin, StoreOrigin::Built);
        assert_eq!((first.report.train.text_bytes, first.report.valid.text_bytes), (135, 45));
        let second = example.prepare(8).unwrap();
        assert_eq!(second.report, PrepareReport { origin: StoreOrigin::Reused, ..first.report });
        assert!(second.report.to_string().contains("tokens reused; skipped nothing"));
        assert_eq!(second.train.read(0..136), first.train.read(0..136));
        assert_eq!(fs::read_dir(example.cache_dir()).unwrap().count(), 2);
    }

    #[test]
    fn a_changed_text_split_or_tokenizer_makes_new_stores() {
        let mut example = Example::new();
        let bytes = Tokenizer::bytes();
        let bpe = train_bpe(["one line".to_owned()].into_iter(), 257).unwrap();
        let origin = |example: &Example, tokenizer: &Tokenizer| {
            let prepared = prepare(&example.config, tokenizer, &example.cache_dir(), 8, &mut |_, _| {});
            prepared.unwrap().report.origin
        };
        assert_eq!(origin(&example, &bytes), StoreOrigin::Built);
        assert_eq!(origin(&example, &bpe), StoreOrigin::Built);
        assert_eq!(origin(&example, &bytes), StoreOrigin::Reused);
        // Of the same length, so that the halves keep their names.
        fs::write(&example.config.paths[0], "ONE LINE\n".repeat(20)).unwrap();
        assert_eq!(origin(&example, &bytes), StoreOrigin::Built);
        example.config.held_out = HeldOut::Tail { fraction: 0.5 };
        assert_eq!(origin(&example, &bytes), StoreOrigin::Built);
    }

    #[test]
    fn a_damaged_store_is_made_again() {
        let example = Example::new();
        let path = example.prepare(8).unwrap().report.valid.path;
        let whole = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 2]).unwrap();
        assert_eq!(example.prepare(8).unwrap().report.origin, StoreOrigin::Built);
        assert_eq!(fs::read(&path).unwrap(), whole);
    }

    #[test]
    fn a_side_too_small_for_a_row_is_named_with_its_count() {
        let error = Example::new().prepare(64).unwrap_err();
        assert!(matches!(error, DataError::TooFewTokens { side: "held-out", found: 46, expected: 64, .. }));
        let error = Example::new().prepare(1000).unwrap_err();
        assert!(error.to_string().contains("the training text has 136 tokens, expected at least 1000"));
    }

    #[test]
    fn progress_runs_over_both_sides() {
        let example = Example::new();
        let mut seen = Vec::new();
        let mut progress = |done, total| seen.push((done, total));
        prepare(&example.config, &Tokenizer::bytes(), &example.cache_dir(), 8, &mut progress).unwrap();
        assert_eq!(seen, [(135, 180), (180, 180)]);
    }

    #[test]
    fn a_cache_that_is_no_folder_is_reported_with_its_path() {
        let example = Example::new();
        fs::write(example.folder.path().join("cache"), "a file").unwrap();
        let error = example.prepare(8).unwrap_err();
        assert!(matches!(error, DataError::Write { .. }));
        assert!(error.to_string().contains(&example.cache_dir().display().to_string()));
    }
}
