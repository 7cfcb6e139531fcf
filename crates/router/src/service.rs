//! Handles clients' requests: forwards them, or answers requests about the router itself.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use forebay_api::peer::DEATHS_HEADER;
use forebay_api::{ApiError, BackendUrl, Inflater, RegistrationRequest, parse_request};
use forebay_http::{Keys, RequestBody};
use forebay_webui::{FeedBody, page};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Body, Frame, SizeHint};
use serde::Serialize;
use serde_json::json;

use crate::admission::{client, operator};
use crate::ask::Ask;
use crate::attempt::Reached;
use crate::homes::is_of_response;
use crate::intake::{BodyLimits, collect};
use crate::live;
use crate::loads::{loads, metrics};
use crate::models::{self, LIST, conflicts, is_listed, renew};
use crate::pairs::{are_ours, faults, is_paired, no_pair, paired};
use crate::reach::{Failure, reach};
use crate::registry::Source;
use crate::relay::{Cut, Relay};
use crate::shared::{Shared, Worker};
use crate::splice::PairNeeds;

/// The longest and default lease of a registration.
const LONGEST_LEASE: Duration = Duration::from_secs(86_400);
const DEFAULT_LEASE: Duration = Duration::from_secs(60);
/// The largest number of backends that may have a lease.
const MAX_LEASES: usize = 1024;
/// The limits on the body of a registration request.
const REGISTRATION: BodyLimits = BodyLimits { whole: 1 << 16, json: 1 << 16, all: 0 };
/// The header that controls whether OpenAI's clients retry by themselves.
const SHOULD_RETRY: &str = "x-should-retry";
/// The media type of Prometheus' text exposition.
const EXPOSITION: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Routes whose POST requests are forwarded.
const POSTED: &[&str] = &[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/generate",
    "/completion",
    "/apply-template",
    "/v1/embeddings",
    "/embeddings",
    "/pooling",
    "/classify",
    "/v1/classify",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
    "/tokenize",
    "/detokenize",
];

/// The body of a response of the router.
pub(crate) enum Answer {
    /// An answer of the router itself.
    Own(Full<Bytes>),
    /// The feed of the router's backends, for as long as the client is connected.
    Fed(FeedBody),
    /// A backend's response.
    Relayed(Box<Relay>),
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match self.get_mut() {
            Self::Own(body) => Pin::new(body)
                .poll_frame(context)
                .map(|frame| frame.map(|frame| frame.map_err(|never: Infallible| match never {}))),
            Self::Fed(body) => Pin::new(body)
                .poll_frame(context)
                .map(|frame| frame.map(|frame| frame.map_err(|never: Infallible| match never {}))),
            Self::Relayed(relay) => Pin::new(relay.as_mut()).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Own(body) => body.is_end_stream(),
            Self::Fed(body) => body.is_end_stream(),
            Self::Relayed(relay) => relay.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Own(body) => body.size_hint(),
            Self::Fed(body) => body.size_hint(),
            Self::Relayed(relay) => relay.size_hint(),
        }
    }
}

/// Answers a request.
pub(crate) async fn answer(
    worker: Arc<Worker>,
    request: Request<RequestBody>,
    address: IpAddr,
) -> Response<Answer> {
    let access = &worker.shared.config.access;
    let allowed = access.check(request.headers(), request.uri(), request.version());
    let answered = match allowed.and_then(|()| route(&request)) {
        Ok(Route::PassOn) => pass_on(&worker, request, address).await,
        Ok(Route::Models) => match list(&worker.shared, &request).await {
            Ok(None) => pass_on(&worker, request, address).await,
            Ok(Some(answer)) => Ok(answer),
            Err(error) => Err(error),
        },
        Ok(Route::Own(own)) => own_answer(&worker, own, request).await,
        Err(error) => Err(error),
    };
    answered.unwrap_or_else(|error| refusal(&error))
}

enum Route {
    PassOn,
    /// The list of the models of all backends.
    Models,
    Own(Own),
}

#[derive(Clone, Copy)]
enum Own {
    Health,
    Alive,
    Ping,
    Version,
    Metrics,
    Loads,
    Backends,
    Register,
    Unregister,
    Live,
    Page,
}

