//! Requests to the hub: follows redirects, sends the token only to the hub, and limits waiting
//! times.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, HeaderName, HeaderValue, LOCATION,
    PROXY_AUTHORIZATION, RANGE, RETRY_AFTER, USER_AGENT,
};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use url::Url;

use crate::connector::{Connector, deepest};
use crate::proxies::Proxies;
use crate::settings::Settings;

const MAX_REDIRECTS: usize = 10;
/// The response header with the content's ETag, in redirects to the content.
pub(crate) const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");

/// Why a request has no usable response.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// There was no response, or the body was shorter than announced. The request can be repeated.
    Broken(String),
    /// The server returned an error status.
    Status(Refusal),
    /// The server sent an invalid or contradictory response.
    Lie(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broken(cause) | Self::Lie(cause) => f.write_str(cause),
            Self::Status(refusal) => write!(f, "it answers {}", refusal.status),
        }
    }
}

/// A response with a status other than 200 or 206.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    /// The hub's error code.
    pub(crate) code: Option<String>,
    /// The hub's error message.
    pub(crate) message: Option<String>,
    pub(crate) retry_after: Option<Duration>,
}

impl Trouble {
    /// True if the same request may succeed later.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Broken(_) => true,
            Self::Status(refusal) => matches!(refusal.status, 408 | 425 | 429 | 500..=599),
            Self::Lie(_) => false,
        }
    }
}

/// Sends requests to the hub, and to servers that it redirects to.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    http: legacy::Client<Connector, Empty<Bytes>>,
    proxies: Arc<Proxies>,
    pub(crate) endpoint: String,
    origin: Option<url::Origin>,
    token: Option<HeaderValue>,
    pub(crate) patience: Duration,
}

