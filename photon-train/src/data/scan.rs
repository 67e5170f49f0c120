//! One pass over the files before any is tokenised: what they hold, and a hash of it.
//!
//! The results are kept beside the shards, so that files that did not change are not read again.

use std::{
    collections::BTreeMap,
    fs,
    ops::ControlFlow,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use photon_core::{atomic_file, hex};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    DataError, Progress, Stage, TextFile,
    documents::{DocumentHash, read_parts},
};

/// Where scans are kept.
const CACHE_FILE: &str = "scans.json";
/// A file changed this short a time before it was scanned may change again without a sign: clocks of file systems
/// are coarse.
const SETTLED: Duration = Duration::from_secs(2);

/// What a file holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct FileScan {
    /// Documents with text.
    pub(super) n_documents: u64,
    /// Bytes of their text.
    pub(super) text_bytes: u64,
    /// SHA-256 over the documents' hashes.
    #[serde(with = "hex::serde")]
    pub(super) content: DocumentHash,
    /// The lowest hash of a document; in a file that is one document, its hash.
    #[serde(with = "hex::serde")]
    pub(super) lowest: DocumentHash,
    /// The highest.
    #[serde(with = "hex::serde")]
    pub(super) highest: DocumentHash,
    /// Lines, rows or files without text.
    pub(super) empty: u64,
    /// Offset of the first NUL byte of a file that is no text; it then counts no documents.
    pub(super) nul_at: Option<u64>,
    /// Offset of the first byte that is not UTF-8.
    pub(super) not_utf8_at: Option<u64>,
}