fn route<B>(request: &Request<B>) -> Result<Route, ApiError> {
    let (method, path) = (request.method(), request.uri().path());
    // HEAD is handled like GET: hyper omits the body.
    let method = if method == Method::HEAD { &Method::GET } else { method };
    let own = match (method, path) {
        (&Method::GET, "/health") => Own::Health,
        (&Method::GET, "/livez") => Own::Alive,
        (&Method::GET | &Method::POST, "/ping") => Own::Ping,
        (&Method::GET, "/version") => Own::Version,
        (&Method::GET, "/metrics") => Own::Metrics,
        (&Method::GET, "/v1/loads") => Own::Loads,
        (&Method::GET, "/backends") => Own::Backends,
        (&Method::POST, "/backends") => Own::Register,
        (&Method::DELETE, "/backends") => Own::Unregister,
        (&Method::GET, "/v1/live") => Own::Live,
        (&Method::GET, "/") => Own::Page,
        (&Method::GET, path) if path.starts_with("/assets/") => Own::Page,
        (&Method::POST, path) if POSTED.contains(&path) => return Ok(Route::PassOn),
        (&Method::GET, LIST) => return Ok(Route::Models),
        (&Method::GET, path) if path.starts_with("/v1/models/") => return Ok(Route::PassOn),
        (&Method::GET | &Method::DELETE | &Method::POST, path) if is_of_response(path) => {
            return Ok(Route::PassOn);
        }
        (&Method::GET, "/api/tags" | "/api/ps" | "/api/version") => return Ok(Route::PassOn),
        (&Method::GET, "/server_info" | "/openapi.json" | "/health_generate") => {
            return Ok(Route::PassOn);
        }
        (_, path) => {
            let (method, path) = (request.method().to_string(), path.to_owned());
            let known = POSTED.contains(&path.as_str()) || path.starts_with("/v1/models");
            return Err(match known {
                true => ApiError::MethodNotAllowed { method, path },
                false => ApiError::UnknownRoute { method, path, near: None },
            });
        }
    };
    Ok(Route::Own(own))
}

async fn pass_on(
    worker: &Arc<Worker>,
    request: Request<RequestBody>,
    address: IpAddr,
) -> Result<Response<Answer>, ApiError> {
    let shared = &worker.shared;
    if shared.draining.load(Ordering::Acquire) {
        return Err(ApiError::Draining);
    }
    let config = &shared.config;
    let ours = !config.pairs.is_empty() && are_ours(&shared.registry.current());
    let by_pair =
        !config.pairs.is_empty() && is_paired(request.method(), request.uri().path(), ours)?;
    // Check the key before any of the body is read.
    let reading = shared.reading(client(request.headers(), &shared.keys)?, address);
    let live = shared.enter();
    let (mut parts, body) = request.into_parts();
    // The body is decompressed here, because policies read it, and because a backend that continues
    // a stream gets token ids before the body.
    let inflater = Inflater::of(&parts.headers)?;
    if inflater.is_some() {
        parts.headers.remove(CONTENT_ENCODING);
    }
    let time = config.receive_timeout;
    let body = collect((body, inflater), config.bodies, &shared.budget, time).await?;
    let deadline = Instant::now() + config.request_timeout;
    let needs = match by_pair {
        // A pair of Forebay servers computes the same requests as a single server.
        true if ours => Some(PairNeeds::default()),
        true => Some(PairNeeds::new(parts.uri.path(), &body.0)?),
        false => None,
    };
    let ask = Ask::new(parts, body, reading, deadline);
    let ask = Arc::new(match needs {
        Some(needs) => {
            let backends = shared.registry.current();
            let up = backends.iter().filter(|backend| backend.is_up());
            if let Some(error) = needs.unserved(&paired(up)) {
                return Err(error);
            }
            ask.for_pair(needs)
        }
        None => ask,
    });
    if let Some(model) = ask.model.as_deref() {
        let backends = shared.registry.current();
        if !is_listed(&backends, model) && shared.unlisted.asks(model) {
            // The model may have been loaded just now.
            renew(&backends, config.health.timeout).await;
        }
    }
    let mut cut = shared.cut.subscribe();
    let reached = tokio::select! {
        reached = reach(worker, &ask, None, None) => reached,
        // Waiting can't fail, because the sender lives as long as the worker thread.
        _ = cut.wait_for(|&cut| cut) => Err(Failure::Api(ApiError::Aborted)),
    };
    match reached {
        Ok(Reached { head, kind, first, flow, .. }) => {
            let relay = Relay::new(Arc::clone(worker), ask, kind, first, flow, live);
            Ok(Response::from_parts(head, Answer::Relayed(Box::new(relay))))
        }
        Err(Failure::Refused(response)) => Ok(response.map(|body| Answer::Own(Full::new(body)))),
        Err(Failure::Api(error)) => {
            shared.totals.errors.fetch_add(1, Ordering::Relaxed);
            Err(error)
        }
    }
}

