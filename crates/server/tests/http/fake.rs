//! An engine that does what the test says, and a server on top of it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::GenerationDefaults;
use forebay_engine::{
    Admission, EngineRequest, Facts, FinishReason, Output, OutputSink, RequestId, SampledToken,
    Stats, Status, SubmitError,
};
use forebay_server::{
    AppState, EgressConfig, EgressSink, Engine, Metrics, ModelInfo, ServerConfig,
};
use forebay_text::{ChatTemplate, TextPool, Tokenizer};
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

pub(crate) const CONTEXT: u32 = 64;
pub(crate) const EOS: i32 = 2;
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
    {% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}\
    {% if add_generation_prompt %}assistant:{% endif %}";

/// What the server did to the engine.
#[derive(Debug)]
pub(crate) enum Event {
    Submit(EngineRequest),
    Abort(RequestId),
}

/// An engine that answers by itself with `script`, or does what the test says.
pub(crate) struct Fake {
    sink: Mutex<Option<EgressSink>>,
    pub(crate) status: Mutex<Status>,
    /// After this many requests, this error.
    refuse: Mutex<Option<(usize, SubmitError)>>,
    pub(crate) stats: Mutex<Stats>,
    /// Tokens that every request generates; `None`: the test drives.
    script: Option<Vec<i32>>,
    alive: Mutex<Vec<RequestId>>,
    events: mpsc::UnboundedSender<Event>,
    vocab_size: u32,
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

    /// One token, the request's first if `first`.
    pub(crate) fn token(
        &self,
        id: RequestId,
        token: i32,
        first: bool,
        finish: Option<FinishReason>,
    ) {
        let admission = first.then_some(Admission { cached_tokens: 1, queue_us: 5 });
        let token = Some(SampledToken { id: token, logprobs: None });
        self.deliver(vec![Output { id, admission, token, finish }]);
    }

    pub(crate) fn refuse_after(&self, requests: usize, error: SubmitError) {
        *self.refuse.lock() = Some((requests, error));
    }

    pub(crate) fn refuse_nothing(&self) {
        *self.refuse.lock() = None;
    }

    /// The engine ends without a word.
    pub(crate) fn die(&self) {
        *self.sink.lock() = None;
    }

    fn play(&self, request: &EngineRequest, script: &[i32]) {
        let length = request.max_tokens as usize;
        for (index, &id) in script.iter().cycle().take(length).enumerate() {
            let finish = if request.stop_ids.contains(&id) {
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
                id: request.id,
                admission: (index == 0).then_some(Admission { cached_tokens: 1, queue_us: 5 }),
                token: Some(SampledToken { id, logprobs: request.sampling.logprobs.map(entries) }),
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
        match &mut *self.refuse.lock() {
            Some((0, error)) => return Err(error.clone()),
            Some((more, _)) => *more -= 1,
            None => {}
        }
        if *self.status.lock() == Status::Draining {
            return Err(SubmitError::Draining);
        }
        self.alive.lock().push(request.id);
        if let Some(script) = &self.script {
            self.play(&request, script);
        }
        self.events.send(Event::Submit(request)).ok();
        Ok(())
    }
    fn abort(&self, id: RequestId) {
        if self.alive.lock().contains(&id) {
            let finish = Some(FinishReason::Abort);
            self.deliver(vec![Output { id, admission: None, token: None, finish }]);
        }
        self.events.send(Event::Abort(id)).ok();
    }
    fn status(&self) -> Status {
        self.status.lock().clone()
    }
    fn stats(&self) -> Stats {
        *self.stats.lock()
    }
    fn facts(&self) -> Option<Facts> {
        (!matches!(*self.status.lock(), Status::Starting(_))).then(|| Facts {
            context_length: CONTEXT,
            vocab_size: self.vocab_size,
            page_count: 8,
            page_size: 16,
            weight_bytes: 1,
            kv_bytes: 1,
            device: "fake".into(),
            load_seconds: 0.5,
        })
    }
    fn drain(&self) {
        *self.status.lock() = Status::Draining;
    }
    fn flush_cache(&self, reply: Box<dyn FnOnce(bool) + Send>) {
        reply(self.alive.lock().is_empty());
    }
}

/// A running server.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Arc<Fake>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    events: mpsc::UnboundedReceiver<Event>,
    shutdown: Option<oneshot::Sender<()>>,
    serving: JoinHandle<std::io::Result<()>>,
}

impl TestServer {
    /// A server whose engine answers every request with `script`, over and over.
    pub(crate) async fn scripted(script: &str) -> Self {
        Self::start(Some(script), |_| {}).await
    }