/// Scans files, on all threads, but those that did not change since an earlier scan into `cache_dir`.
///
/// # Errors
/// As [`read_parts`]; a NUL byte is noted and no error here.
pub(super) fn scan_files(
    files: &[TextFile],
    text_field: &str,
    cache_dir: &Path,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<FileScan>, DataError> {
    let cache_path = cache_dir.join(CACHE_FILE);
    // A cache that is missing or damaged is an empty one.
    let cached: BTreeMap<String, Known> =
        fs::read(&cache_path).ok().and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default();
    let total_bytes = files.iter().map(|file| file.bytes).sum();
    let done_bytes = AtomicU64::new(0);
    let scan_one = |file: &TextFile| {
        let known = cached.get(&key_of(file, text_field)).filter(|known| known.still_holds(file));
        let scan = known.map_or_else(|| scan_file(file, text_field), |known| Ok(known.scan.clone()))?;
        let done_bytes = done_bytes.fetch_add(file.bytes, Ordering::Relaxed) + file.bytes;
        progress(Progress { stage: Stage::Reading, done_bytes, total_bytes });
        Ok(scan)
    };
    let started_ns = now_ns();
    let scans: Vec<FileScan> = files.par_iter().map(scan_one).collect::<Result<_, DataError>>()?;

    let mut known = cached;
    for (file, scan) in files.iter().zip(&scans) {
        if file.modified_ns + SETTLED.as_nanos() as u64 <= started_ns {
            let entry = Known { bytes: file.bytes, modified_ns: file.modified_ns, scan: scan.clone() };
            known.insert(key_of(file, text_field), entry);
        }
    }
    let json = serde_json::to_vec(&known).expect("scans are plain data");
    fs::create_dir_all(cache_dir)
        .and_then(|()| atomic_file::write(&cache_path, &json))
        .map_err(|source| DataError::Write { path: cache_path, source })?;
    Ok(scans)
}

/// A scan, and how the file looked.
#[derive(Serialize, Deserialize)]
struct Known {
    bytes: u64,
    modified_ns: u64,
    scan: FileScan,
}

impl Known {
    fn still_holds(&self, file: &TextFile) -> bool {
        (self.bytes, self.modified_ns) == (file.bytes, file.modified_ns) && file.modified_ns != 0
    }
}

fn key_of(file: &TextFile, text_field: &str) -> String {
    let path = std::path::absolute(&file.path).unwrap_or_else(|_| file.path.clone());
    format!("{}\n{text_field}", path.display())
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

fn scan_file(file: &TextFile, text_field: &str) -> Result<FileScan, DataError> {
    let mut scan = FileScan::default();
    let mut all = Sha256::new();
    let mut document = Sha256::new();
    let read = read_parts(file, text_field, &mut |part| {
        scan.text_bytes += part.text.len() as u64;
        if part.hash.is_none() {
            document.update(part.text);
        }
        if part.ends_document {
            let hash = part.hash.unwrap_or_else(|| document.finalize_reset().into());
            all.update(hash);
            scan.lowest = if scan.n_documents == 0 { hash } else { scan.lowest.min(hash) };
            scan.highest = scan.highest.max(hash);
            scan.n_documents += 1;
        }
        ControlFlow::Continue(())
    });
    match read {
        Ok(notes) => {
            scan.content = all.finalize().into();
            Ok(FileScan { empty: notes.empty, not_utf8_at: notes.not_utf8_at, ..scan })
        }
        Err(DataError::Binary { offset, .. }) => Ok(FileScan { nul_at: Some(offset), ..Default::default() }),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::{
        super::files::{list_files, tests::folder_of},
        *,
    };

    fn scan(folder: &tempfile::TempDir, name: &str) -> Result<FileScan, DataError> {
        let files = list_files(&[folder.path().join(name).display().to_string()]).unwrap().files;
        scan_files(&files, "text", &folder.path().join("cache"), &|_| {}).map(|mut scans| scans.remove(0))
    }

    #[test]
    fn a_scan_counts_and_hashes_what_a_file_holds() {
        let folder = folder_of(&[
            ("a.jsonl", b"{\"text\":\"one\"}\n{\"text\":\"\"}\n{\"text\":\"three\"}\n"),
            ("b.txt", b"one\r\n"),
            ("c.txt", b"one\n"),
            ("d.txt", b"o\0"),
        ]);
        let lines = scan(&folder, "a.jsonl").unwrap();
        assert_eq!((lines.n_documents, lines.text_bytes, lines.empty), (2, 8, 1));
        let mut hashes: Vec<DocumentHash> = ["one", "three"].map(|text| Sha256::digest(text).into()).to_vec();
        hashes.sort_unstable();
        assert_eq!((lines.lowest, lines.highest), (hashes[0], hashes[1]));
        let text = scan(&folder, "b.txt").unwrap();
        assert_eq!(text.lowest, <DocumentHash>::from(Sha256::digest("one\n")));
        assert_eq!(text.content, scan(&folder, "c.txt").unwrap().content);
        assert_ne!(text.content, lines.content);
        assert_eq!(scan(&folder, "d.txt").unwrap(), FileScan { nul_at: Some(1), ..Default::default() });
    }

    #[test]
    fn a_file_is_read_again_only_when_it_looks_changed() {
        let folder = folder_of(&[("a.txt", b"one"), ("b.txt", b"one")]);
        let old = SystemTime::now() - Duration::from_secs(60);
        let path = folder.path().join("a.txt");
        let rewrite = |text: &str, modified: SystemTime| {
            fs::write(&path, text).unwrap();
            File::options().append(true).open(&path).unwrap().set_modified(modified).unwrap();
        };
        rewrite("one", old);
        let first = scan(&folder, "a.txt").unwrap();
        // Nobody can tell: same size, same time.
        rewrite("two", old);
        assert_eq!(scan(&folder, "a.txt").unwrap(), first);
        rewrite("two", old + Duration::from_nanos(1000));
        assert_ne!(scan(&folder, "a.txt").unwrap(), first);
        // Too fresh to be trusted.
        let now = SystemTime::now();
        rewrite("one", now);
        scan(&folder, "a.txt").unwrap();
        rewrite("two", now);
        assert_ne!(scan(&folder, "a.txt").unwrap(), first);
    }
}