/// Returns the list of the models of all backends; `None`: no backend has returned a list.
async fn list<B>(
    shared: &Shared,
    request: &Request<B>,
) -> Result<Option<Response<Answer>>, ApiError> {
    if shared.draining.load(Ordering::Acquire) {
        return Err(ApiError::Draining);
    }
    client(request.headers(), &shared.keys)?;
    let backends = shared.registry.current();
    renew(&backends, shared.config.health.timeout).await;
    Ok(models::all(&backends).map(|list| ok(&list)))
}

async fn own_answer(
    worker: &Arc<Worker>,
    own: Own,
    request: Request<RequestBody>,
) -> Result<Response<Answer>, ApiError> {
    let shared = &worker.shared;
    if matches!(own, Own::Loads | Own::Metrics | Own::Backends | Own::Live) {
        operator(request.headers(), &shared.keys, &shared.admin_keys)?;
    }
    match own {
        Own::Health => health(shared),
        // The router itself is alive even if no backend is up.
        Own::Alive => Ok(ok(&json!({"status": "alive"}))),
        Own::Ping => Ok(ok(&json!({}))),
        Own::Live => live::watch(shared).map(|response| response.map(Answer::Fed)),
        Own::Page => {
            let file = shared.config.webui.then(|| page(request.uri().path(), request.headers()));
            let file = file.flatten().ok_or_else(|| unknown(&request))?;
            Ok(file.map(|body| Answer::Own(Full::new(body))))
        }
        Own::Version => Ok(ok(&json!({"version": env!("CARGO_PKG_VERSION")}))),
        Own::Loads => Ok(ok(&loads(shared))),
        Own::Metrics => {
            let text = metrics(shared).map_err(|error| {
                let reason = format!("the metrics could not be written: {error}");
                ApiError::Internal { reason, code: None }
            })?;
            let mut response = Response::new(Answer::Own(Full::new(text.into())));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(EXPOSITION));
            Ok(response)
        }
        Own::Backends => {
            let backends = shared.registry.current();
            let urls: Vec<String> = backends.iter().map(|backend| backend.url.url()).collect();
            Ok(ok(&json!({"backends": urls})))
        }
        Own::Register => {
            let (url, ttl) = registration(shared, request).await?;
            register(shared, url, ttl)
        }
        Own::Unregister => {
            let (url, _) = registration(shared, request).await?;
            let removed = shared.registry.remove(&Source::Lease(url.url()));
            Ok(ok(&json!({"removed": removed})))
        }
    }
}

fn health(shared: &Shared) -> Result<Response<Answer>, ApiError> {
    if shared.draining.load(Ordering::Acquire) {
        return Err(ApiError::Draining);
    }
    let backends = shared.registry.current();
    let up = || backends.iter().filter(|backend| backend.is_up());
    let pairs = !shared.config.pairs.is_empty();
    if up().next().is_none() || pairs && paired(up()).is_empty() {
        let reason = match pairs {
            true => no_pair(&backends),
            false => "no backend takes requests now".to_owned(),
        };
        return Err(ApiError::Unavailable { reason, code: "no_backend" });
    }
    let mut health = json!({"status": "ready", "backends": up().count()});
    let mut warnings = conflicts(&backends);
    warnings.extend(faults(&backends));
    if !warnings.is_empty() {
        health["warning"] = warnings.join("; ").into();
    }
    Ok(ok(&health))
}

/// Parses a registration: the URL of the backend and the length of its lease.
async fn registration(
    shared: &Shared,
    request: Request<RequestBody>,
) -> Result<(BackendUrl, Option<f64>), ApiError> {
    let Some(key) = &shared.config.sources.registration_key else {
        return Err(unknown(&request));
    };
    Keys::new([key]).shown(request.headers()).ok_or(ApiError::Unauthorized)?;
    let time = shared.config.receive_timeout;
    let body = (request.into_body(), None);
    let (body, _held) = collect(body, REGISTRATION, &shared.budget, time).await?;
    let parsed = parse_request::<RegistrationRequest>(&body, |_| Ok(()))?;
    let RegistrationRequest { url, ttl } = parsed.request;
    let url =
        BackendUrl::parse(&url).map_err(|error| ApiError::invalid("url", error.to_string()))?;
    Ok((url, ttl.map(f64::from)))
}

