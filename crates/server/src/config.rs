//! The server's settings, which the binary makes.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use forebay_api::{Access, GenerationDefaults};
use forebay_dialect::Dialect;
use forebay_engine::Namer;
use forebay_fetch::Fetcher;
use forebay_grammar::{Grammars, Markers};
use serde_json::{Map, Value};

use crate::client::TrustedProxies;
use crate::guard::Guard;
use crate::images::model::ImageModel;
use crate::keys::Keys;
use crate::pooling::model::PooledModel;
use crate::store::StoreConfig;
use crate::stream::mode::EgressMode;
use crate::tls::Tls;

/// The rule of which clients share cached blocks.
#[derive(Debug, Clone)]
pub struct Sharing {
    /// The namer of the engine's blocks. Salts are made with it too, so that nobody can find a
    /// second one for the same names.
    pub namer: Namer,
    /// Clients with different keys share blocks.
    pub across_keys: bool,
}

/// The settings of the server. The listener is opened by the caller.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Keys of which clients must show one, if there are any.
    pub api_keys: Keys,
    /// Keys for routes that change the server or tell about it; these routes need one of them, if
    /// there are any. They are good for all else too.
    pub admin_keys: Keys,
    /// Key of routers, which are told the blocks of the prefix caches.
    pub router_key: Option<String>,
    /// The clients that share cached blocks.
    pub sharing: Sharing,
    /// Clients are not told how many of their tokens were found in the prefix cache.
    pub hide_cached_tokens: bool,
    /// Hosts and pages whose requests are answered.
    pub access: Access,
    /// The prefix that paths may have, such as `/llm`: a proxy in front has it in its URLs. Empty,
    /// or without a slash at its end.
    pub root_path: String,
    /// Proxies that are believed when they tell the sender of a request.
    pub trusted_proxies: TrustedProxies,
    /// The largest number of connections at a time. A few more are answered, with 503 or how the
    /// server is.
    pub max_connections: usize,
    /// Certificate and key, where connections are encrypted.
    pub tls: Option<Tls>,
    /// The largest `priority` that clients may ask for; minus this number is the smallest.
    pub max_client_priority: u32,
    /// The largest request body in bytes; only embeddings or images may exceed `max_json_bytes` of
    /// it.
    pub max_body_bytes: usize,
    /// The largest request body without its embeddings and images in bytes.
    pub max_json_bytes: usize,
    /// The largest number of bytes that all requests take together, from their bodies to their
    /// expected output.
    pub max_request_bytes_in_flight: usize,
    /// The longest time for a request's head to arrive; also how long an idle connection is kept.
    pub header_timeout: Duration,
    /// The longest time for a request's body to arrive.
    pub body_timeout: Duration,
    /// The longest time in which a client may take none of the bytes that wait for it. Then its
    /// connection is cut.
    pub send_timeout: Duration,
    /// The largest number of bytes of a response that wait for its client, as they would be
    /// written; then it ends with an error.
    pub max_unread_bytes: usize,
    /// The time for which running requests may go on after the shutdown signal.
    pub drain_timeout: Duration,
    /// The longest time that /health_generate waits for its token.
    pub health_timeout: Duration,
    /// The way of chunks to their sockets.
    pub egress: EgressMode,
    /// Tokens that a stream gathers before it gets a chunk, where the request does not say; the
    /// first token and the end do not wait.
    pub stream_interval: u32,
    /// The store of responses, for clients that ask for them again, or go on from them.
    pub responses: StoreConfig,
    /// There is a page at `/`.
    pub webui: bool,
    /// Requests that come before the model is loaded wait for it, in place of an error.
    pub queue_while_loading: bool,
    /// A parameter that has no effect is an error.
    pub strict_params: bool,
    /// Tokens that /tokenize and /detokenize take at a time; `None`: four times the context, and
    /// 65536 at least.
    pub max_tokenize_tokens: Option<usize>,
    /// Watches over the threads; /health reports its findings.
    pub guard: Guard,
    /// Log lines that nobody took in time, for /metrics.
    pub log_lines_dropped: Arc<AtomicU64>,
    /// The resolved configuration, as /server_info shows it.
    pub info: Value,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            api_keys: Keys::default(),
            admin_keys: Keys::default(),
            router_key: None,
            sharing: Sharing { namer: Namer::open(), across_keys: false },
            hide_cached_tokens: false,
            access: Access::default(),
            root_path: String::new(),
            trusted_proxies: TrustedProxies::default(),
            max_connections: 65_536,
            tls: None,
            max_client_priority: u32::MAX,
            max_body_bytes: 64 << 20,
            max_json_bytes: 4 << 20,
            max_request_bytes_in_flight: 1 << 30,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(60),
            max_unread_bytes: 64 << 20,
            drain_timeout: Duration::from_secs(30),
            health_timeout: Duration::from_secs(20),
            egress: EgressMode::default(),
            stream_interval: 1,
            responses: StoreConfig::default(),
            webui: true,
            queue_while_loading: false,
            strict_params: false,
            max_tokenize_tokens: None,
            guard: Guard::default(),
            log_lines_dropped: Arc::default(),
            info: Value::Null,
        }
    }
}

/// The served model.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    /// Names that requests may use, at least one; the first is shown.
    pub served_names: Vec<String>,
    /// The loaded model: a hub id or a path.
    pub root: String,
    /// End-of-sequence token ids.
    pub eos: Arc<[i32]>,
    /// Sampling parameters that the model's generation config sets.
    pub defaults: GenerationDefaults,
    /// The output in place of text.
    pub pooling: Option<PooledModel>,
    /// The content of its tokenizer_config.json.
    pub tokenizer_config: Map<String, Value>,
    /// The form in which it writes reasoning and calls of tools.
    pub dialect: Dialect,
    /// Special tokens that are marks of that, ascending.
    pub marks: Arc<[i32]>,
    /// The compiler of the forms of answers; `None`: answers have any form.
    pub grammars: Option<Grammars>,
    /// The images that it sees; `None`: none.
    pub images: Option<ImageModel>,
    /// The fetcher of images by their URLs.
    pub fetcher: Option<Fetcher>,
    /// The marks around its reasoning, if they are known.
    pub markers: Option<Markers>,
}
