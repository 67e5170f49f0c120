//! Cuts a long text at line ends where no token can reach across.
//!
//! The Hugging Face library takes some 150 bytes of memory per byte of a text it encodes, and one
//! thread; pieces bound the first and allow more of the second. Only pre-tokenizers known to end
//! a word at such a line end are cut, so the token ids stay those of the whole text:
//!
//! ```text
//! "one.\ntwo"   -> "one.\n" + "two"     a lone line end between a mark or letter and a letter
//! "one.\n\ntwo" -> whole                GPT-2 looks at what follows a run of white space
//! "one.\n/two"  -> whole                some patterns take marks across the line end
//! ```

use tokenizers::{
    NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer as HfTokenizer,
    pre_tokenizers::split::SplitPattern,
};

/// Pieces encoded at once, in parallel.
pub(super) const PIECES_AT_ONCE: usize = 16;
/// A piece ends at the first safe line end after this many bytes.
const PIECE_BYTES: usize = 16 * 1024;

/// Word patterns that end a word at the line ends [`cut_at_lines`] chooses.
const SAFE_PATTERNS: [&str; 2] = [
    // Llama 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Whether the tokenizer gives the pieces of [`cut_at_lines`] the token ids of the whole text.
pub(super) fn can_be_cut_at_lines(tokenizer: &HfTokenizer) -> bool {
    let normalizer_is_local = matches!(tokenizer.get_normalizer(), None | Some(NormalizerWrapper::NFC(_)));
    let added_tokens_stay_in_their_line = tokenizer
        .get_added_tokens_decoder()
        .values()
        .all(|token| !token.lstrip && !token.rstrip && !token.content.contains('\n'));
    let stages = match tokenizer.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::Sequence(sequence)) => sequence.as_ref(),
        Some(single) => std::slice::from_ref(single),
        None => &[],
    };
    normalizer_is_local
        && added_tokens_stay_in_their_line
        && stages.iter().all(keeps_line_ends)
        && stages.iter().any(ends_words_at_line_ends)
}

/// Stages that see a piece as they see it within the whole.
fn keeps_line_ends(stage: &PreTokenizerWrapper) -> bool {
    match stage {
        PreTokenizerWrapper::ByteLevel(stage) => !stage.add_prefix_space,
        PreTokenizerWrapper::Digits(_) => true,
        _ => ends_words_at_line_ends(stage),
    }
}

fn ends_words_at_line_ends(stage: &PreTokenizerWrapper) -> bool {
    match stage {
        PreTokenizerWrapper::ByteLevel(stage) => stage.use_regex && !stage.add_prefix_space,
        PreTokenizerWrapper::Split(stage) => {
            !stage.invert
                && stage.behavior == SplitDelimiterBehavior::Isolated
                && matches!(&stage.pattern, SplitPattern::Regex(pattern)
                    if SAFE_PATTERNS.contains(&pattern.as_str()))
        }
        _ => false,
    }
}

/// The text in pieces of some [`PIECE_BYTES`], each ending at a safe line end; together the text.
pub(super) fn cut_at_lines(text: &str) -> Vec<&str> {
    let mut pieces = Vec::with_capacity(text.len() / PIECE_BYTES + 1);
    let mut rest = text;
    while let Some(cut) = safe_cut(rest, PIECE_BYTES) {
        let (piece, after) = rest.split_at(cut);
        pieces.push(piece);
        rest = after;
    }
    if !rest.is_empty() {
        pieces.push(rest);
    }
    pieces
}

