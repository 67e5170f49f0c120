//! Reads files, folders and patterns as documents, in a fixed order.
//!
//! Line ends are made one: CRLF and a lone CR become LF. Nothing else of a text is changed, and it
//! need not be UTF-8. Dividing documents is left to `split`, tokenising to `store`.

use std::{
    collections::HashSet,
    fmt, fs, io,
    path::{Path, PathBuf},
};

use serde_json::Value;
use walkdir::WalkDir;

use super::DataError;

/// Extensions read from a folder.
const TEXT_EXTENSIONS: [&str; 48] = [
    "txt", "text", "md", "markdown", "rst", "adoc", "org", "tex", "rs", "py", "js", "mjs", "jsx", "ts", "tsx", "c",
    "h", "cc", "cpp", "cxx", "hpp", "cs", "java", "kt", "scala", "swift", "go", "rb", "php", "lua", "pl", "r", "jl",
    "hs", "ml", "sh", "sql", "html", "css", "xml", "json", "jsonl", "toml", "yaml", "yml", "csv", "tsv", "ini",
];

/// A text that belongs together: a file, or a line of a `.jsonl` file.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The file's path as it was given or found, with `:line` for a line of a `.jsonl` file.
    pub name: String,
    /// The text, its line ends LF.
    pub text: Vec<u8>,
    /// Offset in the file of the first byte that is not UTF-8.
    pub not_utf8_at: Option<usize>,
}

impl Document {
    /// A document of a file's bytes.
    pub fn new(name: impl Into<String>, raw: Vec<u8>) -> Self {
        let not_utf8_at = str::from_utf8(&raw).err().map(|error| error.valid_up_to());
        Self { name: name.into(), text: with_unix_line_ends(raw), not_utf8_at }
    }

    /// Fails where the text is not UTF-8.
    ///
    /// # Errors
    /// Names the document and the offset in its file.
    pub fn check_utf8(&self) -> Result<(), DataError> {
        match self.not_utf8_at {
            None => Ok(()),
            Some(offset) => Err(DataError::NotUtf8 { name: self.name.clone(), offset }),
        }
    }
}

/// The documents read, and what was passed over.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Corpus {
    /// In the order of the paths; within a folder sorted by name.
    pub documents: Vec<Document>,
    /// What was not read.
    pub skipped: Skipped,
}

/// Counts of what was passed over in folders, patterns and `.jsonl` files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Files and folders whose name starts with a dot.
    pub hidden: usize,
    /// Files with a NUL byte.
    pub binary: usize,
    /// Files in folders whose extension is not known to be text.
    pub not_text: usize,
    /// Files and `.jsonl` texts of no bytes.
    pub empty: usize,
    /// Files reached a second time.
    pub repeated: usize,
}

