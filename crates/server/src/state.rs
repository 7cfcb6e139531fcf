//! The state that all routes share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::adapters::{AdapterSettings, Adapters, NamedAdapter};
use crate::config::{ModelInfo, ServerConfig};
use crate::intake::Intake;
use crate::live::shown::Live;
use crate::loaded::ModelLoad;
use crate::pd::PdParts;
use crate::pd::side::Pd;
use crate::peers::book::Book;
use crate::peers::log::BlockLog;
use crate::store::Store;
use crate::trainer::Trainer;
use crate::weights::{WeightSettings, Weights};
use forebay_api::limits::{SHOWN_BYTES, cut};
use forebay_api::{ApiError, Limits};
use forebay_batches::BatchStore;
use forebay_egress::{Egress, Engine, Metrics};
use forebay_engine::{Dtype, RequestId, SharedHistory, Status};
use forebay_http::{ByteBudget, Clients, Guard, HasClients, Keys};
use forebay_text::TextPool;
use serde_json::Value;

/// The parts from which a server is built.
pub struct ServerParts {
    /// The settings.
    pub config: ServerConfig,
    /// The resolved configuration of the whole program, for /server_info.
    pub info: Value,
    /// Watches the server's threads; /health reports its findings.
    pub guard: Guard,
    /// The number of log lines that were dropped because the writer lagged, for /metrics.
    pub log_lines_dropped: Arc<AtomicU64>,
    /// The served model.
    pub model: ModelInfo,
    /// The engine, with all replicas.
    pub engine: Arc<dyn Engine>,
    /// The threads that tokenise prompts.
    pub text: Arc<TextPool>,
    /// The threads that parse large bodies.
    pub intake: Intake,
    /// The receiving end of the engines' output sink.
    pub egress: Egress,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The log of changes of the engines' prefix caches, if enabled.
    pub blocks: Option<BlockLog>,
    /// The store of files and batches; `None`: none are stored.
    pub batches: Option<Arc<BatchStore>>,
    /// The adapters; `None`: requests can name none.
    pub adapters: Option<AdapterSettings>,
    /// The settings of weight updates; `None`: the weights never change.
    pub weights: Option<WeightSettings>,
    /// The parts for disaggregated prefill; `None`: the server computes only whole requests, by
    /// itself.
    pub pd: Option<PdParts>,
    /// The parts that this model shares with other models of the process; `None`: it is the only
    /// model.
    pub common: Option<CommonParts>,
}

/// The parts that all models of a process share. Clones refer to the same parts.
#[derive(Debug, Clone)]
pub struct CommonParts {
    /// The memory budget of all requests in bytes.
    pub(crate) budget: ByteBudget,
    pub(crate) store: Arc<Store>,
    pub(crate) clients: Arc<Clients>,
}

impl CommonParts {
    /// Creates the parts of a server with these settings.
    #[must_use]
    pub fn new(config: &ServerConfig) -> Self {
        Self::with_budget(config, config.max_request_bytes_in_flight)
    }

    fn with_budget(config: &ServerConfig, bytes: usize) -> Self {
        Self {
            budget: ByteBudget::new(bytes),
            store: Arc::new(Store::new(config.responses)),
            clients: Arc::new(Clients::new(config.trusted_proxies.clone())),
        }
    }
}

/// The state of a server.
#[derive(Clone)]
pub struct AppState(Shared);

/// A served name, and the adapter it refers to.
pub(crate) type Named = (String, Option<Arc<NamedAdapter>>);

/// The maximum number of adapters that an error lists.
const LISTED: usize = 16;

/// The state that the routes share.
pub(crate) type Shared = Arc<Inner>;

