//! The threads that turn text into tokens.

use std::process::Command;
use std::sync::Arc;

use anyhow::{Result, bail};
use forebay_server::Guard;
use forebay_text::{Backend, ChatTemplate, TextConfig, TextMode, TextPool, Tokenizer};
use tracing::warn;

use crate::config::Config;
use crate::flags::TextFlags;
pub(crate) use crate::flags::{TokenizerBackend, TokenizerMode};
use crate::hands;

/// Prompts that may wait for the text threads, beyond those that the engine queues. If the engine
/// may queue more, this limit is as large: a large queue can then be filled at once.
const QUEUE: usize = 1024;

/// The command of a process that renders chats.
pub(crate) fn renderer() -> Command {
    let mut command = Command::new(hands::own_program());
    command.arg("render");
    // Its memory is limited, so it reserves no gibibyte of addresses ahead.
    command.env("MIMALLOC_ARENA_RESERVE", "64MiB");
    command
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
