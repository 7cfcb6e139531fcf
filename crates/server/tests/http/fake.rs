//! An engine that the test controls, and a server on top of it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use forebay_api::GenerationDefaults;
use forebay_dialect::{Choice, Dialect, Evidence};
use forebay_engine::{
    AdapterOrder, Admission, BlockHash, Dtype, EngineHandle, EngineRequest, Facts, FinishReason,
    Namer, Output, OutputSink, PromptLogprobs, Ready, Request, RequestId, SampledToken, Stats,
    Status, SubmitError,
};
use forebay_fetch::{Config as FetchConfig, Fetcher};
use forebay_grammar::{CompileHook, GrammarConfig, Grammars, ThreadStart};
use forebay_replicas::{Load, LocalCounts, ReplicaReport, Role};
use forebay_server::{
    AdapterFiles, AdapterSettings, AppState, DecodeConfig, Disaggregation, EgressConfig, Engine,
    Guard, ImageModel, Intake, IntakeMode, Listener, Metrics, ModelFacts, ModelInfo, PdParts,
    PooledModel, PoolingTask, ScoreFunction, ServerConfig, ServerParts,
};
use forebay_text::{ChatTemplate, TextPool, Tokenizer};
use forebay_vision::Processing;
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::memory::{Memory, Tier};

pub(crate) const CONTEXT: u32 = 64;
pub(crate) const EOS: i32 = 2;
/// The number of elements of a prompt embedding.
pub(crate) const HIDDEN: u32 = 4;
/// The number of pages of the host tier.
const HOST_PAGES: u32 = 8;
pub(crate) const PAGE_BYTES: u64 = 8;
/// The maximum number of uncached tokens that the server computes without a prefill server.
pub(crate) const LOCAL_TOKENS: u32 = 16;
/// Bytes of the arena for payloads.
pub(crate) const MEMORY: usize = 1024;
const IMAGE_MEMORY: usize = 8 << 20;
/// The budget for requests. Half of it is for decoding images: less than the largest image needs.
const PIXEL_BYTES: usize = 160 << 20;
const MOST_PIXELS: u64 = 8 << 20;
/// The token that an image has in a prompt.
pub(crate) const IMAGE: i32 = 7;
/// The maximum number of waiting large requests.
pub(crate) const QUEUE: usize = 3;
const TEMPLATE: &str = "{% if tools %}{% for t in tools %}{{ t.function.name }}\n{% endfor %}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
    {% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}\
    {% if add_generation_prompt %}assistant:{% endif %}";

/// A request that the engine received.
#[derive(Debug)]
pub(crate) struct Submitted {
    pub(crate) id: RequestId,
    pub(crate) all: EngineRequest,
}

impl std::ops::Deref for Submitted {
    type Target = Request;

    fn deref(&self) -> &Request {
        &self.all.request
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    Submit(Box<EngineRequest>),
    Drain(usize, bool),
    Role(usize, Role),
    Abort(RequestId),
    Adapter(AdapterOrder),
}

/// Where the server parses large requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntakeKind {
    Threads,
    Inline,
}

/// What the served model can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModelKind {
    Text,
    /// Text with adapters. If true, clients may load adapters without an admin key.
    Adapts(bool),
    Pools(PoolingTask),
    /// Text and images, also from local files.
    Sees,
    /// Text, on a decode server that uses prefill servers.
    Decodes,
}

/// Where the engine panics, in the thread that calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Panic {
    /// In the call that aborts a request.
    Abort,
    /// In the call that submits a request, after this many others.
    Submit(usize),
}

/// An engine that responds with `script` by itself, or waits for the test to act.
pub(crate) struct Fake {
    sink: Mutex<Option<Box<dyn OutputSink>>>,
    pub(crate) status: Mutex<Status>,
    /// After this many requests, the engine rejects requests with this error.
    refuse: Mutex<Option<(usize, SubmitError)>>,
    pub(crate) stats: Mutex<Stats>,
    /// The load of each replica.
    pub(crate) loads: Mutex<Vec<Load>>,
    /// Tokens that every request generates; `None`: the test delivers the tokens.
    script: Option<Vec<i32>>,
    alive: Mutex<Vec<RequestId>>,
    /// True for each replica that was drained.
    drained: Mutex<Vec<bool>>,
    /// The role of each replica; empty if replicas have no roles.
    pub roles: Mutex<Vec<Role>>,
    /// The call in which the engine panics next; it panics once.
    pub(crate) panic_at: Mutex<Option<Panic>>,
    events: mpsc::UnboundedSender<Event>,
    pub(crate) vocab_size: AtomicU32,
    /// The number of times that the server has read the engine's counters.
    looks: AtomicUsize,
    submitted: AtomicUsize,
    /// The number of leading blocks of every prompt that are cached.
    pub(crate) cached: AtomicUsize,
}

