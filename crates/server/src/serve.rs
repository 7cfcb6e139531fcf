//! Serving a listener, and draining at shutdown.

use std::io;
use std::time::Duration;

use axum::Router;
use forebay_http::{ConnectionSetup, Connections, Guard, Listener};
use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::computing;
use crate::config::ServerConfig;
use crate::fleet::ModelServer;
use crate::reserve::{self, RESERVE};
use crate::routes;
use crate::state::AppState;

/// How long connections may take to close after the last request.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long connections may take to close after their requests were aborted.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

/// A server of one model, or of several.
#[derive(Clone)]
pub enum AnyServer {
    /// A server of one model.
    One(AppState),
    /// A server of several models.
    Several(ModelServer),
}

impl From<AppState> for AnyServer {
    fn from(state: AppState) -> Self {
        Self::One(state)
    }
}

impl From<ModelServer> for AnyServer {
    fn from(server: ModelServer) -> Self {
        Self::Several(server)
    }
}

impl AnyServer {
    pub(crate) fn config(&self) -> &ServerConfig {
        match self {
            Self::One(state) => &state.shared().config,
            Self::Several(server) => &server.0.config,
        }
    }

    pub(crate) fn guard(&self) -> &Guard {
        match self {
            Self::One(state) => &state.shared().guard,
            Self::Several(server) => &server.0.guard,
        }
    }

    fn router(&self) -> Router {
        match self {
            Self::One(state) => routes::router(state.shared().clone()),
            Self::Several(server) => routes::fleet::router(server.0.clone()),
        }
    }

    /// Starts computing batches, if the server has a store for them.
    fn compute_batches(&self) -> Option<AbortHandle> {
        let Self::One(state) = self else { return None };
        let state = state.shared();
        state.batches.as_ref().map(|store| computing::start(store, state))
    }

    fn drain(&self) {
        match self {
            Self::One(state) => state.shared().engine.drain(),
            Self::Several(server) => server.0.drain(),
        }
    }

    async fn idle(&self) {
        match self {
            Self::One(state) => state.shared().idle().await,
            Self::Several(server) => server.0.idle().await,
        }
    }

    fn abort_all(&self) {
        match self {
            Self::One(state) => state.shared().abort_all(),
            Self::Several(server) => server.0.abort_all(),
        }
    }
}

/// Serves until `shutdown` completes, and then drains. New requests get 503, and running requests
/// have `drain_timeout` to finish. Requests that still run then, or when `hurry` completes, are
/// aborted, each with a terminal event. Then connections are closed. The engine is left drained,
/// not stopped.
///
/// # Errors
/// The spare file descriptor cannot be opened. Later there are no errors.
pub async fn serve(
    listener: impl Into<Listener>,
    server: impl Into<AnyServer>,
    shutdown: impl Future<Output = ()>,
    hurry: impl Future<Output = ()>,
) -> io::Result<()> {
    let listener = listener.into();
    let server = server.into();
    let config = server.config();
    tracing::info!(limit = config.max_connections, "listening");
    let mut connections = connections(&server)?;
    let computing = server.compute_batches();
    connections.accept_until(&listener, shutdown).await;

    server.drain();
    tracing::info!(timeout = ?config.drain_timeout, "draining");
    tokio::pin!(hurry);
    let mut hurried = false;
    let drained = async {
        tokio::select! {
            () = server.idle() => return,
            () = sleep(config.drain_timeout) => {
                tracing::warn!("requests are still running after the drain timeout: aborting them");
            }
            () = &mut hurry => {
                tracing::warn!("told to stop at once: aborting the requests that are still running");
                hurried = true;
            }
        }
        server.abort_all();
    };
    connections.accept_until(&listener, drained).await;
    drop(listener);
    let patience = async {
        tokio::select! {
            () = sleep(CLOSE_TIMEOUT) => {}
            () = async { if !hurried { hurry.await } } => sleep(CUT_TIMEOUT).await,
        }
    };
    connections.close(patience).await;
    // Batch requests without a response are computed after the next start.
    computing.iter().for_each(AbortHandle::abort);
    Ok(())
}

/// Creates the set of connections. Connections beyond its limit get an error, or the server's
/// health.
fn connections(server: &AnyServer) -> io::Result<Connections> {
    let config = server.config();
    let usual = ConnectionSetup {
        router: server.router(),
        header_timeout: config.receive_timeout,
        send_timeout: config.send_timeout,
        keep_alive: true,
        tls: config.tls.clone(),
    };
    let reserve = reserve::setup(server);
    let kinds = [(config.max_connections, usual), (RESERVE, reserve)];
    Connections::new("a connection", kinds).with_spare()
}
