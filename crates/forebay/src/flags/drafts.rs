//! Speculation, by the names of SGLang, vLLM and llama.cpp.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use forebay_engine::DraftConfig;
use serde::Deserialize;

/// The largest number of drafts of a row.
const MOST_DRAFTS: u32 = 32;

#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct DraftFlags {
    /// The source of drafts, which a step verifies beside other tokens. `ngram` takes the tokens
    /// behind an earlier occurrence of the last few, in the prompt, the answer and OpenAI's
    /// `prediction`. Drafts change no token. A step has them where their measured time is worth it
    /// [default: none].
    #[arg(long, visible_alias = "spec-type", value_enum, ignore_case = true, value_name = "NAME")]
    pub(crate) speculative_algorithm: Option<DraftAlgorithm>,
    /// The largest number of drafts of a request in a step [default: 8].
    #[arg(long, visible_aliases = ["draft-max", "num-speculative-tokens"], value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_DRAFTS)))]
    pub(crate) speculative_num_draft_tokens: Option<u32>,
    /// The same in one JSON object, as in vLLM: method (`ngram`), num_speculative_tokens.
    #[arg(long, value_name = "JSON", value_parser = parsed, conflicts_with_all = ["speculative_algorithm", "speculative_num_draft_tokens"])]
    pub(crate) speculative_config: Option<SpeculativeConfig>,
    /// For measurements: verify every draft, whatever its time is worth.
    #[arg(long)]
    pub(crate) speculative_unpriced: bool,
}

/// A source of drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DraftAlgorithm {
    /// No drafts.
    None,
    /// Earlier occurrences of the last tokens.
    #[value(aliases = ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "prompt-lookup"])]
    Ngram,
}

/// vLLM's `--speculative-config`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SpeculativeConfig {
    method: DraftAlgorithm,
    num_speculative_tokens: Option<u32>,
    /// Lengths of matches. A draft's price decides here, whatever the length.
    #[serde(rename = "prompt_lookup_min")]
    _prompt_lookup_min: Option<u32>,
    #[serde(rename = "prompt_lookup_max")]
    _prompt_lookup_max: Option<u32>,
}

impl DraftFlags {
    /// The drafts of the engine, if there are any.
    ///
    /// # Errors
    /// A flag says something of drafts that are off.
    pub(crate) fn engine(&self) -> Result<Option<DraftConfig>> {
        let (algorithm, most) = match &self.speculative_config {
            Some(config) => (Some(config.method), config.num_speculative_tokens),
            None => (self.speculative_algorithm, self.speculative_num_draft_tokens),
        };
        if algorithm == Some(DraftAlgorithm::Ngram) {
            let usual = DraftConfig::default();
            return Ok(Some(DraftConfig {
                speculative_num_draft_tokens: most.unwrap_or(usual.speculative_num_draft_tokens),
                speculative_unpriced: self.speculative_unpriced,
            }));
        }
        if self.speculative_num_draft_tokens.is_some() || self.speculative_unpriced {
            bail!("drafts are off: --speculative-algorithm ngram turns them on");
        }
        Ok(None)
    }
}

fn parsed(text: &str) -> Result<SpeculativeConfig, String> {
    let config: SpeculativeConfig =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    match config.num_speculative_tokens {
        Some(most) if !(1..=MOST_DRAFTS).contains(&most) => {
            Err(format!("num_speculative_tokens: expected 1 to {MOST_DRAFTS}"))
        }
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
            (r#"--speculative-config {"method":"ngram"}"#, Some((8, false))),
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
            "--speculative-algorithm ngram --draft-max 33",
            r#"--speculative-config {"method":"eagle3"}"#,
            r#"--speculative-config {"method":"ngram","num_speculative_tokens":0}"#,
            r#"--speculative-config {"method":"ngram","model":"x"}"#,
        ] {
            assert!(drafts(wrong).is_err(), "{wrong}");
        }
    }
}
