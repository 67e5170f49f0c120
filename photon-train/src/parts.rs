//! Parts of a model by name, as parameter groups select them.

use std::fmt;
use std::str::FromStr;

use photon_core::config::ModelConfig;
use photon_core::infer_config::{Stage, Stages};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Where a parameter stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A table of tokens.
    Embedding,
    /// The learned vector before everything.
    Start,
    /// The matrix to the logits.
    Head,
    /// The chunker of a level, counted from 1, where it has parameters.
    Chunker(usize),
    /// The converter of a level, counted from 1.
    Converter(usize),
    /// The transformer of a stage.
    Stack(Stage),
}

/// A part of a model as a config names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `all`, or the stages of a cache rule: an encoder goes with its chunker, a decoder with its converter.
    Stages(Stages),
    /// `level 2`: encoder and decoder of a level.
    Level(usize),
    /// `embeddings`
    Embeddings,
    /// `start`
    Start,
    /// `head`
    Head,
    /// `chunkers`
    Chunkers,
    /// `converters`
    Converters,
}

impl Place {
    /// Where the parameter of this name stands; names are those of the files of weights.
    pub fn of(name: &str) -> Option<Self> {
        let level = |index: &str| index.parse::<usize>().ok().map(|index| index + 1);
        let parts: Vec<&str> = name.split('.').collect();
        match parts.as_slice() {
            ["embedding" | "encoder_embedding" | "decoder_embedding", ..] => Some(Self::Embedding),
            ["start" | "start_latent", ..] => Some(Self::Start),
            ["head", ..] => Some(Self::Head),
            ["stack", ..] => Some(Self::Stack(Stage::Stack)),
            ["encoders", index, "chunker", ..] => level(index).map(Self::Chunker),
            ["encoders", index, "stack", ..] => level(index).map(|level| Self::Stack(Stage::Encoder(level))),
            ["decoders", index, "converter", ..] => level(index).map(Self::Converter),
            ["decoders", index, "stack", ..] => level(index).map(|level| Self::Stack(Stage::Decoder(level))),
            _ => None,
        }
    }

    /// Every place of a model that has parameters.
    pub fn all_of(model: &ModelConfig) -> Vec<Self> {
        let mut places = vec![Self::Embedding, Self::Start, Self::Head];
        places.extend(Stage::all_of(model).into_iter().map(Self::Stack));
        if let ModelConfig::Photon(config) = model {
            let levels = 1..=config.n_levels();
            places.extend(levels.clone().filter(|&level| config.chunker_projects(level)).map(Self::Chunker));
            places.extend(levels.map(Self::Converter));
        }
        places
    }

    /// The stage that it goes with.
    fn stage(self) -> Option<Stage> {
        match self {
            Self::Embedding | Self::Start | Self::Head => None,
            Self::Chunker(level) => Some(Stage::Encoder(level)),
            Self::Converter(level) => Some(Stage::Decoder(level)),
            Self::Stack(stage) => Some(stage),
        }
    }
}

impl Part {
    /// Whether it holds a place of a model of so many levels.
    pub fn contains(self, place: Place, n_levels: usize) -> bool {
        match self {
            Self::Stages(Stages::All) => true,
            Self::Stages(stages) => place.stage().is_some_and(|stage| stages.contains(stage, n_levels)),
            Self::Level(level) => [Stage::Encoder(level), Stage::Decoder(level)].map(Some).contains(&place.stage()),
            Self::Embeddings => place == Place::Embedding,
            Self::Start => place == Place::Start,
            Self::Head => place == Place::Head,
            Self::Chunkers => matches!(place, Place::Chunker(_)),
            Self::Converters => matches!(place, Place::Converter(_)),
        }
    }

    /// The words that select something of a model, for messages.
    pub fn all_of(model: &ModelConfig) -> String {
        let n_levels = model.n_levels();
        let mut parts = vec![Self::Stages(Stages::All)];
        if n_levels > 0 {
            parts.extend([Stages::Encoders, Stages::Decoders].map(Self::Stages));
        }
        parts.extend(Stage::all_of(model).into_iter().map(|stage| Self::Stages(Stages::One(stage))));
        parts.extend((1..=n_levels).map(Self::Level));
        parts.extend([Self::Embeddings, Self::Start, Self::Head, Self::Chunkers, Self::Converters]);
        let places = Place::all_of(model);
        parts.retain(|part| places.iter().any(|&place| part.contains(place, n_levels)));
        parts.iter().map(Self::to_string).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stages(stages) => stages.fmt(f),
            Self::Level(level) => write!(f, "level {level}"),
            Self::Embeddings => f.write_str("embeddings"),
            Self::Start => f.write_str("start"),
            Self::Head => f.write_str("head"),
            Self::Chunkers => f.write_str("chunkers"),
            Self::Converters => f.write_str("converters"),
        }
    }
}

