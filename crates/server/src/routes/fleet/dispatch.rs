//! Dispatches requests to the routes of the model that they name.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Request, State};
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Uri};
use axum::response::Response;
use forebay_api::peer::{RESUME_HEADER, ROUTER_HEADER};
use forebay_api::{ApiError, members};
use forebay_http::{ClientId, KeyId, Line, Remote};
use serde::Deserialize;
use serde_json::Value;
use tokio::task::spawn_blocking;
use tower::ServiceExt;
use utoipa::IntoParams;

use super::super::ollama;
use super::lists::shown;
use crate::fleet::{Front, ModelBody, RunningModel, Visit};
use crate::limits::{self, Upload};
use crate::reply::Failure;

/// Bodies of more than this many bytes are parsed on another thread.
const LONG: usize = 1 << 20;

/// The fields of a body that the dispatcher reads; the model's own routes read the whole body.
#[derive(Debug, Default, PartialEq)]
struct WantedModel {
    model: Option<String>,
    keep_alive: Option<Value>,
    /// True if the body has neither a prompt nor a message.
    is_empty: bool,
}

impl WantedModel {
    /// Reads the fields of a body that may be invalid: the model's routes report errors.
    fn new(body: &[u8]) -> Self {
        let mut wanted = Self { is_empty: true, ..Self::default() };
        for (name, value) in members(body) {
            match name {
                b"model" => wanted.model = serde_json::from_slice(value).ok(),
                b"name" if wanted.model.is_none() => {
                    wanted.model = serde_json::from_slice(value).ok();
                }
                b"keep_alive" => wanted.keep_alive = serde_json::from_slice(value).ok(),
                b"prompt" | b"messages" => {
                    wanted.is_empty = matches!(value, b"" | b"\"\"" | b"[]" | b"null");
                }
                _ => {}
            }
        }
        wanted
    }
}

/// Parses how long an idle model stays loaded, in the format of Ollama's clients: seconds, or a
/// text such as `5m` or `1h30m`; negative: for ever. Returns `None` if `value` is not a duration,
/// and `Some(None)` for ever.
fn keep_alive(value: &Value) -> Option<Option<Duration>> {
    let seconds = match value {
        Value::Number(number) => number.as_f64()?,
        Value::String(text) => seconds(text)?,
        _ => return None,
    };
    if seconds < 0.0 {
        return Some(None);
    }
    Duration::try_from_secs_f64(seconds).ok().map(Some)
}

/// Parses a number of seconds, or a duration in Go's format. Returns the duration in seconds.
fn seconds(text: &str) -> Option<f64> {
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    if let Ok(plain) = rest.parse::<f64>() {
        return plain.is_finite().then_some(sign * plain);
    }
    let mut total = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let letters = rest.find(|letter: char| letter.is_ascii_digit()).unwrap_or(rest.len());
        total += number
            * match &rest[..letters] {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                _ => return None,
            };
        rest = &rest[letters..];
    }
    Some(sign * total)
}

/// Dispatches a request whose body names its model.
pub(super) async fn by_body(
    State(front): State<Arc<Front>>,
    request: Request,
) -> Result<Response, Failure> {
    let (mut parts, body) = request.into_parts();
    let Ok(client) = ClientId::from_request_parts(&mut parts, &front).await;
    let Ok(upload) = Upload::from_request(Request::from_parts(parts.clone(), body), &front).await;
    let charge = front.common.budget.open(client);
    let (limit, time) = (limits::body_limit(&front.config, true), front.config.receive_timeout);
    let (pieces, turn) = limits::collect(upload, limit, time, &front.turns, &charge).await?;
    let body = pieces.join();
    drop(turn);
    let wanted = match body.len() > LONG {
        true => {
            let body = body.clone();
            spawn_blocking(move || WantedModel::new(&body)).await.unwrap_or_default()
        }
        false => WantedModel::new(&body),
    };
    let model = front.find(wanted.model.as_deref())?;
    let path = parts.uri.path();
    // A client that may not unload a model may not set its idle time either.
    let keep = wanted.keep_alive.as_ref().and_then(keep_alive);
    let keep = keep.filter(|_| path.starts_with("/api/") && may_administer(&front, &parts.headers));
    let unloads = keep == Some(Some(Duration::ZERO)) && wanted.is_empty && !path.contains("embed");
    if unloads && front.running(model).is_none() {
        let name = wanted.model.as_deref().unwrap_or(&front.entries[model].names[0]);
        return Ok(ollama::unloaded(path, name));
    }
    // Clients that list models send this request for each model. It must not load the models.
    if path == "/api/show" && front.running(model).is_none() {
        return Ok(shown(&front, model));
    }
    let visit = front.visit(model, client).await?;
    if let Some(idle) = keep {
        front.keep(model, idle);
    }
    // Release this charge, because the model's routes charge the body again.
    drop(charge);
    for header in [CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING] {
        parts.headers.remove(header);
    }
    visited(&front, model, visit, parts, body).await
}

fn may_administer(front: &Front, headers: &HeaderMap) -> bool {
    let keys = &front.config.admin_keys;
    keys.is_empty() || keys.shown(headers).is_some()
}