impl Fake {
    pub(crate) fn deliver(&self, outputs: Vec<Output>) {
        for output in &outputs {
            if output.finish.is_some() {
                self.alive.lock().retain(|&id| id != output.id);
            }
        }
        if let Some(sink) = &mut *self.sink.lock() {
            sink.deliver(outputs);
        }
    }

    /// Delivers one token; `first` is true for the request's first token.
    pub(crate) fn token(
        &self,
        id: RequestId,
        token: i32,
        first: bool,
        finish: Option<FinishReason>,
    ) {
        let admission = first.then_some(Admission { cached_tokens: 1, queue_us: 5 });
        let token = Some(SampledToken { id: token, logprobs: None });
        self.deliver(vec![Output {
            id,
            admission,
            token,
            predicted: None,
            pooled: None,
            prompt: None,
            finish,
        }]);
    }

    pub(crate) fn refuse_after(&self, requests: usize, error: SubmitError) {
        *self.refuse.lock() = Some((requests, error));
    }

    /// Panics if the test requires a panic in this call.
    fn maybe_panic(&self, place: Panic) {
        let mut panic_at = self.panic_at.lock();
        if *panic_at == Some(place) {
            *panic_at = None;
            drop(panic_at);
            panic!("as the test wants");
        }
        if let (Some(Panic::Submit(more)), Panic::Submit(_)) = (&mut *panic_at, place) {
            *more -= 1;
        }
    }

    /// Returns the number of times that the server has read the engine's counters.
    pub(crate) fn looks(&self) -> usize {
        self.looks.load(Ordering::Relaxed)
    }

    /// Returns the number of requests that the engine accepted.
    pub(crate) fn submitted(&self) -> usize {
        self.submitted.load(Ordering::Relaxed)
    }

    pub(crate) fn refuse_nothing(&self) {
        *self.refuse.lock() = None;
    }

    /// Stops the engine without any output.
    pub(crate) fn die(&self) {
        *self.sink.lock() = None;
    }

    /// Delivers the vector of a pooled request and finishes the request.
    pub(crate) fn vector(&self, id: RequestId, vector: [f32; 3]) {
        let admission = Some(Admission { cached_tokens: 0, queue_us: 5 });
        let (pooled, finish) = (Some(vector.into()), Some(FinishReason::Length));
        self.deliver(vec![Output {
            id,
            admission,
            token: None,
            predicted: None,
            pooled,
            prompt: None,
            finish,
        }]);
    }

    /// Computes a request. A pooled request gets a vector of its number of tokens, its first token
    /// and the start of its second text; other requests get `script`.
    pub(crate) fn play(&self, request: &Request, script: &[i32]) {
        let (id_of, spec) = (RequestId(request.id), &request.spec);
        if let Some(pooling) = spec.pooling {
            let numbers = [request.prompt.len() as i32, request.prompt[0], pooling.segment as i32];
            return self.vector(id_of, numbers.map(|n| n as f32));
        }
        let length = request.max_tokens as usize;
        let mut told = request.prompt_logprobs.map(|tail| {
            let tokens = &request.prompt[tail.first as usize..];
            let top =
                |id: i32| [id].into_iter().chain((0..i32::from(tail.most)).map(|at| 100 + at));
            let ids: Vec<i32> = tokens.iter().flat_map(|&id| top(id)).collect();
            let values = ids.iter().map(|&id| -1.5 - id as f32 / 7.0).collect();
            PromptLogprobs { ranks: vec![3; tokens.len()], ids, values }
        });
        if length == 0 {
            let (admission, finish) = (None, Some(FinishReason::Length));
            let prompt = told.take();
            self.deliver(vec![Output {
                predicted: None,
                id: id_of,
                admission,
                prompt,
                token: None,
                pooled: None,
                finish,
            }]);
        }
        for (index, &id) in script.iter().cycle().take(length).enumerate() {
            let finish = if spec.stop_ids.contains(&id) {
                Some(FinishReason::Stop { token: id })
            } else if index + 1 == length {
                Some(FinishReason::Length)
            } else {
                None
            };
            let entries = |count: u8| {
                let top = (0..i32::from(count)).map(|rank| (100 + rank, -2.0 - rank as f32));
                [(id, -0.5)].into_iter().chain(top).collect()
            };
            let output = Output {
                predicted: None,
                id: id_of,
                admission: (index == 0).then_some(Admission { cached_tokens: 1, queue_us: 5 }),
                prompt: told.take(),
                token: Some(SampledToken { id, logprobs: spec.sampling.logprobs.map(entries) }),
                pooled: None,
                finish: finish.clone(),
            };
            self.deliver(vec![output]);
            if finish.is_some() {
                return;
            }
        }
    }
}

