//! Routers in front of this brain: which router sent a request, responses to routers, and streams
//! that began at another brain.
//!
//! Nothing changes for requests without the header [`ROUTER_HEADER`], or without the router's key
//! if this brain has any key. See ADR 13 for the messages, and ADR 21 for the key.

pub(crate) mod blocks;
pub(crate) mod book;
pub(crate) mod log;

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Once, OnceLock};
use std::time::Instant;

use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use forebay_api::peer::{
    BACKGROUND, BLOCKS_HEADER, LOAD_HEADER, LoadReport, PREFILL_CAME, PREFILL_FAILED,
    PREFILL_HEADER, QueuedDispatch, RESUME_HEADER, ROUTER_HEADER, ROUTER_KEY_HEADER, RouterTag,
    STREAM_HEADER, StreamName, encode_blocks, read_ids, sample_blocks, write_comment,
};
use forebay_api::{ApiError, BackendUrl};
use forebay_egress::{Delta, EventEncoder, Tally};
use forebay_http::{ClientId, KeyId};
use subtle::ConstantTimeEq;

use crate::adapters::NamedAdapter;
use crate::limits::{self, Upload};
use crate::live;
use crate::names::random_hex;
use crate::pd::counts::Outcome;
use crate::pd::side::Pd;
use crate::reply::Failure;
use crate::state::{Shared, now};

pub(crate) use blocks::wait;
use book::Pace;
pub use log::{BlockLog, ReplicaBlocks};

/// A stream that began at another brain.
#[derive(Debug)]
pub(crate) struct Resume {
    name: StreamName,
    /// Tokens that the client already has.
    pub(crate) generated: Vec<i32>,
}

/// The headers of a router's request, and the extra data that it requested for the response.
#[derive(Debug)]
struct Exchange {
    tag: RouterTag,
    resume: Option<Resume>,
    /// The names of the prompt's blocks, as encoded for the header.
    blocks: OnceLock<String>,
    /// The name of the stream, if another brain can continue it.
    stream: OnceLock<String>,
    /// The prefill server that the router names, if the router is allowed to name one.
    prefill: Option<BackendUrl>,
    /// The outcome of the request to that prefill server.
    fetched: OnceLock<&'static str>,
}

/// The sender of a request: a client, perhaps through a router. The default is the server itself,
/// for requests of its health check.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peer {
    client: Option<ClientId>,
    /// The exchange with the router; `None` without a router.
    exchange: Option<Arc<Exchange>>,
    /// The salt of the client's API key; 0 if keys share the cache.
    tenant: u64,
    /// True for background work, which uses only spare capacity.
    background: bool,
    /// The adapter that the requested model name refers to.
    pub(crate) adapter: Option<Arc<NamedAdapter>>,
}

/// True if a request's headers mark it as background work.
fn is_background(headers: &HeaderMap) -> bool {
    let (name, background) = BACKGROUND;
    let lines = headers.get_all(name).iter().filter_map(|line| line.to_str().ok());
    // If there are several values, the last one counts.
    let mut urgency = lines.flat_map(|line| line.split(',')).map(str::trim);
    urgency.rfind(|item| item.starts_with("u=")) == Some(background)
}

impl FromRequestParts<Shared> for Peer {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &Shared) -> Result<Self, Infallible> {
        let client = Some(ClientId::from_request_parts(parts, state).await?);
        let KeyId(key) = KeyId::from_request_parts(parts, state).await?;
        let exchange = parts.extensions.get::<Arc<Exchange>>().cloned();
        let sharing = &state.config.sharing;
        let apart = state.config.api_keys.len() > 1 && !sharing.share_cache_across_keys;
        let key = key.filter(|_| apart).and_then(|at| state.config.api_keys.text(at));
        let tenant = key.map_or(0, |key| sharing.namer.salt(&[key.as_bytes()]));
        let background = is_background(&parts.headers);
        Ok(Self { client, exchange, tenant, background, adapter: None })
    }
}

impl Peer {
    /// Creates the peer for a request from another server: a prefill of a prompt for `client`.
    pub(crate) fn of_server(client: ClientId, salt: u64, background: bool) -> Self {
        Self { client: Some(client), tenant: salt, background, ..Self::default() }
    }

