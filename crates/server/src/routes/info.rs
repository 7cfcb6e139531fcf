//! Models, health, metrics and other facts about the server.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody, Limits, ModelCard, ModelList};
use forebay_egress::{IntakeStats, PartStats};
use forebay_engine::{Preference, Stats, Status};
use forebay_grammar::Grammars;
use forebay_replicas::{ReplicaReport, Role};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use utoipa::ToSchema;

use crate::adapters::{Adapters, NamedAdapter};
use crate::call::Call;
use crate::constrain;
use crate::pd::side::Pd;
use crate::peers::Peer;
use crate::pooling::{Input, Place, PooledCall};
use crate::reply::{self, Failure};
use crate::state::{Shared, not_serving};
use crate::submission::Submission;

/// The media type of Prometheus' text exposition.
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";
/// The interval at which a health request checks whether the engine has computed a step for other
/// requests.
const STEP_POLL: Duration = Duration::from_millis(10);

/// Lists the served names.
#[utoipa::path(
    get,
    path = "/v1/models",
    responses((status = 200, description = "The models", body = ModelList)),
)]
pub(crate) async fn models(State(state): State<Shared>) -> Response {
    let mut data: Vec<ModelCard> =
        state.model.served_names.iter().map(|name| card(&state, name)).collect();
    data.extend(state.adapters.iter().flat_map(Adapters::all).map(|it| adapter_card(&state, &it)));
    let id = |card: Option<&ModelCard>| card.map(|card| card.id.clone());
    let (first_id, last_id) = (id(data.first()), id(data.last()));
    reply::ok(&ModelList { object: "list", data, first_id, last_id, has_more: false })
}

/// Shows one served name.
#[utoipa::path(
    get,
    path = "/v1/models/{id}",
    params(("id" = String, Path, description = "The served name")),
    responses(
        (status = 200, description = "The model", body = ModelCard),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn model(
    State(state): State<Shared>,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let (name, adapter) = state.named(Some(&id))?;
    Ok(reply::ok(&match adapter {
        Some(adapter) => adapter_card(&state, &adapter),
        None => card(&state, &name),
    }))
}

fn card(state: &Shared, name: &str) -> ModelCard {
    let length = state.engine.facts().map(|facts| facts.context_length);
    model_card(name, &state.model.root, state.started, length)
}

/// Describes an adapter in vLLM's format.
fn adapter_card(state: &Shared, adapter: &NamedAdapter) -> ModelCard {
    let card = card(state, &adapter.name);
    ModelCard {
        created_at: timestamp(adapter.loaded),
        created: adapter.loaded,
        root: adapter.path.display().to_string(),
        parent: state.model.served_names.first().cloned(),
        digest: Some(adapter.digest.clone()),
        ..card
    }
}

/// Describes a model in the format of OpenAI's and Anthropic's clients.
pub(super) fn model_card(
    name: &str,
    root: &str,
    started: u64,
    max_model_len: Option<u32>,
) -> ModelCard {
    ModelCard {
        id: name.to_owned(),
        object: "model",
        kind: "model",
        display_name: name.to_owned(),
        created_at: timestamp(started),
        created: started,
        owned_by: "forebay",
        root: root.to_owned(),
        parent: None,
        digest: None,
        max_model_len,
    }
}

/// Formats seconds since 1970 as an RFC 3339 time.
pub(super) fn timestamp(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(0);
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

/// A server that accepts requests.
#[derive(Serialize, ToSchema)]
pub(crate) struct Healthy {
    /// Always `ready`.
    status: &'static str,
    /// The state of each replica, if there are several: `ready`, or why it is not ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    replicas: Vec<String>,
    /// A failure from which the server recovered with fewer resources: the operating system killed
    /// hands for lack of memory, and they restarted with fewer pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

impl Healthy {
    fn of(state: &Shared) -> Self {
        let replicas = state.engine.replicas();
        let lines = replicas.into_iter().map(|replica| status_line(replica.status));
        let replicas = Some(lines.collect::<Vec<_>>()).filter(|lines| lines.len() > 1);
        let kills = state.engine.stats().hand.memory_kills;
        let warning = (kills > 0).then(|| {
            let times = if kills == 1 { "once".to_owned() } else { format!("{kills} times") };
            format!("memory ran out {times}: hands have fewer KV pages than at the start")
        });
        Self { status: "ready", replicas: replicas.unwrap_or_default(), warning }
    }
}

/// Reports that the process is alive. The response does not depend on the model: a process that is
/// loading or draining is alive.
#[utoipa::path(
    get,
    path = "/livez",
    responses((status = 200, description = "It does")),
)]
pub(crate) async fn live() -> Response {
    reply::ok(&json!({"status": "alive"}))
}

/// Reports whether the server accepts requests and computes them now.
///
/// Responds with 503 and the reason in one line while the model loads, is restarted or has failed,
/// and while every replica or the server drains. Also while no new grammar can be compiled.
#[utoipa::path(
    get,
    path = "/health",
    responses(
        (status = 200, description = "Ready", body = Healthy),
        (status = 503, description = "Why not", body = ErrorBody),
    ),
)]
pub(crate) async fn health(State(state): State<Shared>) -> Result<Response, Failure> {
    match state.status() {
        Status::Ready => {
            state.undrained()?;
            match state.model.grammars.as_ref().and_then(Grammars::stuck) {
                Some(error) => Err(Failure(constrain::stuck(&error))),
                None => Ok(reply::ok(&Healthy::of(&state))),
            }
        }
        status => Err(Failure(not_serving(status))),
    }
}