/// Serves a request about stored responses. All models share these responses, so any generating
/// model can serve the request.
pub(super) async fn kept(
    State(front): State<Arc<Front>>,
    request: Request,
) -> Result<Response, Failure> {
    let (mut parts, _) = request.into_parts();
    let Ok(client) = ClientId::from_request_parts(&mut parts, &front).await;
    let generators = || (0..front.entries.len()).filter(|&model| front.entries[model].generates);
    let loaded = generators().find(|&model| front.running(model).is_some());
    let model = loaded.or_else(|| generators().next()).unwrap_or(0);
    let visit = front.visit(model, client).await?;
    visited(&front, model, visit, parts, Bytes::new()).await
}

/// Runs a model's routes, and keeps the model loaded until the response is complete.
async fn visited(
    front: &Arc<Front>,
    model: usize,
    visit: Visit,
    parts: Parts,
    body: Bytes,
) -> Result<Response, Failure> {
    let Some(running) = front.running(model) else { return Err(absent(front, model)) };
    let response = answered(running, parts, Body::from(body)).await;
    Ok(response.map(|body| ModelBody::held(body, visit)))
}

/// Passes a request to a model's routes. The routes match the path again.
async fn answered(running: RunningModel, parts: Parts, body: Body) -> Response {
    let mut request = Request::new(body);
    *request.method_mut() = parts.method;
    *request.uri_mut() = parts.uri;
    *request.version_mut() = parts.version;
    *request.headers_mut() = parts.headers;
    // Remove routers' headers: the response would report the load of one model, and a router would
    // mistake it for the load of the whole server.
    for header in [ROUTER_HEADER, RESUME_HEADER] {
        request.headers_mut().remove(header);
    }
    let to = request.extensions_mut();
    if let Some(remote) = parts.extensions.get::<Remote>() {
        to.insert(*remote);
    }
    if let Some(line) = parts.extensions.get::<Arc<Line>>() {
        to.insert(Arc::clone(line));
    }
    if let Some(client) = parts.extensions.get::<(ClientId, KeyId)>() {
        to.insert(*client);
    }
    match running.router.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

/// The parameters of a URL that names a model.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ModelQuery {
    /// A name that `/v1/models` lists, or an alias.
    pub(super) model: Option<String>,
}

/// Serves a query about a loaded model: the model that the URL names, or the first loaded one. It
/// neither loads a model nor keeps one loaded.
pub(super) async fn by_query(
    State(front): State<Arc<Front>>,
    uri: Uri,
    request: Request,
) -> Result<Response, Failure> {
    let query: ModelQuery = limits::query(&uri)?;
    let (parts, body) = request.into_parts();
    let model = match &query.model {
        Some(name) => front.find(Some(name))?,
        None => (0..front.entries.len())
            .find(|&model| front.running(model).is_some())
            .unwrap_or_default(),
    };
    let Some(running) = front.running(model) else { return Err(absent(&front, model)) };
    let left = running.left();
    let response = answered(running, parts, body).await;
    Ok(response.map(|body| ModelBody::until(body, left)))
}

fn absent(front: &Front, model: usize) -> Failure {
    let name = &front.entries[model].names[0];
    let reason = format!("the model {name} is not loaded");
    Failure(ApiError::Unavailable { reason, code: "model_not_loaded" })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn times_as_ollama_takes_them() {
        let seconds = |count: f64| Some(Some(Duration::from_secs_f64(count)));
        for (value, expected) in [
            (json!(0), seconds(0.0)),
            (json!(90), seconds(90.0)),
            (json!("0"), seconds(0.0)),
            (json!("5m"), seconds(300.0)),
            (json!("1h30m"), seconds(5400.0)),
            (json!("1.5s"), seconds(1.5)),
            (json!("250ms"), seconds(0.25)),
            (json!(-1), Some(None)),
            (json!("-1m"), Some(None)),
            (json!("5 minutes"), None),
            (json!("m"), None),
            (json!(true), None),
            (json!(1e300), None),
        ] {
            assert_eq!(keep_alive(&value), expected, "{value}");
        }
    }

    #[test]
    fn bodies_name_their_model() {
        let wanted = |body: Value| WantedModel::new(body.to_string().as_bytes());
        let chat =
            wanted(json!({"model": "a\"b", "messages": [{"content": "{\"model\": \"c\"}"}]}));
        assert_eq!((chat.model.as_deref(), chat.is_empty), (Some("a\"b"), false));
        let load = wanted(json!({"model": "a", "keep_alive": 0}));
        assert!(load.is_empty && load.keep_alive == Some(json!(0)));
        assert!(wanted(json!({"messages": []})).is_empty);
        assert_eq!(wanted(json!({"name": "a"})).model.as_deref(), Some("a"));
        for other in [json!({}), json!({"model": 7}), json!([1]), json!("model")] {
            assert_eq!(wanted(other.clone()).model, None, "{other}");
        }
        // The model's own routes report errors in the rest of the body.
        assert_eq!(WantedModel::new(b"{\"model\": \"a\"").model.as_deref(), Some("a"));
    }
}