    /// Returns the prefill server that the router names.
    pub(crate) fn prefill(&self) -> Option<&BackendUrl> {
        self.exchange.as_ref()?.prefill.as_ref()
    }

    /// Records the outcome of the request to a prefill server, for the router.
    pub(crate) fn fetched(&self, outcome: Outcome) {
        let told = match outcome {
            Outcome::Came => PREFILL_CAME,
            failed if failed.is_failure() => PREFILL_FAILED,
            _ => return,
        };
        if let Some(exchange) = &self.exchange {
            // Only one prompt of a request goes to a prefill server, so the cell is empty.
            let _ = exchange.fetched.set(told);
        }
    }

    /// Returns the client whose share the request uses.
    pub(crate) fn client(&self) -> ClientId {
        self.client.unwrap_or(ClientId(0))
    }

    /// True if the request is the server's own health check.
    pub(crate) fn is_probe(&self) -> bool {
        self.client.is_none()
    }

    /// True for background work.
    pub(crate) fn is_background(&self) -> bool {
        self.background
    }

    pub(crate) fn tag(&self) -> Option<&RouterTag> {
        self.exchange.as_ref().map(|exchange| &exchange.tag)
    }

    /// Returns the salt of a request with this `cache_salt`. Only requests with the same salt share
    /// cached blocks. The salt depends on the adapter's content, not on its name.
    pub(crate) fn salt(&self, state: &Shared, cache_salt: Option<&str>) -> u64 {
        let namer = &state.config.sharing.namer;
        let salt = cache_salt
            .map_or(self.tenant, |salt| namer.salt(&[&self.tenant.to_le_bytes(), salt.as_bytes()]));
        self.adapter.as_ref().map_or(salt, |adapter| {
            namer.salt(&[&salt.to_le_bytes(), b"adapter", adapter.digest.as_bytes()])
        })
    }

    /// Returns the stream that this request continues.
    pub(crate) fn resume(&self) -> Option<&Resume> {
        self.exchange.as_ref()?.resume.as_ref()
    }

    /// Returns the response's name: a new one, unless it continues another brain's response.
    pub(crate) fn name(&self, prefix: &str) -> StreamName {
        match self.resume() {
            Some(resume) => resume.name.clone(),
            None => StreamName { id: format!("{prefix}{}", random_hex()), created: now() },
        }
    }

    /// Adds the names of a prompt's blocks to the response's head, if requested.
    pub(crate) fn name_blocks(&self, state: &Shared, salt: u64, prompt: &[i32]) {
        let Some(exchange) = &self.exchange else { return };
        if exchange.tag.blocks {
            let names = sample_blocks(&blocks::names(state, salt, prompt));
            // Only the first of several prompts is reported.
            let _ = exchange.blocks.set(encode_blocks(&names));
        }
    }

    /// Makes a stream carry the data with which another brain can resume it.
    pub(crate) fn tagged(
        &self,
        state: &Shared,
        name: &StreamName,
        encoder: Box<dyn EventEncoder>,
    ) -> Box<dyn EventEncoder> {
        let Some(exchange) = &self.exchange else { return encoder };
        if !encoder.resumable() {
            return encoder;
        }
        // A request has at most one stream, so the cell is empty.
        let _ = exchange.stream.set(name.encode());
        let router = exchange.tag.router;
        let pace = state.book.pace(router);
        Box::new(AnnotatedEvents {
            encoder,
            ids: Vec::new(),
            router,
            pace,
            state: Arc::clone(state),
        })
    }
}

/// Returns the load of this brain, as reported to `router`.
pub(crate) fn report(state: &Shared, router: Option<u64>) -> LoadReport {
    let stats = state.engine.stats().scheduler;
    let replicas = state.engine.replicas();
    LoadReport {
        running: u32::try_from(stats.running).unwrap_or(u32::MAX),
        waiting: u32::try_from(stats.waiting).unwrap_or(u32::MAX),
        tokens: replicas.iter().map(|replica| replica.load.work.tokens()).sum(),
        ahead: replicas.iter().map(|replica| replica.load.work.prefill).sum::<u64>()
            / replicas.len().max(1) as u64,
        pages_free: (stats.pages_free + stats.pages_cached) as u64,
        names: state.config.sharing.namer.id(),
        ..state.book.report(router)
    }
}