/// See [`AppState`].
pub(crate) struct Inner {
    pub(crate) config: ServerConfig,
    /// The resolved configuration of the whole program, for /server_info.
    pub(crate) info: Value,
    /// Watches the server's threads; /health reports its findings.
    pub(crate) guard: Guard,
    /// The number of log lines that were dropped because the writer lagged, for /metrics.
    pub(crate) log_lines_dropped: Arc<AtomicU64>,
    pub(crate) model: ModelInfo,
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) text: Arc<TextPool>,
    pub(crate) intake: Arc<Intake>,
    /// The memory budget of all requests in bytes.
    pub(crate) budget: ByteBudget,
    pub(crate) egress: Egress,
    pub(crate) store: Arc<Store>,
    pub(crate) loaded: ModelLoad,
    pub(crate) live: Live,
    pub(crate) metrics: Arc<Metrics>,
    /// The start of the server, in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) clients: Arc<Clients>,
    /// The calls whose response is not finished.
    pub(crate) book: Book,
    /// The changes of the engines' prefix caches, for routers.
    pub(crate) blocks: Option<BlockLog>,
    /// The store of files and batches; `None`: none are stored.
    pub(crate) batches: Option<Arc<BatchStore>>,
    pub(crate) adapters: Option<Adapters>,
    pub(crate) weights: Arc<Weights>,
    pub(crate) trainer: Arc<Trainer>,
    /// The server's side of disaggregated prefill; `None`: the server computes only whole requests,
    /// by itself.
    pub(crate) pd: Option<Pd>,
    /// The earlier answers in which drafts are looked up; `None`: drafts come from a request's own
    /// text only.
    pub(crate) answers: Option<Arc<SharedHistory>>,
    next_id: AtomicU64,
}

impl AppState {
    /// Creates the state from its parts.
    pub fn new(parts: ServerParts) -> Self {
        let ServerParts { config, info, guard, log_lines_dropped, model, engine, adapters, .. } =
            parts;
        let ServerParts { text, intake, egress, metrics, blocks, common, batches, .. } = parts;
        let weights = Weights::new(parts.weights, Arc::clone(&engine));
        let adapters = adapters.map(|settings| Adapters::new(settings, Arc::clone(&engine)));
        let own = || {
            let bytes = config.max_request_bytes_in_flight.saturating_sub(intake.pixel_bytes());
            CommonParts::with_budget(&config, bytes)
        };
        let CommonParts { budget, store, clients } = common.unwrap_or_else(own);
        let kept = config.speculative_shared_history as usize;
        let answers = (kept > 0).then(|| Arc::new(SharedHistory::new(kept << 20)));
        let inner = Inner {
            budget,
            store,
            loaded: ModelLoad::default(),
            live: Live::default(),
            config,
            info,
            guard,
            log_lines_dropped,
            model,
            engine,
            text,
            intake: Arc::new(intake),
            egress,
            metrics,
            started: now(),
            clients,
            book: Book::new(),
            blocks,
            batches,
            adapters,
            trainer: Trainer::new(Arc::clone(&weights)),
            pd: parts.pd.and_then(Pd::new),
            weights,
            answers,
            next_id: AtomicU64::new(1),
        };
        Self(Arc::new(inner))
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0
    }
}

impl Inner {
    /// Returns a request id that was never used.
    pub(crate) fn next_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the limits for a new request.
    ///
    /// # Errors
    /// The server accepts no new requests at present.
    pub(crate) fn admit(&self) -> Result<Limits, ApiError> {
        match self.status() {
            Status::Ready | Status::Recovering(_) => {}
            status => return Err(not_serving(status)),
        }
        self.undrained()?;
        self.limits()
    }

    /// Returns the engine's status, or `Failed` if a thread of the server has panicked.
    pub(crate) fn status(&self) -> Status {
        match self.guard.cause() {
            Some(cause) => Status::Failed(cause),
            None => self.engine.status(),
        }
    }

    /// Checks that at least one replica accepts new requests.
    ///
    /// # Errors
    /// All replicas are drained.
    pub(crate) fn undrained(&self) -> Result<(), ApiError> {
        if !self.engine.drained() {
            return Ok(());
        }
        let reason = "every replica is drained: POST /replicas/N/resume brings one back".into();
        Err(ApiError::Unavailable { reason, code: "drained" })
    }

    /// Returns the limits of the loaded model.
    ///
    /// # Errors
    /// The model has not been loaded yet.
    pub(crate) fn limits(&self) -> Result<Limits, ApiError> {
        let facts = self.engine.facts().ok_or_else(|| not_serving(self.engine.status()))?;
        Ok(Limits {
            context_length: facts.context_length,
            prompt_length: facts.prompt_length,
            vocab_size: facts.hand.vocab_size,
            replicas: self.engine.count(),
            images: self.model.images.map_or(0, |images| images.most),
        })
    }

    /// True if the loaded model's hand can verify drafts, and drafts are enabled.
    pub(crate) fn verifies_drafts(&self) -> bool {
        self.engine.facts().is_some_and(|facts| facts.hand.verifies_drafts)
    }

