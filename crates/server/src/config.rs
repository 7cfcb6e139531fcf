//! The server's settings, which the binary creates.

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

/// Which clients share cached blocks.
#[derive(Debug, Clone, Serialize)]
pub struct Sharing {
    /// Computes the names of the engine's blocks. It also derives the engine's salts from those of
    /// clients, so that no client can find another salt that gives the same names.
    #[serde(skip)]
    pub namer: Namer,
    /// True if clients with different keys share blocks.
    pub share_cache_across_keys: bool,
}

/// The settings of the server. The caller opens the listener. A field that comes from a flag has
/// the flag's name. Keys are not serialised.
#[derive(Debug, Clone, Serialize)]
pub struct ServerConfig {
    /// Keys of clients. If there are any, each client must send one.
    #[serde(skip)]
    pub api_keys: Keys,
    /// Keys for routes that change the server or report on it. If there are any, these routes need
    /// one of them. They are accepted on all other routes too.
    #[serde(skip)]
    pub admin_keys: Keys,
    /// The key of routers. A router that sends this key receives the server's load and the names of
    /// the blocks in the prefix caches.
    #[serde(skip)]
    pub router_key: Option<String>,
    /// Which clients share cached blocks.
    #[serde(flatten)]
    pub sharing: Sharing,
    /// True if cached tokens are hidden from clients.
    pub hide_cached_tokens: bool,
    /// MiB of earlier answers in which requests with the same salt look up draft tokens; 0:
    /// disabled.
    pub speculative_shared_history: u32,
    /// The hosts and origins whose requests are accepted.
    #[serde(skip)]
    pub access: Access,
    /// A path prefix that requests may have, such as `/llm`, for a proxy that does not strip it.
    /// Empty, or without a trailing slash.
    pub root_path: String,
    /// Proxies whose headers with the client's address are trusted.
    #[serde(skip)]
    pub trusted_proxies: TrustedProxies,
    /// The maximum number of open connections. A few more are accepted, which receive a 503 or the
    /// server's health.
    pub max_connections: usize,
    /// Certificate and key; `None`: connections are not encrypted.
    #[serde(skip)]
    pub tls: Option<Tls>,
    /// The maximum `priority` of a client; the minimum is its negative. `None`: no bounds.
    pub max_client_priority: Option<u32>,
    /// The maximum size of a request body in bytes. Everything but embeddings and images is limited
    /// to `max_json_bytes`.
    pub max_body_bytes: usize,
    /// The maximum size of a request body without its embeddings and images, in bytes.
    pub max_json_bytes: usize,
    /// The maximum memory of all requests together in bytes, from their bodies to their expected
    /// output.
    pub max_request_bytes_in_flight: usize,
    /// A time limit that applies separately to a request's head, to its body, and to an idle
    /// connection.
    #[serde(serialize_with = "as_seconds")]
    pub receive_timeout: Duration,
    /// How long a client may read nothing while output waits. Then its connection is closed.
    #[serde(serialize_with = "as_seconds")]
    pub send_timeout: Duration,
    /// The maximum number of unsent bytes of a response. A response with more unsent bytes fails.
    pub max_unread_bytes: usize,
    /// How long running requests may continue after the shutdown signal.
    #[serde(serialize_with = "as_seconds")]
    pub drain_timeout: Duration,
    /// The time within which the test request of /health_generate has to generate a token.
    #[serde(skip)]
    pub health_timeout: Duration,
    /// How stream chunks are written to their sockets.
    pub egress: EgressMode,
    /// The number of tokens per chunk of a stream, unless the request sets it. The first token and
    /// the last chunk are sent at once.
    pub stream_interval: u32,
    /// The bounds of stored responses, which clients can retrieve or continue.
    #[serde(flatten)]
    pub responses: StoreConfig,
    /// The settings of files and batches; `None`: none are stored.
    #[serde(flatten)]
    pub batches: Option<BatchConfig>,
    /// True if a web page is served at `/`.
    pub webui: bool,
    /// True if requests wait while the model loads. Otherwise they get an error.
    pub queue_while_loading: bool,
    /// True if a parameter without an effect is an error.
    pub strict_params: bool,
    /// The maximum number of tokens of /tokenize and /detokenize; `None`: four times the context,
    /// and at least 65536.
    pub max_tokenize_tokens: Option<usize>,
}

impl Default for ServerConfig {
    /// Creates the settings with the defaults of the flags.
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
    /// Names that requests may use, at least one; model lists show the first.
    pub served_names: Vec<String>,
    /// Further names that requests may use; model lists do not show them.
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
    /// Ids of the special tokens that are marks of this dialect, ascending.
    pub marks: Arc<[i32]>,
    /// The compiler of grammars; `None`: answers can't be constrained.
    pub grammars: Option<Grammars>,
    /// The image inputs that the model accepts; `None`: no images.
    pub images: Option<ImageModel>,
    /// Downloads images from their URLs.
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
