//! A file each of whose lines is a document: an object with the text under a key.

use std::{borrow::Cow, fmt, io::BufRead, ops::ControlFlow};

use photon_core::unix_lines::UnixLines;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::{
    DataError, TextFile,
    documents::{Notes, Visit, visit_document},
};

/// Reads `lines`, the unpacked contents of `file`.
pub(super) fn read(
    file: &TextFile,
    mut lines: impl BufRead,
    text_field: &str,
    visit: &mut Visit,
) -> Result<Notes, DataError> {
    let mut notes = Notes::default();
    let (mut line, mut text) = (Vec::new(), Vec::new());
    let (mut line_number, mut document, mut n_read) = (0, 0, 0);
    loop {
        line.clear();
        match lines.read_until(b'\n', &mut line) {
            Ok(0) => return Ok(notes),
            Ok(n) => n_read += n as u64,
            Err(error) => return Err(DataError::unpack(file, n_read, error)),
        }
        line_number += 1;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let raw = string_under(text_field, line.trim_ascii_end()).map_err(|found| DataError::JsonLine {
            path: file.path.clone(),
            line: line_number,
            text_field: text_field.to_owned(),
            found,
        })?;
        if raw.is_empty() {
            notes.empty += 1;
            continue;
        }
        text.clear();
        UnixLines::default().push(raw.as_bytes(), &mut text);
        if visit_document(document, &text, visit) == ControlFlow::Break(()) {
            return Ok(notes);
        }
        document += 1;
    }
}

/// The string under `key` of the object in `line`, or what stands there instead.
fn string_under<'a>(key: &str, line: &'a [u8]) -> Result<Cow<'a, str>, String> {
    let mut json = serde_json::Deserializer::from_slice(line);
    match (StringUnder(key).deserialize(&mut json), json.end()) {
        (Ok(Some(text)), Ok(())) => Ok(text),
        _ => Err(what_is_wrong(key, line)),
    }
}

/// Reads an object and keeps one string of it only.
struct StringUnder<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for StringUnder<'_> {
    type Value = Option<Cow<'de, str>>;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Self::Value, D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StringUnder<'_> {
    type Value = Option<Cow<'de, str>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
        let mut text = None;
        while let Some(key) = object.next_key::<Cow<'de, str>>()? {
            match key == self.0 {
                true => text = Some(Cow::Owned(object.next_value::<String>()?)),
                false => _ = object.next_value::<IgnoredAny>()?,
            }
        }
        Ok(text)
    }
}

fn what_is_wrong(key: &str, line: &[u8]) -> String {
    match serde_json::from_slice::<Value>(line) {
        Err(error) => {
            let message = error.to_string();
            let what = message.rsplit_once(" at line ").map_or(message.as_str(), |(what, _)| what);
            format!("malformed JSON at column {} ({what})", error.column())
        }
        Ok(Value::Object(mut object)) => match object.remove(key) {
            Some(other) => format!("{} there", kind_of(&other)),
            None => {
                let keys: Vec<&str> = object.keys().map(String::as_str).collect();
                format!("only the keys [{}]", keys.join(", "))
            }
        },
        Ok(other) => format!("{} alone", kind_of(&other)),
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

#[cfg(test)]
mod tests {
    use super::super::{documents::tests::documents_of, files::tests::folder_of, *};

    fn read(contents: &[u8], text_field: &str) -> Result<Vec<String>, DataError> {
        let folder = folder_of(&[("d.jsonl", contents)]);
        let documents = documents_of(&[folder.path().join("d.jsonl").display().to_string()], text_field)?;
        Ok(documents.into_iter().map(|text| String::from_utf8(text).unwrap()).collect())
    }

    #[test]
    fn each_line_is_a_document() {
        let lines = b"{\"text\":\"one\\r\\n1\"}\r\n\n{\"id\":[2,{}],\"text\":\"tw\\u00f6\"}\n{\"text\":\"\"}";
        assert_eq!(read(lines, "text").unwrap(), ["one\n1", "twö"]);
        assert_eq!(read(b"{\"body\":\"x\",\"text\":3}", "body").unwrap(), ["x"]);
    }

    #[test]
    fn a_bad_line_is_named() {
        for (line, found) in [
            (&b"{\"text\":"[..], "malformed JSON at column 8"),
            (b"{\"text\":\"a\"} x", "malformed JSON at column 14 (trailing characters)"),
            (b"[1]", "an array alone"),
            (b"{\"text\":3}", "a number there"),
            (b"{\"body\":\"x\",\"id\":1}", "only the keys [body, id]"),
            (b"{\"text\":\"\xff\"}", "malformed JSON"),
        ] {
            let message = read(&[b"{\"text\":\"ok\"}\n", line, b"\n"].concat(), "text").unwrap_err().to_string();
            assert!(message.contains("d.jsonl line 2: "), "{message}");
            assert!(message.contains(found), "{message}");
        }
    }
}
