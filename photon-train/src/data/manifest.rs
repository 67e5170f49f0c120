//! What a folder of shards holds and what it was made of, as `manifest.json`.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use photon_core::{atomic_file, hex};
use serde::{Deserialize, Serialize};

use super::{
    DataError,
    shard::{FORMAT_VERSION, Header, Shard},
    split::{HeldOut, Position, Side},
};

const FILE_NAME: &str = "manifest.json";

/// The contents of a folder of shards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format_version: u32,
    /// Whether nothing is missing; until then the folder is a beginning to go on from.
    pub(super) is_complete: bool,
    /// SHA-256 of the tokenizer.
    pub(super) tokenizer: String,
    pub(super) vocab_size: usize,
    /// Bytes of a token id.
    pub(super) id_bytes: usize,
    /// How the held-out text was chosen.
    pub(super) held_out: HeldOut,
    /// Training documents left out because they are held out.
    pub(super) n_equal: u64,
    /// The files read, in order.
    pub(super) files: Vec<FileEntry>,
    pub(super) train: Vec<ShardEntry>,
    pub(super) valid: Vec<ShardEntry>,
}

/// A file that the shards were made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct FileEntry {
    pub(super) path: String,
    pub(super) bytes: u64,
    /// SHA-256 over the hashes of its documents.
    pub(super) content: String,
    pub(super) n_documents: u64,
    pub(super) text_bytes: u64,
}

/// A shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ShardEntry {
    /// Name in the folder.
    pub(super) file: String,
    #[serde(with = "hex::serde")]
    pub(super) sha256: [u8; 32],
    pub(super) n_tokens: u64,
    /// Documents that end in it.
    pub(super) n_documents: u64,
    pub(super) text_bytes: u64,
    /// Text of this side from here on is in later shards.
    pub(super) end: Position,
}

impl ShardEntry {
    pub(super) fn new(file: String, header: &Header, end: Position) -> Self {
        let &Header { sha256, n_tokens, n_documents, text_bytes, .. } = header;
        Self { file, sha256, n_tokens, n_documents, text_bytes, end }
    }

    /// Whether the shard is the one that was written.
    pub(super) fn check(&self, shard: &Shard) -> Result<(), DataError> {
        let header = shard.header();
        if header.sha256 == self.sha256 && (header.n_tokens, header.n_documents) == (self.n_tokens, self.n_documents) {
            return Ok(());
        }
        let describe = |sha256: &[u8; 32], n_tokens, n_documents| {
            format!("{n_tokens} tokens, {n_documents} documents, hash {}", &hex::encode(sha256)[..16])
        };
        Err(DataError::Shard {
            path: shard.path().to_owned(),
            what: "the header",
            found: describe(&header.sha256, header.n_tokens, header.n_documents),
            expected: format!("{} (by {FILE_NAME})", describe(&self.sha256, self.n_tokens, self.n_documents)),
        })
    }
}

impl Manifest {
    /// The manifest in `folder`; none where there is none of this version.
    ///
    /// # Errors
    /// When it cannot be read or is malformed.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>, DataError> {
        let path = folder.join(FILE_NAME);
        let json = match fs::read(&path) {
            Ok(json) => json,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(DataError::read(&path, error)),
        };
        let malformed = |error: serde_json::Error| DataError::Shard {
            path: path.clone(),
            what: "the contents",
            found: error.to_string(),
            expected: "a manifest".to_owned(),
        };
        let manifest: Self = serde_json::from_slice(&json).map_err(malformed)?;
        Ok((manifest.format_version == FORMAT_VERSION).then_some(manifest))
    }

    /// Writes it into `folder`, whole or not at all.
    pub(super) fn write(&self, folder: &Path) -> Result<(), DataError> {
        let path = folder.join(FILE_NAME);
        let json = serde_json::to_vec_pretty(self).expect("a manifest is plain data");
        atomic_file::write(&path, &json).map_err(|source| DataError::Write { path, source })
    }

    /// The shards of a side.
    pub(super) fn shards(&self, side: Side) -> &[ShardEntry] {
        match side {
            Side::Train => &self.train,
            Side::Valid => &self.valid,
        }
    }

    pub(super) fn shards_mut(&mut self, side: Side) -> &mut Vec<ShardEntry> {
        match side {
            Side::Train => &mut self.train,
            Side::Valid => &mut self.valid,
        }
    }

    /// Forgets the shards from the first one on whose file is gone: they are made again.
    pub(super) fn forget_missing(&mut self, folder: &Path) {
        for side in [Side::Train, Side::Valid] {
            let shards = self.shards_mut(side);
            if let Some(missing) = shards.iter().position(|shard| !folder.join(&shard.file).exists()) {
                shards.truncate(missing);
                self.is_complete = false;
            }
        }
    }
}

/// Where shard number `index` of a side lies.
pub(super) fn shard_path(folder: &Path, side: Side, index: usize) -> PathBuf {
    let side = match side {
        Side::Train => "train",
        Side::Valid => "valid",
    };
    folder.join(format!("{side}-{index:05}.tokens"))
}
