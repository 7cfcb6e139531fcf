//! Several models in one server: the driver of [`forebay_fleet`].
//!
//! The state of one model is its [`AppState`], with its own routes. The [`Front`] has the shared
//! state, and the load state of each model. A request visits a model: it waits until the model is
//! ready, and the model stays loaded until the response is complete.

mod driver;
pub(crate) mod metrics;
mod names;
mod visit;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use forebay_api::limits::{SHOWN_BYTES, cut};
use forebay_api::{ApiError, GenerationDefaults};
use forebay_fleet::{Fleet, FleetBounds, FleetModel, FleetRefusal, ModelState, SleepLevel, Ticket};
use forebay_http::{ClientId, Clients, Guard, HasClients, Keys};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::config::ServerConfig;
use crate::facts::ModelFacts;
use crate::intake::turns::Turns;
use crate::routes;
use crate::state::{AppState, CommonParts, HasSettings, Shared, now};

use names::NameIndex;
pub(crate) use visit::{ModelBody, Visit};

/// The maximum number of bodies above `LARGE_BODY` that are read at the same time.
const READERS: usize = 2;
/// The client id of the server itself, which loads pinned models. No client has this id.
const SERVER: ClientId = ClientId(0);

/// A model that a server may load.
#[derive(Debug, Clone)]
pub struct ModelEntry {
    /// Names that requests may use, at least one; lists show the first.
    pub names: Vec<String>,
    /// Further names, which no list shows.
    pub aliases: Vec<String>,
    /// The model as the user wrote it: a hub id or a path.
    pub root: String,
    /// Facts about the model's files.
    pub facts: ModelFacts,
    /// Bytes of the model's files.
    pub stored_bytes: u64,
    /// True if the model generates text.
    pub generates: bool,
    /// Sampling parameters that the model's generation config sets.
    pub defaults: GenerationDefaults,
    /// The chat template; empty: there is none.
    pub template: String,
    /// The maximum number of tokens of prompt and answer together.
    pub context_length: u32,
    /// True if the memory measured after a load replaces the planned memory.
    pub measures: bool,
    /// The model's entry in the fleet's plan of memory.
    pub plan: FleetModel,
}

/// Stops the hands of a model and waits for their exit.
type StopModel = Box<dyn FnOnce() + Send>;

/// A model whose hands are starting.
pub struct StartedModel {
    /// The model's state.
    pub state: AppState,
    /// Receives a value when the model's engine has stopped.
    pub ended: oneshot::Receiver<()>,
    /// Stops the model's engine and hands, and waits for their exit.
    pub stop: StopModel,
}

/// Starts models. Its methods run on threads that may block.
pub trait ModelLoader: Send + Sync + 'static {
    /// Starts a model that may use `bytes` bytes for weights and pages.
    ///
    /// # Errors
    /// The model can't be started; the error is a one-line reason.
    fn start(&self, model: usize, entry: &ModelEntry, bytes: u64) -> Result<StartedModel, String>;

    /// Drops the state that was kept for a model's next start.
    fn forget(&self, model: usize);

    /// Returns the number of bytes of free memory; `None` if it is not known.
    fn available(&self) -> Option<u64>;
}

/// The parts from which a server of several models is built.
pub struct FleetParts {
    /// The settings that all models share.
    pub config: ServerConfig,
    /// The parts that all models share.
    pub common: CommonParts,
    /// Detects panics of the process's threads.
    pub guard: Guard,
    /// The models, at least one. Requests that name none go to the first.
    pub models: Vec<ModelEntry>,
    /// The bounds on memory, the number of loaded models, and the queues.
    pub bounds: FleetBounds,
    /// Starts the models.
    pub loader: Arc<dyn ModelLoader>,
}

/// A server of several models. Clones refer to the same server.
#[derive(Clone)]
pub struct ModelServer(pub(crate) Arc<Front>);

/// The dispatcher in front of the models.
pub(crate) struct Front {
    pub(crate) config: ServerConfig,
    pub(crate) common: CommonParts,
    pub(crate) guard: Guard,
    pub(crate) turns: Turns,
    pub(crate) entries: Vec<ModelEntry>,
    /// The start of the server, in seconds since 1970.
    pub(crate) started: u64,
    names: NameIndex,
    loader: Arc<dyn ModelLoader>,
    /// The configured memory bound in bytes.
    memory_bytes: u64,
    books: Mutex<Books>,
    /// A counter that is incremented at each change of state, to wake waiting tasks.
    changes: watch::Sender<u64>,
    /// Wakes the fleet's timer task.
    wake: Notify,
    /// The number of running and waiting visits.
    visits: watch::Sender<usize>,
    clock: Instant,
    draining: AtomicBool,
    /// True once loads in progress are to be abandoned.
    closing: watch::Sender<bool>,
}

/// The state of all models.
struct Books {
    fleet: Fleet,
    waiting: HashMap<Ticket, oneshot::Sender<Result<(), ()>>>,
    slots: Vec<Slot>,
}

/// A model, in memory or not.
#[derive(Default)]
struct Slot {
    running: Option<RunningModel>,
    /// The reason for the last failure.
    error: Option<String>,
    loads: u64,
    load_seconds: f64,
}

