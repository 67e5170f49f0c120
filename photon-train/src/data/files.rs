//! From paths, folders and patterns to files, in a fixed order. Contents are left to `documents`.

use std::{
    collections::HashSet,
    fmt, fs, io,
    ops::Range,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use serde::Serialize;
use walkdir::WalkDir;

use super::{DataError, format::Format};

/// A file to read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TextFile {
    /// As given or found.
    pub(super) path: PathBuf,
    pub(super) format: Format,
    /// Given by its own path: to be read whatever its name, and its faults are errors.
    pub(super) is_named: bool,
    /// Bytes on disk.
    pub(super) bytes: u64,
    /// Last change, in nanoseconds since 1970; 0 where the system does not say.
    pub(super) modified_ns: u64,
}

/// The files of some paths.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// In the order of the paths; within a folder sorted by name.
    pub(super) files: Vec<TextFile>,
    /// Passed over by name.
    pub(super) skipped: Skipped,
    /// Folders and patterns, with the files and what was passed over for them.
    pub(super) searches: Vec<Search>,
}

/// What a folder or pattern gave.
#[derive(Debug)]
pub(super) struct Search {
    pub(super) given: String,
    pub(super) files: Range<usize>,
    pub(super) skipped: Skipped,
}

/// Counts of what was passed over in folders, patterns, `.jsonl` and `.parquet` files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Skipped {
    /// Files and folders whose name starts with a dot.
    pub hidden: u64,
    /// Files with a NUL byte.
    pub binary: u64,
    /// Files in folders whose extension is not known to be text.
    pub not_text: u64,
    /// Files, lines and rows of no text.
    pub empty: u64,
    /// Files reached a second time.
    pub repeated: u64,
}

impl Skipped {
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            hidden: self.hidden + other.hidden,
            binary: self.binary + other.binary,
            not_text: self.not_text + other.not_text,
            empty: self.empty + other.empty,
            repeated: self.repeated + other.repeated,
        }
    }
}

/// `skipped 2 hidden, 1 binary`.
impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            (self.hidden, "hidden"),
            (self.binary, "binary"),
            (self.not_text, "of an unknown extension"),
            (self.empty, "empty"),
            (self.repeated, "repeated"),
        ];
        let words: Vec<String> =
            counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
        match words.as_slice() {
            [] => write!(f, "skipped nothing"),
            words => write!(f, "skipped {}", words.join(", ")),
        }
    }
}

/// Lists every path: a file, a folder with all below it, or a pattern (`*`, `**`, `?`, `[..]`).
///
/// Folders pass over hidden names and unknown extensions, patterns over hidden names and folders. A file reached
/// twice is listed once.
///
/// # Errors
/// Names the path that is missing, malformed or matches nothing.
pub(super) fn list_files(paths: &[String]) -> Result<Listing, DataError> {
    let mut lister = Lister::default();
    for given in paths {
        lister.list(given)?;
    }
    Ok(lister.listing)
}

#[derive(Default)]
struct Lister {
    listing: Listing,
    seen: HashSet<PathBuf>,
}

