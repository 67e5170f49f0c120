//! From the data config to stores that can be trained on, and a report of them.

use std::{fmt, path::Path};

use photon_core::{hex, tokenizer::Tokenizer};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{
    DataConfig, DataError, HeldOut, Mixture, MixtureSource, OverlapReport, Packing, Progress, Skipped, StoreOrigin,
    TokenStore,
    build::BuildSizes,
    config::Source,
    overlap::find_overlap,
    source::{SourceStores, prepare_source},
};

/// Token stores of all sources, ready to train on.
#[derive(Debug)]
pub struct Prepared {
    /// Tokens to train on.
    pub train: Mixture,
    /// Tokens held out, of all sources one after the other.
    pub valid: TokenStore,
    /// The same of each source that holds out text, by its name.
    pub valid_sources: Vec<(String, TokenStore)>,
    /// What was read and done.
    pub report: PrepareReport,
    packing: Packing,
    document_mask: bool,
}

/// What [`prepare`] read and did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrepareReport {
    /// The sources, in the order of the config.
    pub sources: Vec<SourceReport>,
    /// Held-out text that is also trained on.
    pub overlap: OverlapReport,
    /// SHA-256 over the tokenizer and all shards in order: equal for equal data, wherever it lies.
    pub content_hash: String,
}

/// One source in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SourceReport {
    /// Its name.
    pub name: String,
    /// Share of the rows, from 0 to 1.
    pub share: f64,
    /// The training side.
    pub train: SideReport,
    /// The held-out side.
    pub valid: SideReport,
    /// What was passed over.
    pub skipped: Skipped,
    /// Training documents left out because held-out files hold the same text.
    pub n_equal: u64,
    /// Whether the tokens were there already.
    pub origin: StoreOrigin,
    /// The folder of the shards.
    pub folder: String,
}

/// One side of the split in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SideReport {
    /// Documents.
    pub n_documents: usize,
    /// Bytes of their text.
    pub text_bytes: u64,
    /// Tokens, end-of-document tokens included.
    pub n_tokens: usize,
    /// Files of tokens.
    pub n_shards: usize,
}

/// A few lines for the log.
impl fmt::Display for PrepareReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for source in &self.sources {
            let of = if self.sources.len() > 1 { format!("{}, ", source.name) } else { String::new() };
            for (name, side) in [("train", &source.train), ("held out", &source.valid)] {
                let SideReport { n_documents, text_bytes, n_tokens, .. } = side;
                writeln!(f, "{of}{name}: {n_tokens} tokens of {text_bytes} bytes in {n_documents} documents")?;
            }
            let origin = match source.origin {
                StoreOrigin::Built => "tokenised",
                StoreOrigin::Completed => "tokenised the rest",
                StoreOrigin::Reused => "tokens reused",
            };
            write!(f, "{of}{origin}; {}", source.skipped)?;
            if source.n_equal > 0 {
                write!(f, "; left out {} training documents that are also held out", source.n_equal)?;
            }
            writeln!(f)?;
        }
        write!(f, "{}", self.overlap)
    }
}

