//! Text to token ids and back: plain bytes, or any Hugging Face `tokenizer.json`.
//!
//! Both kinds have a `tokenizer.json`, so every checkpoint folder carries one. Cutting text into
//! documents is left to `photon-train`, and stopping at a token to `photon-infer`.

mod bpe;
mod error;
mod hugging_face;
mod pieces;
mod stream;

use std::{fmt, fs, path::Path};

use serde::{Deserialize, Serialize, de::IgnoredAny};
use sha2::{Digest, Sha256};
use tokenizers::Tokenizer as HfTokenizer;

use hugging_face::HuggingFace;

pub use bpe::{MIN_BPE_VOCAB_SIZE, train_bpe};
pub use error::TokenizerError;
pub use stream::ByteStream;

/// Id of the byte tokenizer's end-of-document token; the ids below it are the bytes themselves.
const BYTES_EOS_ID: u32 = 256;
/// Spelling of the end-of-document token of our own tokenizers.
const EOS: &str = "<eos>";
/// Version of the byte tokenizer's own `tokenizer.json`.
const BYTES_VERSION: u32 = 1;

/// Turns text into token ids and back.
///
/// # Examples
/// ```
/// use photon_core::tokenizer::Tokenizer;
/// let tokenizer = Tokenizer::bytes();
/// let token_ids = tokenizer.encode(b"Hi", "greeting")?;
/// assert_eq!(token_ids, [72, 105]);
/// assert_eq!(tokenizer.decode(&token_ids), b"Hi");
/// # Ok::<(), photon_core::tokenizer::TokenizerError>(())
/// ```
#[derive(Clone)]
pub struct Tokenizer {
    kind: Kind,
    vocab_size: usize,
    eos_id: Option<u32>,
    fingerprint: String,
}

#[derive(Clone)]
enum Kind {
    Bytes,
    HuggingFace(Box<HuggingFace>),
}

/// The byte tokenizer's `tokenizer.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BytesFile {
    photon_tokenizer: String,
    version: u32,
}

/// The keys that tell the two forms of `tokenizer.json` apart.
#[derive(Deserialize)]
struct Probe {
    photon_tokenizer: Option<IgnoredAny>,
    model: Option<IgnoredAny>,
}

impl Tokenizer {
    /// The byte tokenizer: ids 0 to 255 are the bytes, 256 is `<eos>`.
    pub fn bytes() -> Self {
        Self {
            kind: Kind::Bytes,
            vocab_size: BYTES_EOS_ID as usize + 1,
            eos_id: Some(BYTES_EOS_ID),
            fingerprint: fingerprint_of(&bytes_json()),
        }
    }