impl Skipped {
    pub(super) fn add(&mut self, other: &Self) {
        self.hidden += other.hidden;
        self.binary += other.binary;
        self.not_text += other.not_text;
        self.empty += other.empty;
        self.repeated += other.repeated;
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

/// Reads every path: a file, a folder with all below it, or a pattern (`*`, `**`, `?`, `[..]`).
///
/// A file named by its own path is read whatever its name. Folders pass over hidden names, unknown
/// extensions, binary and empty files; patterns pass over hidden, binary and empty files and match
/// no folders. A file reached twice is read once. In a `.jsonl` file each line is a document, its
/// text under `text_field`; any other file is one document.
///
/// # Errors
/// Names the path that is missing, empty, binary, malformed or without any text.
pub fn read_corpus(paths: &[String], text_field: &str) -> Result<Corpus, DataError> {
    let mut reader = Reader { text_field, corpus: Corpus::default(), seen: HashSet::new() };
    for path in paths {
        reader.read_path(path)?;
    }
    Ok(reader.corpus)
}

struct Reader<'a> {
    text_field: &'a str,
    corpus: Corpus,
    seen: HashSet<PathBuf>,
}

impl Reader<'_> {
    fn read_path(&mut self, given: &str) -> Result<(), DataError> {
        let path = Path::new(given);
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => self.read_folder(path),
            Ok(_) => self.read_named_file(path),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(read_error(path, error)),
            Err(_) if given.contains(['*', '?', '[']) => self.read_pattern(given),
            Err(_) => Err(DataError::Missing { path: path.to_owned() }),
        }
    }

    fn read_named_file(&mut self, path: &Path) -> Result<(), DataError> {
        if self.is_repeated(path)? {
            return Ok(());
        }
        let raw = fs::read(path).map_err(|error| read_error(path, error))?;
        if let Some(offset) = raw.iter().position(|&byte| byte == 0) {
            return Err(DataError::Binary { path: path.to_owned(), offset });
        }
        let before = self.corpus.documents.len();
        if !raw.is_empty() {
            self.add_file(path, raw)?;
        }
        if self.corpus.documents.len() == before {
            return Err(DataError::EmptyFile { path: path.to_owned() });
        }
        Ok(())
    }

    fn read_folder(&mut self, folder: &Path) -> Result<(), DataError> {
        let before = self.corpus.counts();
        let mut hidden = 0;
        let entries = WalkDir::new(folder).follow_links(true).sort_by_file_name().into_iter().filter_entry(|entry| {
            let is_hidden = entry.depth() > 0 && entry.file_name().as_encoded_bytes().starts_with(b".");
            hidden += usize::from(is_hidden);
            !is_hidden
        });
        for entry in entries {
            let entry = entry.map_err(|error| {
                let path = error.path().unwrap_or(folder).to_owned();
                read_error(&path, error.into())
            })?;
            if !entry.file_type().is_file() {
                continue;
            }
            if has_text_extension(entry.path()) {
                self.read_found_file(entry.path())?;
            } else {
                self.corpus.skipped.not_text += 1;
            }
        }
        self.corpus.skipped.hidden += hidden;
        self.expect_more_than(before, &folder.display().to_string())
    }

    fn read_pattern(&mut self, pattern: &str) -> Result<(), DataError> {
        let before = self.corpus.counts();
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
        let matches = glob::glob_with(pattern, options)
            .map_err(|source| DataError::Pattern { pattern: pattern.to_owned(), source })?;
        let mut n_files = 0;
        for path in matches {
            let path = path.map_err(|error| {
                let path = error.path().to_owned();
                read_error(&path, error.into())
            })?;
            if path.is_file() {
                n_files += 1;
                self.read_found_file(&path)?;
            }
        }
        if n_files == 0 {
            return Err(DataError::NoMatch { pattern: pattern.to_owned() });
        }
        self.expect_more_than(before, pattern)
    }

    /// A file nobody named: what is no text is counted and passed over.
    fn read_found_file(&mut self, path: &Path) -> Result<(), DataError> {
        if self.is_repeated(path)? {
            return Ok(());
        }
        let raw = fs::read(path).map_err(|error| read_error(path, error))?;
        if raw.is_empty() {
            self.corpus.skipped.empty += 1;
            return Ok(());
        }
        if raw.contains(&0) {
            self.corpus.skipped.binary += 1;
            return Ok(());
        }
        self.add_file(path, raw)
    }

    fn is_repeated(&mut self, path: &Path) -> Result<bool, DataError> {
        let canonical = path.canonicalize().map_err(|error| read_error(path, error))?;
        let is_repeated = !self.seen.insert(canonical);
        self.corpus.skipped.repeated += usize::from(is_repeated);
        Ok(is_repeated)
    }

    fn add_file(&mut self, path: &Path, raw: Vec<u8>) -> Result<(), DataError> {
        let name = path.display().to_string();
        if !extension(path).eq_ignore_ascii_case("jsonl") {
            self.corpus.documents.push(Document::new(name, raw));
            return Ok(());
        }
        for (index, line) in raw.split(|&byte| byte == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let line_number = index + 1;
            let text = json_text(line, self.text_field).map_err(|found| DataError::JsonLine {
                path: path.to_owned(),
                line: line_number,
                text_field: self.text_field.to_owned(),
                found,
            })?;
            if text.is_empty() {
                self.corpus.skipped.empty += 1;
            } else {
                self.corpus.documents.push(Document::new(format!("{name}:{line_number}"), text.into_bytes()));
            }
        }
        Ok(())
    }

    /// A folder or pattern that adds no document was surely meant to; repeats are already read.
    fn expect_more_than(&self, before: Counts, path: &str) -> Result<(), DataError> {
        let now = self.corpus.counts();
        if now.n_documents > before.n_documents || now.skipped.repeated > before.skipped.repeated {
            return Ok(());
        }
        let skipped = Skipped {
            hidden: now.skipped.hidden - before.skipped.hidden,
            binary: now.skipped.binary - before.skipped.binary,
            not_text: now.skipped.not_text - before.skipped.not_text,
            empty: now.skipped.empty - before.skipped.empty,
            repeated: 0,
        };
        Err(DataError::NoText { path: path.to_owned(), skipped })
    }
}

