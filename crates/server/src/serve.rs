//! The accept loop, and the shutdown.

use std::fs::File;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use rustix::io::Errno;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::client::Remote;
use crate::connection::{self, Setup};
use crate::places::Places;
use crate::reserve::{self, RESERVE};
use crate::routes;
use crate::socket::{Listener, Socket};
use crate::state::{AppState, Shared};

/// The time that connections may take to end once no request is alive.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that connections may take to end once requests were ended at once.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);
/// The pause after the system refused a connection for a reason that is not the client's.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The file that is opened only to be closed.
const NOTHING: &str = "/dev/null";

/// Serves until `shutdown` is ready, and then drains. New requests get 503, and running ones have
/// `drain_timeout` to finish. Requests that are left then, or when `hurry` is ready, are aborted,
/// each with its last event. Connections are closed, and this returns. The engine is left drained,
/// not stopped.
///
/// # Errors
/// The spare descriptor cannot be opened. There are no errors later.
pub async fn serve(
    listener: impl Into<Listener>,
    state: AppState,
    shutdown: impl Future<Output = ()>,
    hurry: impl Future<Output = ()>,
) -> io::Result<()> {
    let listener = listener.into();
    let state = state.shared();
    tracing::info!(limit = state.config.max_connections, "listening");
    let mut connections = Connections::new(state)?;
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
    /// The connections that are served, and their setup.
    usual: (Arc<Places>, Setup),
    /// The connections beyond the limit, which get an error or the server's health.
    reserve: (Arc<Places>, Setup),
    /// The file is closed for a moment when there are no descriptors left: a waiting connection can
    /// then be turned away.
    spare: Option<File>,
    graceful: GracefulShutdown,
    tasks: JoinSet<()>,
}

impl Connections {
    fn new(state: &Shared) -> io::Result<Self> {
        let config = &state.config;
        let usual = Setup {
            router: routes::router(Arc::clone(state)),
            header_timeout: config.receive_timeout,
            send_timeout: config.send_timeout,
            keep_alive: true,
            tls: config.tls.clone(),
        };
        let reserve = reserve::setup(Arc::clone(state), config.tls.clone());
        Ok(Self {
            usual: (Places::new(config.max_connections), usual),
            reserve: (Places::new(RESERVE), reserve),
            spare: Some(File::open(NOTHING)?),
            graceful: GracefulShutdown::new(),
            tasks: JoinSet::new(),
        })
    }

    async fn accept_until(&mut self, listener: &Listener, end: impl Future<Output = ()>) {
        let mut end = pin!(end);
        loop {
            tokio::select! {
                () = &mut end => return,
                accepted = listener.accept() => match accepted {
                    Ok((socket, remote)) => self.spawn(socket, remote),
                    Err(error) => self.recover(listener, &error).await,
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

    fn spawn(&mut self, socket: Socket, remote: Remote) {
        let kinds = [&self.usual, &self.reserve];
        let found = kinds.into_iter().find_map(|(places, setup)| Some((places.take()?, setup)));
        let Some((seat, setup)) = found else { return };
        let connection =
            connection::run(setup.clone(), socket, remote, seat, self.graceful.watcher());
        self.tasks.spawn(connection);
    }

    /// Goes on after the system gave an error in place of a connection.
    async fn recover(&mut self, listener: &Listener, error: &io::Error) {
        let code = error.raw_os_error().map(Errno::from_raw_os_error);
        if matches!(code, Some(Errno::MFILE | Errno::NFILE)) {
            // The listener stays ready as long as somebody waits there: without this, the loop
            // would turn and turn.
            self.usual.0.shed();
            if self.spare.take().is_some() {
                // Dropped at once.
                let _ = poll_fn(|context| Poll::Ready(listener.poll_accept(context))).await;
                tracing::debug!("no descriptor left: a connection was turned away");
            }
            self.spare = File::open(NOTHING).ok();
            if self.spare.is_some() {
                return;
            }
        }
        tracing::warn!(%error, "a connection could not be accepted");
        sleep(ACCEPT_PAUSE).await;
    }

    async fn close(self, patience: impl Future<Output = ()>) {
        let Self { graceful, mut tasks, usual, reserve, .. } = self;
        // hyper waits for the rest of a head that has begun, and nobody else for the end of a
        // handshake.
        usual.0.shed_all();
        reserve.0.shed_all();
        tokio::select! {
            () = graceful.shutdown() => {}
            () = patience => tracing::warn!("some connections did not end in time and are cut"),
        }
        tasks.shutdown().await;
    }
}
