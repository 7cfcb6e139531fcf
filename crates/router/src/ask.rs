//! A client's request, prepared so that it can be sent to several backends in turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use bytes::Bytes;
use forebay_api::peer::{
    RESUME_HEADER, ROUTER_HEADER, ROUTER_KEY_HEADER, RouterTag, STREAM_HEADER,
};
use forebay_api::{is_from_own_page, members, plain_string};
use forebay_balance::MOST_MOVES;
use forebay_http::ClientId;
use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, ORIGIN, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use parking_lot::Mutex;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::backend::{Backend, Sent};
use crate::budget::Held;
use crate::homes::wanted;
use crate::index::Texts;
use crate::models;
use crate::pairs::Duty;
use crate::past::Past;
use crate::payload::Payload;
use crate::splice::PairNeeds;
use crate::tape::IdShare;

const ROUTING_KEY: &str = "x-routing-key";
const ROUTING_KEY_OF_SGLANG: &str = "x-smg-routing-key";
/// The prefix of headers that only routers and brains exchange, except for those in [`TOLD`].
const OURS: &str = "x-forebay-";
/// The headers with the prefix [`OURS`] that clients may receive.
const TOLD: [&str; 3] =
    ["x-forebay-ignored", "x-forebay-responses-evicted", forebay_api::peer::RESPONSE_HEADER];
/// The estimated number of bytes of a body per token.
const BYTES_A_TOKEN: usize = 4;

/// A client's request.
#[derive(Debug)]
pub(crate) struct Ask {
    method: Method,
    path: PathAndQuery,
    headers: HeaderMap,
    body: Bytes,
    /// The body's share of the memory budget for bodies.
    _held: Held,
    /// The sampling seed if the client gave none.
    seed: u64,
    /// The deadline of the answer.
    pub(crate) deadline: Instant,
    /// The client that sent the request.
    pub(crate) client: ClientId,
    /// The routing key of the request, for policies that keep requests with the same key together.
    pub(crate) key: Option<u64>,
    /// Names of the prompt's prefixes, for `cache_aware`.
    pub(crate) texts: Option<Texts>,
    /// The response that the request names or continues.
    pub(crate) response: Option<Box<str>>,
    /// The model or adapter that the request names.
    pub(crate) model: Option<Box<str>>,
    /// True if the request names a routing key or a replica, so that it must not move to another
    /// backend.
    pinned: bool,
    /// The requirements for a pair of servers that computes the request. `None`: a single backend
    /// computes it.
    pub(crate) pair: Option<PairNeeds>,
    /// The number of times that the request has moved from one queue to another.
    moves: AtomicU8,
    /// The request's history: the backends that died while they computed it.
    pub(crate) past: Mutex<Past>,
}

/// The fields that [`Ask::new`] is to read from a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    /// True if a policy keeps requests with the same key together.
    pub(crate) keys: bool,
    /// True if a policy uses the caches of backends.
    pub(crate) texts: bool,
    /// The client that sent the request.
    pub(crate) client: ClientId,
    /// The seed for the names of texts if a request gives no salt.
    pub(crate) root: u64,
}

/// The data with which another brain can continue a stream.
#[derive(Debug, Clone)]
pub(crate) struct Resume {
    /// The name that the first brain gave to the stream.
    pub(crate) name: HeaderValue,
    /// The ids of the tokens that the client has received, in decimal, each followed by a comma.
    pub(crate) ids: Bytes,
    /// The share of the memory budget that the ids take.
    pub(crate) share: Arc<IdShare>,
}

impl Ask {
    /// Parses the fields of a request that policies need.
    pub(crate) fn new(
        mut parts: Parts,
        (body, held): (Bytes, Held),
        Reading { keys, texts: by_texts, client, root }: Reading,
        deadline: Instant,
    ) -> Self {
        let key = keys.then(|| routing_key(&parts.headers, &body)).flatten();
        let pinned = key.is_some() || is_pinned(&parts.headers, &body);
        let texts = by_texts.then(|| texts(&body, root)).flatten();
        keep_end_to_end(&mut parts.headers);
        // A request from the router's own web page may go to a backend. There the page's origin
        // would count as foreign.
        if is_from_own_page(&parts.headers) {
            parts.headers.remove(ORIGIN);
        }
        parts.headers.remove(HOST);
        parts.headers.remove(CONTENT_LENGTH);
        parts.headers.remove(EXPECT);
        let path = parts.uri.path_and_query().cloned();
        let response = wanted(parts.uri.path(), &body);
        let model = models::wanted(parts.uri.path(), &body);
        Self {
            method: parts.method,
            path: path.unwrap_or(PathAndQuery::from_static("/")),
            headers: parts.headers,
            body,
            _held: held,
            seed: rand::random(),
            deadline,
            client,
            key,
            texts,
            response,
            model,
            pinned,
            pair: None,
            moves: AtomicU8::new(0),
            past: Mutex::default(),
        }
    }

