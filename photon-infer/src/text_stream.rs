//! Text that grows with the bytes of the tokens, cut before the first stop string.
//!
//! Tokens end in the middle of characters and of stop strings: what is not yet decided is held back. The
//! bytes of a token are the tokenizer's matter, printing is the caller's.
//!
//! With the stop `END`, pushed piece by piece:
//!
//! ```text
//!  push      "a日"[..3]   the rest of 日 + "E"   "N"   "X"      "END!"
//!  returned  "a"          "日"                   ""    "ENX"    "" and stopped
//!  held      2 bytes      "E"                    "EN"  ""       ""
//! ```

/// Turns bytes into text that can be printed at once.
///
/// All that is returned, in a row, is what [`String::from_utf8_lossy`] makes of all bytes, cut before the
/// first stop string: the one that is complete first and, of those complete at the same byte, the longest.
#[derive(Clone, Debug)]
pub struct TextStream {
    stops: Vec<String>,
    /// Bytes of a character that is not complete.
    partial_char: Vec<u8>,
    /// Decoded text that may be the beginning of a stop string.
    undecided: String,
    stopped: bool,
}

/// What a push makes certain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "the text is returned only once"]
pub struct Emitted {
    /// Text that follows what was returned before.
    pub text: String,
    /// Whether a stop string is complete: nothing follows `text`.
    pub stopped: bool,
}

impl TextStream {
    /// A stream that ends before the first of `stops`; empty ones stop nothing.
    pub fn new(mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        Self { stops, partial_char: Vec::new(), undecided: String::new(), stopped: false }
    }

    /// Adds the bytes of a token and returns the text that no later byte can change.
    ///
    /// After a stop string, bytes are dropped.
    pub fn push(&mut self, bytes: &[u8]) -> Emitted {
        if !self.stopped {
            self.decode(bytes);
            self.stop_at_first_match();
        }
        let certain = if self.stopped { self.undecided.len() } else { self.first_possible_stop() };
        Emitted { text: self.undecided.drain(..certain).collect(), stopped: self.stopped }
    }

    /// Ends the text and returns what is held: an incomplete character becomes U+FFFD, the beginning of a
    /// stop string is plain text.
    #[must_use = "the text is returned only once"]
    pub fn finish(&mut self) -> String {
        if !self.partial_char.is_empty() {
            self.partial_char.clear();
            self.undecided.push(char::REPLACEMENT_CHARACTER);
            self.stop_at_first_match();
        }
        std::mem::take(&mut self.undecided)
    }

    /// Moves all whole characters to the undecided text.
    fn decode(&mut self, bytes: &[u8]) {
        self.partial_char.extend_from_slice(bytes);
        let mut chunks = self.partial_char.utf8_chunks().peekable();
        let mut partial_len = 0;
        while let Some(chunk) = chunks.next() {
            self.undecided.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if chunks.peek().is_none() && may_become_char(invalid) {
                partial_len = invalid.len();
            } else if !invalid.is_empty() {
                self.undecided.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.partial_char.drain(..self.partial_char.len() - partial_len);
    }

    /// Drops the text from the first stop string on, if one is complete.
    fn stop_at_first_match(&mut self) {
        // Least end first; with the same end, least start is the longest.
        let first = self.stops.iter().filter_map(|stop| {
            let start = self.undecided.find(stop.as_str())?;
            Some((start + stop.len(), start))
        });
        if let Some((_, start)) = first.min() {
            self.undecided.truncate(start);
            self.partial_char.clear();
            self.stopped = true;
        }
    }

    /// Where the undecided text may be the beginning of a stop string; its length if nowhere.
    fn first_possible_stop(&self) -> usize {
        let mut starts = self.undecided.char_indices().map(|(start, _)| start);
        let possible = starts.find(|&start| {
            let tail = &self.undecided[start..];
            self.stops.iter().any(|stop| stop.starts_with(tail))
        });
        possible.unwrap_or(self.undecided.len())
    }
}

/// Whether more bytes can make a character of this end of a text.
fn may_become_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, seq::IndexedRandom};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    fn stream(stops: &[&str]) -> TextStream {
        TextStream::new(stops.iter().map(|stop| stop.to_string()).collect())
    }

    /// What each push returns, `STOP` marking the one that stopped, then what the end returns.
    fn run(stops: &[&str], pushes: &[&[u8]]) -> Vec<String> {
        let mut stream = stream(stops);
        let mut returned = Vec::new();
        for bytes in pushes {
            let Emitted { text, stopped } = stream.push(bytes);
            returned.push(if stopped { text + "STOP" } else { text });
        }
        returned.push(stream.finish());
        returned
    }

    #[test]
    fn example_of_the_file_header() {
        let ri = "日".as_bytes();
        let pushes = [&[b"a", &ri[..2]].concat(), &[&ri[2..], b"E"].concat(), &b"N"[..], b"X", b"END!"];
        assert_eq!(run(&["END"], &pushes), ["a", "日", "", "ENX", "STOP", ""]);
    }

    #[test]
    fn without_stops_whole_characters_come_at_once() {
        let smile = "😀".as_bytes();
        assert_eq!(run(&[], &[b"ab", &smile[..1], &smile[1..3], &smile[3..]]), ["ab", "", "", "😀", ""]);
    }

