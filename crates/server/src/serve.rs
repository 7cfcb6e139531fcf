//! The service of a listener, and its drain.

use std::io;
use std::time::Duration;

use forebay_http::{ConnectionSetup, Connections, Listener};
use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::computing;
use crate::reserve::{self, RESERVE};
use crate::routes;
use crate::state::{AppState, Shared};

/// The time that connections may take to end once no request is alive.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time that connections may take to end once requests were ended at once.
const CUT_TIMEOUT: Duration = Duration::from_secs(1);

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
    let mut connections = connections(state)?;
    let computing = state.batches.as_ref().map(|store| computing::start(store, state));
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
    // What it has not answered is computed after the next start.
    computing.iter().for_each(AbortHandle::abort);
    Ok(())
}

/// The connections that are served, and behind them those beyond the limit, which get an error or
/// the server's health.
fn connections(state: &Shared) -> io::Result<Connections> {
    let config = &state.config;
    let usual = ConnectionSetup {
        router: routes::router(state.clone()),
        header_timeout: config.receive_timeout,
        send_timeout: config.send_timeout,
        keep_alive: true,
        tls: config.tls.clone(),
    };
    let reserve = reserve::setup(state.clone(), config.tls.clone());
    let kinds = [(config.max_connections, usual), (RESERVE, reserve)];
    Connections::new("a connection", kinds).with_spare()
}
