//! Flags about speculative decoding, by the names of SGLang, vLLM and llama.cpp.

use std::str::FromStr;

use anyhow::{Result, bail};
use clap::Args;
use forebay_engine::DraftConfig;
use serde::Deserialize;

/// The largest number of draft tokens per row.
const MOST_DRAFTS: u32 = 32;
/// The default largest number of drafts per row that the hand computes itself. Each draft takes a
/// forward pass of the draft model or head.
const HAND_DRAFTS: u32 = 3;

#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation")]
pub(crate) struct DraftFlags {
    /// Source of draft tokens for speculative decoding: `auto`, `none`, `ngram`, `draft_model`
    /// (SGLang: `STANDALONE`), `eagle3`, or `mtp` (SGLang: `NEXTN`, `EAGLE`). `ngram` takes drafts
    /// from earlier text of the prompt and the answer, from OpenAI's `prediction`, and from tokens
    /// that a grammar forces. A step verifies n-gram drafts only while the expected gain exceeds
    /// the measured cost; drafts of models and heads are always verified. Drafts never change the
    /// output. `auto` is `ngram` with the Rust hand, otherwise `none` [default: auto, or
    /// draft_model with a draft model].
    #[arg(long, visible_alias = "spec-type", value_name = "NAME")]
    pub(crate) speculative_algorithm: Option<DraftAlgorithm>,
    /// Largest number of draft tokens for a request in a step; numbers above 32 count as 32
    /// [default: 8, or 3 with a draft model or head].
    #[arg(
        long,
        visible_aliases = ["draft-max", "num-speculative-tokens"],
        value_name = "TOKENS",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub(crate) speculative_num_draft_tokens: Option<u32>,
    /// The draft model, or the EAGLE-3 head: a folder or a name, as for the model itself. A draft
    /// model needs the same tokenizer. MTP layers need no path: they are in the model's own files.
    #[arg(long, value_name = "MODEL")]
    pub(crate) speculative_draft_model_path: Option<String>,
    /// SGLang's flag for the number of drafts of a head. It overrides
    /// --speculative-num-draft-tokens, which in SGLang is larger by one.
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) speculative_num_steps: Option<u32>,
    /// Number of alternative tokens that SGLang's heads draft for a position. Only 1 is supported,
    /// because drafts are chains.
    #[arg(long, value_name = "TOKENS", value_parser = chain)]
    pub(crate) speculative_eagle_topk: Option<u32>,
    /// vLLM's form of these settings, as a JSON object: method (`ngram`, `draft_model`, `eagle3`,
    /// `mtp`), model, num_speculative_tokens.
    #[arg(
        long,
        value_name = "JSON",
        value_parser = parsed,
        conflicts_with_all = [
            "speculative_algorithm",
            "speculative_num_draft_tokens",
            "speculative_draft_model_path",
            "speculative_num_steps",
            "speculative_eagle_topk",
        ]
    )]
    pub(crate) speculative_config: Option<SpeculativeConfig>,
    /// Memory in MiB per model for a shared history of answers, from which `ngram` also drafts for
    /// other requests [default: none]. Requests share it only within the same `cache_salt` and,
    /// without --share-cache-across-keys, the same API key. With a shared history, the speed of an
    /// answer can reveal earlier answers.
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) speculative_shared_history: Option<u32>,
    /// For measurements: verify every draft, even if verification costs more time than it saves.
    #[arg(long)]
    pub(crate) speculative_unpriced: bool,
}

/// The source of draft tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum DraftAlgorithm {
    /// `Ngram` where measurements found that drafts cost nothing, else `None`.
    Auto,
    /// No drafts.
    None,
    /// Tokens that followed earlier occurrences of the last tokens.
    Ngram,
    /// A separate model with the same vocabulary.
    Model,
    /// A head in separate files that reads hidden states of several layers.
    Eagle3,
    /// The model's MTP layer, which follows its last regular layer.
    Mtp,
}

