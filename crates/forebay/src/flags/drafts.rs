//! Speculation, by the names of SGLang, vLLM and llama.cpp.

use std::str::FromStr;

use anyhow::{Result, bail};
use clap::Args;
use forebay_engine::DraftConfig;
use serde::Deserialize;

/// The largest number of drafts of a row.
const MOST_DRAFTS: u32 = 32;
/// The default number of drafts of a draft model, each of which costs a step of it.
const MODEL_DRAFTS: u32 = 3;

#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct DraftFlags {
    /// Source of draft tokens, which steps verify: `none`, `ngram`, or `draft_model`
    /// (`STANDALONE`). `ngram` drafts from earlier text of the prompt and the answer, from OpenAI's
    /// `prediction`, and what a grammar forces; a step takes the drafts that are worth their
    /// measured time. The drafts of a draft model are always verified. Drafts change no token
    /// [default: none].
    #[arg(long, visible_alias = "spec-type", value_name = "NAME")]
    pub(crate) speculative_algorithm: Option<DraftAlgorithm>,
    /// The largest number of drafts of a request in a step, at least 1. More than 32 are 32
    /// [default: 8, of a draft model 3].
    #[arg(
        long,
        visible_aliases = ["draft-max", "num-speculative-tokens"],
        value_name = "TOKENS",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) speculative_num_draft_tokens: Option<u32>,
    /// The draft model: a folder or a name, as for the model itself. It has the same tokenizer.
    #[arg(long, value_name = "MODEL")]
    pub(crate) speculative_draft_model_path: Option<String>,
    /// The same in one JSON object, as in vLLM: method (`ngram`, `draft_model`), model,
    /// num_speculative_tokens.
    #[arg(
        long,
        value_name = "JSON",
        value_parser = parsed,
        conflicts_with_all = [
            "speculative_algorithm",
            "speculative_num_draft_tokens",
            "speculative_draft_model_path",
        ]
    )]
    pub(crate) speculative_config: Option<SpeculativeConfig>,
    /// For measurements: verify every draft, whatever its time is worth.
    #[arg(long)]
    pub(crate) speculative_unpriced: bool,
}

/// A source of drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum DraftAlgorithm {
    /// No drafts.
    None,
    /// Earlier occurrences of the last tokens.
    Ngram,
    /// Another model of the same vocabulary.
    Model,
}

impl FromStr for DraftAlgorithm {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        // llama.cpp has lists of them, and vLLM's older names are in brackets.
        let name = name.to_ascii_lowercase();
        let (mut found, mut count) = (Self::None, 0);
        for one in name.split(',').map(|one| one.trim_matches(['[', ']', ' '])) {
            let before = found;
            match one {
                "none" => {}
                "draft" | "draft_model" | "standalone" | "draft-simple" => found = Self::Model,
                "ngram" | "suffix" | "prompt-lookup" | "ngram-simple" | "ngram-map-k"
                | "ngram-map-k4v" | "ngram-mod" | "ngram-cache" => found = Self::Ngram,
                "eagle" | "eagle3" | "mtp" | "nextn" | "medusa" | "mlp_speculator" | "dflash"
                | "draft-eagle3" | "draft-mtp" => {
                    return Err(format!(
                        "{one}: heads that draft are not there; ngram and draft_model are"
                    ));
                }
                _ => {
                    return Err(format!(
                        "{one:?} is no source of drafts: none, ngram, draft_model"
                    ));
                }
            }
            count += u32::from(before != found);
        }
        if count > 1 {
            return Err("drafts come from the text or from a draft model, not from both".into());
        }
        Ok(found)
    }
}

impl TryFrom<String> for DraftAlgorithm {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

/// vLLM's `--speculative-config`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SpeculativeConfig {
    method: Option<DraftAlgorithm>,
    /// The draft model; or the method in brackets.
    model: Option<String>,
    num_speculative_tokens: Option<u32>,
    /// Lengths of matches. A draft's price decides here, whatever the length.
    #[serde(rename = "prompt_lookup_min")]
    _prompt_lookup_min: Option<u32>,
    #[serde(rename = "prompt_lookup_max")]
    _prompt_lookup_max: Option<u32>,
}

/// The chosen source of drafts.
struct ChosenDrafts<'a> {
    algorithm: DraftAlgorithm,
    most: Option<u32>,
    model: Option<&'a str>,
}

