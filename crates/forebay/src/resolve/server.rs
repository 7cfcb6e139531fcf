//! Resolves the settings of the server, and of the threads that parse requests and write responses.

use anyhow::{Result, bail};
use forebay_engine::EngineConfig;
use forebay_grammar::GrammarConfig;
use forebay_machine::{Machine, Processors};
use forebay_server::{EgressConfig, EgressMode, ServerConfig, Sharing};
use forebay_text::{TextConfig, TextMode};
use serde::Serialize;
use tracing::warn;

use crate::flags::{Egress, ServeFlags, TextFlags, TokenizerMode};
use crate::model::Model;

/// The settings of the server, and of the threads that parse requests and write responses.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ServerSettings {
    #[serde(flatten)]
    pub(crate) server: ServerConfig,
    #[serde(flatten)]
    pub(crate) egress: EgressConfig,
    #[serde(flatten)]
    pub(crate) text: TextConfig,
    /// The grammar compiler; `None`: answers can't be constrained.
    #[serde(flatten)]
    pub(crate) grammar: Option<GrammarConfig>,
    pub(crate) http_threads: u16,
    pub(crate) intake_threads: u16,
    pub(crate) inline_intake: bool,
}

impl ServerSettings {
    pub(super) fn new(
        flags: &ServeFlags,
        model: &Model,
        machine: &Machine,
        engine: &EngineConfig,
        access: ServerConfig,
    ) -> Result<Self> {
        let (http, processors) = (&flags.http, machine.processors());
        let sharing = Sharing {
            namer: engine.namer.clone(),
            share_cache_across_keys: flags.sharing.share_cache_across_keys,
        };
        // This is enough for the running requests and as many waiting ones.
        let running = (2 * engine.max_running_requests as usize).min(engine.max_queued_requests);
        let concurrency = running.max(1) * flags.replicas.ranks.dp_size as usize;
        let server = ServerConfig {
            batches: flags.batches.store(flags.limits.max_body_bytes, concurrency),
            router_key: flags.sharing.router_key.clone(),
            responses: flags.responses.store(),
            sharing,
            hide_cached_tokens: flags.sharing.hide_cached_tokens,
            speculative_shared_history: flags.drafts.speculative_shared_history.unwrap_or(0),
            root_path: flags.access.root_path.clone(),
            trusted_proxies: flags.access.trusted_proxies.clone(),
            max_client_priority: flags.schedule.max_client_priority,
            max_body_bytes: flags.limits.max_body_bytes,
            max_json_bytes: flags.limits.max_json_bytes,
            max_request_bytes_in_flight: flags.limits.request_bytes(&machine.memory()),
            receive_timeout: http.receive_timeout,
            send_timeout: http.send_timeout,
            max_unread_bytes: http.max_unread_bytes,
            drain_timeout: http.drain_timeout,
            egress: match http.egress {
                Egress::Direct => EgressMode::Direct,
                Egress::Tasks => EgressMode::Tasks,
                Egress::Naive => EgressMode::Naive,
            },
            stream_interval: http.stream_interval,
            webui: !http.no_webui,
            queue_while_loading: http.queue_while_loading,
            strict_params: http.strict_params,
            max_tokenize_tokens: flags.text.max_tokenize_tokens.map(Into::into),
            ..access
        };
        let egress_threads = http.egress_threads.unwrap_or_else(|| egress_threads(&processors));
        let text_threads = http.text_threads.unwrap_or_else(|| text_threads(&processors));
        Ok(Self {
            server,
            egress: EgressConfig {
                egress_threads: egress_threads.into(),
                stream_flush: http.stream_flush(),
                ..EgressConfig::default()
            },
            text: text(&flags.text, text_threads, engine.max_queued_requests)?,
            grammar: flags
                .grammar
                .wanted(model.pooling.is_some())
                .then(|| flags.grammar.compiler()),
            http_threads: http.http_threads,
            intake_threads: http.intake_threads,
            inline_intake: http.inline_intake,
        })
    }
}

/// The settings of the threads that tokenise. Their queue is at least as long as the engine's, so
/// that the engine's queue can be filled at once.
fn text(flags: &TextFlags, threads: u16, engine_queue: usize) -> Result<TextConfig> {
    if flags.enable_dynamic_batch_tokenizer && flags.tokenizer_mode == TokenizerMode::Inline {
        bail!(
            "--tokenizer-mode inline makes no batches: leave out --enable-dynamic-batch-tokenizer"
        );
    }
    if flags.dynamic_batch_tokenizer_batch_timeout.is_some() {
        warn!(
            "--dynamic-batch-tokenizer-batch-timeout has no effect: prompts are tokenised as soon as a thread is free"
        );
    }
    Ok(TextConfig {
        text_threads: threads.into(),
        queue: TextConfig::default().queue.max(engine_queue),
        tokenizer_mode: match flags.tokenizer_mode {
            TokenizerMode::Auto => TextMode::Auto,
            TokenizerMode::Inline => TextMode::Inline,
        },
        text_cache_bytes: flags.text_cache_bytes,
        dynamic_batch_tokenizer_batch_size: flags.dynamic_batch_tokenizer_batch_size,
        allow_special_tokens_in_content: flags.allow_special_tokens_in_content,
    })
}

/// The default number of egress threads. A thread writes more than 100 000 chunks per second, more
/// than most devices produce.
fn egress_threads(processors: &Processors) -> u16 {
    u16::try_from(1 + processors.threads() / 16).unwrap_or(u16::MAX).min(8)
}

/// The default number of text threads. The second tokenises short prompts while the first is busy
/// with a long prompt.
fn text_threads(processors: &Processors) -> u16 {
    if processors.threads() > 1 { 2 } else { 1 }
}