impl Lister {
    fn list(&mut self, given: &str) -> Result<(), DataError> {
        let path = Path::new(given);
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => self.search(given, |lister| lister.list_folder(path)),
            Ok(_) => self.add(path, true),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(DataError::read(path, error)),
            Err(_) if given.contains(['*', '?', '[']) => self.search(given, |lister| lister.list_pattern(given)),
            Err(_) => Err(DataError::Missing { path: path.to_owned() }),
        }
    }

    fn search(&mut self, given: &str, list: impl FnOnce(&mut Self) -> Result<(), DataError>) -> Result<(), DataError> {
        let first = self.listing.files.len();
        let before = std::mem::take(&mut self.listing.skipped);
        list(self)?;
        let skipped = self.listing.skipped;
        self.listing.skipped = before.plus(skipped);
        let files = first..self.listing.files.len();
        self.listing.searches.push(Search { given: given.to_owned(), files, skipped });
        Ok(())
    }

    fn list_folder(&mut self, folder: &Path) -> Result<(), DataError> {
        let mut hidden = 0;
        let entries = WalkDir::new(folder).follow_links(true).sort_by_file_name().into_iter().filter_entry(|entry| {
            let is_hidden = entry.depth() > 0 && entry.file_name().as_encoded_bytes().starts_with(b".");
            hidden += u64::from(is_hidden);
            !is_hidden
        });
        for entry in entries {
            let entry = entry.map_err(|error| {
                let path = error.path().unwrap_or(folder).to_owned();
                DataError::read(&path, error.into())
            })?;
            if !entry.file_type().is_file() {
                continue;
            }
            match Format::of(entry.path()).is_known {
                true => self.add(entry.path(), false)?,
                false => self.listing.skipped.not_text += 1,
            }
        }
        self.listing.skipped.hidden += hidden;
        Ok(())
    }

    fn list_pattern(&mut self, pattern: &str) -> Result<(), DataError> {
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
        let matches = glob::glob_with(pattern, options)
            .map_err(|source| DataError::Pattern { pattern: pattern.to_owned(), source })?;
        let mut n_files = 0;
        for path in matches {
            let path = path.map_err(|error| {
                let path = error.path().to_owned();
                DataError::read(&path, error.into())
            })?;
            if path.is_file() {
                n_files += 1;
                self.add(&path, false)?;
            }
        }
        match n_files {
            0 => Err(DataError::NoMatch { pattern: pattern.to_owned() }),
            _ => Ok(()),
        }
    }

    fn add(&mut self, path: &Path, is_named: bool) -> Result<(), DataError> {
        let canonical = path.canonicalize().map_err(|error| DataError::read(path, error))?;
        if !self.seen.insert(canonical) {
            self.listing.skipped.repeated += 1;
            return Ok(());
        }
        let metadata = fs::metadata(path).map_err(|error| DataError::read(path, error))?;
        let since_1970 = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        self.listing.files.push(TextFile {
            path: path.to_owned(),
            format: Format::of(path),
            is_named,
            bytes: metadata.len(),
            modified_ns: since_1970.map_or(0, |time| time.as_nanos() as u64),
        });
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A folder with these files; a name with `/` makes folders.
    pub(crate) fn folder_of(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, contents) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        }
        folder
    }

    fn list(folder: &tempfile::TempDir, paths: &[&str]) -> Result<Listing, DataError> {
        let paths: Vec<String> = paths.iter().map(|path| folder.path().join(path).display().to_string()).collect();
        list_files(&paths)
    }

    fn names(listing: &Listing) -> Vec<&str> {
        listing.files.iter().map(|file| file.path.file_name().unwrap().to_str().unwrap()).collect()
    }

    #[test]
    fn folders_are_listed_in_order_and_count_what_they_skip() {
        let folder = folder_of(&[
            ("b.txt", b"2"),
            ("a/z.MD", b"1"),
            ("c.jsonl.zst", b"3"),
            ("photo.png", b"\x89PNG"),
            (".git/config.txt", b"hidden"),
            ("a/.env.txt", b"hidden"),
        ]);
        let listing = list(&folder, &[""]).unwrap();
        assert_eq!(names(&listing), ["z.MD", "b.txt", "c.jsonl.zst"]);
        assert_eq!(listing.skipped, Skipped { hidden: 2, not_text: 1, ..Default::default() });
        assert_eq!(listing.skipped.to_string(), "skipped 2 hidden, 1 of an unknown extension");
        assert_eq!(listing.searches[0].files, 0..3);
    }

    #[test]
    fn patterns_match_files_of_any_extension_below() {
        let folder = folder_of(&[("x/a.log", b"1"), ("x/y/b.log", b"2"), ("x/.c.log", b"no")]);
        assert_eq!(names(&list(&folder, &["**/*.log"]).unwrap()), ["a.log", "b.log"]);
        assert!(matches!(list(&folder, &["*.log"]), Err(DataError::NoMatch { .. })));
        assert!(matches!(list(&folder, &["x/***"]), Err(DataError::Pattern { .. })));
        assert!(matches!(list(&folder, &["none.txt"]), Err(DataError::Missing { .. })));
    }

    #[test]
    fn a_name_with_brackets_is_a_file_when_there_is_one() {
        let folder = folder_of(&[("a[1].txt", b"it"), ("a1.txt", b"other")]);
        assert_eq!(names(&list(&folder, &["a[1].txt"]).unwrap()), ["a[1].txt"]);
    }

    #[test]
    fn a_file_reached_twice_is_listed_once() {
        let folder = folder_of(&[("a.txt", b"1"), ("b.txt", b"2")]);
        let listing = list(&folder, &["b.txt", "", "*.txt"]).unwrap();
        assert_eq!(names(&listing), ["b.txt", "a.txt"]);
        assert_eq!(listing.skipped.repeated, 3);
    }
}
