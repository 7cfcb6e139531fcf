//! The flags about text, and the threads that turn it into tokens.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use forebay_server::Guard;
use forebay_text::{Backend, ChatTemplate, TextConfig, TextMode, TextPool, Tokenizer};
use serde::Serialize;
use tracing::warn;

use crate::config::Config;
use crate::flags::seconds;

/// Prompts that may wait for the text threads, beyond those that the engine queues. If the engine
/// may queue more, this limit is as large: a large queue can then be filled at once.
const QUEUE: usize = 1024;

#[derive(Debug, Args)]
#[command(next_help_heading = "Text")]
pub(crate) struct TextFlags {
    /// The tokenizer library: Hugging Face's, or `fastokens`, which is many times faster but knows
    /// byte-level BPE only.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tokenizer_backend: TokenizerBackend,
    /// The threads that tokenise prompts: the text threads, or for comparison the thread that read
    /// the request.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) tokenizer_mode: TokenizerMode,
    /// Bytes of tokenised text kept for the next turn of a conversation; 0 keeps none.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    pub(crate) text_cache_bytes: usize,
    /// Let the strings of chats write special tokens: without this, what looks like one in a
    /// message is text like other text.
    #[arg(long)]
    pub(crate) allow_special_tokens_in_content: bool,
    /// Tokens that /tokenize and /detokenize take at a time [default: four times the context, and
    /// 65536 at least].
    #[arg(long, value_name = "N")]
    pub(crate) max_tokenize_tokens: Option<NonZeroUsize>,
    /// For those used to SGLang, and always on: what has come while the text threads were busy is
    /// tokenised together.
    #[arg(long)]
    pub(crate) enable_dynamic_batch_tokenizer: bool,
    /// Most prompts that a text thread takes at a time [default: bounded by their length only].
    #[arg(long, value_name = "N")]
    pub(crate) dynamic_batch_tokenizer_batch_size: Option<NonZeroUsize>,
    /// For those used to SGLang, and answered with a warning: a prompt never waits for others to
    /// come.
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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum TokenizerMode {
    #[default]
    Auto,
    Inline,
}

impl From<TokenizerBackend> for Backend {
    fn from(backend: TokenizerBackend) -> Self {
        match backend {
            TokenizerBackend::Hf => Self::Hf,
            TokenizerBackend::Fastokens => Self::Fastokens,
        }
    }
}

impl TextFlags {
    /// The threads that tokenise as these flags say, under `guard`.
    ///
    /// # Errors
    /// Flags that exclude each other.
    pub(crate) fn pool(
        &self,
        config: &Config,
        tokenizer: Arc<Tokenizer>,
        template: Option<Arc<ChatTemplate>>,
        guard: &Guard,
    ) -> Result<TextPool> {
        if self.enable_dynamic_batch_tokenizer && self.tokenizer_mode == TokenizerMode::Inline {
            bail!(
                "--tokenizer-mode inline makes no batches: leave out --enable-dynamic-batch-tokenizer"
            );
        }
        if self.dynamic_batch_tokenizer_batch_timeout.is_some() {
            warn!(
                "--dynamic-batch-tokenizer-batch-timeout has no effect: prompts are tokenised as soon as a thread is free"
            );
        }
        let pool = TextConfig {
            threads: config.text_threads.into(),
            queue: QUEUE.max(config.max_queued_requests),
            mode: match self.tokenizer_mode {
                TokenizerMode::Auto => TextMode::Auto,
                TokenizerMode::Inline => TextMode::Inline,
            },
            cache_bytes: self.text_cache_bytes,
            batch_inputs: self.dynamic_batch_tokenizer_batch_size,
            special_tokens_in_content: self.allow_special_tokens_in_content,
        };
        let start = |thread, work: Box<dyn FnMut() + Send>| guard.start(thread, work);
        Ok(TextPool::started_by(tokenizer, template, &pool, &start)?)
    }
}
