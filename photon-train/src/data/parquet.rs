//! A file each of whose rows is a document: the text in one column.

use std::{fs::File, ops::ControlFlow};

use parquet::{
    basic::Type as PhysicalType,
    column::reader::get_typed_column_reader,
    data_type::ByteArrayType,
    errors::ParquetError,
    file::{
        metadata::ParquetMetaData,
        reader::{FileReader, SerializedFileReader},
    },
};
use photon_core::unix_lines::UnixLines;

use super::{
    DataError, TextFile,
    documents::{Notes, Visit, visit_document},
};

/// Rows that are in memory at once.
const ROWS_AT_ONCE: usize = 64;

/// Reads the column `text_field`, one group of rows after the other.
pub(super) fn read(file: &TextFile, text_field: &str, visit: &mut Visit) -> Result<Notes, DataError> {
    let malformed =
        |row: u64, error: ParquetError| DataError::Parquet { path: file.path.clone(), row, reason: error.to_string() };
    let opened = File::open(&file.path).map_err(|error| DataError::read(&file.path, error))?;
    let reader = SerializedFileReader::new(opened).map_err(|error| malformed(0, error))?;
    let column = column(reader.metadata(), text_field).map_err(|found| DataError::Column {
        path: file.path.clone(),
        text_field: text_field.to_owned(),
        found,
    })?;

    let mut notes = Notes::default();
    let (mut row, mut document, mut text) = (0, 0, Vec::new());
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).map_err(|error| malformed(row, error))?;
        let column = group.get_column_reader(column).map_err(|error| malformed(row, error))?;
        let mut column = get_typed_column_reader::<ByteArrayType>(column);
        loop {
            let (mut levels, mut values) = (Vec::new(), Vec::new());
            let (n_rows, n_values, _) = column
                .read_records(ROWS_AT_ONCE, Some(&mut levels), None, &mut values)
                .map_err(|error| malformed(row, error))?;
            if n_rows == 0 {
                break;
            }
            notes.empty += (n_rows - n_values) as u64;
            for value in &values {
                if value.is_empty() {
                    notes.empty += 1;
                    continue;
                }
                if let Err(error) = str::from_utf8(value.data()) {
                    let reason = format!("the text is not UTF-8 at byte {}", error.valid_up_to());
                    return Err(DataError::Parquet { path: file.path.clone(), row, reason });
                }
                text.clear();
                UnixLines::default().push(value.data(), &mut text);
                if visit_document(document, &text, visit) == ControlFlow::Break(()) {
                    return Ok(notes);
                }
                document += 1;
            }
            row += n_rows as u64;
        }
    }
    Ok(notes)
}

/// The index of a column of texts, or which columns there are instead.
fn column(metadata: &ParquetMetaData, name: &str) -> Result<usize, String> {
    let columns = metadata.file_metadata().schema_descr().columns();
    let is_text = |index: &usize| {
        let column = &columns[*index];
        column.physical_type() == PhysicalType::BYTE_ARRAY && column.max_rep_level() == 0
    };
    let found = (0..columns.len()).find(|&index| columns[index].path().string() == name);
    if let Some(index) = found.filter(is_text) {
        return Ok(index);
    }
    let texts: Vec<String> = (0..columns.len()).filter(is_text).map(|index| columns[index].path().string()).collect();
    let texts = if texts.is_empty() { "none".to_owned() } else { texts.join(", ") };
    match found {
        Some(_) => Err(format!("numbers or lists in that column; columns of text: {texts}")),
        None => Err(format!("no such column; columns of text: {texts}")),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use parquet::{
        basic::{Compression, ZstdLevel},
        data_type::{ByteArray, Int32Type},
        file::{properties::WriterProperties, writer::SerializedFileWriter},
        schema::parser::parse_message_type,
    };

    use super::{
        super::{documents::tests::documents_of, files::tests::folder_of},
        *,
    };

    /// A file with a column `id` and a column `body` of texts, absent ones among them; `group_rows` rows in a group.
    pub(crate) fn parquet_of(texts: &[Option<&str>], group_rows: usize, compression: Compression) -> Vec<u8> {
        let schema = "message m { required int32 id; optional binary body (UTF8); }";
        let properties = WriterProperties::builder().set_compression(compression).build();
        let mut bytes = Vec::new();
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
        for group in texts.chunks(group_rows) {
            let mut rows = writer.next_row_group().unwrap();
            let mut ids = rows.next_column().unwrap().unwrap();
            let numbers: Vec<i32> = (0..group.len() as i32).collect();
            ids.typed::<Int32Type>().write_batch(&numbers, None, None).unwrap();
            ids.close().unwrap();
            let mut bodies = rows.next_column().unwrap().unwrap();
            let values: Vec<ByteArray> = group.iter().flatten().map(|text| ByteArray::from(*text)).collect();
            let levels: Vec<i16> = group.iter().map(|text| i16::from(text.is_some())).collect();
            bodies.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
            bodies.close().unwrap();
            rows.close().unwrap();
        }
        writer.close().unwrap();
        bytes
    }

    fn read(contents: &[u8], text_field: &str) -> Result<Vec<Vec<u8>>, DataError> {
        let folder = folder_of(&[("d.parquet", contents)]);
        documents_of(&[folder.path().join("d.parquet").display().to_string()], text_field)
    }

    #[test]
    fn each_row_with_text_is_a_document_in_every_compression() {
        let texts: Vec<String> = (0..200).map(|i| format!("row {i}\r\n")).collect();
        let mut rows: Vec<Option<&str>> = texts.iter().map(|text| Some(text.as_str())).collect();
        rows[3] = None;
        rows[150] = Some("");
        let expected: Vec<Vec<u8>> = rows
            .iter()
            .flatten()
            .filter(|text| !text.is_empty())
            .map(|text| text.replace('\r', "").into_bytes())
            .collect();
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::GZIP(Default::default()),
            Compression::LZ4_RAW,
            Compression::ZSTD(ZstdLevel::default()),
        ] {
            assert_eq!(read(&parquet_of(&rows, 70, compression), "body").unwrap(), expected, "{compression:?}");
        }
    }

    #[test]
    fn a_wrong_column_lists_the_right_ones() {
        let file = parquet_of(&[Some("a")], 1, Compression::SNAPPY);
        let message = |field: &str| read(&file, field).unwrap_err().to_string();
        assert!(message("text").contains("d.parquet: expected a column `text` of texts, found no such column"));
        assert!(message("text").contains("columns of text: body; set `text_field`"), "{}", message("text"));
        assert!(message("id").contains("found numbers or lists"), "{}", message("id"));
    }

    #[test]
    fn a_damaged_file_is_named() {
        let whole = parquet_of(&[Some("a text of some length"); 10], 5, Compression::SNAPPY);
        for damaged in [&whole[..whole.len() - 3], &whole[..20], b"PAR1", b""] {
            let message = read(damaged, "body").unwrap_err().to_string();
            assert!(message.contains("d.parquet") && message.contains("fetch or write it again"), "{message}");
        }
    }
}