    /// Loads a `tokenizer.json` of either form.
    ///
    /// # Errors
    /// When the file is missing, or as [`Tokenizer::from_bytes`].
    pub fn load(path: &Path) -> Result<Self, TokenizerError> {
        let json = fs::read(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
        Self::from_bytes(&json, &path.display().to_string())
    }

    /// Reads the contents of a `tokenizer.json` of either form; `origin` names it in errors.
    ///
    /// A Hugging Face file's truncation, padding and BPE dropout are dropped: documents are
    /// encoded whole, and always the same way.
    ///
    /// # Errors
    /// When the JSON is malformed, of an unknown form, or refused by the Hugging Face library.
    pub fn from_bytes(json: &[u8], origin: &str) -> Result<Self, TokenizerError> {
        let format_error = |expected, found| TokenizerError::Format { origin: origin.to_owned(), expected, found };
        let probe: Probe =
            serde_json::from_slice(json).map_err(|error| format_error("a JSON object", error.to_string()))?;
        if probe.photon_tokenizer.is_some() {
            let expected = "`{\"photon_tokenizer\":\"bytes\",\"version\":1}`";
            let file: BytesFile =
                serde_json::from_slice(json).map_err(|error| format_error(expected, error.to_string()))?;
            if file.photon_tokenizer != "bytes" || file.version != BYTES_VERSION {
                let found = format!("`{}` version {}", file.photon_tokenizer, file.version);
                return Err(format_error(expected, found));
            }
            return Ok(Self::bytes());
        }
        let expected = "a Hugging Face `tokenizer.json` or photon's byte tokenizer";
        if probe.model.is_none() {
            let found = "JSON with neither `model` nor `photon_tokenizer`".to_owned();
            return Err(format_error(expected, found));
        }
        let inner = HfTokenizer::from_bytes(json).map_err(|error| format_error(expected, error.to_string()))?;
        Self::from_hugging_face(inner).map_err(|reason| format_error(expected, reason))
    }

    fn from_hugging_face(inner: HfTokenizer) -> Result<Self, String> {
        let hf = HuggingFace::new(inner)?;
        Ok(Self {
            vocab_size: hf.vocab_size().ok_or("an empty vocabulary")?,
            eos_id: hf.eos_id(),
            fingerprint: fingerprint_of(&hf.to_json()?),
            kind: Kind::HuggingFace(Box::new(hf)),
        })
    }

    /// Writes the canonical `tokenizer.json`, whole or not at all.
    ///
    /// # Errors
    /// When the folder is missing, cannot be written or is full.
    pub fn save(&self, path: &Path) -> Result<(), TokenizerError> {
        crate::atomic_file::write(path, self.to_json().as_bytes())
            .map_err(|source| TokenizerError::Write { path: path.to_owned(), source })
    }

    fn to_json(&self) -> String {
        match &self.kind {
            Kind::Bytes => bytes_json(),
            Kind::HuggingFace(hf) => hf.to_json().expect("it was serialised when it was loaded"),
        }
    }

    /// `bytes`, or the kind of Hugging Face model: `bpe`, `unigram`, `wordlevel`, `wordpiece`.
    pub fn name(&self) -> &'static str {
        match &self.kind {
            Kind::Bytes => "bytes",
            Kind::HuggingFace(hf) => hf.name(),
        }
    }

    /// One more than the largest id, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Id of the token that ends a document, if the tokenizer has one.
    ///
    /// For Hugging Face files: the first of `<eos>`, `<|endoftext|>`, `</s>`, `<|im_end|>`,
    /// `<|eot_id|>` that is an added special token.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// SHA-256 (hex) of the canonical serialised form, which is the file [`Tokenizer::save`] writes.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Whether [`Tokenizer::encode`] refuses text that is not UTF-8.
    pub fn needs_utf8(&self) -> bool {
        matches!(self.kind, Kind::HuggingFace(_))
    }

    /// Token ids of `text`, with no token added; `origin` names the text in errors.
    ///
    /// As in Hugging Face's own library, a special token's spelling inside the text becomes that
    /// token; the byte tokenizer knows no spellings.
    ///
    /// # Errors
    /// When a Hugging Face tokenizer meets text that is not UTF-8, or that its model refuses.
    pub fn encode(&self, text: &[u8], origin: &str) -> Result<Vec<u32>, TokenizerError> {
        match &self.kind {
            Kind::Bytes => Ok(text.iter().copied().map(u32::from).collect()),
            Kind::HuggingFace(hf) => match str::from_utf8(text) {
                Ok(text) => hf.encode(text, origin),
                Err(error) => Err(TokenizerError::NotUtf8 {
                    origin: origin.to_owned(),
                    offset: error.valid_up_to(),
                    byte: text[error.valid_up_to()],
                }),
            },
        }
    }

    /// The text of `token_ids`; special tokens are spelled out, ids without a token give nothing.
    ///
    /// The bytes need not be UTF-8: a token may hold part of a character.
    pub fn decode(&self, token_ids: &[u32]) -> Vec<u8> {
        let mut stream = self.stream(&[]);
        match &self.kind {
            Kind::HuggingFace(hf) if !hf.byte_level => hf.decode(token_ids).into_bytes(),
            _ => token_ids.iter().flat_map(|&id| stream.push(id)).collect(),
        }
    }