/// A model that accepts requests.
#[derive(Clone)]
pub(crate) struct RunningModel {
    pub(crate) shared: Shared,
    pub(crate) router: Router,
    /// True once the model is being unloaded.
    leaving: Arc<watch::Sender<bool>>,
    stop: Arc<Mutex<Option<StopModel>>>,
}

impl RunningModel {
    fn new(started: StartedModel) -> (Self, oneshot::Receiver<()>) {
        let shared = Arc::clone(started.state.shared());
        let running = Self {
            router: routes::router(Arc::clone(&shared)),
            shared,
            leaving: Arc::new(watch::Sender::new(false)),
            stop: Arc::new(Mutex::new(Some(started.stop))),
        };
        (running, started.ended)
    }

    /// Waits until the model is being unloaded.
    pub(crate) fn left(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut leaving = self.leaving.subscribe();
        async move {
            // If the sender was dropped, the model has been unloaded.
            let _ = leaving.wait_for(|&leaves| leaves).await;
        }
    }

    /// Stops the model's feeds, engine and hands.
    async fn stop(&self) {
        self.leaving.send_replace(true);
        let Some(stop) = self.stop.lock().take() else { return };
        self.shared.engine.drain();
        if spawn_blocking(stop).await.is_err() {
            tracing::error!("a model could not be stopped");
        }
    }
}

/// A model's entry in model lists.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ModelReport {
    pub(crate) state: ModelState,
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Bytes of weights and pages in memory.
    pub(crate) bytes: u64,
    /// Seconds until the model is unloaded if no request comes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_in: Option<f64>,
    /// The reason for the last failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    #[serde(skip)]
    pub(crate) loads: u64,
    #[serde(skip)]
    pub(crate) load_seconds: f64,
}

impl ModelServer {
    /// Builds the server.
    ///
    /// # Errors
    /// Two models share a name, or a model can never be loaded.
    pub fn new(parts: FleetParts) -> Result<Self, String> {
        let FleetParts { config, common, guard, mut models, bounds, loader } = parts;
        let names = NameIndex::new(&mut models)?;
        let memory_bytes = bounds.memory_bytes;
        let fleet = Fleet::new(bounds, models.iter().map(|entry| entry.plan.clone()).collect());
        for (model, entry) in models.iter().enumerate() {
            if let Err(refusal) = fleet.fits(model) {
                let reason = misfit(refusal);
                return Err(format!("the model {} can't be loaded: {reason}", entry.names[0]));
            }
        }
        let slots = models.iter().map(|_| Slot::default()).collect();
        Ok(Self(Arc::new(Front {
            config,
            common,
            guard,
            turns: Turns::new(READERS),
            entries: models,
            started: now(),
            names,
            loader,
            memory_bytes,
            books: Mutex::new(Books { fleet, waiting: HashMap::new(), slots }),
            changes: watch::Sender::new(0),
            wake: Notify::new(),
            visits: watch::Sender::new(0),
            clock: Instant::now(),
            draining: AtomicBool::new(false),
            closing: watch::Sender::new(false),
        })))
    }

    /// Loads the pinned models and starts unloading idle ones, on the current runtime.
    pub fn begin(&self) {
        let front = &self.0;
        let timed = Arc::clone(front);
        tokio::spawn(front.guard.clone().task("the fleet's clock", async move {
            loop {
                let wake = timed.books.lock().fleet.next_wake(timed.now_ms());
                let pause = wake.map(|at| Duration::from_millis(at - timed.now_ms().min(at)));
                tokio::select! {
                    () = sleep(pause.unwrap_or(Duration::MAX)) => timed.step(),
                    () = timed.wake.notified() => {}
                }
            }
        }));
        for (model, entry) in front.entries.iter().enumerate().filter(|(_, e)| e.plan.pinned) {
            let (front, name) = (Arc::clone(front), entry.names[0].clone());
            tokio::spawn(async move {
                if let Err(error) = front.visit(model, SERVER).await {
                    tracing::error!("the pinned model {name} can't be served: {error}");
                }
            });
        }
    }

    /// Stops all models. Loads in progress are abandoned.
    pub async fn stop(&self) {
        let front = &self.0;
        front.draining.store(true, Ordering::SeqCst);
        front.closing.send_replace(true);
        front.fail_waiting();
        let running: Vec<RunningModel> = {
            let books = front.books.lock();
            books.slots.iter().filter_map(|slot| slot.running.clone()).collect()
        };
        for model in running {
            model.stop().await;
        }
        let mut changes = front.changes.subscribe();
        while front.is_moving() {
            // The sender lives in the front, so waiting cannot fail.
            let _ = changes.changed().await;
        }
    }
}

/// Returns the error text for a model that can never be loaded, with the sizes in question.
fn misfit(refusal: FleetRefusal) -> String {
    let gb = |bytes: u64| format!("{:.2} GB", bytes as f64 / 1e9);
    match refusal {
        FleetRefusal::TooLarge { bytes, most } => format!(
            "it needs {}, and models may have {} beside the pinned ones (--models-memory)",
            gb(bytes),
            gb(most)
        ),
        FleetRefusal::NoPlace => {
            "there are as many pinned models as --models-max allows".to_owned()
        }
        FleetRefusal::QueueFull { .. } | FleetRefusal::Paused { .. } => "not now".to_owned(),
    }
}