    /// Returns the request with the requirements for the pair that is to compute it.
    pub(crate) fn for_pair(self, needs: PairNeeds) -> Self {
        Self { pair: Some(needs), ..self }
    }

    /// The client's body.
    pub(crate) fn body(&self) -> &Bytes {
        &self.body
    }

    /// True if the backend may compute the request, alone or as a member of a pair.
    pub(crate) fn is_for(&self, backend: &Backend) -> bool {
        match (&self.pair, backend.duty) {
            (None, duty) => !duty.is_prefill(),
            (Some(_), Duty::Whole) => false,
            (Some(needs), _) => backend.peer().is_some_and(|peer| needs.fit(peer.engine)),
        }
    }

    /// True if the request may move while it waits in a backend's queue.
    pub(crate) fn may_move(&self) -> bool {
        let moved = self.moves.load(Ordering::Relaxed);
        let free = !self.pinned && self.response.is_none();
        free && moved < MOST_MOVES && self.past.lock().deaths() == 0
    }

    /// Counts a move of the request.
    pub(crate) fn note_move(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns an estimate of the number of tokens of the request.
    pub(crate) fn tokens(&self) -> u32 {
        u32::try_from(self.body.len() / BYTES_A_TOKEN).unwrap_or(u32::MAX)
    }

    /// Builds the request for a backend, with the router's name and key. `body` replaces the
    /// client's body.
    pub(crate) fn request(
        &self,
        (router, router_key): (u64, Option<&HeaderValue>),
        sent: &Sent,
        resume: Option<&Resume>,
        body: Option<Payload>,
    ) -> Request<Payload> {
        let tag = RouterTag {
            router,
            seq: sent.seq,
            floor: sent.floor,
            seed: self.seed,
            blocks: self.texts.is_some(),
        };
        let whole = || match resume {
            None => Payload::from(self.body.clone()),
            Some(resume) => Payload::from(vec![resume.ids.clone(), self.body.clone()]),
        };
        let body = body.unwrap_or_else(whole);
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = Uri::from(self.path.clone());
        let headers = request.headers_mut();
        headers.clone_from(&self.headers);
        headers.insert(HOST, sent.backend.host.clone());
        // The tag consists of digits, letters and semicolons.
        if let Ok(tag) = HeaderValue::from_str(&tag.encode()) {
            headers.insert(HeaderName::from_static(ROUTER_HEADER), tag);
        }
        if let Some(key) = router_key {
            headers.insert(HeaderName::from_static(ROUTER_KEY_HEADER), key.clone());
        }
        if let Some(resume) = resume {
            headers.insert(HeaderName::from_static(STREAM_HEADER), resume.name.clone());
            let length = HeaderValue::from(resume.ids.len());
            headers.insert(HeaderName::from_static(RESUME_HEADER), length);
        }
        request
    }
}

/// Removes hop-by-hop headers, and headers that only routers and brains exchange.
pub(crate) fn keep_end_to_end(headers: &mut HeaderMap) {
    let mut named: Vec<HeaderName> = Vec::new();
    for value in headers.get_all(CONNECTION) {
        let names = value.to_str().unwrap_or_default().split(',');
        named.extend(names.filter_map(|name| name.trim().parse::<HeaderName>().ok()));
    }
    let hop = [
        CONNECTION,
        HeaderName::from_static("keep-alive"),
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
    ];
    for name in named.iter().chain(&hop) {
        headers.remove(name);
    }
    let ours =
        |name: &&HeaderName| name.as_str().starts_with(OURS) && !TOLD.contains(&name.as_str());
    let ours: Vec<HeaderName> = headers.keys().filter(ours).cloned().collect();
    for name in ours {
        headers.remove(name);
    }
}

/// Returns the routing key, which keeps a client's requests together.
fn routing_key(headers: &HeaderMap, body: &[u8]) -> Option<u64> {
    let header = headers.get(ROUTING_KEY).or_else(|| headers.get(ROUTING_KEY_OF_SGLANG));
    if let Some(key) = header {
        return Some(xxh3_64(key.as_bytes()));
    }
    let fields: [&[u8]; 3] = [b"routing_key", b"session_id", b"user"];
    let mut found = [None; 3];
    for (name, value) in members(body) {
        if let Some(place) = fields.iter().position(|&field| field == name) {
            found[place] = Some(value);
        }
    }
    let key = found.into_iter().flatten().find(|&value| value != b"null")?;
    Some(xxh3_64(plain_string(key).unwrap_or(key)))
}

/// True if a request names a replica, or a routing key.
fn is_pinned(headers: &HeaderMap, body: &[u8]) -> bool {
    let fields: [&[u8]; 3] = [b"routing_key", b"routed_dp_rank", b"data_parallel_rank"];
    let named = |(name, value): (&[u8], &[u8])| fields.contains(&name) && value != b"null";
    [ROUTING_KEY, ROUTING_KEY_OF_SGLANG].iter().any(|&name| headers.contains_key(name))
        || members(body).any(named)
}

/// Returns the names of the prompt's prefixes. Prompts with different salts have no common names.
fn texts(body: &[u8], root: u64) -> Option<Texts> {
    let (prompt, salt) = prompt(body)?;
    Some(Texts::new(salt.map_or(root, |salt| xxh3_64_with_seed(salt, root)), prompt))
}

/// Returns the prompt and its salt, as they are written in the JSON body.
fn prompt(body: &[u8]) -> Option<(&[u8], Option<&[u8]>)> {
    let fields: [&[u8]; 5] = [b"messages", b"prompt", b"text", b"input_ids", b"input"];
    let (mut prompt, mut salt) = (None, None);
    for (name, value) in members(body) {
        if prompt.is_none() && fields.contains(&name) {
            prompt = Some(value);
        } else if name == b"cache_salt" && value != b"null" {
            salt = Some(value);
        }
    }
    // Drop the closing quote or bracket. With it, a prompt would not be a prefix of a longer prompt
    // that starts with the same text.
    prompt?.split_last().map(|(_, text)| (text, salt))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair =
            |&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn only_what_is_meant_for_the_other_end_is_passed_on() {
        let mut found = headers(&[
            ("connection", "close, X-Private"),
            ("x-private", "1"),
            ("keep-alive", "5"),
            ("x-forebay-load", "1"),
            ("authorization", "Bearer k"),
        ]);
        keep_end_to_end(&mut found);
        assert_eq!(found, headers(&[("authorization", "Bearer k")]));
    }

    #[test]
    fn a_key_is_the_same_in_a_header_and_in_a_field() {
        let in_header = routing_key(&headers(&[("x-routing-key", "ann")]), b"{}");
        assert!(in_header.is_some());
        assert_eq!(routing_key(&headers(&[("x-smg-routing-key", "ann")]), b"{}"), in_header);
        let body = |text: &str| routing_key(&HeaderMap::new(), text.as_bytes());
        assert_eq!(body(r#"{"user":"bob","routing_key":"ann"}"#), in_header);
        assert_eq!(body(r#"{"user":"ann","routing_key":null}"#), in_header);
        assert_ne!(body(r#"{"user":"bob"}"#), in_header);
        assert_eq!(body(r#"{"prompt":"x"}"#), None);
        assert_eq!(body("not json"), None);
    }

    #[test]
    fn who_names_a_key_or_a_replica_is_pinned() {
        let body = |text: &str| is_pinned(&HeaderMap::new(), text.as_bytes());
        assert!(is_pinned(&headers(&[("x-smg-routing-key", "ann")]), b"{}"));
        assert!(body(r#"{"routing_key":"ann"}"#) && body(r#"{"data_parallel_rank":0}"#));
        assert!(!body(r#"{"routed_dp_rank":null,"user":"ann","prompt":"x"}"#));
    }

    #[test]
    fn a_longer_prompt_begins_with_a_shorter_one() {
        let find = |body: &'static str| prompt(body.as_bytes()).unwrap().0;
        let short = find(r#"{"model":"m","messages":[{"role":"user","content":"a"}]}"#);
        let long = find(r#"{"messages":[{"role":"user","content":"a"},{"role":"x"}],"n":1}"#);
        assert!(long.starts_with(short));
        assert_eq!(find(r#"{"prompt":"abc"}"#), b"\"abc");
        assert_eq!(find(r#"{"input_ids":[1,2]}"#), b"[1,2");
        assert_eq!(prompt(b"{}"), None);
        assert_eq!(prompt(b"{\"prompt\":}"), None);
    }

    #[test]
    fn texts_of_different_salts_and_clients_are_apart() {
        let of = |body: &str, root| texts(body.as_bytes(), root).unwrap();
        let plain = of(r#"{"prompt":"abc"}"#, 1);
        assert_eq!(of(r#"{"prompt":"abc","cache_salt":null}"#, 1), plain);
        assert_ne!(of(r#"{"prompt":"abc"}"#, 2), plain);
        let salted = of(r#"{"prompt":"abc","cache_salt":"x"}"#, 1);
        assert_eq!(of(r#"{"cache_salt":"x","prompt":"abc"}"#, 1), salted);
        for other in [
            of(r#"{"prompt":"abc","cache_salt":"y"}"#, 1),
            of(r#"{"prompt":"abc","cache_salt":"x"}"#, 2),
            plain,
        ] {
            assert_ne!(other, salted);
        }
    }
}
