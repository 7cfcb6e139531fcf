//! Flags about tokenisation.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_text::TextConfig;
use serde::Serialize;

use super::seconds;

#[derive(Debug, Args)]
#[command(next_help_heading = "Text")]
pub(crate) struct TextFlags {
    /// Tokenizer library: `hf`, that of Hugging Face, or `fastokens`, which is many times faster
    /// but supports only byte-level BPE.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tokenizer_backend: TokenizerBackend,
    /// Threads that tokenise prompts. `auto`: the text threads. `inline`, for comparison: the
    /// thread that reads the request.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tokenizer_mode: TokenizerMode,
    /// Size in bytes of the cache of tokenised text for later turns of conversations; 0: no cache.
    #[arg(long, value_name = "BYTES", default_value_t = TextConfig::default().text_cache_bytes)]
    pub(crate) text_cache_bytes: usize,
    /// Let special tokens in messages keep their meaning. Without the flag they are plain text.
    #[arg(long)]
    pub(crate) allow_special_tokens_in_content: bool,
    /// Largest number of tokens for /tokenize and /detokenize [default: four times the context, at
    /// least 65536].
    #[arg(long, value_name = "N")]
    pub(crate) max_tokenize_tokens: Option<NonZeroUsize>,
    /// Accepted for SGLang without effect: inputs that arrive while the text threads are busy are
    /// always tokenised together.
    #[arg(long)]
    pub(crate) enable_dynamic_batch_tokenizer: bool,
    /// Largest number of prompts that a text thread tokenises together [default: limited only by
    /// their length].
    #[arg(long, value_name = "N")]
    pub(crate) dynamic_batch_tokenizer_batch_size: Option<NonZeroUsize>,
    /// Accepted for SGLang, with a warning: prompts never wait for a batch.
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) dynamic_batch_tokenizer_batch_timeout: Option<Duration>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TokenizerBackend {
    #[default]
    Hf,
    Fastokens,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum TokenizerMode {
    #[default]
    Auto,
    Inline,
}
