//! Tokenises documents into shards: one thread reads, all encode, one writes, with bounded queues between.
//!
//! A finished shard is put in place by a rename and then named in the manifest, so that whatever ends the work leaves
//! whole shards only, and the next call goes on behind them.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
};

use photon_core::{atomic_file, tokenizer::Tokenizer};
use rayon::prelude::*;
use tempfile::NamedTempFile;

use super::{
    DataError, Progress, Stage, TextFile,
    documents::read_parts,
    manifest::{Manifest, ShardEntry, shard_path},
    scan::FileScan,
    shard::{ShardWriter, id_bytes},
    split::{Position, Rule, Side},
};

/// How the work is cut; tests make it small.
#[derive(Clone, Copy, Debug)]
pub(super) struct BuildSizes {
    /// A shard ends with the part that brings it to this many tokens.
    pub(super) shard_tokens: u64,
    /// Text that is read, encoded and written at a time.
    pub(super) group_bytes: usize,
}

impl Default for BuildSizes {
    fn default() -> Self {
        // Two parts for each thread, so that none waits long for the last.
        Self { shard_tokens: 1 << 26, group_bytes: rayon::current_num_threads() * (2 << 20) }
    }
}

/// What to tokenise.
pub(super) struct Build<'a> {
    pub(super) files: &'a [TextFile],
    pub(super) scans: &'a [FileScan],
    pub(super) text_field: &'a str,
    pub(super) rule: &'a Rule,
    pub(super) tokenizer: &'a Tokenizer,
    /// Where the shards go.
    pub(super) folder: &'a Path,
    pub(super) sizes: BuildSizes,
}

/// Text of one side.
struct Piece {
    side: Side,
    position: Position,
    text: Vec<u8>,
    ends_document: bool,
}

/// Its tokens.
struct Encoded {
    side: Side,
    /// Where the text ends.
    end: Position,
    /// Little-endian.
    ids: Vec<u8>,
    text_bytes: u64,
    ends_document: bool,
}

/// A thread at the other end of a queue is gone; it knows why.
struct Gone;

