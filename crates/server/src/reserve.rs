//! Answers that need no free connection: the liveness of the process, and the state of the server.
//!
//! The main listener has a few places beyond its limit. Their clients are refused, unless they ask
//! for `/livez` or `/health`. A health listener (`--health-port`) also has a thread of its own for
//! nothing else.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use forebay_api::ApiError;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::connection::{self, Setup};
use crate::places::Places;
use crate::reply::Failure;
use crate::routes::info;
use crate::socket::Listener;
use crate::state::{AppState, Shared};
use crate::tls::Tls;

/// Connections beyond the limit, and at most at a health listener.
pub(crate) const RESERVE: usize = 64;
/// The longest time for a head to arrive there.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time in which a client of a reserve place may take no bytes.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

fn health(state: Shared) -> Router<Shared> {
    Router::new()
        .route("/livez", get(info::live))
        .route("/health", get(info::health))
        .with_state(state)
}

/// The setup of connections beyond the limit.
pub(crate) fn setup(state: Shared, tls: Option<Tls>) -> Setup {
    let limit = state.config.max_connections;
    let full = move || async move {
        let reason = format!("the server has its {limit} connections (--max-connections)");
        Failure(ApiError::Unavailable { reason, code: "too_many_connections" })
    };
    let router = health(Arc::clone(&state)).fallback(full).with_state(state);
    Setup {
        router,
        header_timeout: HEADER_TIMEOUT,
        send_timeout: SEND_TIMEOUT,
        keep_alive: false,
        tls,
    }
}

/// A thread that answers `/livez`, `/health` and `/metrics`. To drop it ends it.
#[derive(Debug)]
pub struct HealthThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HealthThread {
    /// Answers clients of `listener`, in plain HTTP.
    ///
    /// # Errors
    /// The system has no room for a thread, or the listener can't be polled.
    pub fn start(listener: TcpListener, state: &AppState) -> io::Result<Self> {
        let state = Arc::clone(state.shared());
        let guard = state.guard.clone();
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _entered = runtime.enter();
            Listener::from(tokio::net::TcpListener::from_std(listener)?)
        };
        let (stop, stopped) = oneshot::channel();
        let mut work = Some(answer(listener, state, stopped));
        let run = move || {
            if let Some(work) = work.take() {
                runtime.block_on(work);
            }
        };
        let thread = guard.spawn("health", run)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for HealthThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic was reported by its guard.
            let _ = thread.join();
        }
    }
}

async fn answer(listener: Listener, state: Shared, mut stopped: oneshot::Receiver<()>) {
    let router = health(Arc::clone(&state)).route("/metrics", get(info::metrics));
    let router = router.with_state(state);
    let setup = Setup {
        router,
        header_timeout: HEADER_TIMEOUT,
        send_timeout: SEND_TIMEOUT,
        keep_alive: true,
        tls: None,
    };
    let (places, graceful) = (Places::new(RESERVE), GracefulShutdown::new());
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            // Nothing is ever sent: the other end is dropped.
            _ = &mut stopped => return,
            accepted = listener.accept() => match accepted {
                Ok((socket, remote)) => if let Some(seat) = places.take() {
                    let watcher = graceful.watcher();
                    tasks.spawn(connection::run(setup.clone(), socket, remote, seat, watcher));
                },
                Err(error) => {
                    tracing::warn!(%error, "a health connection could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            },
            Some(_) = tasks.join_next() => {}
        }
    }
}
