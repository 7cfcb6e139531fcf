//! A lean HTTP/1.1 client for streams. It keeps connections alive, and parses responses only as far
//! as measuring times requires.
//!
//! ```text
//! let client = Client::new(Target::new(backend, &ServerFlags)?, timeout);       // one server and one route
//! let body = options.body(backend, &item)?;                                     // RequestOptions: model, stream, stop, extra, ...
//! let reply = client.send(body, expected_chunks, clock, &live).await;           // never fails: a failure is in the reply
//! let (record, exact) = reply.into_record(intended_us, &asked);                 // after the run: decodes the text
//! ```
//!
//! `run::drive` sends many requests by a schedule or at a fixed concurrency, and returns all
//! replies.

mod backend;
mod link;
mod load;
mod reply;
mod scan;
mod sse;
mod target;
mod wire;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http::Method;
use serde_json::Value;

pub use backend::Backend;
pub(crate) use backend::{Dialect, RequestOptions};
pub(crate) use load::rest;
pub(crate) use reply::{PlannedRequest, Reply};
pub use target::ServerFlags;
pub(crate) use target::Target;

use link::{Answer, BROKE, Link};
use sse::Lines;

const OK: u16 = 200;

/// A clock in microseconds from the start of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock(Instant);

impl Clock {
    /// Starts the clock.
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since the clock's start, in microseconds.
    pub(crate) fn now_us(self) -> u64 {
        u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Returns the instant at which the clock shows `elapsed`.
    pub(crate) fn at(self, elapsed: Duration) -> Instant {
        self.0 + elapsed
    }
}

/// Counters of a run, which other threads may read while it runs.
#[derive(Debug, Default)]
pub(crate) struct Live {
    /// The number of requests that were sent.
    pub(crate) sent: AtomicU64,
    /// The number of requests that have finished or failed.
    pub(crate) ended: AtomicU64,
    /// The number of requests that were sent too late.
    pub(crate) late: AtomicU64,
    /// The number of received chunks.
    pub(crate) chunks: AtomicU64,
}

/// Sends requests to one route of one server.
pub(crate) struct Client {
    target: Target,
    timeout: Duration,
    idle: Mutex<Vec<Link>>,
}

impl Client {
    /// Creates a client without connections. A request that takes longer than `timeout` fails.
    pub(crate) fn new(target: Target, timeout: Duration) -> Self {
        Self { target, timeout, idle: Mutex::default() }
    }

    /// The server and the measured route.
    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Sends a request and reads the whole response. Errors are stored in the reply.
    pub(crate) async fn send(
        &self,
        body: Bytes,
        expected_chunks: usize,
        clock: Clock,
        live: &Live,
    ) -> Reply {
        let dialect = self.target.backend.dialect();
        let mut reply = Reply::new(dialect, clock.now_us(), expected_chunks);
        live.sent.fetch_add(1, Ordering::Relaxed);
        let exchange = self.exchange(body, &mut reply, clock, live);
        let failure = match tokio::time::timeout(self.timeout, exchange).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(format!("{error:#}")),
            Err(_) => Some(format!("no complete answer within {} s", self.timeout.as_secs_f64())),
        };
        if let Some(failure) = failure {
            reply.end_us = clock.now_us();
            reply.fail(failure);
        }
        live.ended.fetch_add(1, Ordering::Relaxed);
        reply
    }

    async fn exchange(
        &self,
        body: Bytes,
        reply: &mut Reply,
        clock: Clock,
        live: &Live,
    ) -> Result<()> {
        let answer = self.request(&Method::POST, &self.target.route, body).await?;
        if answer.head.status == OK && answer.head.is_stream {
            return self.read_stream(answer, reply, clock, live).await;
        }
        let status = answer.head.status;
        let body = self.read_whole(answer).await?;
        reply.end_us = clock.now_us();
        if status == OK {
            reply.whole(&body, reply.end_us);
            live.chunks.fetch_add(reply.chunk_count() as u64, Ordering::Relaxed);
        } else {
            reply.refused(status, &body);
        }
        Ok(())
    }

    /// Sends a request to another route of the server, and returns the body of the response.
    ///
    /// # Errors
    /// The server does not respond, or not with a success status.
    pub(crate) async fn call(&self, method: Method, path: &str) -> Result<Vec<u8>> {
        let (status, body) = self.status(method, path).await?;
        if !(200..300).contains(&status) {
            bail!("{path} answered HTTP {status}");
        }
        Ok(body)
    }

    /// The first model in the server's list, and the `root` that the server reports for it.
    ///
    /// # Errors
    /// The server does not respond, or lists no model.
    pub(crate) async fn first_model(&self) -> Result<(String, Option<String>)> {
        let body = self.call(Method::GET, "/v1/models").await?;
        let list: Value = serde_json::from_slice(&body).context("/v1/models is not JSON")?;
        let first = &list["data"][0];
        let id = first["id"].as_str().context("/v1/models lists no model")?;
        Ok((id.to_owned(), first["root"].as_str().map(str::to_owned)))
    }

    /// Sends a request as [`Client::call`] does, but accepts every status.
    ///
    /// # Errors
    /// The server does not respond.
    pub(crate) async fn status(&self, method: Method, path: &str) -> Result<(u16, Vec<u8>)> {
        let path = self.target.path(path);
        let exchange = async {
            let answer = self.request(&method, &path, Bytes::new()).await?;
            anyhow::Ok((answer.head.status, self.read_whole(answer).await?))
        };
        tokio::time::timeout(self.timeout, exchange)
            .await
            .with_context(|| format!("{path} did not answer in time"))?
    }

    /// Sends a request and waits for the head of the response.
    ///
    /// A server may close an idle connection just when it is reused. So a request whose reused
    /// connection broke before any response is sent again on a new connection.
    async fn request(&self, method: &Method, path: &str, body: Bytes) -> Result<Answer> {
        let head = self.target.head(method, path, body.len());
        if let Some(link) = self.idle_link()
            && let Ok(answer) = link.send(head.clone(), body.clone()).await
        {
            return Ok(answer);
        }
        let link = Link::open(&self.target.addresses).await.context("cannot connect")?;
        link.send(head, body).await.context(BROKE)
    }

    /// Returns an idle connection that the server has not closed.
    fn idle_link(&self) -> Option<Link> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        std::iter::from_fn(|| idle.pop()).find(Link::is_idle)
    }

    fn keep(&self, answer: Answer) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.extend(answer.into_link());
    }

    async fn read_stream(
        &self,
        mut answer: Answer,
        reply: &mut Reply,
        clock: Clock,
        live: &Live,
    ) -> Result<()> {
        let mut lines = Lines::default();
        loop {
            let before = reply.chunk_count();
            let mut now = None;
            let more = answer
                .next(|piece| {
                    let now = *now.get_or_insert_with(|| clock.now_us());
                    lines.feed(piece, |payload| reply.event(payload, now));
                })
                .await?;
            reply.end_us = now.unwrap_or(reply.end_us);
            live.chunks.fetch_add((reply.chunk_count() - before) as u64, Ordering::Relaxed);
            if !more {
                break;
            }
        }
        reply.end_of_stream();
        self.keep(answer);
        Ok(())
    }

    async fn read_whole(&self, mut answer: Answer) -> Result<Vec<u8>> {
        let mut whole = Vec::new();
        while answer.next(|piece| whole.extend_from_slice(piece)).await? {}
        self.keep(answer);
        Ok(whole)
    }
}
