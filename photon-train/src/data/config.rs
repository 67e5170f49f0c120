//! Which texts to train on, in what proportion, how rows are packed, and what is held out.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use super::{DataError, HeldOut};

/// Which texts to train on, and which to hold out.
///
/// # Examples
/// ```
/// let config: photon_train::data::DataConfig = toml::from_str(r#"
///     paths = ["books/", "notes.md", "logs/**/*.jsonl.zst"]
///     held_out = { documents = { fraction = 0.1 } }
/// "#)?;
/// config.validate()?;
///
/// let mixture: photon_train::data::DataConfig = toml::from_str(r#"
///     packing = "documents"
///     document_mask = true
///     [[sources]]
///     name = "prose"
///     paths = ["books/"]
///     weight = 3
///     [[sources]]
///     name = "code"
///     paths = ["code.parquet"]
///     text_field = "content"
///     weight = 1
/// "#)?;
/// mixture.validate()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Files, folders (with all below them) or patterns such as `texts/**/*.md`; stands for a single source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// Key of the text in a line of a `.jsonl` file, or the column of a `.parquet` file.
    #[serde(default = "default_text_field")]
    pub text_field: String,
    /// How the held-out text is chosen.
    #[serde(default)]
    pub held_out: HeldOut,
    /// How documents are laid into rows.
    #[serde(default)]
    pub packing: Packing,
    /// Whether the model computes each document of a row as if it were alone: attention does not reach into the one
    /// before, positions count from the document's start, and its first unit has nothing before it. A hierarchical model
    /// needs `packing = "documents"` for that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub document_mask: bool,
    /// Several sources, in place of `paths`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceConfig>,
}

/// One of several sources of text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// What reports call it.
    pub name: String,
    /// Files, folders or patterns.
    pub paths: Vec<String>,
    /// Share of the rows, relative to the other weights. Absent in all sources: by their numbers of tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Instead of the mixture's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_field: Option<String>,
    /// Instead of the mixture's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<HeldOut>,
}

/// How documents are laid into rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// One after the other, without a gap.
    #[default]
    Stream,
    /// Each begins at a multiple of the tokens under one top-level unit: no chunk holds two documents.
    Documents,
}

/// A source with nothing left to a default but the weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Source {
    pub(super) name: String,
    pub(super) paths: Vec<String>,
    pub(super) weight: Option<f64>,
    pub(super) text_field: String,
    pub(super) held_out: HeldOut,
}

fn default_text_field() -> String {
    "text".to_owned()
}

impl DataConfig {
    /// Checks what serde cannot.
    ///
    /// # Errors
    /// Names the key, its value and what it should be.
    pub fn validate(&self) -> Result<(), DataError> {
        if self.paths.is_empty() && self.sources.is_empty() {
            return Err(DataError::config("paths", "[]", "at least one file, folder or pattern, or `sources`"));
        }
        if !self.paths.is_empty() && !self.sources.is_empty() {
            return Err(DataError::config("paths", "given beside `sources`", "one of the two: move it into a source"));
        }
        let mut names = HashSet::new();
        for source in self.sources() {
            if source.name.is_empty() || !names.insert(source.name.clone()) {
                return Err(DataError::config("sources.name", format!("{:?}", source.name), "a name of its own"));
            }
            if source.paths.is_empty() {
                return Err(DataError::config("sources.paths", "[]", "at least one file, folder or pattern"));
            }
            if source.text_field.is_empty() {
                return Err(DataError::config("text_field", "\"\"", "the key or column of the text"));
            }
            if source.weight.is_some_and(|weight| !(weight > 0.0 && weight.is_finite())) {
                let found = source.weight.unwrap_or_default();
                return Err(DataError::config("sources.weight", found, "a number above 0, or no such source"));
            }
            source.held_out.validate()?;
        }
        let n_weights = self.sources.iter().filter(|source| source.weight.is_some()).count();
        if n_weights != 0 && n_weights != self.sources.len() {
            let found = format!("given for {n_weights} of {} sources", self.sources.len());
            return Err(DataError::config("sources.weight", found, "given for all, or for none (then by size)"));
        }
        if !self.sources.is_empty() && matches!(self.held_out, HeldOut::Paths { .. }) {
            let fix = "`held_out` within each source: each holds out files of its own";
            return Err(DataError::config("held_out.paths", "given beside `sources`", fix));
        }
        if self.sources().iter().all(|source| source.held_out == HeldOut::Nothing) {
            return Err(DataError::config("held_out", "\"nothing\" everywhere", "some text to evaluate on"));
        }
        Ok(())
    }

    /// Calls `change` for every path of the config, to make relative ones absolute.
    pub fn for_each_path(&mut self, mut change: impl FnMut(&mut String)) {
        let held_out = self.sources.iter_mut().flat_map(|source| &mut source.held_out);
        let held_out = [&mut self.held_out].into_iter().chain(held_out).filter_map(|held_out| match held_out {
            HeldOut::Paths { paths } => Some(paths),
            _ => None,
        });
        held_out.flatten().for_each(&mut change);
        self.paths.iter_mut().for_each(&mut change);
        self.sources.iter_mut().flat_map(|source| &mut source.paths).for_each(change);
    }

