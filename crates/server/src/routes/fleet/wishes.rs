//! Administrators' commands for models: load, unload, sleep, wake. The routes are those of
//! llama-server, vLLM and SGLang.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::Uri;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody};
use forebay_fleet::{ModelState, SleepLevel};
use forebay_http::ClientId;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::{IntoParams, ToSchema};

use super::dispatch::ModelQuery;
use crate::fleet::Front;
use crate::limits::{self, Upload};
use crate::reply::{self, Failure};

/// The model that a command names.
#[derive(Deserialize, ToSchema)]
struct NamedModel {
    /// A name that `/v1/models` lists, or an alias. If a command allows omitting it, omission means
    /// all models.
    model: Option<String>,
}

/// The models whose state a command changed.
#[derive(Serialize, ToSchema)]
struct MovedModels {
    success: bool,
    /// The new state of each model by name: `ready`, `asleep`, `unloaded`.
    #[schema(value_type = HashMap<String, String>)]
    models: Map<String, Value>,
}

/// Whether the models sleep.
#[derive(Serialize, ToSchema)]
struct Sleeping {
    is_sleeping: bool,
}

/// Reads a model's name from a body, which may be empty.
async fn named(front: &Arc<Front>, request: Request) -> Result<Option<String>, ApiError> {
    let (mut parts, body) = request.into_parts();
    let Ok(client) = ClientId::from_request_parts(&mut parts, front).await;
    let charge = front.common.budget.open(client);
    let (limit, time) = (limits::body_limit(&front.config, false), front.config.receive_timeout);
    let upload = Upload::new(body, client);
    let (pieces, _turn) = limits::collect(upload, limit, time, &front.turns, &charge).await?;
    let body: NamedModel = limits::order(&pieces.join())?;
    Ok(body.model)
}

fn required(front: &Front, name: Option<String>) -> Result<usize, ApiError> {
    let name = name.ok_or_else(|| ApiError::invalid("model", "`model`: required and missing"))?;
    front.find(Some(&name))
}

/// Returns the index of the named model, or of all models if `name` is `None`.
fn chosen(front: &Front, name: Option<&str>) -> Result<Vec<usize>, ApiError> {
    match name {
        Some(name) => Ok(vec![front.find(Some(name))?]),
        None => Ok((0..front.entries.len()).collect()),
    }
}

fn done(front: &Front, models: &[usize]) -> Response {
    let state =
        |&model: &usize| (front.entries[model].names[0].clone(), json!(front.report(model).state));
    reply::ok(&MovedModels { success: true, models: models.iter().map(state).collect() })
}

