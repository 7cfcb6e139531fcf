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
    /// The namer of the engine's blocks. It also makes salts, so that a second salt for the same
    /// names cannot be found.
    #[serde(skip)]
    pub namer: Namer,
    /// True if clients with different keys share blocks.
    pub share_cache_across_keys: bool,
}

/// The settings of the server. The listener is opened by the caller. A field of a flag has the
/// flag's name. Keys are never written.
#[derive(Debug, Clone, Serialize)]
pub struct ServerConfig {
    /// Keys of clients. If there are any, each client must send one.
    #[serde(skip)]
    pub api_keys: Keys,
    /// Keys for routes that change the server or report on it. If there are any, these routes need
    /// one of them. They are valid for all other routes too.
    #[serde(skip)]
    pub admin_keys: Keys,
    /// The key of routers. A router with the key gets the blocks of the prefix caches.
    #[serde(skip)]
    pub router_key: Option<String>,
    /// The rule for clients that share cached blocks.
    #[serde(flatten)]
    pub sharing: Sharing,
    /// True if cached tokens are hidden from clients.
    pub hide_cached_tokens: bool,
    /// MiB of answers that drafts of other requests of the same salt come from; 0: of none.
    pub speculative_shared_history: u32,
    /// Hosts and pages whose requests are answered.
    #[serde(skip)]
    pub access: Access,
    /// The prefix that paths may have, such as `/llm`, if a proxy in front has it in its URLs. It
    /// is empty, or has no slash at its end.
    pub root_path: String,
    /// Proxies that are trusted to name the sender of a request.
    #[serde(skip)]
    pub trusted_proxies: TrustedProxies,
    /// The largest number of connections at a time. A few further ones get a 503, or the health of
    /// the server.
    pub max_connections: usize,
    /// Certificate and key; `None`: connections are not encrypted.
    #[serde(skip)]
    pub tls: Option<Tls>,
    /// The largest `priority` of a client; minus this number is the smallest. `None`: any.
    pub max_client_priority: Option<u32>,
    /// The largest request body in bytes. Only embeddings or images may take more of it than
    /// `max_json_bytes`.
    pub max_body_bytes: usize,
    /// The largest request body without its embeddings and images in bytes.
    pub max_json_bytes: usize,
    /// The largest number of bytes that all requests take together, from their bodies to their
    /// expected output.
    pub max_request_bytes_in_flight: usize,
    /// The longest time for a request's head to arrive, then for its body, and for a connection to
    /// be idle.
    #[serde(serialize_with = "as_seconds")]
    pub receive_timeout: Duration,
    /// The longest time in which a client may take no bytes although some wait for it. Then its
    /// connection is cut.
    #[serde(serialize_with = "as_seconds")]
    pub send_timeout: Duration,
    /// The largest number of unsent bytes of a response. A response with more ends with an error.
    pub max_unread_bytes: usize,
    /// The time for which running requests may go on after the shutdown signal.
    #[serde(serialize_with = "as_seconds")]
    pub drain_timeout: Duration,
    /// The longest wait of /health_generate for its token.
    #[serde(skip)]
    pub health_timeout: Duration,
    /// The way of chunks to their sockets.
    pub egress: EgressMode,
    /// The number of tokens for a chunk of a stream, if the request has no number. The first token
    /// and the end do not wait.
    pub stream_interval: u32,
    /// The bounds of kept responses, which clients get again or continue.
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
    /// Names that requests may use, at least one; the first is shown.
    pub served_names: Vec<String>,
    /// Further names that requests may use, which no list shows.
    pub aliases: Vec<String>,
    /// The loaded model: a hub id or a path.
    pub root: String,
    /// Facts about its files.
    pub facts: ModelFacts,
    /// End-of-sequence token ids.
    pub eos: Arc<[i32]>,
    /// Sampling parameters that the model's generation config sets.
    pub defaults: GenerationDefaults,
    /// The kind of output of a model that pools; `None`: the model generates text.
    pub pooling: Option<PooledModel>,
    /// The content of the model's tokenizer_config.json.
    pub tokenizer_config: Map<String, Value>,
    /// The form in which the model writes reasoning and calls of tools.
    pub dialect: Dialect,
    /// Special tokens that are marks of this form, ascending.
    pub marks: Arc<[i32]>,
    /// The compiler of the forms of answers; `None`: answers have any form.
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