/// Reads, splits and tokenises the sources into `cache_dir`, or finds their tokens there.
///
/// Each source has a folder named by a hash of its texts, split and tokenizer, so a change of any of them makes a new
/// one, and a text that only moved finds its own. Files whose size and time of change are those of an earlier call are
/// not read again. Shards new or small are read and checked whole, others by header and length; a damaged one is an
/// error that says what to do. What an interrupted call has finished is kept. Each training side and the held-out sides
/// together must have `min_tokens`, one full row.
///
/// # Errors
/// When a file cannot be read or holds something else than it should, nothing can be held out, a shard is damaged or
/// cannot be written, or a side is too small.
pub fn prepare(
    config: &DataConfig,
    tokenizer: &Tokenizer,
    cache_dir: &Path,
    min_tokens: usize,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Prepared, DataError> {
    config.validate()?;
    let sources = config.sources();
    let stores = sources
        .iter()
        .map(|source| prepare_source(source, tokenizer, cache_dir, BuildSizes::default(), progress))
        .collect::<Result<Vec<_>, _>>()?;
    for (source, stores) in sources.iter().zip(&stores) {
        let side = match sources.len() {
            1 => "training text".to_owned(),
            _ => format!("training text of {}", source.name),
        };
        check_size(side, &stores.train, min_tokens, "add text, or choose a shorter `seq_len`")?;
    }
    let valid = TokenStore::chain(stores.iter().map(|stores| &stores.valid));
    let fix = "hold out more, add text, or choose a shorter `seq_len`";
    check_size("held-out text".to_owned(), &valid, min_tokens, fix)?;

    let content_hash = content_hash(tokenizer, &stores);
    let trains: Vec<&TokenStore> = stores.iter().map(|stores| &stores.train).collect();
    let overlap = find_overlap(&trains, &valid, tokenizer, &content_hash, cache_dir, progress)?;
    // Without weights, as if the sources were one text.
    let weight = |source: &Source, stores: &SourceStores| source.weight.unwrap_or(stores.train.len() as f64);
    let all_weights: f64 = sources.iter().zip(&stores).map(|(source, stores)| weight(source, stores)).sum();
    let report = |(source, stores): (&Source, &SourceStores)| SourceReport {
        name: source.name.clone(),
        share: weight(source, stores) / all_weights,
        train: side_report(&stores.train),
        valid: side_report(&stores.valid),
        skipped: stores.skipped,
        n_equal: stores.n_equal,
        origin: stores.origin,
        folder: stores.folder.display().to_string(),
    };
    let report = PrepareReport { sources: sources.iter().zip(&stores).map(report).collect(), overlap, content_hash };
    let mixed = sources.iter().zip(&stores).map(|(source, stores)| MixtureSource {
        name: source.name.clone(),
        weight: weight(source, stores),
        store: stores.train.clone(),
    });
    let train = Mixture::new(mixed.collect());
    let with_text = sources.iter().zip(stores).filter(|(_, stores)| !stores.valid.is_empty());
    let valid_sources = with_text.map(|(source, stores)| (source.name.clone(), stores.valid)).collect();
    let DataConfig { packing, document_mask, .. } = *config;
    Ok(Prepared { train, valid, valid_sources, report, packing, document_mask })
}

impl Prepared {
    /// Lays documents apart where the config says so, each at a multiple of `chunk_tokens`: the tokens under one
    /// top-level unit, 1 for a flat model. With a document mask models keep them apart too.
    #[must_use]
    pub fn packed_for(self, chunk_tokens: usize) -> Self {
        let (packing, document_mask) = (self.packing, self.document_mask);
        let lay = |store: TokenStore| {
            let store = match packing {
                Packing::Stream => store,
                Packing::Documents => store.aligned(chunk_tokens),
            };
            if document_mask { store.with_document_mask() } else { store }
        };
        Self {
            train: self.train.map_stores(lay),
            valid: lay(self.valid),
            valid_sources: self.valid_sources.into_iter().map(|(name, store)| (name, lay(store))).collect(),
            ..self
        }
    }

    /// Reads all shards once to check that they are as they were written.
    ///
    /// # Errors
    /// Names the damaged shard and what to do.
    pub fn verify(&self) -> Result<(), DataError> {
        self.train.sources().iter().try_for_each(|source| source.store.verify())?;
        self.valid.verify()
    }
}

/// Tokenises texts into a folder, with nothing held out.
///
/// # Errors
/// As [`prepare`].
pub fn tokenise_texts(
    paths: &[String],
    text_field: &str,
    tokenizer: &Tokenizer,
    folder: &Path,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<(TokenStore, Skipped), DataError> {
    let source = Source {
        name: "text".to_owned(),
        paths: paths.to_vec(),
        weight: None,
        text_field: text_field.to_owned(),
        held_out: HeldOut::Nothing,
    };
    let stores = prepare_source(&source, tokenizer, folder, BuildSizes::default(), progress)?;
    Ok((stores.train, stores.skipped))
}

fn check_size(side: String, store: &TokenStore, expected: usize, fix: &'static str) -> Result<(), DataError> {
    match store.len() {
        found if found < expected => Err(DataError::TooFewTokens { side, found, expected, fix }),
        _ => Ok(()),
    }
}

fn side_report(store: &TokenStore) -> SideReport {
    SideReport {
        n_documents: store.n_documents(),
        text_bytes: store.text_bytes(),
        n_tokens: store.len(),
        n_shards: store.n_shards(),
    }
}

fn content_hash(tokenizer: &Tokenizer, stores: &[SourceStores]) -> String {
    let mut hash = Sha256::new();
    hash.update(tokenizer.fingerprint());
    for side in stores.iter().flat_map(|stores| [&stores.train, &stores.valid]) {
        hash.update((side.n_shards() as u64).to_le_bytes());
        side.hashes().for_each(|shard| hash.update(shard));
    }
    hex::encode(&hash.finalize())
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf, sync::Mutex};

    use photon_core::tokenizer::train_bpe;

    use super::{super::Stage, *};

    struct Example {
        folder: tempfile::TempDir,
        config: DataConfig,
    }

    impl Example {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join("a.txt"), "one line\n".repeat(20)).unwrap();
            let path = folder.path().join("a.txt").display().to_string();
            let toml = format!("paths = [\"{path}\"]\nheld_out = {{ tail = {{ fraction = 0.25 }} }}");
            Self { config: toml::from_str(&toml).unwrap(), folder }
        }

        /// Two sources, of which the second holds nothing out.
        fn mixed() -> Self {
            let mut example = Self::new();
            fs::write(example.folder.path().join("b.txt"), "no line is as long as this one\n".repeat(20)).unwrap();
            let path = |name: &str| example.folder.path().join(name).display().to_string();
            let toml = format!(
                "[[sources]]\nname = \"short\"\npaths = [\"{}\"]\nheld_out = {{ tail = {{ fraction = 0.25 }} }}\n\
                 [[sources]]\nname = \"long\"\npaths = [\"{}\"]\nheld_out = \"nothing\"\n",
                path("a.txt"),
                path("b.txt")
            );
            example.config = toml::from_str(&toml).unwrap();
            example
        }

        fn cache_dir(&self) -> PathBuf {
            self.folder.path().join("cache").join("deep")
        }

        fn prepare(&self, min_tokens: usize) -> Result<Prepared, DataError> {
            prepare(&self.config, &Tokenizer::bytes(), &self.cache_dir(), min_tokens, &|_| {})
        }
    }

    #[test]
    fn a_second_run_finds_the_tokens_of_the_first() {
        let example = Example::new();
        let [first, second] = [(); 2].map(|()| example.prepare(8).unwrap());
        let origins = [&first, &second].map(|prepared| prepared.report.sources[0].origin);
        assert_eq!(origins, [StoreOrigin::Built, StoreOrigin::Reused]);
        let source = &first.report.sources[0];
        assert_eq!((source.train.text_bytes, source.train.n_tokens, source.train.n_documents), (135, 136, 1));
        assert_eq!((source.valid.text_bytes, source.valid.n_tokens, source.share), (45, 46, 1.0));
        assert_eq!(first.report.content_hash, second.report.content_hash);
        let text = second.report.to_string();
        assert!(text.contains("train: 136 tokens of 135 bytes in 1 documents"), "{text}");
        assert!(text.contains("tokens reused; skipped nothing"), "{text}");
    }

    #[test]
    fn a_changed_text_split_or_tokenizer_makes_new_tokens_and_another_hash() {
        let mut example = Example::new();
        let bytes = Tokenizer::bytes();
        let bpe = train_bpe(["one line".to_owned()].into_iter(), 257).unwrap();
        let mut hashes = Vec::new();
        let mut origin = |example: &Example, tokenizer: &Tokenizer| {
            let report = prepare(&example.config, tokenizer, &example.cache_dir(), 8, &|_| {}).unwrap().report;
            hashes.push(report.content_hash);
            report.sources[0].origin
        };
        assert_eq!(origin(&example, &bytes), StoreOrigin::Built);
        assert_eq!(origin(&example, &bpe), StoreOrigin::Built);
        assert_eq!(origin(&example, &bytes), StoreOrigin::Reused);
        // Of the same length, and so soon that the clock may not show it.
        fs::write(&example.config.paths[0], "ONE LINE\n".repeat(20)).unwrap();
        assert_eq!(origin(&example, &bytes), StoreOrigin::Built);
        example.config.held_out = HeldOut::Tail { fraction: 0.5 };
        assert_eq!(origin(&example, &bytes), StoreOrigin::Built);
        assert_eq!(hashes[0], hashes[2]);
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), 4);
    }

    #[test]
    fn a_side_too_small_for_a_row_is_named_with_its_count() {
        let message = |example: Example, min| example.prepare(min).unwrap_err().to_string();
        assert!(message(Example::new(), 64).contains("the held-out text has 46 tokens, expected at least 64"));
        assert!(message(Example::new(), 1000).contains("the training text has 136 tokens, expected at least 1000"));
        assert!(message(Example::mixed(), 500).contains("the training text of short has 136 tokens"));
    }

    #[test]
    fn sources_are_mixed_by_size_or_by_weight() {
        let mut example = Example::mixed();
        let by_size = example.prepare(8).unwrap();
        let shares =
            |prepared: &Prepared| prepared.report.sources.iter().map(|source| source.share).collect::<Vec<_>>();
        assert_eq!(shares(&by_size), [136.0 / (136.0 + 621.0), 621.0 / (136.0 + 621.0)]);
        assert_eq!(by_size.train.len(), 136 + 621);
        assert_eq!(by_size.valid.len(), 46);
        let names: Vec<&str> = by_size.valid_sources.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["short"]);
        example.config.sources[0].weight = Some(3.0);
        example.config.sources[1].weight = Some(1.0);
        let by_weight = example.prepare(8).unwrap();
        assert_eq!(shares(&by_weight), [0.75, 0.25]);
        // The data are the same; how they are mixed is the config's.
        assert_eq!(by_weight.report.content_hash, by_size.report.content_hash);
    }

    #[test]
    fn documents_are_laid_apart_where_the_config_says_so() {
        let mut example = Example::new();
        assert_eq!(example.prepare(8).unwrap().packed_for(32).train.sources()[0].store.n_places(), 136);
        example.config.packing = Packing::Documents;
        let packed = example.prepare(8).unwrap().packed_for(32);
        assert_eq!(packed.train.sources()[0].store.n_places(), 160);
        assert_eq!((packed.valid.n_places(), packed.valid_sources[0].1.n_places()), (64, 64));
        for (document_mask, packing) in
            [(false, Packing::Documents), (true, Packing::Documents), (true, Packing::Stream)]
        {
            (example.config.document_mask, example.config.packing) = (document_mask, packing);
            let packed = example.prepare(8).unwrap().packed_for(32);
            let stores = [&packed.train.sources()[0].store, &packed.valid, &packed.valid_sources[0].1];
            assert_eq!(stores.map(TokenStore::has_document_mask), [document_mask; 3]);
        }
    }

    #[test]
    fn every_stage_tells_how_far_it_is() {
        let example = Example::new();
        let seen = Mutex::new(Vec::new());
        let progress = |now| seen.lock().unwrap().push(now);
        prepare(&example.config, &Tokenizer::bytes(), &example.cache_dir(), 8, &progress).unwrap();
        let seen = seen.into_inner().unwrap();
        for stage in [Stage::Reading, Stage::Tokenising, Stage::Checking, Stage::Comparing] {
            let last = seen.iter().rfind(|progress| progress.stage == stage).unwrap();
            assert!(last.done_bytes == last.total_bytes && last.done_bytes > 0, "{last:?}");
        }
    }

    #[test]
    fn held_out_text_that_is_trained_on_is_reported() {
        let example = Example::new();
        // All lines are alike, and the held-out ones long enough for runs.
        fs::write(&example.config.paths[0], "one line\n".repeat(40)).unwrap();
        let report = example.prepare(8).unwrap().report;
        assert_eq!((report.overlap.n_runs, report.overlap.n_found), (91 - 63, 91 - 63));
        assert!(report.to_string().contains("warning: held-out text is also trained on"), "{report}");
        let again = example.prepare(8).unwrap().report;
        assert_eq!(report.overlap, again.overlap);
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