/// Loads a model, and responds once it is ready.
#[utoipa::path(
    post,
    path = "/models/load",
    operation_id = "load_model",
    tag = "models",
    request_body = NamedModel,
    responses(
        (status = 200, description = "The model is loaded", body = MovedModels),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn load(
    State(front): State<Arc<Front>>,
    client: ClientId,
    request: Request,
) -> Result<Response, Failure> {
    let name = named(&front, request).await?;
    let model = required(&front, name)?;
    drop(front.visit(model, client).await?);
    Ok(done(&front, &[model]))
}

/// Unloads a model, and drops all state that is kept for its next start.
#[utoipa::path(
    post,
    path = "/models/unload",
    operation_id = "unload_model",
    tag = "models",
    request_body = NamedModel,
    responses(
        (status = 200, description = "The model has left", body = MovedModels),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn unload(
    State(front): State<Arc<Front>>,
    request: Request,
) -> Result<Response, Failure> {
    let name = named(&front, request).await?;
    let model = required(&front, name)?;
    front.dismiss(model, SleepLevel::Unloaded).await;
    Ok(done(&front, &[model]))
}

/// The parameters of `/sleep`.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SleepQuery {
    /// 1 (default): packed weights stay in the page cache; 2: nothing is kept.
    level: Option<u8>,
    /// The model; all models if it is missing.
    model: Option<String>,
}

/// Puts models to sleep, as vLLM's route does: level 1 keeps the state for a fast start.
#[utoipa::path(
    post,
    path = "/sleep",
    operation_id = "sleep",
    tag = "models",
    params(SleepQuery),
    responses(
        (status = 200, description = "The models are asleep", body = MovedModels),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn sleep(State(front): State<Arc<Front>>, uri: Uri) -> Result<Response, Failure> {
    let query: SleepQuery = limits::query(&uri)?;
    let level = match query.level {
        None | Some(1) => SleepLevel::Asleep,
        Some(2) => SleepLevel::Unloaded,
        Some(_) => return Err(Failure(ApiError::invalid("level", "`level`: expected 1 or 2"))),
    };
    let models = chosen(&front, query.model.as_deref())?;
    rest(&front, &models, level).await;
    Ok(done(&front, &models))
}

async fn rest(front: &Arc<Front>, models: &[usize], level: SleepLevel) {
    for &model in models {
        front.dismiss(model, level).await;
    }
}

/// Loads the named model, or all sleeping models.
#[utoipa::path(
    post,
    path = "/wake_up",
    operation_id = "wake_up",
    tag = "models",
    params(ModelQuery),
    responses(
        (status = 200, description = "The models are loaded", body = MovedModels),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn wake_up(
    State(front): State<Arc<Front>>,
    client: ClientId,
    uri: Uri,
) -> Result<Response, Failure> {
    let query: ModelQuery = limits::query(&uri)?;
    wake(&front, client, query.model.as_deref()).await
}

async fn wake(
    front: &Arc<Front>,
    client: ClientId,
    name: Option<&str>,
) -> Result<Response, Failure> {
    let mut models = chosen(front, name)?;
    if name.is_none() {
        models.retain(|&model| front.report(model).state == ModelState::Asleep);
    }
    for &model in &models {
        drop(front.visit(model, client).await?);
    }
    Ok(done(front, &models))
}

/// Reports whether the named model is asleep. Without a name: true if some model is asleep and none
/// is loaded.
#[utoipa::path(
    get,
    path = "/is_sleeping",
    operation_id = "is_sleeping",
    tag = "models",
    params(ModelQuery),
    responses(
        (status = 200, description = "Whether it sleeps", body = Sleeping),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn is_sleeping(
    State(front): State<Arc<Front>>,
    uri: Uri,
) -> Result<Response, Failure> {
    let query: ModelQuery = limits::query(&uri)?;
    let models = chosen(&front, query.model.as_deref())?;
    let states: Vec<ModelState> =
        models.into_iter().map(|model| front.report(model).state).collect();
    let away = |state: &ModelState| matches!(state, ModelState::Asleep | ModelState::Unloaded);
    let is_sleeping = states.contains(&ModelState::Asleep) && states.iter().all(away);
    Ok(reply::ok(&Sleeping { is_sleeping }))
}

/// Makes models release their memory, as SGLang's route does. Weights and pages are released
/// together.
#[utoipa::path(
    post,
    path = "/release_memory_occupation",
    operation_id = "release_memory",
    tag = "models",
    request_body = NamedModel,
    responses(
        (status = 200, description = "The models are asleep", body = MovedModels),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn release(
    State(front): State<Arc<Front>>,
    request: Request,
) -> Result<Response, Failure> {
    let name = named(&front, request).await?;
    let models = chosen(&front, name.as_deref())?;
    rest(&front, &models, SleepLevel::Asleep).await;
    Ok(done(&front, &models))
}

/// Loads the named model, or all models that have released their memory.
#[utoipa::path(
    post,
    path = "/resume_memory_occupation",
    operation_id = "resume_memory",
    tag = "models",
    request_body = NamedModel,
    responses(
        (status = 200, description = "The models are loaded", body = MovedModels),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn resume(
    State(front): State<Arc<Front>>,
    client: ClientId,
    request: Request,
) -> Result<Response, Failure> {
    let name = named(&front, request).await?;
    wake(&front, client, name.as_deref()).await
}