fn register(
    shared: &Shared,
    url: BackendUrl,
    ttl: Option<f64>,
) -> Result<Response<Answer>, ApiError> {
    let allowed = &shared.config.sources.allowed;
    if !allowed.is_empty() && !allowed.iter().any(|pattern| pattern.allows(&url)) {
        let reason = format!("{} is not one of --allowed-backends", url.url());
        return Err(ApiError::Forbidden { reason, code: "backend_not_allowed" });
    }
    let ttl = lease(ttl)?;
    if !shared.registry.lease(Source::Lease(url.url()), url, ttl, MAX_LEASES) {
        let reason = format!("{MAX_LEASES} backends are registered");
        return Err(ApiError::Overloaded { reason });
    }
    Ok(ok(&json!({"registered": true, "ttl": ttl.as_secs_f64()})))
}

fn unknown<B>(request: &Request<B>) -> ApiError {
    let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
    ApiError::UnknownRoute { method, path, near: None }
}

fn lease(ttl: Option<f64>) -> Result<Duration, ApiError> {
    let longest = LONGEST_LEASE.as_secs_f64();
    match ttl {
        None => Ok(DEFAULT_LEASE),
        Some(seconds) if seconds > 0.0 && seconds <= longest => {
            Ok(Duration::from_secs_f64(seconds))
        }
        Some(seconds) => {
            let reason = format!("`ttl`: {seconds} is not above 0 and at most {longest} seconds");
            Err(ApiError::invalid("ttl", reason))
        }
    }
}

fn ok<T: Serialize>(value: &T) -> Response<Answer> {
    written(StatusCode::OK, value)
}

fn written<T: Serialize>(status: StatusCode, value: &T) -> Response<Answer> {
    // Answers contain only values that JSON can represent.
    let body = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Answer::Own(Full::new(body.into())));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

fn refusal(error: &ApiError) -> Response<Answer> {
    let status = StatusCode::from_u16(error.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    tracing::debug!(status = status.as_u16(), %error, "request refused");
    let mut response = written(status, &error.body());
    if let Some(seconds) = error.retry_after() {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let ApiError::BackendDied { deaths } = error {
        let headers = response.headers_mut();
        headers.insert(DEATHS_HEADER, HeaderValue::from(u16::from(*deaths)));
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes() {
        let of = |method: Method, path: &str| {
            let mut request = Request::new(());
            *request.method_mut() = method;
            *request.uri_mut() = path.parse().unwrap();
            route(&request).map(|route| matches!(route, Route::PassOn))
        };
        assert_eq!(of(Method::POST, "/v1/chat/completions?x=1"), Ok(true));
        assert_eq!(of(Method::POST, "/v1/messages/count_tokens"), Ok(true));
        assert_eq!(of(Method::GET, "/v1/models/org/name"), Ok(true));
        assert_eq!(of(Method::DELETE, "/v1/responses/resp_1"), Ok(true));
        assert_eq!(of(Method::POST, "/v1/responses/resp_1/cancel"), Ok(true));
        assert_eq!(of(Method::GET, "/v1/loads"), Ok(false));
        assert_eq!(of(Method::GET, "/"), Ok(false));
        assert_eq!(of(Method::GET, "/assets/page.js"), Ok(false));
        assert_eq!(of(Method::POST, "/").unwrap_err().status(), 404);
        assert_eq!(of(Method::GET, "/generate").unwrap_err().status(), 405);
        assert_eq!(of(Method::POST, "/flush_cache").unwrap_err().status(), 404);
    }

    #[test]
    fn leases() {
        assert_eq!(lease(None), Ok(DEFAULT_LEASE));
        assert_eq!(lease(Some(2.5)), Ok(Duration::from_millis(2500)));
        for wrong in [0.0, -1.0, f64::NAN, 1e9] {
            assert_eq!(lease(Some(wrong)).unwrap_err().status(), 400, "{wrong}");
        }
    }
}