    /// The bytes of one token by itself; empty when no token has this id.
    ///
    /// Exact for bytes and byte-level BPE. Other tokenizers write a token according to its
    /// neighbours: use [`Tokenizer::stream`] there.
    pub fn token_bytes(&self, token_id: u32) -> Vec<u8> {
        match &self.kind {
            Kind::Bytes => match u8::try_from(token_id) {
                Ok(byte) => vec![byte],
                Err(_) if token_id == BYTES_EOS_ID => EOS.as_bytes().to_vec(),
                Err(_) => Vec::new(),
            },
            Kind::HuggingFace(hf) => hf.token_bytes(token_id),
        }
    }

    /// Bytes of text that a token stands for; none for the end-of-document token.
    pub fn text_len(&self, token_id: u32) -> usize {
        match self.eos_id() == Some(token_id) {
            true => 0,
            false => self.token_bytes(token_id).len(),
        }
    }

    /// Decodes token after token, keeping what context the tokenizer needs.
    ///
    /// `context` are the tokens before, such as a prompt's: some tokenizers write a token by its neighbours.
    pub fn stream(&self, context: &[u32]) -> ByteStream<'_> {
        ByteStream::new(self, context)
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("name", &self.name())
            .field("vocab_size", &self.vocab_size)
            .field("eos_id", &self.eos_id)
            .field("fingerprint", &self.fingerprint)
            .finish()
    }
}

/// `bpe, 8192 tokens`.
impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} tokens", self.name(), self.vocab_size)
    }
}