    #[test]
    fn empty_stops_stop_nothing() {
        assert_eq!(run(&[""], &[b"ab"]), ["ab", ""]);
    }

    #[test]
    fn bytes_that_cannot_become_a_character_are_replaced_at_once() {
        assert_eq!(
            run(&[], &[b"a\xFF", b"\xE3\x81", b"b", b"\xF0\x9F"]),
            ["a\u{FFFD}", "", "\u{FFFD}b", "", "\u{FFFD}"]
        );
        // A surrogate: no byte of it waits for another.
        assert_eq!(run(&[], &[b"\xED\xA0"]), ["\u{FFFD}\u{FFFD}", ""]);
    }

    #[test]
    fn the_first_complete_stop_wins_then_the_longest() {
        assert_eq!(run(&["abcd", "c"], &[b"x", b"ab", b"cd"]), ["x", "", "abSTOP", ""]);
        assert_eq!(run(&["c", "bc", "abc"], &[b"xab", b"c"]), ["x", "STOP", ""]);
    }

    #[test]
    fn nothing_follows_a_stop() {
        assert_eq!(run(&["。"], &["日本。\u{E9}".as_bytes(), b"more", b"\xE3"]), ["日本STOP", "STOP", "STOP", ""]);
        assert_eq!(run(&["."], &[b"a.\xE3"]), ["aSTOP", ""]);
    }

    #[test]
    fn no_more_than_the_beginning_of_a_stop_is_held() {
        assert_eq!(run(&["aab"], &[b"aa", b"a", b"a", b"c"]), ["", "a", "a", "aac", ""]);
        assert_eq!(run(&["日本語"], &["東日本".as_bytes(), "人".as_bytes()]), ["東", "日本人", ""]);
    }

    #[test]
    fn the_end_can_complete_a_stop() {
        assert_eq!(run(&["a\u{FFFD}"], &[b"xa\xE3"]), ["x", ""]);
    }

    /// The definition, read off byte by byte: the text to return, and whether a stop cut it.
    fn oracle(bytes: &[u8], stops: &[&str]) -> (String, bool) {
        let whole = String::from_utf8_lossy(bytes).into_owned();
        for end in (0..=whole.len()).filter(|&end| whole.is_char_boundary(end)) {
            let complete = stops.iter().filter(|stop| whole[..end].ends_with(*stop));
            if let Some(longest) = complete.map(|stop| stop.len()).max() {
                return (whole[..end - longest].to_string(), true);
            }
        }
        (whole, false)
    }

    /// Up to `max_len` pieces in a row.
    fn concat(rng: &mut ChaCha8Rng, pieces: &[&[u8]], max_len: usize) -> Vec<u8> {
        let n_pieces = rng.random_range(1..=max_len);
        (0..n_pieces).flat_map(|_| pieces.choose(rng).unwrap().to_vec()).collect()
    }

    #[test]
    fn any_cutting_returns_the_lossy_text_before_the_first_stop() {
        let chars = ["a", "b", "é", "日", "本", "😀", "\u{FFFD}"].map(str::as_bytes);
        let torn: [&[u8]; 9] =
            [b"\xE6", b"\x97", b"\xA5", b"\xF0\x9F", b"\x98\x80", b"\xFF", b"\xC0", b"\xED\xA0", b"\xF4\x90"];
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut n_cut = 0;
        for case in 0..10_000 {
            // Few kinds of characters in a case, so that stops overlap themselves and each other.
            let few: Vec<&[u8]> = (0..rng.random_range(1..=4)).map(|_| *chars.choose(&mut rng).unwrap()).collect();
            let stops: Vec<String> =
                (0..rng.random_range(0..=3)).map(|_| String::from_utf8(concat(&mut rng, &few, 5)).unwrap()).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut pieces = few.repeat(rng.random_range(1..=6));
            pieces.extend(torn.iter().take(rng.random_range(0..=torn.len())));
            let bytes = concat(&mut rng, &pieces, 30);

            let (expected, cut) = oracle(&bytes, &stops);
            n_cut += usize::from(cut);
            let mut stream = stream(&stops);
            let (mut returned, mut stopped) = (String::new(), false);
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let (token, after) = rest.split_at(rng.random_range(0..=rest.len().min(6)));
                rest = after;
                let emitted = stream.push(token);
                returned += &emitted.text;
                assert!(expected.starts_with(&returned), "case {case}: {bytes:?} {stops:?} {returned:?}");
                assert!(emitted.stopped >= stopped, "case {case}: {bytes:?} {stops:?}");
                stopped = emitted.stopped;
            }
            // As late as the end, only a replaced incomplete character can complete a stop.
            let may_stop_at_end = stops.iter().any(|stop| stop.ends_with('\u{FFFD}'));
            assert!(stopped == cut || (cut && may_stop_at_end), "case {case}: {bytes:?} {stops:?}");
            returned += &stream.finish();
            assert_eq!(returned, expected, "case {case}: {bytes:?} {stops:?}");
        }
        // Both outcomes are common, or the cases test little.
        assert!((2_000..8_000).contains(&n_cut), "{n_cut}");
    }
}
