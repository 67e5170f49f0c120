//! Curves in the format that TensorBoard reads: one file of records, each an `Event` of its protocol buffers.
//!
//! The few messages that are needed are written out here; framing and checksums are `tensorboard-rs`'s. That crate's
//! own writer panics on a thread of its own where the system refuses to write, and knows no texts.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use tensorboard_rs::record_writer::RecordWriter;

use crate::histogram::Histogram;
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
    fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> io::Result<()> {
        let scalar =
            |(tag, value): &(String, f64)| point(tag, |message| message.fixed(2, &(*value as f32).to_le_bytes()));
        self.records.write(&summary_event(step, values.iter().map(scalar)))
    }

    fn text(&mut self, step: u64, tag: &str, text: &str) -> io::Result<()> {
        // Shown as Markdown: lines that are indented keep their blanks and line breaks.
        let verbatim = format!("    {}", text.replace('\n', "\n    "));
        self.records.write(&summary_event(step, [point(tag, |message| write_text(message, &verbatim))]))
    }

    fn histogram(&mut self, step: u64, tag: &str, histogram: &Histogram) -> io::Result<()> {
        self.records.write(&summary_event(step, [point(tag, |message| write_histogram(message, histogram))]))
    }
}

/// `Event { wall_time = 1, step = 2, summary = 5 { value = 1, ... } }`
fn summary_event(step: u64, points: impl IntoIterator<Item = Message>) -> Vec<u8> {
    let mut summary = Message::default();
    points.into_iter().for_each(|point| summary.bytes(1, &point.0));
    event(|message| {
        // A field that is zero is left out.
        if step > 0 {
            message.varint(2, step);
        }
        message.bytes(5, &summary.0);
    })
}

/// `Value { tag = 1, simple_value = 2 | histo = 5 | tensor = 8, metadata = 9 }`
fn point(tag: &str, fill: impl FnOnce(&mut Message)) -> Message {
    let mut point = Message::default();
    point.bytes(1, tag.as_bytes());
    fill(&mut point);
    point
}

/// `tensor = 8 { dtype = 1, shape = 2 {}, string_val = 8 }, metadata = 9 { plugin_data = 1 { plugin_name = 1 } }`
fn write_text(message: &mut Message, text: &str) {
    const DT_STRING: u64 = 7;
    let mut tensor = Message::default();
    tensor.varint(1, DT_STRING);
    tensor.bytes(2, &[]);
    tensor.bytes(8, text.as_bytes());
    let (mut plugin, mut metadata) = (Message::default(), Message::default());
    plugin.bytes(1, b"text");
    metadata.bytes(1, &plugin.0);
    message.bytes(8, &tensor.0);
    message.bytes(9, &metadata.0);
}

/// `histo = 5 { min = 1, max = 2, num = 3, sum = 4, sum_squares = 5, bucket_limit = 6 [], bucket = 7 [] }`
fn write_histogram(message: &mut Message, histogram: &Histogram) {
    let Histogram { min, max, count, sum, sum_squares, buckets } = histogram;
    let mut histo = Message::default();
    for (field, value) in (1..).zip([*min, *max, *count as f64, *sum, *sum_squares]) {
        histo.fixed(field, &value.to_le_bytes());
    }
    histo.doubles(6, histogram.limits());
    histo.doubles(7, buckets.iter().map(|&n| n as f64));
    message.bytes(5, &histo.0);
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

    /// A list of doubles, packed.
    fn doubles(&mut self, field: u64, values: impl Iterator<Item = f64>) {
        let bytes: Vec<u8> = values.flat_map(f64::to_le_bytes).collect();
        self.bytes(field, &bytes);
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
            file.scalars(step, &[(tag.to_owned(), value)]).unwrap();
            writer.add_scalar(tag, value as f32, step as usize);
        }
        drop(writer);
        assert_eq!(events(ours.path()), events(theirs.path()));
    }
}