    /// A server whose engine does what the test says.
    pub(crate) async fn driven() -> Self {
        Self::start(None, |_| {}).await
    }

    pub(crate) async fn start(script: Option<&str>, change: fn(&mut ServerConfig)) -> Self {
        Self::start_with(script, Duration::ZERO, change).await
    }

    /// With a window between two chunks of a stream.
    pub(crate) async fn start_with(
        script: Option<&str>,
        window: Duration,
        change: fn(&mut ServerConfig),
    ) -> Self {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = manifest.join("../text/tests/data/tiny-llama-tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_file(&file).unwrap());
        let template = ChatTemplate::new(TEMPLATE, None, None, &Default::default()).unwrap();
        let text = TextPool::new(Arc::clone(&tokenizer), Some(Arc::new(template)), 1, 16);
        let metrics = Arc::new(Metrics::new("tiny", CONTEXT).unwrap());
        let egress_config = EgressConfig { threads: 2, capacity: 256, window };
        let (sink, egress) = forebay_server::egress(&tokenizer, &metrics, egress_config).unwrap();
        let (sender, events) = mpsc::unbounded_channel();
        let engine = Arc::new(Fake {
            sink: Mutex::new(Some(sink)),
            status: Mutex::new(Status::Ready),
            refuse: Mutex::new(None),
            stats: Mutex::default(),
            script: script.map(|script| tokenizer.encode(script, false).unwrap()),
            alive: Mutex::default(),
            events: sender,
            vocab_size: u32::try_from(tokenizer.vocab_size()).unwrap(),
        });
        let mut config = ServerConfig { info: json!({"port": 1}), ..ServerConfig::default() };
        change(&mut config);
        let model = ModelInfo {
            served_names: vec!["tiny".into(), "org/tiny".into()],
            root: "tiny".into(),
            eos: [EOS].into(),
            defaults: GenerationDefaults { top_p: Some(0.9), ..GenerationDefaults::default() },
        };
        let state = AppState::new(config, model, engine.clone(), Arc::new(text), egress, metrics);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, stop) = oneshot::channel();
        let serving = tokio::spawn(forebay_server::serve(listener, state, async {
            stop.await.ok();
        }));
        Self { address, engine, tokenizer, events, shutdown: Some(shutdown), serving }
    }

    /// The next request that the engine got.
    pub(crate) async fn submitted(&mut self) -> EngineRequest {
        match self.event().await {
            Event::Submit(request) => request,
            event => panic!("{event:?}"),
        }
    }

    /// The next request that the engine was told to abort.
    pub(crate) async fn aborted(&mut self) -> RequestId {
        match self.event().await {
            Event::Abort(id) => id,
            event => panic!("{event:?}"),
        }
    }

    async fn event(&mut self) -> Event {
        let next = tokio::time::timeout(Duration::from_secs(20), self.events.recv());
        next.await.expect("the server does something").unwrap()
    }

    pub(crate) fn shut_down(&mut self) {
        self.shutdown.take().unwrap().send(()).unwrap();
    }

    /// Waits for the server to end.
    pub(crate) async fn ended(self) {
        self.serving.await.unwrap().unwrap();
    }

    pub(crate) fn encode(&self, text: &str) -> Vec<i32> {
        self.tokenizer.encode(text, false).unwrap()
    }
}
