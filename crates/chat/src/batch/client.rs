//! One request of a batch, which is retried while the server is overloaded or unreachable.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use forebay_batches::{ANSWER, BatchRequest, LineFault};
use http::header::RETRY_AFTER;
use http::{HeaderMap, Method, StatusCode};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::sleep;

use super::SMALL_ANSWER;
use crate::link::{Connection, Link, refusal};

/// The maximum number of tries for a server that does not respond, or reports that it is
/// unavailable.
const TRIES: u32 = 10;
/// The wait before the second try. Each further wait is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A server, and its idle connections.
pub(super) struct Client {
    link: Link,
    idle: Mutex<Vec<Connection>>,
    /// Permits one large response to be received at a time. The other large responses wait in the
    /// server.
    large: Arc<Semaphore>,
}

/// A response of the server.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) id: Option<String>,
    pub(super) body: Vec<u8>,
    retry_after: Option<Duration>,
    /// The permit of a large response, which is held until the response is written.
    pub(super) large: Option<OwnedSemaphorePermit>,
}

impl Client {
    pub(super) fn new(link: Link) -> Self {
        Self { link, idle: Mutex::default(), large: Arc::new(Semaphore::new(1)) }
    }

    /// Sends a request, and retries until there is a response. An overloaded server is retried for
    /// as long as it reports overload. If a healthy server does not respond to this request, the
    /// request fails.
    ///
    /// # Errors
    /// The server is unavailable, or requires a different key. In both cases the other requests of
    /// the batch would fail too.
    pub(super) async fn ask(&self, request: &BatchRequest) -> Result<Result<Reply, LineFault>> {
        let (mut tries, mut wait) = (0, FIRST_WAIT);
        loop {
            let (error, pause) = match self.try_once(request).await {
                Ok(Ok(reply)) => match reply.status {
                    StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                        bail!("{}", reply.refusal());
                    }
                    StatusCode::TOO_MANY_REQUESTS => {
                        tries = 0;
                        (None, reply.retry_after)
                    }
                    StatusCode::SERVICE_UNAVAILABLE => {
                        tries += 1;
                        (Some(anyhow!("{}", reply.refusal())), reply.retry_after)
                    }
                    _ => return Ok(Ok(reply)),
                },
                Ok(Err(fault)) => return Ok(Err(fault)),
                Err(error) => {
                    tries += 1;
                    (Some(error), None)
                }
            };
            if let Some(error) = error
                && tries >= TRIES
            {
                if !self.is_alive().await {
                    return Err(error);
                }
                let message = format!("no answer in {TRIES} tries: {error:#}");
                return Ok(Err(LineFault { code: "no_answer", message, param: None }));
            }
            sleep(pause.unwrap_or(wait).min(LONGEST_WAIT)).await;
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    /// True if the server responds to its health check, and not with a server error.
    async fn is_alive(&self) -> bool {
        let asked = self.link.ask(Method::GET, "/health").await;
        asked.is_ok_and(|(status, _)| !status.is_server_error())
    }

    async fn try_once(&self, request: &BatchRequest) -> Result<Result<Reply, LineFault>> {
        let mut connection = self.connection().await?;
        let body = Some(request.body.clone());
        let sent = self.link.send_on(&mut connection, Method::POST, request.path, body);
        let response = sent.await?;
        let status = response.status();
        let text = |name: &str| text(response.headers(), name);
        let id = text("x-request-id");
        let retry_after = text(RETRY_AFTER.as_str()).and_then(|seconds| seconds.parse().ok());
        let retry_after = retry_after.map(Duration::from_secs);
        let Some((body, large)) = self.whole(response.into_body()).await? else {
            let message = format!("the answer has more than {ANSWER} bytes");
            return Ok(Err(LineFault { code: "answer_too_large", message, param: None }));
        };
        self.idle().push(connection);
        Ok(Ok(Reply { status, id, body, retry_after, large }))
    }

    /// Reads a response body; `None`: it is too large.
    async fn whole(
        &self,
        mut body: Incoming,
    ) -> Result<Option<(Vec<u8>, Option<OwnedSemaphorePermit>)>> {
        let (mut whole, mut large) = (Vec::new(), None);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| anyhow!("the answer broke off: {error}"))?;
            let Ok(data) = frame.into_data() else { continue };
            if whole.len() + data.len() > ANSWER {
                return Ok(None);
            }
            if whole.len() + data.len() > SMALL_ANSWER && large.is_none() {
                large = Some(Arc::clone(&self.large).acquire_owned().await?);
            }
            whole.extend_from_slice(&data);
        }
        Ok(Some((whole, large)))
    }

    /// Returns an open connection: an idle one if there is any.
    async fn connection(&self) -> Result<Connection> {
        loop {
            let Some(mut idle) = self.idle().pop() else { return self.link.connect().await };
            if idle.ready().await.is_ok() {
                return Ok(idle);
            }
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reply {
    fn refusal(&self) -> String {
        let answer = serde_json::from_slice(&self.body).unwrap_or(Value::Null);
        refusal(self.status, &answer)
    }
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixListener;

    use super::*;

    /// A server that sends these responses in turn, and then repeats the last. An empty response
    /// closes the connection. `health` is the status of its health check.
    struct Scripted {
        client: Client,
        /// The number of requests, and the number of connections.
        counts: Arc<[AtomicUsize; 2]>,
        _folder: TempDir,
    }

    impl Scripted {
        fn start(responses: Vec<String>, health: &'static str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            let listener = UnixListener::bind(&path).unwrap();
            let counts = Arc::<[AtomicUsize; 2]>::default();
            let responses = Arc::new(responses);
            let seen = Arc::clone(&counts);
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    seen[1].fetch_add(1, Ordering::Relaxed);
                    let (seen, responses) = (Arc::clone(&seen), Arc::clone(&responses));
                    tokio::spawn(async move {
                        let mut text = Vec::new();
                        while stream.read_buf(&mut text).await.is_ok_and(|read| read > 0) {
                            let response = if text.starts_with(b"GET") {
                                response(health, "{}")
                            } else if text.ends_with(b"{}") {
                                let at = seen[0].fetch_add(1, Ordering::Relaxed);
                                responses[at.min(responses.len() - 1)].clone()
                            } else {
                                continue;
                            };
                            text.clear();
                            if response.is_empty() {
                                return;
                            }
                            stream.write_all(response.as_bytes()).await.unwrap();
                        }
                    });
                }
            });
            Self { client: Client::new(Link::unix(path)), counts, _folder: folder }
        }

        async fn ask(&self) -> Result<Result<Reply, LineFault>> {
            let body = Bytes::from_static(b"{}");
            self.client.ask(&BatchRequest { path: "/v1/completions", body }).await
        }

        fn count(&self, at: usize) -> usize {
            self.counts[at].load(Ordering::Relaxed)
        }
    }

    const WELL: &str = "200 OK";
    const AWAY: &str = "503 Service Unavailable";

    fn response(status: &str, body: &str) -> String {
        let length = body.len();
        let head = "retry-after: 3600\r\nx-request-id: r\r\ncontent-length";
        format!("HTTP/1.1 {status}\r\n{head}: {length}\r\n\r\n{body}")
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_server_is_asked_for_as_long_as_it_takes() {
        let mut responses = vec![response("429 Too Many Requests", "{}"); 30];
        responses.extend([String::new(), response(AWAY, "{}"), response("400 Bad Request", "[1]")]);
        let server = Scripted::start(responses, WELL);
        let reply = server.ask().await.unwrap().ok().unwrap();
        assert_eq!((reply.status, reply.id.as_deref()), (StatusCode::BAD_REQUEST, Some("r")));
        // An error status counts as a response, and the connection is reused.
        assert_eq!(reply.body, b"[1]");
        assert_eq!((server.count(0), server.count(1)), (33, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_does_not_serve_ends_the_run() {
        for trouble in [response(AWAY, "{\"error\":{\"message\":\"why\"}}"), String::new()] {
            let server = Scripted::start(vec![trouble.clone()], AWAY);
            assert!(server.ask().await.is_err());
            assert_eq!(server.count(0), TRIES as usize);
            let server = Scripted::start(vec![trouble], WELL);
            let fault = server.ask().await.unwrap().err().unwrap();
            assert_eq!(fault.code, "no_answer");
            assert_eq!(server.count(0), TRIES as usize);
        }
        let server = Scripted::start(vec![response("401 Unauthorized", "{}")], WELL);
        assert!(server.ask().await.err().unwrap().to_string().contains("--api-key"));
        assert_eq!(server.count(0), 1);
    }

    #[tokio::test]
    async fn one_answer_at_a_time_is_large() {
        let large = response(WELL, &"a".repeat(SMALL_ANSWER + 1));
        let server = Scripted::start(vec![large, response(WELL, "{}")], WELL);
        let first = server.ask().await.unwrap().ok().unwrap();
        assert_eq!(server.client.large.available_permits(), 0);
        let second = server.ask().await.unwrap().ok().unwrap();
        assert!(second.large.is_none());
        drop(first);
        assert_eq!(server.client.large.available_permits(), 1);
    }
}