    /// The sources; `paths` are one.
    pub(super) fn sources(&self) -> Vec<Source> {
        if self.sources.is_empty() {
            return vec![Source {
                name: "text".to_owned(),
                paths: self.paths.clone(),
                weight: None,
                text_field: self.text_field.clone(),
                held_out: self.held_out.clone(),
            }];
        }
        let of = |source: &SourceConfig| Source {
            name: source.name.clone(),
            paths: source.paths.clone(),
            weight: source.weight,
            text_field: source.text_field.clone().unwrap_or_else(|| self.text_field.clone()),
            held_out: source.held_out.clone().unwrap_or_else(|| self.held_out.clone()),
        };
        self.sources.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(toml: &str) -> Result<DataConfig, toml::de::Error> {
        toml::from_str(toml)
    }

    const TWO: &str = "[[sources]]\nname = \"a\"\npaths = [\"a\"]\n[[sources]]\nname = \"b\"\npaths = [\"b\"]\n";

    #[test]
    fn defaults_hold_out_a_twentieth_of_the_documents() {
        let config = parse("paths = [\"a.txt\"]").unwrap();
        assert_eq!(config.text_field, "text");
        assert_eq!(config.held_out, HeldOut::Documents { fraction: 0.05 });
        assert_eq!(config.packing, Packing::Stream);
        config.validate().unwrap();
    }

    #[test]
    fn every_way_to_hold_out_is_read_and_written() {
        for (toml, held_out) in [
            ("{ tail = { fraction = 0.1 } }", HeldOut::Tail { fraction: 0.1 }),
            ("{ documents = { fraction = 0.2 } }", HeldOut::Documents { fraction: 0.2 }),
            ("{ paths = { paths = [\"v.txt\"] } }", HeldOut::Paths { paths: vec!["v.txt".to_owned()] }),
        ] {
            let config = parse(&format!("paths = [\"a.txt\"]\nheld_out = {toml}")).unwrap();
            assert_eq!(config.held_out, held_out);
            config.validate().unwrap();
            assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
        }
    }

    #[test]
    fn sources_take_what_they_leave_out_from_the_mixture() {
        let source = "name = \"b\"\npaths = [\"b\"]\nheld_out = \"nothing\"\ntext_field = \"body\"";
        let config = parse(
            &format!("held_out = {{ tail = {{ fraction = 0.1 }} }}\n{TWO}\n")
                .replace("name = \"b\"\npaths = [\"b\"]", source),
        )
        .unwrap();
        config.validate().unwrap();
        let [a, b] = config.sources().try_into().unwrap();
        assert_eq!((a.text_field.as_str(), a.held_out), ("text", HeldOut::Tail { fraction: 0.1 }));
        assert_eq!((b.text_field.as_str(), b.held_out), ("body", HeldOut::Nothing));
        assert_eq!(parse(&toml::to_string(&config).unwrap()).unwrap(), config);
    }

    #[test]
    fn every_path_is_visited() {
        let held_out = "held_out = { paths = { paths = [\"c\"] } }\n";
        let mut config = parse(&format!("{TWO}{held_out}")).unwrap();
        let mut seen = Vec::new();
        config.for_each_path(|path| seen.push(path.clone()));
        seen.sort();
        assert_eq!(seen, ["a", "b", "c"]);
        let mut config = parse(&format!("paths = [\"a\"]\n{held_out}")).unwrap();
        config.for_each_path(|path| path.insert(0, '/'));
        assert_eq!((config.paths[0].as_str(), config.held_out), ("/a", HeldOut::Paths { paths: vec!["/c".into()] }));
    }

    #[test]
    fn unknown_keys_are_refused_at_every_depth() {
        for toml in [
            "path = [\"a\"]",
            "paths = [\"a\"]\nshuffle = true",
            "paths = [\"a\"]\npacking = \"tight\"",
            "paths = [\"a\"]\nheld_out = { tail = { fraction = 0.1, lines = 3 } }",
            "paths = [\"a\"]\nheld_out = { lines = { fraction = 0.1 } }",
            "[[sources]]\nname = \"a\"\npaths = [\"a\"]\nwieght = 1",
        ] {
            assert!(parse(toml).is_err(), "{toml}");
        }
    }

    #[test]
    fn validate_names_key_value_and_fix() {
        let message = |toml: &str| parse(toml).unwrap().validate().unwrap_err().to_string();
        assert!(message("paths = []").contains("`paths` is [], expected at least one"));
        let fraction = "paths = [\"a\"]\nheld_out = { tail = { fraction = 0.6 } }";
        assert!(message(fraction).contains("`held_out.tail.fraction` is 0.6, expected"));
        let nan = "paths = [\"a\"]\nheld_out = { documents = { fraction = nan } }";
        assert!(message(nan).contains("NaN"));
        assert!(message("paths = [\"a\"]\nheld_out = { paths = { paths = [] } }").contains("`held_out.paths.paths`"));
        assert!(message("paths = [\"a\"]\ntext_field = \"\"").contains("`text_field`"));
        assert!(message("paths = [\"a\"]\nheld_out = \"nothing\"").contains("`held_out` is \"nothing\""));
        assert!(message(&format!("paths = [\"a\"]\n{TWO}")).contains("one of the two"));
        assert!(message(&TWO.replace("\"b\"\n", "\"a\"\n")).contains("`sources.name` is \"a\""));
        assert!(message(&format!("{TWO}weight = 2")).contains("given for 1 of 2 sources"));
        assert!(message(&TWO.replace("name", "weight = 0.0\nname")).contains("`sources.weight` is 0"));
        let top = format!("held_out = {{ paths = {{ paths = [\"v\"] }} }}\n{TWO}");
        assert!(message(&top).contains("within each source"));
    }
}