/// How far the reading has come.
struct Counts {
    n_documents: usize,
    skipped: Skipped,
}

impl Corpus {
    fn counts(&self) -> Counts {
        Counts { n_documents: self.documents.len(), skipped: self.skipped }
    }
}

/// The string under `text_field`, or what stands there instead.
fn json_text(line: &[u8], text_field: &str) -> Result<String, String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| {
        let message = error.to_string();
        let what = message.rsplit_once(" at line ").map_or(message.as_str(), |(what, _)| what);
        format!("malformed JSON at column {} ({what})", error.column())
    })?;
    let Value::Object(mut object) = value else {
        return Err(format!("{} alone", kind_of(&value)));
    };
    match object.remove(text_field) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("{} there", kind_of(&other))),
        None => {
            let keys: Vec<&str> = object.keys().map(String::as_str).collect();
            Err(format!("only the keys [{}]", keys.join(", ")))
        }
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

fn has_text_extension(path: &Path) -> bool {
    TEXT_EXTENSIONS.iter().any(|known| extension(path).eq_ignore_ascii_case(known))
}

fn read_error(path: &Path, source: io::Error) -> DataError {
    DataError::Read { path: path.to_owned(), source }
}

/// CRLF and lone CR become LF.
fn with_unix_line_ends(raw: Vec<u8>) -> Vec<u8> {
    if !raw.contains(&b'\r') {
        return raw;
    }
    let mut text = Vec::with_capacity(raw.len());
    let mut bytes = raw.into_iter().peekable();
    while let Some(byte) = bytes.next() {
        if byte == b'\r' {
            bytes.next_if_eq(&b'\n');
            text.push(b'\n');
        } else {
            text.push(byte);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with these files; a name with `/` makes folders.
    fn folder_of(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, contents) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        }
        folder
    }

    fn read(folder: &tempfile::TempDir, paths: &[&str]) -> Result<Corpus, DataError> {
        let paths: Vec<String> = paths.iter().map(|path| folder.path().join(path).display().to_string()).collect();
        read_corpus(&paths, "text")
    }

    fn texts(corpus: &Corpus) -> Vec<&str> {
        corpus.documents.iter().map(|document| str::from_utf8(&document.text).unwrap()).collect()
    }

    #[test]
    fn line_ends_become_lf() {
        for (raw, text) in [
            ("a\r\nb", "a\nb"),
            ("a\rb\r", "a\nb\n"),
            ("a\n\r\nb", "a\n\nb"),
            ("a\r\r\nb", "a\n\nb"),
            ("\n", "\n"),
            ("a\nb", "a\nb"),
        ] {
            assert_eq!(Document::new("x", raw.into()).text, text.as_bytes(), "{raw:?}");
        }
        let folder = folder_of(&[("d.jsonl", b"{\"text\":\"a\\r\\nb\"}\r\n{\"text\":\"c\"}\r\n")]);
        assert_eq!(texts(&read(&folder, &["d.jsonl"]).unwrap()), ["a\nb", "c"]);
    }

    #[test]
    fn folders_are_read_in_order_and_count_what_they_skip() {
        let folder = folder_of(&[
            ("b.txt", b"2"),
            ("a/z.MD", b"1"),
            ("c.rs", b"3"),
            ("photo.png", b"\x89PNG"),
            ("binary.txt", b"a\0b"),
            ("empty.py", b""),
            (".git/config.txt", b"hidden"),
            ("a/.env.txt", b"hidden"),
        ]);
        let corpus = read(&folder, &[""]).unwrap();
        assert_eq!(texts(&corpus), ["1", "2", "3"]);
        assert_eq!(corpus.skipped, Skipped { hidden: 2, binary: 1, not_text: 1, empty: 1, repeated: 0 });
        assert_eq!(corpus.skipped.to_string(), "skipped 2 hidden, 1 binary, 1 of an unknown extension, 1 empty");
    }

    #[test]
    fn patterns_match_files_of_any_extension_below() {
        let folder = folder_of(&[("x/a.log", b"1"), ("x/y/b.log", b"2"), ("x/.c.log", b"no"), ("x/d.log", b"\0")]);
        let corpus = read(&folder, &["**/*.log"]).unwrap();
        assert_eq!(texts(&corpus), ["1", "2"]);
        assert_eq!(corpus.skipped, Skipped { binary: 1, ..Default::default() });
        assert!(matches!(read(&folder, &["*.log"]), Err(DataError::NoMatch { .. })));
        assert!(matches!(read(&folder, &["x/d*.log"]), Err(DataError::NoText { .. })));
        assert!(matches!(read(&folder, &["x/***"]), Err(DataError::Pattern { .. })));
    }

    #[test]
    fn a_name_with_brackets_is_a_file_when_there_is_one() {
        let folder = folder_of(&[("a[1].txt", b"it"), ("a1.txt", b"other")]);
        assert_eq!(texts(&read(&folder, &["a[1].txt"]).unwrap()), ["it"]);
    }

    #[test]
    fn a_file_reached_twice_is_read_once() {
        let folder = folder_of(&[("a.txt", b"1"), ("b.txt", b"2")]);
        let corpus = read(&folder, &["b.txt", "", "*.txt"]).unwrap();
        assert_eq!(texts(&corpus), ["2", "1"]);
        assert_eq!(corpus.skipped.repeated, 3);
    }

    #[test]
    fn each_line_of_jsonl_is_a_document_named_by_its_line() {
        let folder = folder_of(&[("d.jsonl", b"{\"text\":\"one\"}\n\n{\"id\":2,\"text\":\"two\"}\n{\"text\":\"\"}\n")]);
        let corpus = read(&folder, &["d.jsonl"]).unwrap();
        assert_eq!(texts(&corpus), ["one", "two"]);
        assert!(corpus.documents[1].name.ends_with("d.jsonl:3"));
        assert_eq!(corpus.skipped.empty, 1);
    }

    #[test]
    fn a_bad_line_of_jsonl_is_named() {
        for (line, found) in [
            ("{\"text\":", "malformed JSON at column 8"),
            ("[1]", "an array alone"),
            ("{\"text\":3}", "a number there"),
            ("{\"body\":\"x\",\"id\":1}", "only the keys [body, id]"),
        ] {
            let folder = folder_of(&[("d.jsonl", format!("{{\"text\":\"ok\"}}\n{line}\n").as_bytes())]);
            let message = read(&folder, &["d.jsonl"]).unwrap_err().to_string();
            assert!(message.contains("d.jsonl line 2: "), "{message}");
            assert!(message.contains(found), "{message}");
        }
    }

    #[test]
    fn another_text_field_can_be_chosen() {
        let folder = folder_of(&[("d.jsonl", b"{\"body\":\"x\"}")]);
        let path = folder.path().join("d.jsonl").display().to_string();
        assert_eq!(texts(&read_corpus(&[path], "body").unwrap()), ["x"]);
    }

    #[test]
    fn paths_without_text_are_named() {
        let folder = folder_of(&[("empty.txt", b""), ("blank.jsonl", b"\n"), ("b.bin", b"ab\0"), ("f/x.png", b"x")]);
        let error = |path| read(&folder, &[path]).unwrap_err();
        assert!(matches!(error("none.txt"), DataError::Missing { .. }));
        assert!(matches!(error("empty.txt"), DataError::EmptyFile { .. }));
        assert!(matches!(error("blank.jsonl"), DataError::EmptyFile { .. }));
        assert!(matches!(error("b.bin"), DataError::Binary { offset: 2, .. }));
        assert!(matches!(error("f"), DataError::NoText { skipped: Skipped { not_text: 1, .. }, .. }));
        assert!(error("none.txt").to_string().contains("none.txt"));
    }

    #[test]
    fn the_offset_of_what_is_not_utf8_counts_the_files_own_line_ends() {
        let document = Document::new("moby.txt", b"a\r\nb\xff".to_vec());
        assert_eq!(document.text, b"a\nb\xff");
        let error = document.check_utf8().unwrap_err();
        assert!(matches!(error, DataError::NotUtf8 { ref name, offset: 4 } if name == "moby.txt"));
    }
}