impl Engine for Fake {
    fn submit(&self, request: EngineRequest) -> Result<(), SubmitError> {
        self.maybe_panic(Panic::Submit(0));
        match &mut *self.refuse.lock() {
            Some((0, error)) => return Err(error.clone()),
            Some((more, _)) => *more -= 1,
            None => {}
        }
        if *self.status.lock() == Status::Draining {
            return Err(SubmitError::Draining);
        }
        self.submitted.fetch_add(1, Ordering::Relaxed);
        self.alive.lock().push(request.id());
        if let Some(script) = &self.script {
            self.play(&request.request, script);
        }
        self.events.send(Event::Submit(Box::new(request))).ok();
        Ok(())
    }
    fn abort(&self, id: RequestId) {
        self.maybe_panic(Panic::Abort);
        if self.alive.lock().contains(&id) {
            let finish = Some(FinishReason::Abort);
            self.deliver(vec![Output {
                predicted: None,
                id,
                admission: None,
                token: None,
                pooled: None,
                prompt: None,
                finish,
            }]);
        }
        self.events.send(Event::Abort(id)).ok();
    }
    fn adapter(&self, order: &AdapterOrder) {
        self.events.send(Event::Adapter(order.clone())).ok();
    }
    fn status(&self) -> Status {
        self.status.lock().clone()
    }
    fn stats(&self) -> Stats {
        self.looks.fetch_add(1, Ordering::Relaxed);
        *self.stats.lock()
    }
    fn count(&self) -> u32 {
        self.loads.lock().len() as u32
    }
    fn now_us(&self) -> u64 {
        0
    }
    fn handles(&self) -> Vec<EngineHandle> {
        Vec::new()
    }
    fn replicas(&self) -> Vec<ReplicaReport> {
        let drained = self.drained.lock().clone();
        let report = |(at, &load): (usize, &Load)| ReplicaReport {
            status: self.status.lock().clone(),
            stats: *self.stats.lock(),
            load,
            drained: drained.get(at).copied().unwrap_or(false),
            local: LocalCounts::default(),
            role: self.roles.lock().get(at).copied().unwrap_or_default(),
            ahead_tokens: 0,
            holding: false,
            holds: 0,
        };
        self.loads.lock().iter().enumerate().map(report).collect()
    }
    fn drain_replica(&self, replica: usize, drained: bool) -> bool {
        self.events.send(Event::Drain(replica, drained)).ok();
        let count = self.loads.lock().len();
        let mut all = self.drained.lock();
        all.resize(count, false);
        all.get_mut(replica).map(|place| *place = drained).is_some()
    }
    fn set_role(&self, replica: usize, role: Role) -> bool {
        self.events.send(Event::Role(replica, role)).ok();
        self.roles.lock().get_mut(replica).map(|place| *place = role).is_some()
    }
    fn has_roles(&self) -> bool {
        !self.roles.lock().is_empty()
    }
    fn drained(&self) -> bool {
        let all = self.drained.lock();
        !all.is_empty() && all.iter().all(|&drained| drained)
    }
    fn block_names(&self, salt: u64, prompt: &[i32]) -> Vec<BlockHash> {
        Namer::open().chain(salt, prompt, 16)
    }
    fn cached(&self, names: &[BlockHash]) -> u64 {
        16 * names.len().min(self.cached.load(Ordering::Relaxed)) as u64
    }
    fn facts(&self) -> Option<Facts> {
        (!matches!(*self.status.lock(), Status::Starting(_))).then(|| Facts {
            context_length: CONTEXT,
            prompt_length: CONTEXT,
            page_size: 16,
            hand: Ready {
                vocab_size: self.vocab_size.load(Ordering::Relaxed),
                hidden_size: HIDDEN,
                dtype: Dtype::Bfloat16,
                page_count: 8,
                weight_bytes: 1,
                kv_bytes: 1,
                device: "fake".into(),
                image_page_count: 64,
                image_page_tokens: 64,
                host_page_count: HOST_PAGES,
                page_bytes: PAGE_BYTES,
                kv_layout: "fake".into(),
                load_seconds: 0.5,
                tokens_a_row: 1,
                lora_modules: vec!["mlp.up_proj".into()],
                ..Ready::default()
            },
        })
    }
    fn run(&self, work: Box<dyn FnOnce() + Send>) {
        work();
    }
    fn drain(&self) {
        *self.status.lock() = Status::Draining;
    }
    fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>) {
        reply(self.alive.lock().is_empty());
    }
}

