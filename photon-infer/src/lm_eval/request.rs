//! What one line asks for.

use photon_core::sampler::{SamplingConfig, SamplingConfigError};
use photon_core::tokenizer::TokenizerError;
use serde::Deserialize;
use serde_json::Value;

/// A request of lm-eval, by the name that it has there.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// How likely a text is after another, and whether greedy decoding would write it.
    Loglikelihood {
        /// What stands before.
        context: String,
        /// What is scored.
        continuation: String,
    },
    /// How likely a whole text is, however long.
    LoglikelihoodRolling {
        /// The text.
        text: String,
    },
    /// How the model goes on.
    GenerateUntil {
        /// What it goes on from.
        context: String,
        /// Texts that end it; they are not part of the answer.
        #[serde(default)]
        until: Vec<String>,
        /// Tokens, at most. Absent: 256, or half of `max_length` where that is less.
        #[serde(default)]
        max_gen_toks: Option<usize>,
        /// 0 takes the likeliest token.
        #[serde(default)]
        temperature: f64,
        /// Choose among this many likeliest tokens only.
        #[serde(default)]
        top_k: Option<usize>,
        /// Choose among the likeliest tokens that hold this share of the probability only.
        #[serde(default)]
        top_p: Option<f64>,
    },
}

/// Why a request has no other answer.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The line is no request.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// The line is JSON, but no object.
    #[error("a request is an object, like {{\"request\": \"loglikelihood_rolling\", \"text\": \"...\"}}")]
    NoObject,
    /// A text cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// There is nothing to score.
    #[error("the continuation has no token of its own: {0}")]
    NoToken(&'static str),
    /// More is to be scored than a row holds.
    #[error("the continuation has {found} tokens, a row holds {max_length}: shorten it or raise --max-length")]
    TooLong {
        /// Tokens of the continuation.
        found: usize,
        /// Tokens of a row.
        max_length: usize,
    },
    /// More is to be generated than leaves room for a context.
    #[error("max_gen_toks = {found}: must be from 1 to less than the {max_length} tokens of a row (--max-length)")]
    MaxGenToks {
        /// Tokens asked for.
        found: usize,
        /// Tokens of a row.
        max_length: usize,
    },
    /// A rule of sampling is broken.
    #[error(transparent)]
    Sampling(#[from] SamplingConfigError),
}

impl Request {
    /// Reads a line; its `id` comes back whether or not the rest can be understood.
    pub fn parse(line: &[u8]) -> (Option<Value>, Result<Self, RequestError>) {
        // A list would do for serde, and means nothing here.
        let mut object = match serde_json::from_slice(line) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return (None, Err(RequestError::NoObject)),
            Err(error) => return (None, Err(error.into())),
        };
        let id = object.remove("id");
        let request = serde_json::from_value::<Self>(Value::Object(object)).map_err(RequestError::from);
        (id, request.and_then(Self::checked))
    }

    fn checked(self) -> Result<Self, RequestError> {
        if let Self::GenerateUntil { temperature, top_k, top_p, .. } = self {
            SamplingConfig { temperature, top_k, top_p, seed: 0 }.validate()?;
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_strictly_and_keep_their_id() {
        let (id, request) = Request::parse(br#"{"id": {"a": 1}, "request": "generate_until", "context": "x"}"#);
        assert_eq!(id, Some(serde_json::json!({ "a": 1 })));
        assert!(matches!(request.unwrap(), Request::GenerateUntil { max_gen_toks: None, temperature: 0.0, .. }));
        for (line, said) in [
            (r#"{"request": "loglikelihood", "context": "x"}"#, "missing field `continuation`"),
            (r#"{"request": "loglikelihood_rolling", "text": "x", "txt": 1}"#, "unknown field `txt`"),
            (r#"{"request": "loglikelihod"}"#, "unknown variant `loglikelihod`"),
            (r#"{"request": "generate_until", "context": "x", "temperature": -1.0}"#, "temperature = -1"),
            (r#"{"request": "generate_until", "context": "x", "until": "."}"#, "expected a sequence"),
            (r#"{"request": "generate_until", "context": "x", "max_gen_toks": -1}"#, "expected usize"),
            (r#"["loglikelihood_rolling", "x"]"#, "a request is an object"),
            ("{", "EOF"),
            ("\"\\ud800\"", "hex escape"),
        ] {
            let error = Request::parse(line.as_bytes()).1.unwrap_err().to_string();
            assert!(error.contains(said), "{line}: {error}");
        }
        let (id, request) = Request::parse(br#"{"id": 3}"#);
        assert!(id == Some(3.into()) && request.is_err());
    }
}