    /// Returns the total number of positions in the image pages of a replica.
    ///
    /// # Errors
    /// The model has not been loaded yet.
    pub(crate) fn image_positions(&self) -> Result<u32, ApiError> {
        let facts = self.engine.facts().ok_or_else(|| not_serving(self.engine.status()))?;
        Ok(facts.hand.image_page_count.saturating_mul(facts.hand.image_page_tokens))
    }

    /// Returns the number and type of an embedding's elements. `param` is the parameter with
    /// embeddings, for the error message.
    ///
    /// # Errors
    /// The model has not been loaded yet, or it accepts only tokens.
    pub(crate) fn embeddings(&self, param: &str) -> Result<(u32, Dtype), ApiError> {
        let facts = self.engine.facts().ok_or_else(|| not_serving(self.engine.status()))?;
        if facts.hand.tokens_only {
            let reason = format!(
                "`{param}`: transformers' own code computes this model, which takes tokens only"
            );
            return Err(ApiError::invalid(param, reason));
        }
        Ok((facts.hand.hidden_size, facts.hand.dtype))
    }

    /// Returns the served name of the model or adapter that a request names.
    ///
    /// # Errors
    /// The model is not served.
    pub(crate) fn model_name(&self, wanted: Option<&str>) -> Result<String, ApiError> {
        self.named(wanted).map(|(name, _)| name)
    }

    /// Returns the served name that the request's model name refers to, and the adapter; `None`:
    /// the model itself. Clients may prefix an adapter's name with the model's name and a colon.
    ///
    /// # Errors
    /// The model is not served.
    pub(crate) fn named(&self, wanted: Option<&str>) -> Result<Named, ApiError> {
        let names = &self.model.served_names;
        let Some(wanted) = wanted else {
            return Ok((names.first().cloned().unwrap_or_default(), None));
        };
        if self.model.is_called(wanted) {
            return Ok((wanted.to_owned(), None));
        }
        if let Some(adapters) = &self.adapters {
            let behind = |base: &String| wanted.strip_prefix(base)?.strip_prefix(':');
            let bases = names.iter().chain(&self.model.aliases);
            let own = std::iter::once(wanted).chain(bases.filter_map(behind));
            if let Some(adapter) = own.into_iter().find_map(|name| adapters.find(name)) {
                return Ok((wanted.to_owned(), Some(adapter)));
            }
        }
        let model = cut(wanted, SHOWN_BYTES).into_owned();
        let adapters = self.adapters.iter().flat_map(Adapters::all);
        let adapters = adapters.map(|adapter| adapter.name.clone()).take(LISTED);
        Err(ApiError::UnknownModel {
            model,
            served: names.iter().cloned().chain(adapters).collect(),
        })
    }

    /// Aborts every request.
    pub(crate) fn abort_all(&self) {
        self.egress.abort_all();
        if let Some(model) = &self.model.pooling {
            model.outputs.abort_all();
        }
    }

    /// Waits until no call is alive.
    pub(crate) async fn idle(&self) {
        // The book lives in self, so waiting cannot fail.
        let _ = self.book.watch().wait_for(|&live| live == 0).await;
    }
}

/// A state that contains a server's settings. The middleware around the routes needs them.
pub(crate) trait HasSettings: HasClients {
    fn settings(&self) -> &ServerConfig;
}

impl HasSettings for Inner {
    fn settings(&self) -> &ServerConfig {
        &self.config
    }
}

impl HasClients for Inner {
    fn clients(&self) -> (&Clients, &Keys) {
        (&*self.clients, &self.config.api_keys)
    }
}

/// Creates the error for a client while the server accepts no requests.
pub(crate) fn not_serving(status: Status) -> ApiError {
    let (reason, code) = match status {
        Status::Draining => return ApiError::Draining,
        Status::Ready => ("the model is not loaded yet".into(), "starting"),
        Status::Starting(stage) => (format!("the model is still loading: {stage}"), "starting"),
        Status::Recovering(reason) => {
            (format!("the model is being restarted: {reason}"), "recovering")
        }
        Status::Failed(reason) => (format!("the model is not available: {reason}"), "failed"),
    };
    ApiError::Unavailable { reason, code }
}

/// Returns the time in seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