/// Returns the default settings for grammars, with a time limit that slow machines meet, and a hook
/// that does nothing.
fn forms() -> (GrammarConfig, CompileHook) {
    let limit = Duration::from_secs(3600);
    (GrammarConfig { grammar_timeout: limit, ..GrammarConfig::default() }, Arc::new(|_| {}))
}

/// Returns adapter settings with one adapter at startup. Their reader reads no files: it derives an
/// adapter from the path alone.
fn adapters(open: bool) -> AdapterSettings {
    let read = |path: &Path| {
        let text = path.display().to_string();
        let changes = if text.contains("other") { "mlp.router" } else { "mlp.up_proj" };
        match text.strip_prefix("bad") {
            Some(_) => Err(format!("{text} is no adapter")),
            None => Ok(AdapterFiles {
                path: path.to_owned(),
                digest: text.trim_end_matches("-copy").to_owned(),
                modules: vec![changes.to_owned()],
                manifest: json!({"of": text}),
            }),
        }
    };
    let first = ("tone".to_owned(), read(Path::new("first")).unwrap());
    AdapterSettings { at_start: vec![first], reader: Some(Arc::new(read)), open }
}

/// Creates the parts of a decode server.
fn decodes() -> PdParts {
    let config = DecodeConfig {
        pd_local_tokens: LOCAL_TOKENS,
        pd_timeout: Duration::from_millis(500),
        ..DecodeConfig::default()
    };
    PdParts {
        config: Disaggregation::Decode(config),
        model: "model m".to_owned(),
        tiers: vec![Arc::new(Tier::default())],
    }
}

/// A running server.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Arc<Fake>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) memory: Memory,
    pub(crate) guard: Guard,
    pub(crate) state: AppState,
    events: mpsc::UnboundedReceiver<Event>,
    shutdown: Option<oneshot::Sender<()>>,
    hurry: Option<oneshot::Sender<()>>,
    serving: JoinHandle<std::io::Result<()>>,
}

impl TestServer {
    /// Starts a server whose engine responds to every request with `script`.
    pub(crate) async fn scripted(script: &str) -> Self {
        Self::start(Some(script), |_| {}).await
    }

    /// Starts a server whose engine does nothing until the test acts.
    pub(crate) async fn driven() -> Self {
        Self::start(None, |_| {}).await
    }

    pub(crate) async fn start(script: Option<&str>, change: fn(&mut ServerConfig)) -> Self {
        Self::serving(script, Duration::ZERO, change, ModelKind::Text, IntakeKind::Threads).await
    }

    /// Starts a server with a minimum time between two chunks of a stream.
    pub(crate) async fn start_with(
        script: Option<&str>,
        window: Duration,
        change: fn(&mut ServerConfig),
    ) -> Self {
        Self::serving(script, window, change, ModelKind::Text, IntakeKind::Threads).await
    }

    /// Starts a server that parses large requests as `intake` specifies.
    pub(crate) async fn with_intake(script: Option<&str>, intake: IntakeKind) -> Self {
        Self::serving(script, Duration::ZERO, |_| {}, ModelKind::Text, intake).await
    }

    /// Starts a server of a pooling model with three-dimensional vectors and normalised scores. The
    /// engine responds by itself if `plays` is true; otherwise the test delivers the vectors.
    pub(crate) async fn pooling(task: PoolingTask, plays: bool) -> Self {
        Self::of_model(ModelKind::Pools(task), plays.then_some("a"), |_| {}).await
    }