impl FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let level =
            text.strip_prefix("level ").and_then(|number| number.parse().ok()).filter(|&level: &usize| level > 0);
        match (text, level) {
            (_, Some(level)) => Ok(Self::Level(level)),
            ("embeddings", _) => Ok(Self::Embeddings),
            ("start", _) => Ok(Self::Start),
            ("head", _) => Ok(Self::Head),
            ("chunkers", _) => Ok(Self::Chunkers),
            ("converters", _) => Ok(Self::Converters),
            _ => text.parse().map(Self::Stages).map_err(|_: String| {
                format!(
                    "unknown part \"{text}\"; use \"all\", \"encoders\", \"lower encoders\", \"top encoder\", \"decoders\", \
                     \"token decoder\", \"encoder 1\", \"decoder 1\", \"level 1\", ..., \"stack\" (of a flat model), \"embeddings\", \"start\", \
                     \"head\", \"chunkers\" or \"converters\""
                )
            }),
        }
    }
}

impl Serialize for Part {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::parameters::parameter_names;
    use burn::tensor::Device;
    use photon_core::config_file;
    use photon_core::model::Model;

    /// Two levels, or a flat model.
    pub(crate) fn model_config(n_levels: usize) -> ModelConfig {
        let level = "[[levels]]\nchunk_len = 2\nd_model = 4\n\
                     encoder = { n_layers = 1, n_heads = 1, d_ff = 4, sink = true }\n\
                     converter = { prefix_len = 1 }\ndecoder = { n_layers = 1, n_heads = 1, d_ff = 4 }\n";
        let toml = match n_levels {
            0 => "architecture = \"flat\"\nvocab_size = 5\nd_model = 4\n[stack]\nn_layers = 1\nn_heads = 1\nd_ff = 4\n"
                .into(),
            _ => format!("architecture = \"photon\"\nvocab_size = 5\nd_model = 4\n{}", level.repeat(n_levels)),
        };
        config_file::parse_model(toml.parse().unwrap(), "test.toml".as_ref()).unwrap()
    }

    #[test]
    fn every_parameter_has_a_place_and_every_place_a_parameter() {
        for n_levels in [0, 1, 3] {
            let config = model_config(n_levels);
            let names = parameter_names(&Model::new(&config, 0, &Device::flex()));
            let place = |name: &String| Place::of(name).unwrap_or_else(|| panic!("{name} has no place"));
            let found: Vec<Place> = names.iter().map(place).collect();
            let places = Place::all_of(&config);
            assert!(places.iter().all(|place| found.contains(place)), "{places:?}\n{found:?}");
            assert!(found.iter().all(|place| places.contains(place)), "{places:?}\n{found:?}");
        }
    }

    #[test]
    fn words_are_read_as_they_are_written_and_select_what_they_say() {
        let photon = model_config(2);
        assert_eq!(
            Part::all_of(&photon),
            "all, encoders, decoders, encoder 1, encoder 2, decoder 1, decoder 2, level 1, level 2, embeddings, start, head, \
             chunkers, converters"
        );
        assert_eq!(Part::all_of(&model_config(0)), "all, stack, embeddings, start, head");
        let selected = |words: &str| -> Vec<Place> {
            let part: Part = words.parse().unwrap();
            assert_eq!(part.to_string(), words);
            Place::all_of(&photon).into_iter().filter(|&place| part.contains(place, 2)).collect()
        };
        assert_eq!(selected("all").len(), Place::all_of(&photon).len());
        assert_eq!(selected("encoder 2"), [Place::Stack(Stage::Encoder(2)), Place::Chunker(2)]);
        assert_eq!(selected("top encoder"), selected("encoder 2"));
        assert_eq!(selected("token decoder"), selected("decoder 1"));
        assert_eq!(selected("decoder 1"), [Place::Stack(Stage::Decoder(1)), Place::Converter(1)]);
        // The chunker of the first level has no parameters.
        assert_eq!(
            selected("level 1"),
            [Stage::Encoder(1), Stage::Decoder(1)]
                .map(Place::Stack)
                .into_iter()
                .chain([Place::Converter(1)])
                .collect::<Vec<_>>()
        );
        assert_eq!(selected("converters"), [Place::Converter(1), Place::Converter(2)]);
        assert_eq!(selected("embeddings"), [Place::Embedding]);
        assert_eq!(selected("stack"), []);
        assert!("encoder 0".parse::<Part>().unwrap_err().contains("unknown part \"encoder 0\""));
    }
}