impl DraftFlags {
    fn chosen(&self) -> ChosenDrafts<'_> {
        let (named, most, model) = match &self.speculative_config {
            Some(config) => (config.method, config.num_speculative_tokens, &config.model),
            None => (
                self.speculative_algorithm,
                self.speculative_num_draft_tokens,
                &self.speculative_draft_model_path,
            ),
        };
        let model = model.as_deref();
        let in_brackets = || model.and_then(|name| name.parse().ok());
        let algorithm = named.or_else(in_brackets).unwrap_or(match model {
            Some(_) => DraftAlgorithm::Model,
            None => DraftAlgorithm::None,
        });
        ChosenDrafts { algorithm, most: most.map(|most| most.min(MOST_DRAFTS)), model }
    }

    /// The drafts of the engine, if there are any.
    ///
    /// # Errors
    /// A flag says something of drafts that are off.
    pub(crate) fn engine(&self) -> Result<Option<DraftConfig>> {
        let ChosenDrafts { algorithm, most, model } = self.chosen();
        let named = model.is_some_and(|name| name.parse::<DraftAlgorithm>().is_err());
        if named && algorithm != DraftAlgorithm::Model {
            bail!("a draft model is for --speculative-algorithm draft_model");
        }
        if algorithm == DraftAlgorithm::Ngram {
            let most = most.unwrap_or(DraftConfig::default().speculative_num_draft_tokens);
            return Ok(Some(DraftConfig {
                speculative_num_draft_tokens: most,
                speculative_unpriced: self.speculative_unpriced,
            }));
        }
        if self.speculative_unpriced && algorithm == DraftAlgorithm::Model {
            bail!("--speculative-unpriced: drafts of a draft model have no price");
        }
        if algorithm == DraftAlgorithm::None
            && (self.speculative_num_draft_tokens.is_some() || self.speculative_unpriced)
        {
            bail!("drafts are off: --speculative-algorithm ngram turns them on");
        }
        Ok(None)
    }

    /// The draft model and the number of its drafts, if there is one.
    ///
    /// # Errors
    /// It has no name.
    pub(crate) fn model(&self) -> Result<Option<(&str, u32)>> {
        match self.chosen() {
            ChosenDrafts { algorithm: DraftAlgorithm::Model, most, model: Some(model) } => {
                Ok(Some((model, most.unwrap_or(MODEL_DRAFTS))))
            }
            ChosenDrafts { algorithm: DraftAlgorithm::Model, .. } => {
                bail!("a draft model has to be named: --speculative-draft-model-path")
            }
            _ => Ok(None),
        }
    }
}

fn parsed(text: &str) -> Result<SpeculativeConfig, String> {
    let config: SpeculativeConfig =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    match config.num_speculative_tokens {
        Some(0) => Err("num_speculative_tokens: expected at least 1".into()),
        _ => Ok(config),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        drafts: DraftFlags,
    }

    fn drafts(line: &str) -> Result<Option<(u32, bool)>> {
        let line = Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace()))?;
        let config = line.drafts.engine()?;
        Ok(config.map(|it| (it.speculative_num_draft_tokens, it.speculative_unpriced)))
    }

    #[test]
    fn each_server_has_its_spelling() {
        for (line, expected) in [
            ("", None),
            ("--speculative-algorithm none", None),
            ("--speculative-algorithm NGRAM", Some((8, false))),
            ("--speculative-algorithm ngram --speculative-num-draft-tokens 3", Some((3, false))),
            ("--spec-type ngram-mod --draft-max 4 --speculative-unpriced", Some((4, true))),
            ("--spec-type ngram-simple,ngram-mod --draft-max 64", Some((32, false))),
            (r#"--speculative-config {"method":"ngram"}"#, Some((8, false))),
            (r#"--speculative-config {"model":"[ngram]"}"#, Some((8, false))),
            (r#"--speculative-config {"method":"suffix"}"#, Some((8, false))),
            (
                r#"--speculative-config {"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}"#,
                Some((5, false)),
            ),
        ] {
            assert_eq!(drafts(line).expect(line), expected, "{line}");
        }
        for wrong in [
            "--draft-max 4",
            "--speculative-unpriced",
            "--speculative-algorithm EAGLE3",
            "--speculative-algorithm ngram --draft-max 0",
            "--speculative-algorithm ngram --speculative-draft-model-path x",
            "--speculative-draft-model-path x --speculative-unpriced",
            "--spec-type ngram-mod,draft-mtp",
            "--spec-type ngram-mod,draft-simple",
            "--spec-type ngrams",
            r#"--speculative-config {"method":"eagle3"}"#,
            r#"--speculative-config {"method":"ngram","num_speculative_tokens":0}"#,
            r#"--speculative-config {"method":"ngram","model":"x"}"#,
        ] {
            assert!(drafts(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_draft_model_has_a_name() {
        let model = |line: &str| -> Result<Option<(String, u32)>> {
            let line = Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace()))?;
            line.drafts.engine()?;
            Ok(line.drafts.model()?.map(|(name, most)| (name.to_owned(), most)))
        };
        for (line, expected) in [
            ("", None),
            ("--speculative-algorithm ngram", None),
            (r#"--speculative-config {"model":"[ngram]"}"#, None),
            ("--speculative-draft-model-path org/m", Some(3)),
            ("--speculative-algorithm STANDALONE --speculative-draft-model-path org/m", Some(3)),
            (
                "--spec-type draft-simple --speculative-draft-model-path org/m --draft-max 5",
                Some(5),
            ),
            (
                r#"--speculative-config {"method":"draft_model","model":"org/m","num_speculative_tokens":99}"#,
                Some(32),
            ),
            (r#"--speculative-config {"model":"org/m"}"#, Some(3)),
        ] {
            let expected = expected.map(|most| ("org/m".to_owned(), most));
            assert_eq!(model(line).expect(line), expected, "{line}");
        }
        for wrong in [
            "--speculative-algorithm draft_model",
            r#"--speculative-config {"method":"draft_model"}"#,
            r#"--speculative-config {"method":"mtp","model":"x"}"#,
        ] {
            assert!(model(wrong).is_err(), "{wrong}");
        }
    }
}
