//! Chooses the hand for a model: the Rust hand in this program, or the PyTorch hand.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use forebay_cpuhand::{Asked, serves, why_no_codes, why_not_stored};
use forebay_hand::HandConfig;
use forebay_weights::ModelError;
use serde::Serialize;

use crate::flags::Hand;
use crate::model::Model;
use crate::python;

/// The hand that was chosen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Chosen {
    /// `rust`, `torch`, or `none` if the device is simulated.
    pub(crate) hand: &'static str,
    /// The reason why the hand is not `rust`.
    pub(crate) hand_reason: Option<String>,
}

impl Chosen {
    fn torch(why: impl Into<String>) -> Self {
        Self { hand: "torch", hand_reason: Some(why.into()) }
    }

    /// Chooses a hand for this configuration and a group of `ranks` ranks.
    pub(crate) fn new(flag: Hand, config: &HandConfig, ranks: u32, model: &Model) -> Result<Self> {
        if config.device == "sim" {
            return Ok(Self { hand: "none", hand_reason: Some("the device is simulated".into()) });
        }
        if model.called.is_some() {
            return Self::of_called(flag, config, ranks, model);
        }
        let Some(shape) = &model.shape else { bail!("the model {} has no shape", model.name) };
        let asked = Asked {
            model: shape,
            pooling: model.pooling.as_ref().map(|pooling| pooling.kind.as_str()),
            sees: model.images.is_some(),
            device: &config.device,
            quantization: config.quantization.as_deref(),
            kv_cache_dtype: config.kv_cache_dtype.as_deref(),
            page_size: config.page_size,
            ranks,
            sparse: config.hot_row_tokens.is_some(),
            attention_backend: config.attention_backend.is_some(),
            adapters: config.lora.is_some(),
            draft_model: config.draft.is_some(),
        };
        // Report here the settings that both hands refuse, so that the user gets the error even
        // without PyTorch.
        if let Some(why) = why_no_codes(&asked).or_else(|| why_not_stored(&asked)) {
            bail!("{why}");
        }
        if flag == Hand::Torch {
            return Ok(Self::torch("--hand torch"));
        }
        match serves(&asked) {
            Ok(()) => Ok(Self { hand: "rust", hand_reason: None }),
            Err(ModelError::Elsewhere(what)) if flag == Hand::Rust => {
                bail!("--hand rust: the Rust hand does not have {what}; leave the flag off")
            }
            Err(error) if flag == Hand::Rust => Err(error).context("--hand rust"),
            Err(ModelError::Elsewhere(what)) => {
                Ok(Self::torch(format!("the Rust hand does not have {what}")))
            }
            Err(error @ ModelError::Unserved(_)) => Err(error.into()),
            // The reference hand will report the fault in the model.
            Err(ModelError::Broken(what)) => Ok(Self::torch(what)),
        }
    }

    /// Chooses the hand for a model that transformers' code computes.
    fn of_called(flag: Hand, config: &HandConfig, ranks: u32, model: &Model) -> Result<Self> {
        let refused = [
            (flag == Hand::Rust, "--hand rust"),
            (ranks > 1, "several ranks"),
            (config.quantization.as_deref().is_some_and(|name| name != "auto"), "--quantization"),
            (config.kv_cache_dtype.is_some(), "--kv-cache-dtype"),
            (config.hot_row_tokens.is_some(), "--enable-hisparse"),
            (
                config.attention_backend.as_deref().is_some_and(|name| name != "torch"),
                "--attention-backend",
            ),
        ];
        if let Some((_, what)) = refused.into_iter().find(|&(wanted, _)| wanted) {
            bail!(
                "transformers' own code computes {}, for which there is not {what}: leave it off",
                model.name
            );
        }
        Ok(Self::torch(
            "transformers' own code has this model, and native code would be faster".to_owned(),
        ))
    }

    /// The program to start, and its arguments.
    pub(crate) fn program(&self, python: &Path) -> (PathBuf, Vec<OsString>) {
        program(self.hand, python)
    }

    /// The banner's line about the hand.
    pub(crate) fn line(&self) -> String {
        match (self.hand, &self.hand_reason) {
            ("torch", Some(why)) => format!("  Computes with PyTorch: {why}\n"),
            ("rust", _) => "  Computes with the Rust hand\n".into(),
            _ => String::new(),
        }
    }
}

/// The program of a hand (`rust`, `torch`), and its arguments.
pub(crate) fn program(hand: &str, python: &Path) -> (PathBuf, Vec<OsString>) {
    if hand != "rust" {
        return (python.to_owned(), python::arguments("forebay.worker"));
    }
    (own_program(), vec!["hand".into()])
}

/// The path of this program's executable.
pub(crate) fn own_program() -> PathBuf {
    // If the executable was replaced while it runs, this path still refers to the old file.
    let own = std::env::current_exe().ok().filter(|path| path.is_file());
    own.unwrap_or_else(|| "/proc/self/exe".into())
}

/// Environment variables of every hand. They make glibc use huge pages for large blocks, unless the
/// user has set its tunables. A step on a CPU reads all weights, and with small pages TLB misses
/// take up to a tenth of its time.
pub(crate) fn environment() -> Vec<(OsString, OsString)> {
    const TUNABLES: &str = "GLIBC_TUNABLES";
    let mut variables: Vec<(OsString, OsString)> = Vec::new();
    if std::env::var_os(TUNABLES).is_none() {
        variables.push((TUNABLES.into(), "glibc.malloc.hugetlb=1".into()));
    }
    variables
}