impl Build<'_> {
    /// Makes the shards that `manifest` does not name yet, and completes it.
    ///
    /// # Errors
    /// When a file cannot be read, a text not tokenised, or a shard not written.
    pub(super) fn run(
        &self,
        mut manifest: Manifest,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<Manifest, DataError> {
        fs::create_dir_all(self.folder).map_err(|source| DataError::Write { path: self.folder.to_owned(), source })?;
        let done = [Side::Train, Side::Valid].map(|side| manifest.shards(side).last().map(|shard| shard.end));
        let (to_encode, pieces) = sync_channel(1);
        let (to_write, encoded) = sync_channel(1);
        let (n_equal, open) = thread::scope(|scope| {
            let reader = scope.spawn(move || self.read(done, &to_encode));
            let manifest = &mut manifest;
            let writer = scope.spawn(move || self.write(manifest, encoded));
            let encoding = self.encode(&pieces, &to_write, progress);
            // Both ends let go, so that neither thread waits for ever.
            drop((pieces, to_write));
            let reading = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let writing = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // What the writer says comes first: the others break off because of it.
            let open = writing?;
            encoding?;
            Ok::<_, DataError>((reading?, open))
        })?;
        for (side, shard) in [Side::Train, Side::Valid].into_iter().zip(open) {
            if let Some(shard) = shard {
                manifest.shards_mut(side).push(shard.finish()?);
            }
        }
        manifest.n_equal = n_equal;
        manifest.is_complete = true;
        manifest.write(self.folder)?;
        Ok(manifest)
    }

    /// Sends the text that is not in a shard yet, in groups; returns how many documents are left out.
    fn read(&self, done: [Option<Position>; 2], groups: &SyncSender<Vec<Piece>>) -> Result<u64, DataError> {
        let mut group = Group { pieces: Vec::new(), n_bytes: 0, limit_bytes: self.sizes.group_bytes, queue: groups };
        let mut n_equal = 0;
        for (index, (file, scan)) in self.files.iter().zip(self.scans).enumerate() {
            if scan.nul_at.is_some() {
                continue;
            }
            let (mut n_documents, mut text_bytes) = (0, 0);
            let mut is_gone = false;
            read_parts(file, self.text_field, &mut |part| {
                let at = |offset| Position { file: index as u64, document: part.document, offset };
                let position = at(part.offset);
                n_documents += u64::from(part.ends_document);
                text_bytes += part.text.len() as u64;
                let hash = part.hash.unwrap_or(scan.lowest);
                let Some(side) = self.rule.side(position, &hash) else {
                    n_equal += u64::from(part.ends_document);
                    return ControlFlow::Continue(());
                };
                let cut = self.rule.cut_within(position, part.text.len());
                let (head, rest) = part.text.split_at(cut.unwrap_or(part.text.len()));
                let cut_at = at(part.offset + head.len() as u64);
                let pieces = [
                    (side, position, head, part.ends_document || cut.is_some()),
                    (Side::Valid, cut_at, rest, part.ends_document),
                ];
                for (side, position, text, ends_document) in pieces {
                    let is_done = done[side as usize].is_some_and(|end| position < end);
                    if text.is_empty() || is_done {
                        continue;
                    }
                    let piece = Piece { side, position, text: text.to_vec(), ends_document };
                    if group.push(piece).is_err() {
                        is_gone = true;
                        return ControlFlow::Break(());
                    }
                }
                ControlFlow::Continue(())
            })?;
            if is_gone {
                return Ok(n_equal);
            }
            if (n_documents, text_bytes) != (scan.n_documents, scan.text_bytes) {
                return Err(DataError::Changed { path: file.path.clone() });
            }
        }
        let _ = group.send();
        Ok(n_equal)
    }

    fn encode(
        &self,
        groups: &Receiver<Vec<Piece>>,
        encoded: &SyncSender<Vec<Encoded>>,
        progress: &(dyn Fn(Progress) + Sync),
    ) -> Result<(), DataError> {
        let total_bytes = self.scans.iter().map(|scan| scan.text_bytes).sum();
        let mut done_bytes = 0;
        for group in groups {
            let group_bytes: u64 = group.iter().map(|piece| piece.text.len() as u64).sum();
            let group = group.into_par_iter().map(|piece| self.encode_piece(&piece)).collect::<Result<_, _>>()?;
            if encoded.send(group).is_err() {
                break;
            }
            done_bytes += group_bytes;
            progress(Progress { stage: Stage::Tokenising, done_bytes, total_bytes });
        }
        Ok(())
    }

    fn encode_piece(&self, piece: &Piece) -> Result<Encoded, DataError> {
        let Position { file, document, offset } = piece.position;
        let path = self.files[file as usize].path.display();
        let name = format!("{path}, document {}, from byte {offset}", document + 1);
        let mut token_ids = self.tokenizer.encode(&piece.text, &name)?;
        if piece.ends_document {
            token_ids.extend(self.tokenizer.eos_id());
        }
        let ids = match id_bytes(self.tokenizer) {
            2 => token_ids.iter().flat_map(|&id| (id as u16).to_le_bytes()).collect(),
            _ => token_ids.iter().flat_map(|&id| id.to_le_bytes()).collect(),
        };
        let text_bytes = piece.text.len() as u64;
        let end = Position { offset: offset + text_bytes, ..piece.position };
        Ok(Encoded { side: piece.side, end, ids, text_bytes, ends_document: piece.ends_document })
    }

    /// Writes all that comes; returns the shards that are not full, which are whole only if nothing failed.
    fn write(
        &self,
        manifest: &mut Manifest,
        groups: Receiver<Vec<Encoded>>,
    ) -> Result<[Option<OpenShard>; 2], DataError> {
        let mut open = [None, None];
        for piece in groups.iter().flatten() {
            let place = &mut open[piece.side as usize];
            let shard = place.take().map_or_else(|| OpenShard::create(self, manifest, piece.side), Ok)?;
            let shard = place.insert(shard);
            shard.push(&piece)?;
            if shard.writer.n_tokens() >= self.sizes.shard_tokens
                && let Some(full) = place.take()
            {
                manifest.shards_mut(piece.side).push(full.finish()?);
                manifest.write(self.folder)?;
            }
        }
        Ok(open)
    }
}

/// Pieces that are sent together.
struct Group<'a> {
    pieces: Vec<Piece>,
    n_bytes: usize,
    limit_bytes: usize,
    queue: &'a SyncSender<Vec<Piece>>,
}

impl Group<'_> {
    fn push(&mut self, piece: Piece) -> Result<(), Gone> {
        self.n_bytes += piece.text.len();
        self.pieces.push(piece);
        if self.n_bytes >= self.limit_bytes { self.send() } else { Ok(()) }
    }

    fn send(&mut self) -> Result<(), Gone> {
        self.n_bytes = 0;
        self.queue.send(std::mem::take(&mut self.pieces)).map_err(|_| Gone)
    }
}

