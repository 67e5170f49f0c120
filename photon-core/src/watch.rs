//! A look at what every part of the training forward puts out.

use std::fmt;

use burn::tensor::Tensor;

/// What a part of the training forward puts out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The tokens as the first chunker reads them, or the stack of a flat model.
    Embedding,
    /// The tokens as the token decoder reads them.
    DecoderEmbedding,
    /// One vector for each chunk of a level, counted from 1, before its encoder.
    Chunker(usize),
    /// The latents of a level.
    Encoder(usize),
    /// The prefixes of all chunks of a level, one after the other.
    Converter(usize),
    /// What the decoder of a level emits for the units of the level below.
    Decoder(usize),
    /// The hidden states of a flat model.
    Stack,
}

/// Looks at the outputs of a forward, and says with what it goes on.
pub trait Watch {
    /// Sees an output, `[B, N, D]`; the parts that follow read what is returned.
    fn see(&mut self, output: Output, values: Tensor<3>) -> Tensor<3>;
}

/// Nobody looks.
pub struct Unwatched;

impl Watch for Unwatched {
    fn see(&mut self, _: Output, values: Tensor<3>) -> Tensor<3> {
        values
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("embedding"),
            Self::DecoderEmbedding => f.write_str("decoder embedding"),
            Self::Chunker(level) => write!(f, "chunker {level}"),
            Self::Encoder(level) => write!(f, "encoder {level}"),
            Self::Converter(level) => write!(f, "converter {level}"),
            Self::Decoder(level) => write!(f, "decoder {level}"),
            Self::Stack => f.write_str("stack"),
        }
    }
}
