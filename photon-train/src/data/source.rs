//! From one source of the config to its two token stores, once per text, split and tokenizer.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use photon_core::{hex, tokenizer::Tokenizer};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{
    DataError, HeldOut, Progress, Skipped, Stage, TextFile, TokenStore,
    build::{Build, BuildSizes},
    config::Source,
    files::{Listing, list_files},
    manifest::{FileEntry, Manifest},
    scan::{FileScan, scan_files},
    shard::{FORMAT_VERSION, id_bytes},
    split::{Rule, Side},
};

/// Stores of at most so many bytes are read and checked whole at every start: that takes a moment.
const VERIFY_ALWAYS_BYTES: u64 = 64 << 20;

/// Where tokens came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StoreOrigin {
    /// Tokenised by this call.
    Built,
    /// Some by an earlier call that did not end, the rest by this one.
    Completed,
    /// Found from an earlier call with the same texts, split and tokenizer.
    Reused,
}

/// The stores of a source.
pub(super) struct SourceStores {
    pub(super) train: TokenStore,
    pub(super) valid: TokenStore,
    pub(super) skipped: Skipped,
    pub(super) n_equal: u64,
    pub(super) origin: StoreOrigin,
    pub(super) folder: PathBuf,
}

/// The files of a source and what they hold.
struct Corpus {
    files: Vec<TextFile>,
    scans: Vec<FileScan>,
    /// Files from here on are held out.
    first_held_out: usize,
    skipped: Skipped,
}

