//! Flags about text.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::{Args, ValueEnum};
use forebay_text::TextConfig;
use serde::Serialize;

use super::seconds;

#[derive(Debug, Args)]
#[command(next_help_heading = "Text")]
pub(crate) struct TextFlags {
    /// The tokenizer library: Hugging Face's, or `fastokens`, which is many times faster but
    /// supports byte-level BPE only.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tokenizer_backend: TokenizerBackend,
    /// The threads that tokenise prompts: the text threads, or for comparison the thread that read
    /// the request.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tokenizer_mode: TokenizerMode,
    /// Bytes of tokenised text kept for the next turn of a conversation; 0 keeps none.
    #[arg(long, value_name = "BYTES", default_value_t = TextConfig::default().text_cache_bytes)]
    pub(crate) text_cache_bytes: usize,
    /// Let messages contain special tokens; without this, their spelling is plain text.
    #[arg(long)]
    pub(crate) allow_special_tokens_in_content: bool,
    /// Tokens that /tokenize and /detokenize take at a time [default: four times the context, and
    /// 65536 at least].
    #[arg(long, value_name = "N")]
    pub(crate) max_tokenize_tokens: Option<NonZeroUsize>,
    /// Accepted for SGLang, and always on: inputs that came while the text threads were busy are
    /// tokenised together.
    #[arg(long)]
    pub(crate) enable_dynamic_batch_tokenizer: bool,
    /// The largest number of prompts that a text thread takes at a time [default: bounded by their
    /// length only].
    #[arg(long, value_name = "N")]
    pub(crate) dynamic_batch_tokenizer_batch_size: Option<NonZeroUsize>,
    /// Accepted for SGLang, with a warning: a prompt never waits for a batch.
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