/// A shard that is being written beside its place.
struct OpenShard {
    writer: ShardWriter<NamedTempFile>,
    path: PathBuf,
    end: Position,
}

impl OpenShard {
    fn create(build: &Build, manifest: &Manifest, side: Side) -> Result<Self, DataError> {
        let path = shard_path(build.folder, side, manifest.shards(side).len());
        let writer = atomic_file::beside(&path).and_then(|file| ShardWriter::new(file, build.tokenizer));
        match writer {
            Ok(writer) => Ok(Self { writer, path, end: Position::default() }),
            Err(source) => Err(DataError::Write { path, source }),
        }
    }

    fn push(&mut self, piece: &Encoded) -> Result<(), DataError> {
        self.writer
            .push(&piece.ids, piece.text_bytes)
            .map_err(|source| DataError::Write { path: self.path.clone(), source })?;
        if piece.ends_document {
            self.writer.end_document();
        }
        self.end = piece.end;
        Ok(())
    }

    fn finish(self) -> Result<ShardEntry, DataError> {
        let Self { writer, path, end } = self;
        let written = writer.finish().and_then(|(file, header)| {
            atomic_file::finish(file, &path)?;
            Ok(header)
        });
        let header = written.map_err(|source| DataError::Write { path: path.clone(), source })?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(ShardEntry::new(name, &header, end))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use sha2::{Digest, Sha256};

    use super::{
        super::{
            files::{list_files, tests::folder_of},
            scan::scan_files,
        },
        *,
    };

    fn with_build<R>(text: &str, rule: &Rule, work: impl FnOnce(Build, &Path) -> R) -> R {
        let folder = folder_of(&[("d.jsonl", text.as_bytes())]);
        let files = list_files(&[folder.path().join("d.jsonl").display().to_string()]).unwrap().files;
        let scans = scan_files(&files, "text", folder.path(), &|_| {}).unwrap();
        let tokens = folder.path().join("tokens");
        let build = Build {
            files: &files,
            scans: &scans,
            text_field: "text",
            rule,
            tokenizer: &Tokenizer::bytes(),
            folder: &tokens,
            sizes: BuildSizes { shard_tokens: 10_000, group_bytes: 8_000 },
        };
        work(build, &tokens)
    }

    #[test]
    fn the_reader_waits_for_those_behind_it() {
        // Every other document is left out and counted, which shows how far the reader went.
        let lines: String = (0..2000).map(|i| format!("{{\"text\":\"x\"}}\n{{\"text\":\"{i:1000}\"}}\n")).collect();
        let rule = Rule::Paths { first_file: 9, held_out: HashSet::from([Sha256::digest("x").into()]) };
        let n_read = with_build(&lines, &rule, |build, _| {
            let (sender, groups) = sync_channel(1);
            thread::scope(|scope| {
                let reader = scope.spawn(|| build.read([None, None], &{ sender }));
                groups.recv().unwrap();
                drop(groups);
                reader.join().unwrap().unwrap()
            })
        });
        // One group taken, one queued, one in hand, of eight documents each.
        assert!((8..=3 * 8 + 1).contains(&n_read), "{n_read} of 2000 documents");
    }

    #[test]
    fn a_failure_leaves_whole_shards_only() {
        let lines: String = (0..100).map(|i| format!("{{\"text\":\"{i:1000}\"}}\n")).collect();
        with_build(&lines, &Rule::AllTrain, |build, tokens| {
            // The file has changed since.
            let mut scans = build.scans.to_vec();
            scans[0].text_bytes += 1;
            let manifest: Manifest = serde_json::from_str(
                r#"{"format_version":2,"is_complete":false,"tokenizer":"","vocab_size":257,"id_bytes":2,
                "held_out":"nothing","n_equal":0,"files":[],"train":[],"valid":[]}"#,
            )
            .unwrap();
            let failing = Build { scans: &scans, ..build };
            let error = failing.run(manifest, &|_| {}).unwrap_err();
            assert!(matches!(error, DataError::Changed { .. }), "{error}");
            let left = Manifest::read(tokens).unwrap().unwrap();
            assert!(!left.is_complete && (1..11).contains(&left.train.len()), "{}", left.train.len());
            let names: HashSet<String> =
                fs::read_dir(tokens).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            let whole = left.train.iter().map(|shard| shard.file.clone());
            assert_eq!(names, whole.chain(["manifest.json".to_owned()]).collect());
        });
    }
}
