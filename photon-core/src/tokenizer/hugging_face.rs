//! A tokenizer run by the Hugging Face library, as [`Tokenizer`](super::Tokenizer) wants it.

use std::{collections::HashMap, sync::LazyLock};

use tokenizers::{DecoderWrapper, Model, ModelWrapper, Tokenizer};

use super::{TokenizerError, pieces};

/// Special tokens taken as the end of a document, the first one present wins.
const EOS_TOKENS: [&str; 7] =
    [super::EOS, "<|endoftext|>", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>"];

#[derive(Clone)]
pub(super) struct HuggingFace {
    pub(super) inner: Tokenizer,
    /// Each token spells its bytes in GPT-2's byte alphabet, so decoding needs no context.
    pub(super) byte_level: bool,
    /// Long texts may be cut at line ends without any token changing.
    pub(super) cuts_at_lines: bool,
}

impl HuggingFace {
    /// Takes out what would cut a document short or encode it differently each time.
    pub(super) fn new(mut inner: Tokenizer) -> Result<Self, String> {
        inner.with_truncation(None).map_err(|error| error.to_string())?;
        inner.with_padding(None);
        if let ModelWrapper::BPE(model) = inner.get_model()
            && model.dropout.is_some()
        {
            let mut model = model.clone();
            model.dropout = None;
            inner.with_model(model);
        }
        Ok(Self {
            byte_level: matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))),
            cuts_at_lines: pieces::can_be_cut_at_lines(&inner),
            inner,
        })
    }

    pub(super) fn to_json(&self) -> Result<String, String> {
        self.inner.to_string(false).map_err(|error| error.to_string())
    }

    pub(super) fn name(&self) -> &'static str {
        match self.inner.get_model() {
            ModelWrapper::BPE(_) => "bpe",
            ModelWrapper::Unigram(_) => "unigram",
            ModelWrapper::WordLevel(_) => "wordlevel",
            ModelWrapper::WordPiece(_) => "wordpiece",
        }
    }

    pub(super) fn vocab_size(&self) -> Option<usize> {
        let largest_id = self.inner.get_vocab(true).into_values().max()?;
        Some(largest_id as usize + 1)
    }

    pub(super) fn eos_id(&self) -> Option<u32> {
        let added = self.inner.get_added_vocabulary();
        let eos = EOS_TOKENS.into_iter().find(|token| added.is_special_token(token))?;
        self.inner.token_to_id(eos)
    }

    pub(super) fn encode(&self, text: &str, origin: &str) -> Result<Vec<u32>, TokenizerError> {
        let pieces = if self.cuts_at_lines { pieces::cut_at_lines(text) } else { vec![text] };
        let mut token_ids = Vec::with_capacity(text.len() / 3);
        // The library holds some 150 bytes per byte of text while it works, so few pieces at once.
        for group in pieces.chunks(pieces::PIECES_AT_ONCE) {
            let encodings = self
                .inner
                .encode_batch_fast(group.to_vec(), false)
                .map_err(|error| TokenizerError::Encode { origin: origin.to_owned(), reason: error.to_string() })?;
            for encoding in encodings {
                token_ids.extend_from_slice(encoding.get_ids());
            }
        }
        Ok(token_ids)
    }

    /// Ids that the decoder refuses give nothing, as ids without a token do.
    pub(super) fn decode(&self, token_ids: &[u32]) -> String {
        self.inner.decode(token_ids, false).unwrap_or_default()
    }

    pub(super) fn token_bytes(&self, token_id: u32) -> Vec<u8> {
        if !self.byte_level {
            return self.decode(&[token_id]).into_bytes();
        }
        // Added tokens are spelled as they are, the model's own in the byte alphabet.
        if let Some(token) = self.inner.get_added_vocabulary().simple_id_to_token(token_id) {
            return token.into_bytes();
        }
        let token = self.inner.get_model().id_to_token(token_id).unwrap_or_default();
        token
            .chars()
            .map(|char| BYTE_OF_CHAR.get(&char).copied())
            .collect::<Option<Vec<u8>>>()
            .unwrap_or_else(|| token.into_bytes())
    }
}

/// GPT-2's byte alphabet, backwards: printable Latin-1 stands for itself, the other bytes in turn
/// for the characters from U+0100.
static BYTE_OF_CHAR: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let mut spare = '\u{100}'..;
    (0..=u8::MAX)
        .filter_map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE.. => Some((char::from(byte), byte)),
            _ => Some((spare.next()?, byte)),
        })
        .collect()
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_the_librarys() {
        let library = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        assert!(library.iter().all(|char| BYTE_OF_CHAR.contains_key(char)));
        let bytes: std::collections::HashSet<u8> = BYTE_OF_CHAR.values().copied().collect();
        assert_eq!((library.len(), BYTE_OF_CHAR.len(), bytes.len()), (256, 256, 256));
        assert_eq!(BYTE_OF_CHAR[&'Ġ'], b' ');
        assert_eq!(BYTE_OF_CHAR[&'Ċ'], b'\n');
    }
}