    /// Starts a server of a model of this kind.
    pub(crate) async fn of_model(
        model: ModelKind,
        script: Option<&str>,
        change: fn(&mut ServerConfig),
    ) -> Self {
        Self::serving(script, Duration::ZERO, change, model, IntakeKind::Threads).await
    }

    /// Starts a server with these grammar settings; the hook is called before each compilation.
    pub(crate) async fn with_grammars(
        script: Option<&str>,
        change: fn(&mut ServerConfig),
        forms: (GrammarConfig, CompileHook),
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (place, intake) = ((listener.into(), address), IntakeKind::Threads);
        let kind = ModelKind::Text;
        Self::serving_at(place, script, Duration::ZERO, change, kind, intake, forms).await
    }

    /// Starts a server with a listener that the test created.
    pub(crate) async fn listening(
        listener: impl Into<Listener>,
        script: Option<&str>,
        change: fn(&mut ServerConfig),
    ) -> Self {
        let nowhere = (listener.into(), SocketAddr::from(([0; 4], 0)));
        let (intake, kind) = (IntakeKind::Threads, ModelKind::Text);
        Self::serving_at(nowhere, script, Duration::ZERO, change, kind, intake, forms()).await
    }

    async fn serving(
        script: Option<&str>,
        window: Duration,
        change: fn(&mut ServerConfig),
        kind: ModelKind,
        intake: IntakeKind,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let place = (listener.into(), address);
        Self::serving_at(place, script, window, change, kind, intake, forms()).await
    }