/// Reads, splits and tokenises a source, or finds its stores in `cache_dir`.
pub(super) fn prepare_source(
    source: &Source,
    tokenizer: &Tokenizer,
    cache_dir: &Path,
    sizes: BuildSizes,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<SourceStores, DataError> {
    let corpus = Corpus::read(source, cache_dir, progress)?;
    if tokenizer.needs_utf8() {
        corpus.check_utf8()?;
    }
    let folder = cache_dir.join(corpus.key(source, tokenizer, sizes));
    let mut manifest = Manifest::read(&folder)?.unwrap_or_else(|| corpus.manifest(source, tokenizer));
    manifest.forget_missing(&folder);
    let origin = match (manifest.is_complete, manifest.train.is_empty() && manifest.valid.is_empty()) {
        (true, _) => StoreOrigin::Reused,
        (false, true) => StoreOrigin::Built,
        (false, false) => StoreOrigin::Completed,
    };
    // What is there is looked at before anything is added to it.
    let open = |manifest: &Manifest| {
        let stores = [Side::Train, Side::Valid].map(|side| TokenStore::open(&folder, manifest.shards(side), tokenizer));
        let [train, valid] = stores;
        Ok::<_, DataError>((train?, valid?))
    };
    let (mut train, mut valid) = open(&manifest)?;
    if !manifest.is_complete {
        let Corpus { files, scans, first_held_out, .. } = &corpus;
        let rule = Rule::new(&source.held_out, files, scans, *first_held_out, &source.text_field)?;
        let text_field = &source.text_field;
        let build = Build { files, scans, text_field, rule: &rule, tokenizer, folder: &folder, sizes };
        manifest = build.run(manifest, progress)?;
        (train, valid) = open(&manifest)?;
    }
    if origin != StoreOrigin::Reused || train.file_bytes() + valid.file_bytes() <= VERIFY_ALWAYS_BYTES {
        let total_bytes = train.file_bytes() + valid.file_bytes();
        progress(Progress { stage: Stage::Checking, done_bytes: 0, total_bytes });
        train.verify()?;
        valid.verify()?;
        progress(Progress { stage: Stage::Checking, done_bytes: total_bytes, total_bytes });
    }
    if train.is_empty() {
        return Err(DataError::Split {
            found: "every training document is also in `held_out.paths.paths`".to_owned(),
            fix: "hold out other files, or add documents",
        });
    }
    Ok(SourceStores { train, valid, skipped: corpus.skipped, n_equal: manifest.n_equal, origin, folder })
}

impl Corpus {
    fn read(source: &Source, cache_dir: &Path, progress: &(dyn Fn(Progress) + Sync)) -> Result<Self, DataError> {
        let mut train = list_files(&source.paths)?;
        let held_out = match &source.held_out {
            HeldOut::Paths { paths } => list_files(paths)?,
            _ => Listing::default(),
        };
        let n_train = train.files.len();
        train.files.extend(held_out.files.iter().cloned());
        let scans = scan_files(&train.files, &source.text_field, cache_dir, progress)?;
        for search in &train.searches {
            check_search(&search.given, search.skipped, &scans[search.files.clone()])?;
        }
        for search in &held_out.searches {
            let files: Range<usize> = n_train + search.files.start..n_train + search.files.end;
            check_search(&search.given, search.skipped, &scans[files])?;
        }
        for (file, scan) in train.files.iter().zip(&scans).filter(|(file, _)| file.is_named) {
            if let Some(offset) = scan.nul_at {
                return Err(DataError::Binary { path: file.path.clone(), offset });
            }
            if scan.n_documents == 0 {
                return Err(DataError::EmptyFile { path: file.path.clone() });
            }
        }
        let skipped = train.skipped.plus(held_out.skipped).plus(skipped_in(&scans));
        Ok(Self { files: train.files, scans, first_held_out: n_train, skipped })
    }

    fn check_utf8(&self) -> Result<(), DataError> {
        match self.files.iter().zip(&self.scans).find_map(|(file, scan)| Some((file, scan.not_utf8_at?))) {
            None => Ok(()),
            Some((file, offset)) => Err(DataError::NotUtf8 { name: file.path.display().to_string(), offset }),
        }
    }

    /// What the shards depend on, as 32 hexadecimal digits; where the files lie does not matter.
    fn key(&self, source: &Source, tokenizer: &Tokenizer, sizes: BuildSizes) -> String {
        let mut hash = Sha256::new();
        // Each part with its length before it, so that no two lists of parts run together.
        let mut add = |part: &[u8]| {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        add(&FORMAT_VERSION.to_le_bytes());
        add(tokenizer.fingerprint().as_bytes());
        add(&sizes.shard_tokens.to_le_bytes());
        let held_out = match &source.held_out {
            HeldOut::Paths { .. } => format!("files from {}", self.first_held_out),
            other => serde_json::to_string(other).expect("a config is plain data"),
        };
        add(held_out.as_bytes());
        self.scans.iter().for_each(|scan| add(&scan.content));
        hex::encode(&hash.finalize()[..16])
    }

    fn manifest(&self, source: &Source, tokenizer: &Tokenizer) -> Manifest {
        let file = |(file, scan): (&TextFile, &FileScan)| FileEntry {
            path: file.path.display().to_string(),
            bytes: file.bytes,
            content: hex::encode(&scan.content),
            n_documents: scan.n_documents,
            text_bytes: scan.text_bytes,
        };
        Manifest {
            format_version: FORMAT_VERSION,
            is_complete: false,
            tokenizer: tokenizer.fingerprint().to_owned(),
            vocab_size: tokenizer.vocab_size(),
            id_bytes: id_bytes(tokenizer),
            held_out: source.held_out.clone(),
            n_equal: 0,
            files: self.files.iter().zip(&self.scans).map(file).collect(),
            train: Vec::new(),
            valid: Vec::new(),
        }
    }
}

/// A folder or pattern that adds no document was surely meant to; repeats are already read.
fn check_search(given: &str, skipped: Skipped, scans: &[FileScan]) -> Result<(), DataError> {
    if skipped.repeated > 0 || scans.iter().any(|scan| scan.n_documents > 0) {
        return Ok(());
    }
    Err(DataError::NoText { path: given.to_owned(), skipped: skipped.plus(skipped_in(scans)) })
}

fn skipped_in(scans: &[FileScan]) -> Skipped {
    let binary = scans.iter().filter(|scan| scan.nul_at.is_some()).count() as u64;
    Skipped { binary, empty: scans.iter().map(|scan| scan.empty).sum(), ..Default::default() }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fs, os::unix::fs::MetadataExt};

    use photon_core::tokenizer::train_bpe;

    use super::{
        super::{files::tests::folder_of, manifest::shard_path},
        *,
    };

    const SMALL: BuildSizes = BuildSizes { shard_tokens: 500, group_bytes: 300 };

    fn source(folder: &tempfile::TempDir, name: &str, held_out: HeldOut) -> Source {
        let paths = vec![folder.path().join(name).display().to_string()];
        Source { name: "text".into(), paths, weight: None, text_field: "text".into(), held_out }
    }

    fn prepare_into(folder: &tempfile::TempDir, source: &Source, sizes: BuildSizes) -> Result<SourceStores, DataError> {
        prepare_source(source, &Tokenizer::bytes(), &folder.path().join("cache"), sizes, &|_| {})
    }

    /// A side's documents as text.
    fn texts(store: &TokenStore) -> Vec<String> {
        let ids = store.read(0..store.len());
        ids.split_inclusive(|&id| id == 256)
            .map(|ids| ids.iter().filter(|&&id| id < 256).map(|&id| char::from(id as u8)).collect())
            .collect()
    }

    fn numbered(n: usize) -> String {
        (0..n).map(|i| format!("{{\"text\":\"document {i}\"}}\n")).collect()
    }

    fn split(lines: &str, held_out: HeldOut) -> Result<(Vec<String>, Vec<String>), DataError> {
        let folder = folder_of(&[("d.jsonl", lines.as_bytes())]);
        let stores = prepare_into(&folder, &source(&folder, "d.jsonl", held_out), BuildSizes::default())?;
        Ok((texts(&stores.train), texts(&stores.valid)))
    }

    fn split_text(text: &str, fraction: f64) -> Result<(Vec<String>, Vec<String>), DataError> {
        let folder = folder_of(&[("d.txt", text.as_bytes())]);
        let source = source(&folder, "d.txt", HeldOut::Tail { fraction });
        let stores = prepare_into(&folder, &source, BuildSizes::default())?;
        Ok((texts(&stores.train), texts(&stores.valid)))
    }

    #[test]
    fn equal_documents_fall_on_one_side() {
        let (train, valid) = split(&numbered(60).repeat(2), HeldOut::Documents { fraction: 0.3 }).unwrap();
        assert_eq!(train.len() + valid.len(), 120);
        assert!(valid.len() > 2 && valid.iter().all(|text| !train.contains(text)));
    }

    #[test]
    fn the_fraction_is_about_kept_and_documents_keep_their_side() {
        let held_out = HeldOut::Documents { fraction: 0.2 };
        let (_, few) = split(&numbered(1000), held_out.clone()).unwrap();
        // A binomial of 1000 draws at 0.2 has a standard deviation of 12.6: five of them.
        assert!((140..260).contains(&few.len()), "{}", few.len());
        let (_, more) = split(&numbered(1500), held_out).unwrap();
        assert!(few.iter().all(|text| more.contains(text)));
    }

    #[test]
    fn two_documents_give_one_to_each_side_and_one_is_told_to_use_its_tail() {
        for fraction in [1e-9, 0.5] {
            let (train, valid) = split(&numbered(2), HeldOut::Documents { fraction }).unwrap();
            assert_eq!((train.len(), valid.len()), (1, 1));
        }
        for lines in [numbered(1), numbered(1).repeat(2)] {
            let error = split(&lines, HeldOut::default()).unwrap_err();
            assert!(matches!(error, DataError::Split { .. }) && error.to_string().contains("tail"), "{error}");
        }
    }

    #[test]
    fn the_tail_is_cut_at_the_nearest_line_end() {
        let (train, valid) = split_text("aaaa\nbbbb\ncccc\ndddd\n", 0.3).unwrap();
        assert_eq!((train, valid), (vec!["aaaa\nbbbb\ncccc\n".to_owned()], vec!["dddd\n".to_owned()]));
        // A long line ends with a whole character.
        let (train, valid) = split_text("鯨鯨鯨鯨鯨", 0.5).unwrap();
        assert_eq!([train[0].chars().count(), valid[0].chars().count()], [9, 6]);
        assert!(matches!(split_text("a", 0.5), Err(DataError::Split { .. })));
    }

    #[test]
    fn the_tail_takes_whole_documents_after_the_border() {
        let lines = |texts: &[&str]| -> String {
            texts.iter().map(|text| serde_json::json!({ "text": text }).to_string() + "\n").collect()
        };
        let four = lines(&["aaaa\naaaa\n", "bbbb\nbbbb\n", "cccc\n", "dddd\n"]);
        let (train, valid) = split(&four, HeldOut::Tail { fraction: 0.5 }).unwrap();
        assert_eq!(train, ["aaaa\naaaa\n", "bbbb\n"]);
        assert_eq!(valid, ["bbbb\n", "cccc\n", "dddd\n"]);
        let (train, valid) = split(&four, HeldOut::Tail { fraction: 1.0 / 3.0 }).unwrap();
        assert_eq!(train, ["aaaa\naaaa\n", "bbbb\nbbbb\n"]);
        assert_eq!(valid, ["cccc\n", "dddd\n"]);
    }

    #[test]
    fn the_tail_of_a_text_in_many_parts_is_cut_once() {
        let text: String = (0..300_000).map(|i| format!("line {i}\n")).collect();
        let (train, valid) = split_text(&text, 0.3).unwrap();
        assert_eq!((train.len(), valid.len()), (1, 1));
        assert_eq!(train.concat() + &valid.concat(), text);
        assert!(valid[0].starts_with("line ") && valid[0].len().abs_diff(text.len() * 3 / 10) < 12);
    }

    #[test]
    fn held_out_files_leave_the_training_side() {
        let folder =
            folder_of(&[("t/a.txt", b"a"), ("t/b.txt", b"b"), ("v.jsonl", b"{\"text\":\"b\"}\n{\"text\":\"c\"}")]);
        let held_out = |name: &str| HeldOut::Paths { paths: vec![folder.path().join(name).display().to_string()] };
        let stores = prepare_into(&folder, &source(&folder, "t", held_out("v.jsonl")), BuildSizes::default()).unwrap();
        assert_eq!((texts(&stores.train), texts(&stores.valid)), (vec!["a".to_owned()], vec!["b".into(), "c".into()]));
        assert_eq!(stores.n_equal, 1);
        let all = prepare_into(&folder, &source(&folder, "t/b.txt", held_out("v.jsonl")), BuildSizes::default());
        assert!(matches!(all, Err(DataError::Split { .. })));
    }

    #[test]
    fn what_is_no_text_is_counted_in_folders_and_an_error_by_name() {
        let folder = folder_of(&[
            ("t/a.txt", b"a"),
            ("t/binary.txt", b"a\0b"),
            ("t/empty.py", b""),
            ("t/d.jsonl", b"{\"text\":\"\"}\n{\"text\":\"d\"}"),
            ("blank.jsonl", b"\n"),
            ("none/x.txt", b"\0"),
        ]);
        let prepare = |name: &str| prepare_into(&folder, &source(&folder, name, HeldOut::Nothing), SMALL);
        let skipped = prepare("t").unwrap().skipped;
        assert_eq!(skipped, Skipped { binary: 1, empty: 2, ..Default::default() });
        let error = |name: &str| prepare(name).err().unwrap();
        assert!(matches!(error("t/binary.txt"), DataError::Binary { offset: 1, .. }));
        assert!(matches!(error("t/empty.py"), DataError::EmptyFile { .. }));
        assert!(matches!(error("blank.jsonl"), DataError::EmptyFile { .. }));
        assert!(matches!(error("none"), DataError::NoText { skipped: Skipped { binary: 1, .. }, .. }));
    }

    #[test]
    fn text_that_is_not_utf8_is_named_where_the_tokenizer_needs_it() {
        let folder = folder_of(&[("moby.txt", b"abc\r\n\xff")]);
        let source = source(&folder, "moby.txt", HeldOut::Nothing);
        prepare_into(&folder, &source, SMALL).unwrap();
        let bpe = train_bpe(["abc".to_owned()].into_iter(), 257).unwrap();
        let error = prepare_source(&source, &bpe, &folder.path().join("cache"), SMALL, &|_| {}).err().unwrap();
        assert!(matches!(error, DataError::NotUtf8 { ref name, offset: 5 } if name.ends_with("moby.txt")));
    }

    #[test]
    fn a_large_vocabulary_takes_four_bytes() {
        let words: String = (0..70_000).map(|i| format!("\"w{i}\":{i},")).collect();
        let json = format!(
            r#"{{"version":"1.0","added_tokens":[],"pre_tokenizer":{{"type":"WhitespaceSplit"}},
            "model":{{"type":"WordLevel","vocab":{{{words}"?":70000}},"unk_token":"?"}}}}"#
        );
        let tokenizer = Tokenizer::from_bytes(json.as_bytes(), "words").unwrap();
        let folder = folder_of(&[("a.txt", b"w69999 w1")]);
        let source = source(&folder, "a.txt", HeldOut::Nothing);
        let stores = prepare_source(&source, &tokenizer, &folder.path().join("cache"), SMALL, &|_| {}).unwrap();
        assert_eq!(stores.train.read(0..2), [69_999, 1]);
    }

    #[test]
    fn the_sizes_of_shards_and_groups_do_not_change_the_tokens() {
        let folder = folder_of(&[("d.jsonl", numbered(300).as_bytes())]);
        let source = source(&folder, "d.jsonl", HeldOut::Documents { fraction: 0.3 });
        let whole = prepare_into(&folder, &source, BuildSizes::default()).unwrap();
        let parts = prepare_into(&folder, &source, SMALL).unwrap();
        assert_eq!((whole.train.n_shards(), whole.valid.n_shards()), (1, 1));
        assert!(parts.train.n_shards() > 3 && parts.valid.n_shards() > 1);
        for (whole, parts) in [(&whole.train, &parts.train), (&whole.valid, &parts.valid)] {
            assert_eq!(whole.read(0..whole.len()), parts.read(0..parts.len()));
            let ends = |store: &TokenStore| (0..store.n_documents()).map(|i| store.document_end(i)).collect::<Vec<_>>();
            assert_eq!(ends(whole), ends(parts));
        }
    }

    #[test]
    fn a_document_may_go_on_in_the_next_shard() {
        let text = "a line\n".repeat(400_000);
        let folder = folder_of(&[("d.txt", text.as_bytes())]);
        let stores = prepare_into(&folder, &source(&folder, "d.txt", HeldOut::Nothing), SMALL).unwrap();
        assert_eq!((stores.train.n_shards(), stores.train.n_documents()), (3, 1));
        assert_eq!(texts(&stores.train), [text.as_str()]);
        // Also when it is gone on with later.
        fs::remove_file(shard_path(&stores.folder, Side::Train, 1)).unwrap();
        let again = prepare_into(&folder, &source(&folder, "d.txt", HeldOut::Nothing), SMALL).unwrap();
        assert_eq!((again.origin, texts(&again.train)), (StoreOrigin::Completed, vec![text]));
    }

    /// The paths of the training shards, in order.
    fn train_paths(stores: &SourceStores) -> Vec<PathBuf> {
        (0..stores.train.n_shards()).map(|index| shard_path(&stores.folder, Side::Train, index)).collect()
    }

    #[test]
    fn a_preparation_goes_on_behind_its_finished_shards() {
        let folder = folder_of(&[("d.jsonl", numbered(300).as_bytes())]);
        let source = source(&folder, "d.jsonl", HeldOut::Documents { fraction: 0.3 });
        let first = prepare_into(&folder, &source, SMALL).unwrap();
        let expected = train_paths(&first).iter().map(|path| fs::read(path).unwrap()).collect::<Vec<_>>();
        // As after a power cut: some shards finished, one of them begun.
        let mut manifest = Manifest::read(&first.folder).unwrap().unwrap();
        manifest.is_complete = false;
        manifest.train.truncate(2);
        manifest.valid.clear();
        manifest.write(&first.folder).unwrap();
        let paths = train_paths(&first);
        fs::write(&paths[2], &expected[2][..40]).unwrap();
        paths[3..].iter().for_each(|path| fs::remove_file(path).unwrap());
        let kept = fs::metadata(&paths[1]).unwrap().ino();

        let second = prepare_into(&folder, &source, SMALL).unwrap();
        assert_eq!(second.origin, StoreOrigin::Completed);
        assert_eq!(train_paths(&second).iter().map(|path| fs::read(path).unwrap()).collect::<Vec<_>>(), expected);
        assert_eq!(texts(&second.valid), texts(&first.valid));
        assert_eq!(fs::metadata(&paths[1]).unwrap().ino(), kept, "a finished shard was made again");
        assert_eq!(prepare_into(&folder, &source, SMALL).unwrap().origin, StoreOrigin::Reused);
    }

    #[test]
    fn a_damaged_shard_is_refused_and_made_again_once_it_is_gone() {
        let folder = folder_of(&[("d.jsonl", numbered(300).as_bytes())]);
        let source = source(&folder, "d.jsonl", HeldOut::Documents { fraction: 0.3 });
        let first = prepare_into(&folder, &source, SMALL).unwrap();
        let path = train_paths(&first).swap_remove(1);
        let whole = fs::read(&path).unwrap();
        let other = fs::read(&train_paths(&first)[0]).unwrap();
        let mut flipped = whole.clone();
        flipped[150] ^= 1;
        drop(first);
        for damaged in [&whole[..whole.len() - 2], &flipped, &other] {
            fs::remove_file(&path).unwrap();
            fs::write(&path, damaged).unwrap();
            let message = prepare_into(&folder, &source, SMALL).err().unwrap().to_string();
            assert!(message.contains("train-00001.tokens: ") && message.contains("delete the file"), "{message}");
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(prepare_into(&folder, &source, SMALL).unwrap().origin, StoreOrigin::Completed);
        assert_eq!(fs::read(&path).unwrap(), whole);
    }

    #[test]
    fn a_text_that_moved_or_was_packed_finds_its_tokens() {
        let packed = zstd::encode_all(&b"one\r\ntwo\n"[..], 1).unwrap();
        let folder = folder_of(&[("a/d.txt", b"one\ntwo\n"), ("b/other.txt.zst", &packed)]);
        let file = fs::File::options().append(true).open(folder.path().join("a/d.txt")).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let first = prepare_into(&folder, &source(&folder, "a", HeldOut::Nothing), SMALL).unwrap();
        let second = prepare_into(&folder, &source(&folder, "b", HeldOut::Nothing), SMALL).unwrap();
        assert_eq!((first.origin, second.origin), (StoreOrigin::Built, StoreOrigin::Reused));
        assert_eq!(first.folder, second.folder);
    }
}
