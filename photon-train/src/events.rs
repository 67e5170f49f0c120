//! Curves in the format that TensorBoard reads: one file of records, each an `Event` of its protocol buffers.
//!
//! A point is two small messages, written out here; framing and checksums are `tensorboard-rs`'s. That crate's own
//! writer panics on a thread of its own where the system refuses to write.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use tensorboard_rs::record_writer::RecordWriter;

use crate::record::EventWriter;

/// What the first event of a file says.
const FILE_VERSION: &str = "brain.Event:2";

/// A file of events.
pub struct EventFile {
    records: RecordWriter<File>,
}

impl EventFile {
    /// Starts a file in `folder`, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn create(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let name = format!("events.out.tfevents.{:010}.{}", now_secs() as u64, std::process::id());
        let mut records = RecordWriter::new(create_new(folder, &name)?);
        records.write(&event(|message| message.bytes(3, FILE_VERSION.as_bytes())))?;
        Ok(Self { records })
    }
}

/// A file of its own even for one who starts twice within a second.
fn create_new(folder: &Path, name: &str) -> io::Result<File> {
    for n in 0.. {
        match File::create_new(folder.join(format!("{name}.{n}"))) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => return result,
        }
    }
    unreachable!("there are more numbers than files")
}

impl EventWriter for EventFile {
    fn scalar(&mut self, tag: &str, value: f64, step: u64) -> io::Result<()> {
        self.records.write(&scalar_event(tag, value as f32, step))
    }
}

/// `Event { wall_time = 1, step = 2, summary = 5 { value = 1 { tag = 1, simple_value = 2 } } }`
fn scalar_event(tag: &str, value: f32, step: u64) -> Vec<u8> {
    let mut point = Message::default();
    point.bytes(1, tag.as_bytes());
    point.fixed(2, &value.to_le_bytes());
    let mut summary = Message::default();
    summary.bytes(1, &point.0);
    event(|message| {
        // A field that is zero is left out.
        if step > 0 {
            message.varint(2, step);
        }
        message.bytes(5, &summary.0);
    })
}

/// An event of this moment.
fn event(fill: impl FnOnce(&mut Message)) -> Vec<u8> {
    let mut message = Message::default();
    message.fixed(1, &now_secs().to_le_bytes());
    fill(&mut message);
    message.0
}

fn now_secs() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A protocol-buffer message under way: fields, each with its number and kind before it.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, field: u64, value: u64) {
        self.raw_varint(field << 3);
        self.raw_varint(value);
    }

    /// A float of four or a double of eight bytes.
    fn fixed(&mut self, field: u64, bytes: &[u8]) {
        let kind = if bytes.len() == 8 { 1 } else { 5 };
        self.raw_varint(field << 3 | kind);
        self.0.extend(bytes);
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.raw_varint(field << 3 | 2);
        self.raw_varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    /// Seven bits a byte, lowest first; all but the last byte have their top bit set.
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tensorboard_rs::summary_writer::SummaryWriter;

    /// Events of the only file in a folder, without the wall time that each begins with, checksums left out.
    fn events(folder: &Path) -> Vec<Vec<u8>> {
        let path = fs::read_dir(folder).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(path).unwrap();
        let mut rest = bytes.as_slice();
        let mut found = Vec::new();
        while !rest.is_empty() {
            let len = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            found.push(rest[12 + 9..12 + len].to_vec());
            rest = &rest[12 + len + 4..];
        }
        found
    }

    #[test]
    fn events_are_those_of_the_crates_own_writer() {
        let (ours, theirs) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut file = EventFile::create(ours.path()).unwrap();
        let mut writer = SummaryWriter::new(theirs.path());
        for (tag, value, step) in
            [("train/loss_nats", 5.25, 1), ("held_out/bits", 1e-9, 127), ("x", 0.0, 300_000), ("y", -3.0, 0)]
        {
            file.scalar(tag, value, step).unwrap();
            writer.add_scalar(tag, value as f32, step as usize);
        }
        drop(writer);
        assert_eq!(events(ours.path()), events(theirs.path()));
    }
}
