//! One way to end a line: models are trained and measured on texts that end them all alike.

/// CRLF and lone CR become LF, across pieces of a text.
#[derive(Default)]
pub struct UnixLines {
    after_cr: bool,
}

impl UnixLines {
    /// Appends the next piece to `text`.
    pub fn push(&mut self, raw: &[u8], text: &mut Vec<u8>) {
        if !self.after_cr && !raw.contains(&b'\r') {
            text.extend_from_slice(raw);
            return;
        }
        for &byte in raw {
            match byte {
                b'\n' if self.after_cr => {}
                b'\r' => text.push(b'\n'),
                _ => text.push(byte),
            }
            self.after_cr = byte == b'\r';
        }
    }

    /// A whole text.
    pub fn of(raw: &[u8]) -> Vec<u8> {
        let mut text = Vec::with_capacity(raw.len());
        Self::default().push(raw, &mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_of_lines_become_one_kind_wherever_a_text_is_cut() {
        let raw = b"a\r\nb\rc\n\r\n\r";
        for cut in 0..=raw.len() {
            let (mut lines, mut text) = (UnixLines::default(), Vec::new());
            lines.push(&raw[..cut], &mut text);
            lines.push(&raw[cut..], &mut text);
            assert_eq!(text, b"a\nb\nc\n\n\n", "cut at {cut}");
        }
        assert_eq!(UnixLines::of(raw), b"a\nb\nc\n\n\n");
    }
}