/// Responds with 200 if the model computes. A step for another request is sufficient proof.
/// Otherwise the route requests one token, or one vector.
#[utoipa::path(
    get,
    path = "/health_generate",
    responses(
        (status = 200, description = "It does", body = Healthy),
        (status = 503, description = "Why not", body = ErrorBody),
    ),
)]
pub(crate) async fn health_generate(State(state): State<Shared>) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let limits = state.admit()?;
    in_time(&state, computes(&state, limits, arrived)).await
}

/// Waits for proof that the model computes. A step for another request suffices: a server with a
/// full queue is alive, and must not get more work.
async fn computes(state: &Shared, limits: Limits, arrived: Instant) -> Result<(), ApiError> {
    let before = state.engine.stats().scheduler.steps;
    loop {
        let stats = state.engine.stats().scheduler;
        if stats.steps > before {
            return Ok(());
        }
        if stats.running + stats.waiting == 0 {
            match one_token(state, limits, arrived).await {
                // Other requests have arrived in the meantime.
                Err(ApiError::Overloaded { .. } | ApiError::QueueFull { .. }) => {}
                answer => return answer,
            }
        }
        sleep(STEP_POLL).await;
    }
}

async fn one_token(state: &Shared, limits: Limits, arrived: Instant) -> Result<(), ApiError> {
    let token = state.model.eos.first().copied().unwrap_or(0);
    if let Some(model) = &state.model.pooling {
        let inputs = vec![Input { tokens: vec![token], segment: 0 }];
        let place = Place {
            param: "input",
            priority: 0,
            cache_salt: None,
            preference: Preference::default(),
        };
        let peer = Peer::default();
        let call = PooledCall::start(state, model, inputs, limits, place, arrived, &peer).await?;
        return call.named("health").collect().await.map(drop);
    }
    let submissions = vec![Submission::of_one_token(state, vec![token], 0, limits)?];
    let call = Call::start(state, submissions, false, arrived, &Peer::default()).await?;
    let mut call = call.named("health");
    call.collect().await.map(drop)
}

/// Returns an error if a health check takes too long.
async fn in_time<T>(
    state: &Shared,
    answer: impl Future<Output = Result<T, ApiError>>,
) -> Result<Response, Failure> {
    let limit = state.config.health_timeout;
    match timeout(limit, answer).await {
        Ok(result) => {
            result?;
            Ok(reply::ok(&Healthy::of(state)))
        }
        Err(_) => {
            let reason = format!("the model gave nothing within {} seconds", limit.as_secs());
            Err(Failure(ApiError::Unavailable { reason, code: "unresponsive" }))
        }
    }
}

/// The resolved configuration, the model's facts and current statistics.
#[derive(Serialize, ToSchema)]
pub(crate) struct ServerInfo {
    /// The version of the server.
    version: &'static str,
    /// Names that requests may use.
    served_model_names: Vec<String>,
    /// The engine's state in one line.
    status: String,
    /// The resolved configuration.
    #[schema(value_type = Object)]
    config: Value,
    /// The facts from the hand; null until the model is loaded.
    #[schema(value_type = Option<Object>)]
    facts: Value,
    /// One object per replica: its running requests and its counters.
    #[schema(value_type = Vec<Object>)]
    internal_states: Vec<Value>,
}

/// Returns the resolved configuration, the model's facts and current statistics.
#[utoipa::path(
    get,
    path = "/server_info",
    responses((status = 200, description = "The information", body = ServerInfo)),
)]
pub(crate) async fn server_info(State(state): State<Shared>) -> Response {
    reply::ok(&ServerInfo {
        version: env!("CARGO_PKG_VERSION"),
        served_model_names: state.model.served_names.clone(),
        status: match state.undrained() {
            Err(drained) => drained.to_string(),
            Ok(()) => status_line(state.status()),
        },
        config: state.info.clone(),
        facts: json!(state.engine.facts()),
        internal_states: state.engine.replicas().iter().map(internal_state).collect(),
    })
}

