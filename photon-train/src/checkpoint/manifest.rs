//! The list of a checkpoint's files with length and hash, by which one that was cut short or has rotted is known.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use photon_core::{atomic_file, hex};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const MANIFEST: &str = "manifest.toml";

/// What is wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum DamageError {
    /// A file is missing.
    #[error("{file} is missing")]
    Missing {
        /// Its name.
        file: String,
    },
    /// A file is cut short, or longer than it was.
    #[error("{file} has {found} bytes, it was written with {expected}")]
    Length {
        /// Its name.
        file: String,
        /// As written.
        expected: u64,
        /// As found.
        found: u64,
    },
    /// A file holds other bytes than were written.
    #[error("{file} has changed since it was written: its SHA-256 is {found}, expected {expected}")]
    Hash {
        /// Its name.
        file: String,
        /// As written.
        expected: String,
        /// As found.
        found: String,
    },
    /// A file cannot be understood.
    #[error("{file} cannot be understood: {reason}")]
    Content {
        /// Its name.
        file: &'static str,
        /// Why.
        reason: String,
    },
    /// The system refuses.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    files: BTreeMap<String, Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    sha256: String,
}

/// Lists the files of a folder as they are, and sees to it that all of them are on disk.
pub(super) fn write(folder: &Path) -> io::Result<()> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        // Not for writing, but some systems sync only what may be written to.
        OpenOptions::new().write(true).open(&path)?.sync_all()?;
        let (bytes, sha256) = measure(&path)?;
        files.insert(entry.file_name().to_string_lossy().into_owned(), Entry { bytes, sha256 });
    }
    let text = toml::to_string(&Manifest { files }).expect("a manifest is plain data");
    // Syncs the folder too.
    atomic_file::write(&folder.join(MANIFEST), text.as_bytes())
}

/// Whether every file of a checkpoint is as it was written, and the `needed` ones are among them.
pub(super) fn verify(folder: &Path, needed: &[&str]) -> Result<(), DamageError> {
    let text = match fs::read_to_string(folder.join(MANIFEST)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(DamageError::Missing { file: MANIFEST.into() });
        }
        Err(error) => return Err(DamageError::Content { file: MANIFEST, reason: error.to_string() }),
    };
    let manifest: Manifest = toml::from_str(&text)
        .map_err(|error| DamageError::Content { file: MANIFEST, reason: error.message().to_owned() })?;
    if let Some(&file) = needed.iter().find(|&&file| !manifest.files.contains_key(file)) {
        return Err(DamageError::Content { file: MANIFEST, reason: format!("it does not list {file}") });
    }
    // Lengths first: they are had at once.
    for (file, entry) in &manifest.files {
        let path = folder.join(file);
        let found = match fs::metadata(&path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DamageError::Missing { file: file.clone() });
            }
            Err(source) => return Err(DamageError::Read { path, source }),
        };
        if found != entry.bytes {
            return Err(DamageError::Length { file: file.clone(), expected: entry.bytes, found });
        }
    }
    for (file, entry) in manifest.files {
        let path = folder.join(&file);
        let (_, found) = measure(&path).map_err(|source| DamageError::Read { path, source })?;
        if found != entry.sha256 {
            return Err(DamageError::Hash { file, expected: entry.sha256, found });
        }
    }
    Ok(())
}

/// SHA-256 of a file.
pub(crate) fn file_hash(path: &Path) -> io::Result<String> {
    measure(path).map(|(_, hash)| hash)
}

/// Length and SHA-256 of a file.
fn measure(path: &Path) -> io::Result<(u64, String)> {
    let mut file = File::open(path)?;
    let (mut hash, mut n_bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => {
                hash.update(&buffer[..n]);
                n_bytes += n as u64;
            }
        }
    }
    Ok((n_bytes, hex::encode(&hash.finalize())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&a, b"some weights").unwrap();
        fs::write(&b, b"").unwrap();
        write(dir.path()).unwrap();
        verify(dir.path(), &["a", "b"]).unwrap();
        let noticed = || verify(dir.path(), &["a", "b"]).unwrap_err();
        for path in [a.clone(), dir.path().join(MANIFEST)] {
            let whole = fs::read(&path).unwrap();
            for bit in 0..8 * whole.len() {
                let mut flipped = whole.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, &flipped).unwrap();
                // Blanks and the like of the manifest do not matter.
                let is_same = String::from_utf8(flipped).ok().and_then(|text| text.parse::<toml::Table>().ok())
                    == String::from_utf8(whole.clone()).ok().and_then(|text| text.parse::<toml::Table>().ok());
                if path == a || !is_same {
                    noticed();
                }
            }
            for len in 0..whole.len() {
                fs::write(&path, &whole[..len]).unwrap();
                if path == a || len + 1 < whole.len() {
                    noticed();
                }
            }
            fs::write(&path, &whole).unwrap();
        }
        verify(dir.path(), &["a", "b"]).unwrap();
        assert!(matches!(verify(dir.path(), &["c"]), Err(DamageError::Content { .. })));
        fs::remove_file(&b).unwrap();
        assert!(matches!(noticed(), DamageError::Missing { file } if file == "b"));
        fs::remove_file(dir.path().join(MANIFEST)).unwrap();
        assert!(matches!(noticed(), DamageError::Missing { file } if file == MANIFEST));
    }
}