impl Front {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns the index of the model with this served name or alias, or of the first model if
    /// `name` is `None`.
    ///
    /// # Errors
    /// There is no such model.
    pub(crate) fn find(&self, name: Option<&str>) -> Result<usize, ApiError> {
        let Some(name) = name else { return Ok(0) };
        self.names.find(name).ok_or_else(|| {
            let served = self.entries.iter().flat_map(|entry| entry.names.iter().cloned());
            let model = cut(name, SHOWN_BYTES).into_owned();
            ApiError::UnknownModel { model, served: served.collect() }
        })
    }

    /// Returns the current state of a model.
    pub(crate) fn report(&self, model: usize) -> ModelReport {
        let (now, books) = (self.now_ms(), self.books.lock());
        let (running, waiting) = books.fleet.requests(model);
        let idle = books.fleet.idle_until_ms(model);
        let slot = &books.slots[model];
        ModelReport {
            state: books.fleet.state(model),
            running,
            waiting,
            bytes: books.fleet.held(model),
            idle_in: idle.map(|until| until.saturating_sub(now) as f64 / 1000.0),
            error: slot.error.clone(),
            loads: slot.loads,
            load_seconds: slot.load_seconds,
        }
    }

    /// Returns the model if it accepts requests.
    pub(crate) fn running(&self, model: usize) -> Option<RunningModel> {
        self.books.lock().slots[model].running.clone()
    }

    /// Sets the idle time after which a model sleeps; `None` means never. The setting applies until
    /// the model has slept once.
    pub(crate) fn keep(&self, model: usize, idle: Option<Duration>) {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.books.lock().fleet.keep(model, Some(idle.map(millis)));
    }

    /// Unloads a model or puts it to sleep, as `level` states. Waits until this is done, but at
    /// most for the drain timeout.
    pub(crate) async fn dismiss(self: &Arc<Self>, model: usize, level: SleepLevel) {
        let mut changes = self.changes.subscribe();
        let was_asleep = {
            let mut books = self.books.lock();
            let state = books.fleet.state(model);
            books.fleet.dismiss(model, level);
            state == ModelState::Asleep
        };
        if was_asleep && level == SleepLevel::Unloaded {
            self.forget(model).await;
        }
        self.step();
        let inside =
            || !matches!(self.report(model).state, ModelState::Asleep | ModelState::Unloaded);
        let gone = async { while inside() && changes.changed().await.is_ok() {} };
        // After the time limit, the model still leaves memory once its requests have finished.
        let _ = timeout(self.config.drain_timeout, gone).await;
    }

    /// Converts the fleet's refusal of a request to the client's error.
    fn refused(&self, model: usize, refusal: FleetRefusal) -> ApiError {
        let name = &self.entries[model].names[0];
        match refusal {
            FleetRefusal::QueueFull { waiting } => {
                let reason =
                    format!("the model {name} is not loaded, and {waiting} requests wait for it");
                ApiError::Unavailable { reason, code: "model_queue_full" }
            }
            FleetRefusal::Paused { remaining_ms } => {
                let why = self.books.lock().slots[model].error.clone().unwrap_or_default();
                let seconds = remaining_ms.div_ceil(1000);
                let reason = format!(
                    "the model {name} is not available: {why}; it is tried again in {seconds} s"
                );
                ApiError::Unavailable { reason, code: "model_failed" }
            }
            refusal => {
                let reason = format!("the model {name} can't be loaded: {}", misfit(refusal));
                ApiError::Unavailable { reason, code: "model_too_large" }
            }
        }
    }

    /// Rejects new requests from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Waits until no request runs or waits.
    pub(crate) async fn idle(&self) {
        // The sender lives in self, so waiting cannot fail.
        let _ = self.visits.subscribe().wait_for(|&visits| visits == 0).await;
        let running = self.all_running();
        for model in running {
            model.shared.idle().await;
        }
    }

    /// Returns the models that accept requests.
    pub(crate) fn all_running(&self) -> Vec<RunningModel> {
        self.books.lock().slots.iter().filter_map(|slot| slot.running.clone()).collect()
    }

    /// Aborts every request.
    pub(crate) fn abort_all(&self) {
        self.fail_waiting();
        for model in self.all_running() {
            model.shared.abort_all();
        }
    }
}

impl Books {
    fn tell(&mut self, ticket: Ticket, fate: Result<(), ()>) {
        if let Some(waiter) = self.waiting.remove(&ticket) {
            // A dropped waiter handles the outcome itself.
            let _ = waiter.send(fate);
        }
    }
}

impl HasClients for Front {
    fn clients(&self) -> (&Clients, &Keys) {
        (&*self.common.clients, &self.config.api_keys)
    }
}

impl HasSettings for Front {
    fn settings(&self) -> &ServerConfig {
        &self.config
    }
}