fn status_line(status: Status) -> String {
    match status {
        Status::Ready => "ready".to_owned(),
        status => not_serving(status).to_string(),
    }
}

/// The public state of a replica.
#[derive(Serialize)]
pub(super) struct InternalState {
    status: String,
    drained: bool,
    role: Role,
    requests: u64,
    requests_peak: u64,
    dispatched: u64,
    #[serde(flatten)]
    stats: Stats,
}

pub(super) fn internal_state(replica: &ReplicaReport) -> Value {
    json!(InternalState {
        status: status_line(replica.status.clone()),
        drained: replica.drained,
        role: replica.role,
        requests: replica.load.requests,
        requests_peak: replica.load.peak,
        dispatched: replica.load.dispatched,
        stats: replica.stats,
    })
}

/// Returns the tokenizer's configuration, with the chat template that is used.
#[utoipa::path(
    get,
    path = "/tokenizer_info",
    responses((status = 200, description = "What tokenizer_config.json says", body = Object)),
)]
pub(crate) async fn tokenizer_info(State(state): State<Shared>) -> Response {
    let mut info = state.model.tokenizer_config.clone();
    if let Some(template) = state.text.template() {
        info.insert("chat_template".to_owned(), Value::from(template.source()));
    }
    info.entry("tokenizer_class").or_insert_with(|| "PreTrainedTokenizerFast".into());
    reply::ok(&info)
}

/// The confirmation that the prefix cache is empty.
#[derive(Serialize, ToSchema)]
pub(crate) struct FlushAnswer {
    /// Always true.
    flushed: bool,
}

/// Empties the prefix cache. Only possible while no request runs.
#[utoipa::path(
    post,
    path = "/flush_cache",
    responses(
        (status = 200, description = "The cache is empty", body = FlushAnswer),
        (status = 400, description = "Requests are running", body = ErrorBody),
    ),
)]
pub(crate) async fn flush_cache(State(state): State<Shared>) -> Result<Response, Failure> {
    let (sender, receiver) = oneshot::channel();
    let reply = Box::new(move |flushed| {
        // The cache is flushed even if the client has disconnected.
        let _ = sender.send(flushed);
    });
    state.engine.flush_cache(reply);
    match receiver.await {
        Ok(true) => Ok(reply::ok(&FlushAnswer { flushed: true })),
        Ok(false) => Err(Failure(ApiError::CacheInUse)),
        Err(_) => Err(Failure(not_serving(Status::Failed("the engine has ended".into())))),
    }
}

/// Returns metrics in Prometheus' text format.
#[utoipa::path(
    get,
    path = "/metrics",
    responses((status = 200, description = "The metrics", body = String, content_type = "text/plain")),
)]
pub(crate) async fn metrics(State(state): State<Shared>) -> Result<Response, Failure> {
    Ok(exposed(exposition(&state)?))
}

/// Creates a response in Prometheus' text format.
pub(super) fn exposed(text: Vec<u8>) -> Response {
    let mut response = Response::new(text.into());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(EXPOSITION));
    response
}

/// Returns the metrics of a model in Prometheus' text format.
pub(super) fn exposition(state: &Shared) -> Result<Vec<u8>, ApiError> {
    let parts = PartStats {
        text: state.text.stats(),
        grammars: state.model.grammars.as_ref().map(Grammars::stats).unwrap_or_default(),
        intake: IntakeStats { request_bytes: state.budget.used(), ..state.intake.stats() },
        dropped: state.log_lines_dropped.load(Ordering::Relaxed),
        adapters: state.adapters.as_ref().map(Adapters::counts),
        pd: state.pd.as_ref().map(Pd::counts),
    };
    let written = state.metrics.render(&state.engine.replicas(), &parts);
    written.map_err(|error| {
        let reason = format!("the metrics could not be written: {error}");
        ApiError::Internal { reason, code: None }
    })
}

/// The server's version.
#[derive(Serialize, ToSchema)]
pub(crate) struct Version {
    /// The version of the release.
    version: &'static str,
}

/// Returns the server's version.
#[utoipa::path(
    get,
    path = "/version",
    responses((status = 200, description = "The version", body = Version)),
)]
pub(crate) async fn version() -> Response {
    reply::ok(&Version { version: env!("CARGO_PKG_VERSION") })
}

/// Responds as long as the process is alive, whatever the state of the model.
#[utoipa::path(
    method(get, post),
    path = "/ping",
    responses((status = 200, description = "An empty object")),
)]
pub(crate) async fn ping() -> Response {
    reply::ok(&json!({}))
}