    async fn serving_at(
        (listener, address): (Listener, SocketAddr),
        script: Option<&str>,
        window: Duration,
        change: fn(&mut ServerConfig),
        kind: ModelKind,
        intake: IntakeKind,
        (forms, hook): (GrammarConfig, CompileHook),
    ) -> Self {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = manifest.join("../text/tests/data/tiny-llama-tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_file(&file).unwrap());
        let template = ChatTemplate::new(TEMPLATE, None, None, &Default::default()).unwrap();
        let text = TextPool::new(Arc::clone(&tokenizer), Some(Arc::new(template)), 1, 16);
        let metrics = Arc::new(Metrics::new("tiny", CONTEXT, 1).unwrap());
        let guard = Guard::default();
        let egress_config = EgressConfig { egress_threads: 2, capacity: 256, stream_flush: window };
        let (sink, egress) = forebay_server::egress(&metrics, egress_config, &guard).unwrap();
        let mut sink: Box<dyn OutputSink> = Box::new(sink);
        let task = if let ModelKind::Pools(task) = kind { Some(task) } else { None };
        let images = (kind == ModelKind::Sees).then(|| ImageModel {
            processing: Processing::new(16, 2, 1024, 1 << 14).unwrap(),
            token: IMAGE,
            most: 16,
            limits: forebay_vision::Limits { max_pixels: MOST_PIXELS, ..Default::default() },
        });
        let here = FetchConfig {
            media_allow_private: true,
            allowed_media_domains: vec!["127.0.0.1".to_owned()],
            timeout: Duration::from_secs(3600),
            ..FetchConfig::default()
        };
        let fetcher = images.map(|_| Fetcher::new(&here).unwrap());
        let pooling = task.map(|task| {
            let started = forebay_server::pooled(Arc::clone(&metrics), 256, &guard);
            let (pooled_sink, outputs) = started.unwrap();
            sink = Box::new(pooled_sink);
            PooledModel {
                task,
                size: 3,
                normalize: false,
                function: match task {
                    PoolingTask::Classify => ScoreFunction::Softmax,
                    PoolingTask::Embed | PoolingTask::Score => ScoreFunction::Sigmoid,
                },
                labels: ["bad", "good", "so so"].map(str::to_owned).to_vec(),
                outputs,
            }
        });
        let (sender, events) = mpsc::unbounded_channel();
        let engine = Arc::new(Fake {
            sink: Mutex::new(Some(sink)),
            status: Mutex::new(Status::Ready),
            refuse: Mutex::new(None),
            stats: Mutex::default(),
            loads: Mutex::new(vec![Load::default()]),
            script: script.map(|script| tokenizer.encode(script, false).unwrap()),
            alive: Mutex::default(),
            drained: Mutex::default(),
            roles: Mutex::default(),
            panic_at: Mutex::default(),
            events: sender,
            vocab_size: u32::try_from(tokenizer.vocab_size()).unwrap().into(),
            looks: AtomicUsize::new(0),
            submitted: AtomicUsize::new(0),
            cached: AtomicUsize::new(0),
        });
        let mut config = ServerConfig::default();
        change(&mut config);
        let threads = guard.clone();
        let start: ThreadStart = Arc::new(move |thread, work| threads.start(thread, work));
        let vocabulary = tokenizer.vocab_size() as u32;
        let grammars =
            Grammars::with_hook(forms, tokenizer.clone(), &[EOS], vocabulary, &start, hook);
        let model = ModelInfo {
            dialect: {
                let calls = Choice::Named("hermes".to_owned());
                let evidence = Evidence { template: "", has_token: &|_| false };
                Dialect::new(&calls, &Choice::None, evidence).unwrap()
            },
            tokenizer_config: serde_json::Map::default(),
            marks: Arc::default(),
            served_names: vec!["tiny".into(), "org/tiny".into()],
            aliases: Vec::new(),
            root: "tiny".into(),
            facts: ModelFacts::new(
                "gguf",
                json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "num_hidden_layers": 30})
                    .as_object()
                    .unwrap(),
                Some(134_515_008),
                "Q4_K_M",
            ),
            eos: [EOS].into(),
            defaults: GenerationDefaults { top_p: Some(0.9), ..GenerationDefaults::default() },
            pooling,
            images,
            fetcher,
            grammars: Some(grammars.unwrap()),
            markers: None,
        };
        let mode = match intake {
            IntakeKind::Threads => IntakeMode::Threads(1),
            IntakeKind::Inline => IntakeMode::Engine(engine.clone()),
        };
        let memory = Memory::new(if images.is_some() { IMAGE_MEMORY } else { MEMORY });
        let pixels = images.map_or(0, |images| images.decoding_bytes(1, PIXEL_BYTES));
        let intake = Intake::start(mode, Arc::new(memory.clone()), QUEUE, pixels, &guard).unwrap();
        let text = Arc::new(text);
        let state = AppState::new(ServerParts {
            config,
            info: json!({"port": 1}),
            guard: guard.clone(),
            log_lines_dropped: Arc::default(),
            model,
            engine: engine.clone(),
            text,
            intake,
            egress,
            metrics,
            blocks: None,
            batches: None,
            adapters: if let ModelKind::Adapts(open) = kind { Some(adapters(open)) } else { None },
            weights: None,
            pd: (kind == ModelKind::Decodes).then(decodes),
            common: None,
        });
        let (shutdown, stop) = oneshot::channel::<()>();
        let (hurry, hurried) = oneshot::channel::<()>();
        let stop = async { stop.await.unwrap_or_default() };
        let hurried = async {
            if hurried.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let serving = tokio::spawn(forebay_server::serve(listener, state.clone(), stop, hurried));
        Self {
            address,
            engine,
            tokenizer,
            memory,
            guard,
            state,
            events,
            shutdown: Some(shutdown),
            hurry: Some(hurry),
            serving,
        }
    }

    /// Waits for the next request that the engine receives.
    pub(crate) async fn submitted(&mut self) -> Submitted {
        match self.event().await {
            Event::Submit(request) => Submitted { id: request.id(), all: *request },
            event => panic!("{event:?}"),
        }
    }

    /// Waits for the next request that the server aborts.
    pub(crate) async fn aborted(&mut self) -> RequestId {
        match self.event().await {
            Event::Abort(id) => id,
            event => panic!("{event:?}"),
        }
    }

    pub(crate) async fn event(&mut self) -> Event {
        let next = tokio::time::timeout(Duration::from_secs(20), self.events.recv());
        next.await.expect("no event came in time").unwrap()
    }

    /// Returns the next event, if the server has caused one by now.
    #[allow(dead_code, reason = "the resource tests use it")]
    pub(crate) fn try_event(&mut self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    pub(crate) fn shut_down(&mut self) {
        self.shutdown.take().unwrap().send(()).unwrap();
    }

    /// Cuts short the time that a drain leaves to running requests.
    pub(crate) fn hurry(&mut self) {
        self.hurry.take().unwrap().send(()).unwrap();
    }

    /// Waits for the server to stop.
    pub(crate) async fn ended(self) {
        self.serving.await.unwrap().unwrap();
    }

    pub(crate) fn encode(&self, text: &str) -> Vec<i32> {
        self.tokenizer.encode(text, false).unwrap()
    }
}