/// The first safe cut at or after byte `from`.
fn safe_cut(text: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes();
    (from.max(1)..bytes.len()).filter(|&at| bytes[at - 1] == b'\n').find(|&at| {
        let before = text[..at - 1].chars().next_back();
        let after = text[at..].chars().next();
        before.is_some_and(|char| !char.is_whitespace()) && after.is_some_and(char::is_alphanumeric)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Tokenizer, train_bpe};

    #[test]
    fn cuts_lie_only_where_the_table_says() {
        assert_eq!(safe_cut("one.\ntwo", 1), Some(5));
        assert_eq!(safe_cut("one\n鯨", 1), Some(4));
        for whole in ["one.\n\ntwo", "one.\n/two", "one. \ntwo", "one.\n two", "one\n", "\none"] {
            assert_eq!(safe_cut(whole, 1), None, "{whole:?}");
        }
    }

    /// Lines of words, marks, blanks and digits, every ending beside every beginning.
    fn awkward_text() -> String {
        let ends = ["whale", "end.", "7", "x \t", "鯨", "don't", "(", "e\u{301}", "\r", "<eos>"];
        let starts = ["The", "12", " in", "\n\nnew", "/", "'s", "\u{301}", "鯨", "\u{3000}x", "}"];
        let line = |end: &str| starts.map(|start| format!("{start} word {end}\n")).concat();
        ends.map(line).concat()
    }

    fn tokenizers_that_are_cut() -> Vec<Tokenizer> {
        let trained = train_bpe([awkward_text().repeat(9)].into_iter(), 500).unwrap();
        let gpt2 = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":true}"#;
        let digits = r#"{"type":"Digits","individual_digits":true}"#;
        let split = |pattern: &str| {
            let regex = serde_json::to_string(pattern).unwrap();
            format!(
                r#"{{"type":"Split","pattern":{{"Regex":{regex}}},"behavior":"Isolated","invert":false}},{}"#,
                gpt2.replace("\"use_regex\":true", "\"use_regex\":false")
            )
        };
        let stages = [format!("{digits},{gpt2}"), split(SAFE_PATTERNS[0]), split(SAFE_PATTERNS[1])];
        let variants = stages.map(|stages| {
            let sequence = format!(r#"{{"type":"Sequence","pretokenizers":[{stages}]}}"#);
            let old = format!("\"pre_tokenizer\":{gpt2}");
            let json = trained.to_json();
            assert!(json.contains(&old), "{}", &json[..500]);
            let json = json.replace(&old, &format!("\"pre_tokenizer\":{sequence}"));
            Tokenizer::from_bytes(json.as_bytes(), "variant").unwrap()
        });
        [trained].into_iter().chain(variants).collect()
    }

    #[test]
    fn pieces_have_the_token_ids_of_the_whole() {
        let text = awkward_text().repeat(40);
        let pieces = cut_at_lines(&text);
        assert!(pieces.len() > 2);
        assert_eq!(pieces.concat(), text);
        for tokenizer in tokenizers_that_are_cut() {
            let super::super::Kind::HuggingFace(hf) = &tokenizer.kind else {
                unreachable!("all are BPE");
            };
            assert!(hf.cuts_at_lines);
            let whole = hf.inner.encode(text.as_str(), false).unwrap();
            assert_eq!(tokenizer.encode(text.as_bytes(), "t").unwrap(), whole.get_ids());

            // The same for every safe line end, not only those near a piece's end.
            let text = &text[..text.floor_char_boundary(1500)];
            let ids = |part: &str| hf.inner.encode(part, false).unwrap().get_ids().to_vec();
            let whole = ids(text);
            let mut from = 1;
            while let Some(cut) = safe_cut(text, from) {
                let (left, right) = text.split_at(cut);
                assert_eq!([ids(left), ids(right)].concat(), whole, "{cut}");
                from = cut + 1;
            }
        }
    }

    #[test]
    fn other_tokenizers_are_not_cut() {
        let words = r#"{"version":"1.0","added_tokens":[],
            "pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true},
            "model":{"type":"WordLevel","vocab":{"a":0,"?":1},"unk_token":"?"}}"#;
        let words = HfTokenizer::from_bytes(words).unwrap();
        assert!(!can_be_cut_at_lines(&words));
    }
}
