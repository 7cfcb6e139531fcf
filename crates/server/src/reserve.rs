//! Responses that need no free connection: whether the process is alive, and the state of the
//! server.
//!
//! The main listener accepts a few connections beyond its limit. They receive an error, except for
//! requests to `/livez` or `/health`. A health listener (`--health-port`) has a separate thread.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use forebay_api::ApiError;
use forebay_http::{ConnectionSetup, Connections, ListenerThread};

use crate::reply::Failure;
use crate::routes::fleet::lists;
use crate::routes::info;
use crate::serve::AnyServer;

/// The maximum number of connections beyond the limit, and of connections at a health listener.
pub(crate) const RESERVE: usize = 64;
/// The time limit for the head of a request on these connections.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a client of these connections may read nothing while output waits.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns the routes for the process and its health.
fn health(server: &AnyServer) -> Router {
    let live = Router::new().route("/livez", get(info::live));
    live.merge(match server {
        AnyServer::One(state) => {
            Router::new().route("/health", get(info::health)).with_state(Arc::clone(state.shared()))
        }
        AnyServer::Several(server) => {
            Router::new().route("/health", get(lists::health)).with_state(Arc::clone(&server.0))
        }
    })
}

fn metrics(server: &AnyServer) -> Router {
    const PATH: &str = "/metrics";
    match server {
        AnyServer::One(state) => {
            Router::new().route(PATH, get(info::metrics)).with_state(Arc::clone(state.shared()))
        }
        AnyServer::Several(server) => {
            Router::new().route(PATH, get(lists::metrics)).with_state(Arc::clone(&server.0))
        }
    }
}

/// Returns the setup of connections beyond the limit.
pub(crate) fn setup(server: &AnyServer) -> ConnectionSetup {
    let (limit, tls) = (server.config().max_connections, server.config().tls.clone());
    let full = move || async move {
        let reason = format!("all {limit} connections are in use (--max-connections)");
        Failure(ApiError::Unavailable { reason, code: "too_many_connections" })
    };
    let router = health(server).fallback(full);
    ConnectionSetup {
        router,
        header_timeout: HEADER_TIMEOUT,
        send_timeout: SEND_TIMEOUT,
        keep_alive: false,
        tls,
    }
}

/// A thread that serves `/livez`, `/health` and `/metrics`. Dropping this stops the thread.
#[derive(Debug)]
pub struct HealthThread {
    _thread: ListenerThread,
}

impl HealthThread {
    /// Serves clients of `listener`, in plain HTTP.
    ///
    /// # Errors
    /// The system can't start a thread, or the listener can't be polled.
    pub fn start(listener: TcpListener, server: impl Into<AnyServer>) -> io::Result<Self> {
        let server = server.into();
        let setup = ConnectionSetup {
            router: health(&server).merge(metrics(&server)),
            header_timeout: HEADER_TIMEOUT,
            send_timeout: SEND_TIMEOUT,
            keep_alive: true,
            tls: None,
        };
        let connections = Connections::new("a health connection", [(RESERVE, setup)]);
        let thread = ListenerThread::start("health", listener, connections, server.guard())?;
        Ok(Self { _thread: thread })
    }
}
