//! Decodes token after token, for text shown while it is generated.

use super::{Kind, Tokenizer};

/// The longest character in bytes, so in tokens that each hold one byte.
const MAX_CHAR_TOKENS: usize = 4;

/// Tokens of a prompt that the first new token is written after.
const CONTEXT_TOKENS: usize = 8;

/// Turns a stream of token ids into the bytes each one adds.
///
/// Bytes and byte-level BPE give a token's bytes at once, which may end within a character. Other
/// tokenizers write a token according to its neighbours (a space between words, say): there the
/// text before it is decoded again, and a character's bytes are held back until it is whole.
pub struct ByteStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last bytes given out.
    context: Vec<u32>,
    /// Tokens whose text is still held back.
    pending: Vec<u32>,
}

impl<'a> ByteStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, context: &[u32]) -> Self {
        let newest = context.len().saturating_sub(CONTEXT_TOKENS);
        Self { tokenizer, context: context[newest..].to_vec(), pending: Vec::new() }
    }

    /// The bytes that `token_id` adds to the text so far.
    pub fn push(&mut self, token_id: u32) -> Vec<u8> {
        match &self.tokenizer.kind {
            Kind::HuggingFace(hf) if !hf.byte_level => {
                self.pending.push(token_id);
                let text = self.pending_text();
                let may_be_cut = text.is_empty() || text.ends_with(char::REPLACEMENT_CHARACTER);
                if may_be_cut && self.pending.len() < MAX_CHAR_TOKENS {
                    return Vec::new();
                }
                self.context = std::mem::take(&mut self.pending);
                text.into_bytes()
            }
            _ => self.tokenizer.token_bytes(token_id),
        }
    }

    /// What was held back when the stream ends.
    pub fn finish(&mut self) -> Vec<u8> {
        let text = self.pending_text();
        self.pending.clear();
        text.into_bytes()
    }

    fn pending_text(&self) -> String {
        let Kind::HuggingFace(hf) = &self.tokenizer.kind else {
            return String::new();
        };
        let before = hf.decode(&self.context);
        let after = hf.decode(&[self.context.as_slice(), &self.pending].concat());
        match after.strip_prefix(&before) {
            Some(text) => text.to_owned(),
            // The decoder rewrote what was already given out: the new tokens alone are the best left.
            None => hf.decode(&self.pending),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::train_bpe;

    fn streamed(tokenizer: &Tokenizer, token_ids: &[u32]) -> Vec<u8> {
        let mut stream = tokenizer.stream(&[]);
        let mut text: Vec<u8> = token_ids.iter().flat_map(|&id| stream.push(id)).collect();
        text.extend(stream.finish());
        text
    }

    /// A sentencepiece-like tokenizer: word marks become spaces, unknown characters bytes.
    fn byte_fallback() -> Tokenizer {
        let bytes: String = (0..=255).map(|byte| format!("\"<0x{byte:02X}>\":{},", byte + 3)).collect();
        let json = format!(
            r#"{{"version":"1.0","added_tokens":[],"pre_tokenizer":{{"type":"Metaspace",
                "replacement":"▁","prepend_scheme":"always","split":true}},
                "decoder":{{"type":"Sequence","decoders":[{{"type":"ByteFallback"}},
                {{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}},
                {{"type":"Fuse"}}]}},
                "model":{{"type":"BPE","byte_fallback":true,"merges":[],
                "vocab":{{{bytes}"▁":0,"a":1,"b":2}}}}}}"#
        );
        Tokenizer::from_bytes(json.as_bytes(), "fallback").unwrap()
    }

    #[test]
    fn streamed_text_is_the_decoded_text() {
        let bpe = train_bpe(["a ba ab ba\n".repeat(9)].into_iter(), 270).unwrap();
        for tokenizer in [Tokenizer::bytes(), bpe, byte_fallback()] {
            let text = "ab ba 鯨 a\u{1F40B}b";
            let token_ids = tokenizer.encode(text.as_bytes(), "t").unwrap();
            assert_eq!(tokenizer.decode(&token_ids), text.as_bytes());
            assert_eq!(streamed(&tokenizer, &token_ids), text.as_bytes());
        }
    }

    #[test]
    fn tokens_without_byte_alphabet_keep_their_spaces_and_whole_characters() {
        let tokenizer = byte_fallback();
        let token_ids = tokenizer.encode("a 鯨b".as_bytes(), "t").unwrap();
        let mut stream = tokenizer.stream(&[]);
        let steps: Vec<String> = token_ids.iter().map(|&id| String::from_utf8(stream.push(id)).unwrap()).collect();
        assert_eq!(steps, ["", "a", " ", "", "", "鯨", "b"]);
    }

    #[test]
    fn a_character_cut_off_by_the_end_is_given_out_at_the_end() {
        let tokenizer = byte_fallback();
        let token_ids = tokenizer.encode("a鯨".as_bytes(), "t").unwrap();
        let cut = &token_ids[..token_ids.len() - 1];
        assert_eq!(streamed(&tokenizer, cut), tokenizer.decode(cut));
    }
}