impl Client {
    /// Creates a client. Must be called in the context of a tokio runtime.
    pub(crate) fn new(settings: &Settings) -> Self {
        let proxies = Arc::new(Proxies::from_env());
        let connector = Connector::new(Arc::clone(&proxies), settings.patience);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(30))
            .build(connector);
        let token = settings.token.as_ref().and_then(|token| {
            let mut value = HeaderValue::try_from(format!("Bearer {token}")).ok()?;
            value.set_sensitive(true);
            Some(value)
        });
        Self {
            http,
            proxies,
            endpoint: settings.endpoint.clone(),
            origin: Url::parse(&settings.endpoint).ok().map(|url| url.origin()),
            token,
            patience: settings.patience,
        }
    }

    /// Returns the response to HEAD. A redirect to another host is not followed if the hub's
    /// response already describes the file.
    pub(crate) async fn head(&self, path: &str) -> Result<Response<Incoming>, Trouble> {
        let mut url = self.url(path)?;
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(Method::HEAD, &url, None).await?;
            let Some(next) = redirect(&response, &url)? else { return accepted(response) };
            if next.origin() != url.origin() && response.headers().contains_key(LINKED_ETAG) {
                return Ok(response);
            }
            url = next;
        }
        Err(endless(&url))
    }

    /// Sends GET for the content from byte `start` on, and follows all redirects. Returns the
    /// response, and true if the response comes from the hub rather than another server.
    pub(crate) async fn get(
        &self,
        path: &str,
        start: u64,
    ) -> Result<(Response<Incoming>, bool), Trouble> {
        let mut url = self.url(path)?;
        let origin = url.origin();
        for _ in 0..=MAX_REDIRECTS {
            let response = self.send(Method::GET, &url, (start > 0).then_some(start)).await?;
            let Some(next) = redirect(&response, &url)? else {
                return Ok((accepted(response)?, url.origin() == origin));
            };
            url = next;
        }
        Err(endless(&url))
    }

    /// Reads a whole body of at most `limit` bytes.
    pub(crate) async fn body(
        &self,
        mut response: Response<Incoming>,
        limit: usize,
    ) -> Result<Vec<u8>, Trouble> {
        let mut body = Vec::new();
        while let Some(data) = self.next(&mut response).await? {
            if data.len() > limit - body.len() {
                return Err(Trouble::Lie(format!("an answer of more than {limit} bytes")));
            }
            body.extend_from_slice(&data);
        }
        Ok(body)
    }

    /// Reads the next bytes of a body; `None` if the body is complete.
    pub(crate) async fn next(
        &self,
        response: &mut Response<Incoming>,
    ) -> Result<Option<Bytes>, Trouble> {
        loop {
            let frame = tokio::time::timeout(self.patience, response.frame()).await;
            let frame = frame.map_err(|_| {
                Trouble::Broken(format!("the server was silent for {:?}", self.patience))
            })?;
            match frame {
                None => return Ok(None),
                Some(Err(error)) => return Err(Trouble::Broken(deepest(&error))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    fn url(&self, path: &str) -> Result<Url, Trouble> {
        let text = format!("{}{path}", self.endpoint);
        Url::parse(&text).map_err(|_| Trouble::Lie(format!("{text} is no address")))
    }

    async fn send(
        &self,
        method: Method,
        url: &Url,
        start: Option<u64>,
    ) -> Result<Response<Incoming>, Trouble> {
        let uri: Uri =
            url.as_str().parse().map_err(|_| Trouble::Lie(format!("{url} is no address")))?;
        let mut request = Request::builder()
            .method(method)
            .header(USER_AGENT, concat!("forebay/", env!("CARGO_PKG_VERSION")))
            // Size and ETag have to be those of the uncompressed file.
            .header(ACCEPT_ENCODING, "identity");
        if let Some(start) = start {
            request = request.header(RANGE, format!("bytes={start}-"));
        }
        // The token is only for the hub. Links to other servers contain separate credentials.
        if let Some(token) = &self.token
            && self.origin.as_ref() == Some(&url.origin())
        {
            request = request.header(AUTHORIZATION, token);
        }
        if url.scheme() == "http"
            && let Some(proxy) = self.proxies.intercept(&uri)
            && let Some(auth) = proxy.basic_auth()
        {
            request = request.header(PROXY_AUTHORIZATION, auth);
        }
        let request = request
            .uri(uri)
            .body(Empty::new())
            .map_err(|_| Trouble::Lie(format!("{url} is no address")))?;
        let answer = tokio::time::timeout(self.patience * 2, self.http.request(request)).await;
        let host = url.host_str().unwrap_or_default();
        let response = answer
            .map_err(|_| Trouble::Broken(format!("{host} did not answer")))?
            .map_err(|error| Trouble::Broken(format!("{host}: {}", deepest(&error))))?;
        let encoding = response.headers().get(CONTENT_ENCODING);
        if encoding.is_some_and(|encoding| !encoding.as_bytes().eq_ignore_ascii_case(b"identity")) {
            return Err(Trouble::Lie(format!(
                "{host} answers in an encoding that was not requested"
            )));
        }
        Ok(response)
    }
}

/// Returns the URL to which `response` redirects; `None` if `response` is not a redirect.
fn redirect(response: &Response<Incoming>, from: &Url) -> Result<Option<Url>, Trouble> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let location = header(response, LOCATION)
        .ok_or_else(|| Trouble::Lie(format!("{} redirects without an address", host(from))))?;
    let to = from
        .join(location)
        .map_err(|_| Trouble::Lie(format!("{} redirects to {location:?}", host(from))))?;
    let fits = to.scheme() == "https" || (to.scheme() == "http" && from.scheme() == "http");
    if !fits || to.host().is_none() {
        return Err(Trouble::Lie(format!(
            "{} redirects to an address that begins with {}:, which is not followed",
            host(from),
            to.scheme()
        )));
    }
    Ok(Some(to))
}

fn host(url: &Url) -> &str {
    url.host_str().unwrap_or_default()
}

fn endless(url: &Url) -> Trouble {
    Trouble::Lie(format!("{} redirects too often", host(url)))
}

fn accepted(response: Response<Incoming>) -> Result<Response<Incoming>, Trouble> {
    if matches!(response.status(), StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
        return Ok(response);
    }
    let text = |name| header(&response, HeaderName::from_static(name)).map(str::to_owned);
    let seconds = header(&response, RETRY_AFTER).and_then(|seconds| seconds.parse().ok());
    Err(Trouble::Status(Refusal {
        status: response.status().as_u16(),
        code: text("x-error-code"),
        message: text("x-error-message"),
        retry_after: seconds.map(Duration::from_secs),
    }))
}

/// Returns a header as text; `None` if it is missing or not text.
pub(crate) fn header(response: &Response<Incoming>, name: HeaderName) -> Option<&str> {
    response.headers().get(name)?.to_str().ok()
}
