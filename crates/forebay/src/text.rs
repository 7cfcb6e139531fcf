//! The threads that tokenise text.

use std::io;
use std::process::Command;
use std::sync::Arc;

use forebay_server::Guard;
use forebay_text::{Backend, ChatTemplate, TextConfig, TextPool, Tokenizer};

use crate::flags::TokenizerBackend;
use crate::hands;

/// Creates the command that starts a process for rendering chats.
pub(crate) fn renderer() -> Command {
    let mut command = Command::new(hands::own_program());
    command.arg("render");
    // The process has a memory limit, so mimalloc must not reserve a gibibyte of addresses in
    // advance.
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

/// Starts the tokenising threads under `guard`.
///
/// # Errors
/// The system can't start a thread.
pub(crate) fn pool(
    config: &TextConfig,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    guard: &Guard,
) -> io::Result<TextPool> {
    let start = |thread, work: Box<dyn FnMut() + Send>| guard.start(thread, work);
    TextPool::started_by(tokenizer, template, config, &start)
}
