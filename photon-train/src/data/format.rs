//! What a file holds and how it is packed, by the endings of its name; and its bytes, unpacked.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::Path,
};

use flate2::read::MultiGzDecoder;

/// Endings of plain text that are read from a folder.
const TEXT_EXTENSIONS: [&str; 47] = [
    "txt", "text", "md", "markdown", "rst", "adoc", "org", "tex", "rs", "py", "js", "mjs", "jsx", "ts", "tsx", "c",
    "h", "cc", "cpp", "cxx", "hpp", "cs", "java", "kt", "scala", "swift", "go", "rb", "php", "lua", "pl", "r", "jl",
    "hs", "ml", "sh", "sql", "html", "css", "xml", "json", "toml", "yaml", "yml", "csv", "tsv", "ini",
];

/// How documents lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contents {
    /// The file is one document.
    Text,
    /// Each line is a document, as JSON.
    JsonLines,
    /// Each row is a document.
    Parquet,
}

/// How a file's bytes are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packed {
    /// They are not.
    Plain,
    /// gzip, also of several members.
    Gzip,
    /// Zstandard, also of several frames.
    Zstd,
}

/// What the endings of a name say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub(super) contents: Contents,
    pub(super) packed: Packed,
    /// Whether the ending is one that a folder is searched for.
    pub(super) is_known: bool,
}

impl Format {
    /// The format of `a.jsonl.zst`, `a.txt`, `a` and the like.
    pub(super) fn of(path: &Path) -> Self {
        let (packed, inner) = match lowercase_extension(path).as_str() {
            "gz" | "gzip" => (Packed::Gzip, Path::new(path.file_stem().unwrap_or_default())),
            "zst" | "zstd" => (Packed::Zstd, Path::new(path.file_stem().unwrap_or_default())),
            _ => (Packed::Plain, path),
        };
        let extension = lowercase_extension(inner);
        let contents = match extension.as_str() {
            "jsonl" | "ndjson" => Contents::JsonLines,
            // Parquet packs its own columns and must be read from the end.
            "parquet" if packed == Packed::Plain => Contents::Parquet,
            _ => Contents::Text,
        };
        Self { contents, packed, is_known: contents != Contents::Text || TEXT_EXTENSIONS.contains(&&*extension) }
    }
}

fn lowercase_extension(path: &Path) -> String {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_ascii_lowercase()
}

/// The unpacked bytes of a file, from its start.
pub(super) fn open(path: &Path, packed: Packed) -> io::Result<Box<dyn Read>> {
    let file = File::open(path)?;
    Ok(match packed {
        Packed::Plain => Box::new(file),
        Packed::Gzip => Box::new(MultiGzDecoder::new(BufReader::new(file))),
        Packed::Zstd => Box::new(zstd::Decoder::new(file)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_say_what_a_file_is() {
        let format = |name: &str| {
            let Format { contents, packed, is_known } = Format::of(Path::new(name));
            (contents, packed, is_known)
        };
        assert_eq!(format("x/a.MD"), (Contents::Text, Packed::Plain, true));
        assert_eq!(format("a.b.txt.gz"), (Contents::Text, Packed::Gzip, true));
        assert_eq!(format("a.jsonl.zst"), (Contents::JsonLines, Packed::Zstd, true));
        assert_eq!(format("a.ndjson"), (Contents::JsonLines, Packed::Plain, true));
        assert_eq!(format("a.parquet"), (Contents::Parquet, Packed::Plain, true));
        assert_eq!(format("a.png"), (Contents::Text, Packed::Plain, false));
        assert_eq!(format("a.gz"), (Contents::Text, Packed::Gzip, false));
        assert_eq!(format("gz"), (Contents::Text, Packed::Plain, false));
    }
}