fn bytes_json() -> String {
    format!(r#"{{"photon_tokenizer":"bytes","version":{BYTES_VERSION}}}"#)
}

fn fingerprint_of(json: &str) -> String {
    crate::hex::encode(&Sha256::digest(json.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A word-level tokenizer: its decoder joins words by spaces, so a token alone says too little.
    const WORDS: &str = r#"{"version":"1.0","truncation":{"direction":"Right","max_length":2,
        "strategy":"LongestFirst","stride":0},"padding":null,"normalizer":null,
        "added_tokens":[{"id":9,"content":"</s>","single_word":false,"lstrip":false,
            "rstrip":false,"normalized":false,"special":true}],
        "pre_tokenizer":{"type":"WhitespaceSplit"},"post_processor":null,"decoder":null,
        "model":{"type":"WordLevel","vocab":{"the":0,"whale":1,"?":2,"</s>":9},"unk_token":"?"}}"#;

    fn small_bpe() -> Tokenizer {
        let text = "the white whale, the whale\n".repeat(20);
        train_bpe([text].into_iter(), 280).unwrap()
    }

    #[test]
    fn bytes_round_trip_whatever_they_are() {
        let tokenizer = Tokenizer::bytes();
        let text: Vec<u8> = (0..=255).collect();
        let token_ids = tokenizer.encode(&text, "all").unwrap();
        assert_eq!(token_ids, (0..=255).collect::<Vec<u32>>());
        assert_eq!(tokenizer.decode(&token_ids), text);
        assert_eq!(tokenizer.vocab_size(), 257);
        assert_eq!(tokenizer.eos_id(), Some(256));
        assert_eq!(tokenizer.decode(&[104, 256, 257, 9999]), b"h<eos>");
    }

    #[test]
    fn every_kind_is_itself_after_saving_and_loading() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let words = Tokenizer::from_bytes(WORDS.as_bytes(), "words").unwrap();
        for tokenizer in [Tokenizer::bytes(), small_bpe(), words] {
            tokenizer.save(&path).unwrap();
            let loaded = Tokenizer::load(&path).unwrap();
            assert_eq!(loaded.fingerprint(), tokenizer.fingerprint());
            assert_eq!(format!("{loaded:?}"), format!("{tokenizer:?}"));
            let written = fs::read_to_string(&path).unwrap();
            assert_eq!(fingerprint_of(&written), tokenizer.fingerprint());
            let text = "the whale";
            assert_eq!(
                loaded.encode(text.as_bytes(), "text").unwrap(),
                tokenizer.encode(text.as_bytes(), "text").unwrap()
            );
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn fingerprints_tell_tokenizers_apart() {
        assert_ne!(small_bpe().fingerprint(), Tokenizer::bytes().fingerprint());
        assert_eq!(small_bpe().fingerprint(), small_bpe().fingerprint());
        assert_eq!(small_bpe().fingerprint().len(), 64);
    }

    #[test]
    fn text_that_is_not_utf8_names_its_origin_and_offset() {
        let error = small_bpe().encode(b"abc\xffdef", "moby.txt").unwrap_err();
        assert!(matches!(
            error,
            TokenizerError::NotUtf8 { ref origin, offset: 3, byte: 0xff } if origin == "moby.txt"
        ));
    }

    #[test]
    fn foreign_json_says_what_was_expected() {
        let message = |json: &str| Tokenizer::from_bytes(json.as_bytes(), "x.json").unwrap_err().to_string();
        assert!(message("{").contains("x.json is no tokenizer: expected a JSON object"));
        assert!(message("{\"hidden_size\":64}").contains("neither `model` nor"));
        assert!(message("{\"model\":{\"type\":\"BPE\"}}").contains("Hugging Face"));
        let newer = "{\"photon_tokenizer\":\"bytes\",\"version\":2}";
        assert!(message(newer).contains("found `bytes` version 2"));
        let unknown_key = "{\"photon_tokenizer\":\"bytes\",\"version\":1,\"lower\":true}";
        assert!(message(unknown_key).contains("lower"));
    }

    #[test]
    fn missing_file_and_missing_folder_name_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none").join("tokenizer.json");
        let error = Tokenizer::load(&path).unwrap_err();
        assert!(matches!(error, TokenizerError::Read { .. }));
        assert!(error.to_string().contains(&path.display().to_string()));
        let error = Tokenizer::bytes().save(&path).unwrap_err();
        assert!(matches!(error, TokenizerError::Write { .. }));
        assert!(error.to_string().contains(&path.display().to_string()));
    }

    #[test]
    fn a_files_truncation_does_not_cut_documents() {
        let words = Tokenizer::from_bytes(WORDS.as_bytes(), "words").unwrap();
        assert_eq!(words.encode(b"the whale the", "t").unwrap(), [0, 1, 0]);
    }

    #[test]
    fn a_files_dropout_does_not_make_encoding_random() {
        let json = small_bpe().to_json();
        let random = json.replace("\"dropout\":null", "\"dropout\":1.0");
        assert_ne!(random, json);
        let tokenizer = Tokenizer::from_bytes(random.as_bytes(), "dropout").unwrap();
        assert_eq!(tokenizer.fingerprint(), small_bpe().fingerprint());
        assert_eq!(tokenizer.encode(b"the whale", "t").unwrap(), small_bpe().encode(b"the whale", "t").unwrap());
    }

    #[test]
    fn vocab_size_counts_to_the_largest_id_and_eos_is_found() {
        let words = Tokenizer::from_bytes(WORDS.as_bytes(), "words").unwrap();
        assert_eq!(words.vocab_size(), 10);
        assert_eq!(words.eos_id(), Some(9));
        let plain = WORDS.replace("\"special\":true", "\"special\":false");
        let plain = Tokenizer::from_bytes(plain.as_bytes(), "words").unwrap();
        assert_eq!(plain.eos_id(), None);
    }

    #[test]
    fn byte_level_tokens_spell_their_bytes() {
        let tokenizer = small_bpe();
        let text = "the whale 鯨 \u{1F40B}\t\r\n".as_bytes();
        let token_ids = tokenizer.encode(text, "t").unwrap();
        let spelled: Vec<u8> = token_ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
        assert_eq!(spelled, text);
        assert_eq!(tokenizer.decode(&token_ids), text);
    }
}