/// Returns up to `most` waiting dispatches of a router that were never admitted, the latest first.
/// A replica's requests beyond [`forebay_engine::MOST_VIEWS`] are not examined.
pub(crate) async fn queued(state: &Shared, router: u64, most: usize) -> Vec<QueuedDispatch> {
    let told = live::views(&state.engine.handles()).await;
    let untouched = told.into_iter().flatten().flatten().filter(|view| view.untouched);
    let waiting: HashMap<u64, u64> =
        untouched.map(|view| (view.id, u64::from(view.prompt))).collect();
    state.book.queued(router, most, |id| waiting.get(&id).copied())
}

/// Adds a comment after each delta except the last: the delta's tokens, and from time to time the
/// load.
struct AnnotatedEvents {
    encoder: Box<dyn EventEncoder>,
    ids: Vec<i32>,
    router: u64,
    pace: Pace,
    state: Shared,
}

impl EventEncoder for AnnotatedEvents {
    fn delta(
        &mut self,
        choice: u32,
        delta: &mut Delta,
        tally: &Tally,
        out: &mut Vec<u8>,
    ) -> serde_json::Result<()> {
        // Copied before the call, because the encoder may take the delta's fields.
        self.ids.clone_from(&delta.tokens);
        let ends = delta.end.is_some();
        self.encoder.delta(choice, delta, tally, out)?;
        // The router forwards a stream up to a comment. Without a comment after the last delta, the
        // end is forwarded only as a whole: another brain could not resume within it.
        if !ends {
            let due = self.pace.is_due(Instant::now());
            let report = due.then(|| report(&self.state, Some(self.router)));
            write_comment(&self.ids, report.as_ref(), out);
        }
        Ok(())
    }

    fn end(&mut self, tally: &Tally, out: &mut Vec<u8>) -> serde_json::Result<()> {
        self.encoder.end(tally, out)
    }

    fn is_said_done(&self) -> bool {
        self.encoder.is_said_done()
    }

    fn fail(&mut self, error: &ApiError, out: &mut Vec<u8>) -> serde_json::Result<()> {
        self.encoder.fail(error, out)
    }

    fn media_type(&self) -> &'static str {
        self.encoder.media_type()
    }

    fn resumable(&self) -> bool {
        true
    }

    fn resume(&mut self, before: &Delta) {
        self.encoder.resume(before);
    }
}

/// True if a request comes from a router that may read this brain's blocks and load. If no router
/// key is set, every sender may read them, but only if the server requires no key at all.
pub(crate) fn is_router(state: &Shared, headers: &HeaderMap) -> bool {
    let config = &state.config;
    match &config.router_key {
        Some(key) => headers
            .get(ROUTER_KEY_HEADER)
            .is_some_and(|given| given.as_bytes().ct_eq(key.as_bytes()).into()),
        None => config.api_keys.is_empty() && config.admin_keys.is_empty(),
    }
}

/// Creates the error for a sender that may not read this brain's blocks and load.
pub(crate) fn not_a_router() -> ApiError {
    let reason = "only routers with the key of this server may ask this: --router-key".to_owned();
    ApiError::Forbidden { reason, code: "router_key_needed" }
}

/// Reads a router's headers, and adds the requested data to the response.
pub(crate) async fn talk(State(state): State<Shared>, request: Request, next: Next) -> Response {
    if !request.headers().contains_key(ROUTER_HEADER) {
        return next.run(request).await;
    }
    if !is_router(&state, request.headers()) {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            tracing::warn!("a router without the key of this server is answered as any client");
        });
        if request.headers().contains_key(RESUME_HEADER) {
            return Failure(not_a_router()).into_response();
        }
        return next.run(request).await;
    }
    let (exchange, mut request) = match read(&state, request).await {
        Ok(read) => read,
        Err(error) => return Failure(error).into_response(),
    };
    let exchange = Arc::new(exchange);
    request.extensions_mut().insert(Arc::clone(&exchange));
    let mut response = next.run(request).await;
    let mut load = Vec::new();
    report(&state, Some(exchange.tag.router)).encode(&mut load);
    let headers = response.headers_mut();
    insert(headers, LOAD_HEADER, &load);
    for (name, value) in [
        (BLOCKS_HEADER, exchange.blocks.get().map(String::as_str)),
        (STREAM_HEADER, exchange.stream.get().map(String::as_str)),
        (PREFILL_HEADER, exchange.fetched.get().copied()),
    ] {
        if let Some(value) = value {
            insert(headers, name, value.as_bytes());
        }
    }
    response
}