/// The source of the drafts that the hand computes itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandDrafts<'a> {
    /// A draft model of this name.
    Model(&'a str),
    /// An EAGLE-3 head of this name.
    Eagle3(&'a str),
    /// The model's MTP layer.
    Mtp,
}

/// vLLM's names for MTP, by model family.
const MTP_OF_FAMILIES: [&str; 11] = [
    "deepseek_mtp",
    "ernie_mtp",
    "exaone_moe_mtp",
    "glm4_moe_lite_mtp",
    "glm4_moe_mtp",
    "longcat_flash_mtp",
    "mimo_mtp",
    "nemotron_h_mtp",
    "pangu_ultra_moe_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
];
const SOURCES: &str = "ngram, draft_model, eagle3, mtp";

impl FromStr for DraftAlgorithm {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        // llama.cpp accepts a comma-separated list here, and vLLM's older method names are in
        // square brackets.
        let name = name.to_ascii_lowercase();
        if name == "auto" {
            return Ok(Self::Auto);
        }
        let (mut found, mut count) = (Self::None, 0);
        for one in name.split(',').map(|one| one.trim_matches(['[', ']', ' '])) {
            let before = found;
            match one {
                "none" => {}
                "draft" | "draft_model" | "standalone" | "draft-simple" => found = Self::Model,
                "ngram" | "suffix" | "prompt-lookup" | "ngram-simple" | "ngram-map-k"
                | "ngram-map-k4v" | "ngram-mod" | "ngram-cache" => found = Self::Ngram,
                "eagle3" | "draft-eagle3" => found = Self::Eagle3,
                // SGLang's EAGLE, for a model with an MTP layer.
                "mtp" | "nextn" | "eagle" | "draft-mtp" => found = Self::Mtp,
                name if MTP_OF_FAMILIES.contains(&name) => found = Self::Mtp,
                "medusa" | "mlp_speculator" | "dflash" => {
                    return Err(format!("{one} is not supported; use {SOURCES}"));
                }
                _ => return Err(format!("{one:?} is no source of drafts: auto, none, {SOURCES}")),
            }
            count += u32::from(before != found);
        }
        if count > 1 {
            return Err("drafts come from one source, and several are named".into());
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
    /// The draft model, or vLLM's older method name in square brackets.
    model: Option<String>,
    num_speculative_tokens: Option<u32>,
    /// Accepted without effect: the expected gain of a draft decides, whatever the match length.
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
                self.speculative_num_steps.or(self.speculative_num_draft_tokens),
                &self.speculative_draft_model_path,
            ),
        };
        let model = model.as_deref();
        let in_brackets = || model.and_then(|name| name.parse().ok());
        let algorithm = named.or_else(in_brackets).unwrap_or(match model {
            Some(_) => DraftAlgorithm::Model,
            None => DraftAlgorithm::Auto,
        });
        ChosenDrafts { algorithm, most: most.map(|most| most.min(MOST_DRAFTS)), model }
    }

    /// The engine's settings for drafts; `None`: drafts are off. `usual` is true if `auto` turns
    /// drafts on.
    ///
    /// # Errors
    /// A flag sets a parameter of drafts that are off.
    pub(crate) fn engine(&self, usual: bool) -> Result<Option<DraftConfig>> {
        let ChosenDrafts { algorithm, most, model } = self.chosen();
        let algorithm = match algorithm {
            DraftAlgorithm::Auto if usual => DraftAlgorithm::Ngram,
            DraftAlgorithm::Auto => DraftAlgorithm::None,
            named => named,
        };
        let named = model.is_some_and(|name| name.parse::<DraftAlgorithm>().is_err());
        let heads = self.speculative_num_steps.is_some() || self.speculative_eagle_topk.is_some();
        match algorithm {
            DraftAlgorithm::None | DraftAlgorithm::Ngram if named => {
                bail!("a draft model is for --speculative-algorithm draft_model or eagle3")
            }
            DraftAlgorithm::None | DraftAlgorithm::Ngram if heads => bail!(
                "--speculative-num-steps and --speculative-eagle-topk are for drafts of models and heads"
            ),
            _ => {}
        }
        self.of_hand()?;
        if self.speculative_shared_history.is_some() && algorithm != DraftAlgorithm::Ngram {
            bail!("--speculative-shared-history is for --speculative-algorithm ngram");
        }
        if algorithm == DraftAlgorithm::Ngram {
            let most = most.unwrap_or(DraftConfig::default().speculative_num_draft_tokens);
            return Ok(Some(DraftConfig {
                speculative_num_draft_tokens: most,
                speculative_unpriced: self.speculative_unpriced,
            }));
        }
        if self.speculative_unpriced && algorithm != DraftAlgorithm::None {
            bail!("--speculative-unpriced needs --speculative-algorithm ngram");
        }
        if algorithm == DraftAlgorithm::None
            && (self.speculative_num_draft_tokens.is_some() || self.speculative_unpriced)
        {
            bail!("drafts are off: --speculative-algorithm ngram turns them on");
        }
        Ok(None)
    }

    /// The source of the drafts that the hand computes, and their largest number per row; `None`:
    /// the hand computes no drafts.
    ///
    /// # Errors
    /// A path is missing, or given for a source that takes none.
    pub(crate) fn of_hand(&self) -> Result<Option<(HandDrafts<'_>, u32)>> {
        let ChosenDrafts { algorithm, most, model } = self.chosen();
        let source = match (algorithm, model) {
            (DraftAlgorithm::Auto | DraftAlgorithm::None | DraftAlgorithm::Ngram, _) => {
                return Ok(None);
            }
            (DraftAlgorithm::Mtp, Some(name)) if name.parse::<DraftAlgorithm>().is_err() => bail!(
                "an MTP layer is in the model's own files: leave {name} off, or name an EAGLE-3 \
                 head with --speculative-algorithm eagle3"
            ),
            (DraftAlgorithm::Mtp, _) => HandDrafts::Mtp,
            (DraftAlgorithm::Model, Some(model)) => HandDrafts::Model(model),
            (DraftAlgorithm::Eagle3, Some(head)) => HandDrafts::Eagle3(head),
            (DraftAlgorithm::Model, None) => {
                bail!("a draft model has to be named: --speculative-draft-model-path")
            }
            (DraftAlgorithm::Eagle3, None) => {
                bail!("an EAGLE-3 head has to be named: --speculative-draft-model-path")
            }
        };
        Ok(Some((source, most.unwrap_or(HAND_DRAFTS))))
    }
}

