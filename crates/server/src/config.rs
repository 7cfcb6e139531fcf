//! The server's settings, which the binary makes.

use std::sync::Arc;
use std::time::Duration;

use forebay_api::{Access, GenerationDefaults};
use forebay_batches::BatchConfig;
use forebay_dialect::Dialect;
use forebay_egress::EgressMode;
use forebay_engine::{Namer, as_seconds};
use forebay_fetch::Fetcher;
use forebay_grammar::{Grammars, Markers};
use forebay_http::{Keys, Tls, TrustedProxies};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::facts::ModelFacts;
use crate::images::model::ImageModel;
use crate::pooling::model::PooledModel;
use crate::store::StoreConfig;

/// The rule for clients that share cached blocks.
#[derive(Debug, Clone, Serialize)]
pub struct Sharing {
    /// The namer of the engine's blocks. It also makes salts, so that clients cannot find another
    /// salt that gives the same names.
    #[serde(skip)]
    pub namer: Namer,
    /// True if clients with different keys share blocks.
    pub share_cache_across_keys: bool,
}

/// The settings of the server. The listener is opened by the caller. A field that comes from a flag
/// has the flag's name. Keys are never shown.
#[derive(Debug, Clone, Serialize)]
pub struct ServerConfig {
    /// Keys of clients. If there are any, each client must send one.
    #[serde(skip)]
    pub api_keys: Keys,
    /// Keys for routes that change the server or report on it. If there are any, these routes need
    /// one of them. They are accepted on all other routes too.
    #[serde(skip)]
    pub admin_keys: Keys,
    /// The key of routers. A router that sends it gets the blocks of the prefix caches.
    #[serde(skip)]
    pub router_key: Option<String>,
    /// The rule for clients that share cached blocks.
    #[serde(flatten)]
    pub sharing: Sharing,
    /// True if cached tokens are hidden from clients.
    pub hide_cached_tokens: bool,
    /// MiB of answers in which requests of the same salt find drafts; 0: none.
    pub speculative_shared_history: u32,
    /// Hosts and pages whose requests are answered.
    #[serde(skip)]
    pub access: Access,
    /// A prefix that paths may have, such as `/llm`, for a proxy that keeps it in URLs. Empty, or
    /// without a slash at its end.
    pub root_path: String,
    /// Proxies that are trusted to name the sender of a request.
    #[serde(skip)]
    pub trusted_proxies: TrustedProxies,
    /// The largest number of connections at a time. A few more get a 503, or the server's health.
    pub max_connections: usize,
    /// Certificate and key; `None`: connections are not encrypted.
    #[serde(skip)]
    pub tls: Option<Tls>,
    /// The largest `priority` of a client; the smallest is its negative. `None`: any.
    pub max_client_priority: Option<u32>,
    /// The largest request body in bytes. Everything but embeddings and images is limited to
    /// `max_json_bytes`.
    pub max_body_bytes: usize,
    /// The largest request body without its embeddings and images in bytes.
    pub max_json_bytes: usize,
    /// The largest memory of all requests together in bytes, from their bodies to their expected
    /// output.
    pub max_request_bytes_in_flight: usize,
    /// How long a request's head may take to arrive, then its body, and how long a connection may
    /// be idle.
    #[serde(serialize_with = "as_seconds")]
    pub receive_timeout: Duration,
    /// How long a client may accept no bytes while some wait for it. Then its connection is closed.
    #[serde(serialize_with = "as_seconds")]
    pub send_timeout: Duration,
    /// The largest number of unsent bytes of a response. A response that exceeds it ends with an
    /// error.
    pub max_unread_bytes: usize,
    /// How long running requests may continue after the shutdown signal.
    #[serde(serialize_with = "as_seconds")]
    pub drain_timeout: Duration,
    /// The longest wait of /health_generate for its token.
    #[serde(skip)]
    pub health_timeout: Duration,
    /// The way of chunks to their sockets.
    pub egress: EgressMode,
    /// The number of tokens in a chunk of a stream, unless the request sets it. The first token and
    /// the end are sent at once.
    pub stream_interval: u32,
    /// The bounds of stored responses, which clients can retrieve or continue.
    #[serde(flatten)]
    pub responses: StoreConfig,
    /// The store of files and batches; `None`: none are kept.
    #[serde(flatten)]
    pub batches: Option<BatchConfig>,
    /// True if there is a page at `/`.
    pub webui: bool,
    /// True if requests wait while the model loads. Otherwise they get an error.
    pub queue_while_loading: bool,
    /// True if a parameter without an effect is an error.
    pub strict_params: bool,
    /// The largest number of tokens of /tokenize and /detokenize; `None`: four times the context,
    /// and at least 65536.
    pub max_tokenize_tokens: Option<usize>,
}

impl Default for ServerConfig {
    /// The defaults of the flags.
    fn default() -> Self {
        Self {
            api_keys: Keys::default(),
            admin_keys: Keys::default(),
            router_key: None,
            sharing: Sharing { namer: Namer::open(), share_cache_across_keys: false },
            hide_cached_tokens: false,
            speculative_shared_history: 0,
            access: Access::default(),
            root_path: String::new(),
            trusted_proxies: TrustedProxies::default(),
            max_connections: 65_536,
            tls: None,
            max_client_priority: None,
            max_body_bytes: 64 << 20,
            max_json_bytes: 4 << 20,
            max_request_bytes_in_flight: 1 << 30,
            receive_timeout: Duration::from_secs(60),
            send_timeout: Duration::from_secs(60),
            max_unread_bytes: 64 << 20,
            drain_timeout: Duration::from_secs(30),
            health_timeout: Duration::from_secs(20),
            egress: EgressMode::default(),
            stream_interval: 1,
            responses: StoreConfig::default(),
            batches: None,
            webui: true,
            queue_while_loading: false,
            strict_params: false,
            max_tokenize_tokens: None,
        }
    }
}

/// The served model.
#[derive(Debug, Clone)]
pub struct ModelInfo {
    /// Names that requests may use, at least one; lists show the first.
    pub served_names: Vec<String>,
    /// Further names that requests may use, shown in no list.
    pub aliases: Vec<String>,
    /// The loaded model: a hub id or a path.
    pub root: String,
    /// Facts about the model's files.
    pub facts: ModelFacts,
    /// End-of-sequence token ids.
    pub eos: Arc<[i32]>,
    /// Sampling parameters that the model's generation config sets.
    pub defaults: GenerationDefaults,
    /// The output of a pooling model; `None`: the model generates text.
    pub pooling: Option<PooledModel>,
    /// The content of the model's tokenizer_config.json.
    pub tokenizer_config: Map<String, Value>,
    /// The form in which the model writes reasoning and tool calls.
    pub dialect: Dialect,
    /// Special tokens that are marks of this form, ascending.
    pub marks: Arc<[i32]>,
    /// The compiler of grammars for answers; `None`: answers can't be constrained.
    pub grammars: Option<Grammars>,
    /// The images that the model takes; `None`: none.
    pub images: Option<ImageModel>,
    /// The fetcher of images by their URLs.
    pub fetcher: Option<Fetcher>,
    /// The marks around the model's reasoning, if they are known.
    pub markers: Option<Markers>,
}

impl ModelInfo {
    /// True if requests may call the model by this name.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.served_names.iter().chain(&self.aliases).any(|own| own == name)
    }
}
