//! Trains our own byte-level BPE tokenizer.
//!
//! The counting and merging are the Hugging Face library's; this file fixes the recipe.

use std::sync::atomic::{AtomicU64, Ordering};

use tokenizers::{
    AddedToken, Tokenizer as HfTokenizer,
    models::{
        TrainerWrapper,
        bpe::{BPE, BpeTrainer},
    },
    pre_tokenizers::byte_level::ByteLevel,
};

use super::{EOS, Tokenizer, TokenizerError, pieces};

/// The smallest vocabulary of [`train_bpe`]: `<eos>` and the 256 bytes.
pub const MIN_BPE_VOCAB_SIZE: usize = 257;

/// A pair must be seen this often to be merged.
const MIN_PAIR_COUNT: u64 = 2;
/// The library counts pairs in `i32`, so a longer text could overflow one.
const MAX_TEXT_BYTES: u64 = i32::MAX as u64;

/// Trains a byte-level BPE tokenizer: id 0 is `<eos>`, ids 1 to 256 are the bytes, merges follow.
///
/// The same texts give the same tokenizer, whatever the number of threads. On a small corpus the
/// vocabulary ends early, when no pair is left that is seen twice.
///
/// # Errors
/// When `vocab_size` is below [`MIN_BPE_VOCAB_SIZE`], or the texts exceed 2 GiB.
///
/// # Source
/// GPT-2's pre-tokenizer (no space is put before the text), with the whole byte alphabet.
pub fn train_bpe(texts: impl Iterator<Item = String> + Send, vocab_size: usize) -> Result<Tokenizer, TokenizerError> {
    if vocab_size < MIN_BPE_VOCAB_SIZE {
        return Err(TokenizerError::VocabSize { found: vocab_size, expected: MIN_BPE_VOCAB_SIZE });
    }
    let train_error = |reason: String| TokenizerError::Train { reason };

    let add_prefix_space = false;
    let trim_offsets = false;
    let use_regex = true;
    let byte_level = ByteLevel::new(add_prefix_space, trim_offsets, use_regex);
    let mut inner = HfTokenizer::new(BPE::default());
    inner.with_pre_tokenizer(Some(byte_level));
    inner.with_decoder(Some(byte_level));

    let mut trainer = TrainerWrapper::from(
        BpeTrainer::builder()
            .vocab_size(vocab_size)
            .min_frequency(MIN_PAIR_COUNT)
            .show_progress(false)
            .special_tokens(vec![AddedToken::from(EOS, true)])
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .build(),
    );
    let text_bytes = AtomicU64::new(0);
    let pieces = texts.flat_map(|text| {
        text_bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        let pieces = pieces::cut_at_lines(&text).into_iter();
        pieces.map(str::to_owned).collect::<Vec<String>>()
    });
    inner.train(&mut trainer, pieces).map_err(|error| train_error(error.to_string()))?;

    let found = text_bytes.into_inner();
    if found > MAX_TEXT_BYTES {
        return Err(TokenizerError::TooMuchText { found, limit: MAX_TEXT_BYTES });
    }
    Tokenizer::from_hugging_face(inner).map_err(train_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sailor(i: usize) -> String {
        format!("the {i}th sailor saw {} white whales, the sailors' fear\n", i * 7 % 13)
    }

    #[test]
    fn the_same_texts_give_the_same_tokenizer() {
        let train = || train_bpe((0..300).map(sailor), 300).unwrap();
        let first = train();
        assert_eq!(first.vocab_size(), 300);
        assert_eq!(first.eos_id(), Some(0));
        for _ in 0..3 {
            assert_eq!(train().fingerprint(), first.fingerprint());
        }
    }

    #[test]
    fn a_tiny_corpus_ends_the_vocabulary_early() {
        let tokenizer = train_bpe(["abab".to_owned()].into_iter(), 1000).unwrap();
        assert_eq!(tokenizer.vocab_size(), MIN_BPE_VOCAB_SIZE + 1);
        assert_eq!(tokenizer.encode(b"abab", "t").unwrap(), [257, 257]);
    }

    #[test]
    fn a_vocabulary_below_the_bytes_is_refused() {
        let error = train_bpe(["a".to_owned()].into_iter(), 256).unwrap_err();
        assert!(error.to_string().contains("vocab_size is 256, expected at least 257"));
    }

    #[test]
    fn any_utf8_survives_a_tokenizer_that_never_saw_it() {
        let tokenizer = train_bpe((0..50).map(sailor), 300).unwrap();
        let text = "\u{0}鯨を見た。\r\n  naïve\t<eos>e\u{301}".as_bytes();
        let token_ids = tokenizer.encode(text, "t").unwrap();
        assert_eq!(tokenizer.decode(&token_ids), text);
    }
}