fn chain(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(1) => Ok(1),
        _ => Err("drafts are chains here, and no trees: leave it off, or use 1".into()),
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

    fn drafts_where(line: &str, usual: bool) -> Result<Option<(u32, bool)>> {
        let line = Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace()))?;
        let config = line.drafts.engine(usual)?;
        Ok(config.map(|it| (it.speculative_num_draft_tokens, it.speculative_unpriced)))
    }

    fn drafts(line: &str) -> Result<Option<(u32, bool)>> {
        drafts_where(line, false)
    }

    #[test]
    fn drafts_are_on_where_they_are_usual() {
        for (line, expected) in [
            ("", Some((8, false))),
            ("--speculative-algorithm auto", Some((8, false))),
            ("--draft-max 4", Some((4, false))),
            ("--speculative-unpriced", Some((8, true))),
            ("--speculative-shared-history 64", Some((8, false))),
            (r#"--speculative-config {"num_speculative_tokens":5}"#, Some((5, false))),
            ("--speculative-algorithm none", None),
            ("--speculative-algorithm NEXTN", None),
            ("--speculative-draft-model-path org/m", None),
        ] {
            assert_eq!(drafts_where(line, true).expect(line), expected, "{line}");
        }
        for wrong in ["--speculative-num-steps 3", "--speculative-algorithm none --draft-max 4"] {
            assert!(drafts_where(wrong, true).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_server_has_its_spelling() {
        for (line, expected) in [
            ("", None),
            ("--speculative-algorithm none", None),
            ("--speculative-algorithm auto", None),
            ("--speculative-algorithm NGRAM", Some((8, false))),
            ("--spec-type ngram-cache --speculative-shared-history 64", Some((8, false))),
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
            "--speculative-shared-history 64",
            "--speculative-algorithm ngram --speculative-shared-history 0",
            "--speculative-algorithm nextn --speculative-shared-history 64",
            "--speculative-algorithm medusa",
            "--speculative-algorithm ngram --draft-max 0",
            "--speculative-algorithm ngram --speculative-num-steps 3",
            "--speculative-algorithm ngram --speculative-eagle-topk 1",
            "--speculative-algorithm eagle3 --speculative-eagle-topk 2",
            "--speculative-algorithm eagle3 --speculative-num-steps 0",
            "--speculative-algorithm nextn --speculative-unpriced",
            "--speculative-algorithm EAGLE --speculative-draft-model-path x",
            "--speculative-algorithm ngram --speculative-draft-model-path x",
            "--speculative-draft-model-path x --speculative-unpriced",
            "--spec-type ngram-mod,draft-mtp",
            "--spec-type ngram-mod,draft-simple",
            "--spec-type ngrams",
            r#"--speculative-config {"method":"mlp_speculator"}"#,
            r#"--speculative-config {"method":"ngram","num_speculative_tokens":0}"#,
            r#"--speculative-config {"method":"ngram","model":"x"}"#,
        ] {
            assert!(drafts(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn drafts_of_the_hand_have_a_source() {
        use HandDrafts::{Eagle3, Model, Mtp};
        let source = |line: &str| -> Result<Option<String>> {
            let line = Line::try_parse_from(std::iter::once("x").chain(line.split_whitespace()))?;
            line.drafts.engine(true)?;
            Ok(line.drafts.of_hand()?.map(|found| format!("{found:?}")))
        };
        for (line, expected) in [
            ("", None),
            ("--speculative-algorithm ngram", None),
            (r#"--speculative-config {"model":"[ngram]"}"#, None),
            ("--speculative-draft-model-path org/m", Some((Model("org/m"), 3))),
            (
                "--speculative-algorithm STANDALONE --speculative-draft-model-path org/m",
                Some((Model("org/m"), 3)),
            ),
            (
                "--spec-type draft-simple --speculative-draft-model-path org/m --draft-max 5",
                Some((Model("org/m"), 5)),
            ),
            (
                r#"--speculative-config {"method":"draft_model","model":"org/m","num_speculative_tokens":99}"#,
                Some((Model("org/m"), 32)),
            ),
            (r#"--speculative-config {"model":"org/m"}"#, Some((Model("org/m"), 3))),
            (
                "--speculative-algorithm EAGLE3 --speculative-draft-model-path org/m \
                 --speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6",
                Some((Eagle3("org/m"), 5)),
            ),
            (
                r#"--speculative-config {"method":"eagle3","model":"org/m","num_speculative_tokens":2}"#,
                Some((Eagle3("org/m"), 2)),
            ),
            ("--speculative-algorithm NEXTN", Some((Mtp, 3))),
            ("--speculative-algorithm EAGLE --speculative-num-draft-tokens 4", Some((Mtp, 4))),
            ("--spec-type draft-mtp", Some((Mtp, 3))),
            (
                r#"--speculative-config {"method":"deepseek_mtp","num_speculative_tokens":1}"#,
                Some((Mtp, 1)),
            ),
        ] {
            let expected = expected.map(|found| format!("{found:?}"));
            assert_eq!(source(line).expect(line), expected, "{line}");
        }
        for wrong in [
            "--speculative-algorithm draft_model",
            "--speculative-algorithm eagle3",
            r#"--speculative-config {"method":"draft_model"}"#,
            r#"--speculative-config {"method":"mtp","model":"x"}"#,
        ] {
            assert!(source(wrong).is_err(), "{wrong}");
        }
    }
}
