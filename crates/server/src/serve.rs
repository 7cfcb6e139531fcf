//! The accept loop and the way down.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::ServiceExt;

use crate::line::{Line, LineIo};
use crate::routes;
use crate::stall::Stalling;
use crate::state::AppState;

/// How long connections may take to end once no request is alive.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The same, once there is no more patience.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long to wait after the system refused a connection, most likely for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `shutdown` is ready, then drains: new requests get 503 while the running ones have `drain_timeout` to finish. What is
/// left then, or as soon as `hurry` is ready, is aborted, each with its terminal event; connections are closed, and this returns. The engine
/// is left drained, not stopped.
///
/// # Errors
/// None once it runs; the listener's address cannot be read.
pub async fn serve(
    listener: TcpListener,
    state: AppState,
    shutdown: impl Future<Output = ()>,
    hurry: impl Future<Output = ()>,
) -> io::Result<()> {
    let state = state.shared();
    tracing::info!(address = %listener.local_addr()?, "listening");
    let mut connections = Connections {
        router: routes::router(Arc::clone(state)),
        header_timeout: state.config.header_timeout,
        send_timeout: state.config.send_timeout,
        graceful: GracefulShutdown::new(),
        tasks: JoinSet::new(),
    };
    connections.accept_until(&listener, shutdown).await;

    state.engine.drain();
    tracing::info!(timeout = ?state.config.drain_timeout, "draining");
    tokio::pin!(hurry);
    let mut hurried = false;
    let drained = async {
        tokio::select! {
            () = state.idle() => return,
            () = sleep(state.config.drain_timeout) => {
                tracing::warn!("requests are still running after the drain timeout: aborting them");
            }
            () = &mut hurry => {
                tracing::warn!("told to stop at once: aborting the requests that are still running");
                hurried = true;
            }
        }
        state.abort_all();
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
    Ok(())
}

/// All open connections. Dropping it cuts them.
struct Connections {
    router: Router,
    header_timeout: Duration,
    send_timeout: Duration,
    graceful: GracefulShutdown,
    tasks: JoinSet<()>,
}

impl Connections {
    async fn accept_until(&mut self, listener: &TcpListener, end: impl Future<Output = ()>) {
        tokio::pin!(end);
        loop {
            tokio::select! {
                () = &mut end => return,
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => self.spawn(stream),
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(ended) = self.tasks.join_next() => match ended {
                    // What the connection held has been dropped: its request is aborted.
                    Err(error) if error.is_panic() => {
                        tracing::error!(%error, "a connection's task panicked");
                    }
                    _ => {}
                }
            }
        }
    }

    fn spawn(&mut self, stream: TcpStream) {
        // Events are small and each matters; failing to say so only costs latency.
        let _ = stream.set_nodelay(true);
        let line = Line::new(stream);
        let io = TokioIo::new(Stalling::new(LineIo(Arc::clone(&line)), self.send_timeout));
        let service = self.router.clone().map_request(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(Arc::clone(&line));
            request
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.header_timeout)
            .serve_connection(io, TowerToHyperService::new(service));
        let connection = self.graceful.watch(connection);
        self.tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended early");
            }
        });
    }

    async fn close(self, patience: impl Future<Output = ()>) {
        let Self { graceful, mut tasks, .. } = self;
        tokio::select! {
            () = graceful.shutdown() => {}
            () = patience => tracing::warn!("some connections did not end in time and are cut"),
        }
        tasks.shutdown().await;
    }
}