fn insert(headers: &mut HeaderMap, name: &'static str, value: &[u8]) {
    // A client may name its request with bytes that a header can't contain. The stream then can't
    // be resumed.
    if let Ok(value) = HeaderValue::from_bytes(value) {
        headers.insert(name, value);
    }
}

/// True if this request's router may name this prefill server. If routers need no key, a request
/// from any client could name a server, so only the servers in the configuration are allowed.
fn may_name(state: &Shared, url: &BackendUrl) -> bool {
    let Some(Pd::Decode(side)) = &state.pd else { return false };
    if state.config.router_key.is_some() || side.knows(url) {
        return true;
    }
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(
            "a router without a key named a prefill server, which is ignored: give both the same \
             --router-key, or list the server in --pd-prefill-servers"
        );
    });
    false
}

/// Reads the router's headers and the tokens of a resumed stream. Returns them and the rest of the
/// request.
async fn read(state: &Shared, request: Request) -> Result<(Exchange, Request), ApiError> {
    let (mut parts, body) = request.into_parts();
    let Ok(client) = ClientId::from_request_parts(&mut parts, state).await;
    let text = |name: &'static str| {
        parts.headers.get(name).map(|value| {
            value.to_str().map_err(|_| ApiError::invalid(name, format!("`{name}`: not text")))
        })
    };
    let wrong = |name: &'static str, error: &dyn std::fmt::Display| {
        ApiError::invalid(name, format!("`{name}`: {error}"))
    };
    let tag = RouterTag::decode(text(ROUTER_HEADER).transpose()?.unwrap_or_default())
        .map_err(|error| wrong(ROUTER_HEADER, &error))?;
    let prefill = match text(PREFILL_HEADER).transpose()? {
        Some(url) => {
            let url = BackendUrl::parse(url).map_err(|error| wrong(PREFILL_HEADER, &error))?;
            Some(url).filter(|url| may_name(state, url))
        }
        None => None,
    };
    let (mut resume, mut body) = (None, body);
    if let Some(length) = text(RESUME_HEADER).transpose()? {
        let length: usize = length.parse().map_err(|error| wrong(RESUME_HEADER, &error))?;
        let name = StreamName::decode(text(STREAM_HEADER).transpose()?.unwrap_or_default())
            .map_err(|error| wrong(STREAM_HEADER, &error))?;
        let (mut whole, _charge) = limits::whole(Upload::new(body, client), state).await?;
        if length > whole.len() {
            return Err(wrong(RESUME_HEADER, &"more bytes than the body has"));
        }
        let ids = whole.split_to(length);
        let ids = std::str::from_utf8(&ids).map_err(|error| wrong(RESUME_HEADER, &error))?;
        let generated = read_ids(ids).map_err(|error| wrong(RESUME_HEADER, &error))?;
        resume = Some(Resume { name, generated });
        body = Body::from(whole);
    }
    let exchange = Exchange {
        tag,
        resume,
        blocks: OnceLock::new(),
        stream: OnceLock::new(),
        prefill,
        fetched: OnceLock::new(),
    };
    Ok((exchange, Request::from_parts(parts, body)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urgency_seven_is_work_in_the_background() {
        let background = |lines: &[&'static str]| {
            let line = |&line| (axum::http::HeaderName::from_static(BACKGROUND.0), line);
            let lines = lines.iter().map(line);
            is_background(
                &lines.map(|(name, line)| (name, HeaderValue::from_static(line))).collect(),
            )
        };
        assert!(background(&["u=7"]) && background(&["i, u=7"]) && background(&["u=3", "u=7,i"]));
        for other in [&[][..], &["u=1, i"], &["i"], &["7"], &["u=70"], &["u=7, u=3"], &["x=u=7"]] {
            assert!(!background(other), "{other:?}");
        }
    }
}
