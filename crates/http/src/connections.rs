//! The accept loop, and closing all connections.

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
use crate::connection::{self, ConnectionSetup};
use crate::places::Places;
use crate::socket::{Listener, Socket};

/// The pause after an accept failed for a reason that the client did not cause.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The file that is opened only to reserve a descriptor.
const NOTHING: &str = "/dev/null";

/// All open connections of a listener. Dropping this closes them.
pub struct Connections {
    /// The name of the listener's connections in logs.
    name: &'static str,
    /// The limit and the setup of each kind of connection. A new connection gets the first kind
    /// that has room.
    kinds: Vec<(Arc<Places>, ConnectionSetup)>,
    spare: Option<Spare>,
    graceful: GracefulShutdown,
    tasks: JoinSet<()>,
}

/// A file that reserves a descriptor. When no descriptors are left, the file is closed for a
/// moment, so that a waiting connection can be accepted and closed.
struct Spare(Option<File>);

impl Connections {
    /// Creates a set without connections, with the limit and the setup of each kind of connection.
    /// Logs call a connection `name`.
    pub fn new(
        name: &'static str,
        kinds: impl IntoIterator<Item = (usize, ConnectionSetup)>,
    ) -> Self {
        let kinds = kinds.into_iter().map(|(places, setup)| (Places::new(places), setup));
        Self {
            name,
            kinds: kinds.collect(),
            spare: None,
            graceful: GracefulShutdown::new(),
            tasks: JoinSet::new(),
        }
    }

    /// Enables closing new connections when there are no descriptors left. Otherwise new
    /// connections wait for a descriptor.
    ///
    /// # Errors
    /// The spare descriptor cannot be opened.
    pub fn with_spare(self) -> io::Result<Self> {
        Ok(Self { spare: Some(Spare(Some(File::open(NOTHING)?))), ..self })
    }

    /// Accepts and serves connections until `end` completes.
    pub async fn accept_until<T>(&mut self, listener: &Listener, end: impl Future<Output = T>) {
        let mut end = pin!(end);
        loop {
            tokio::select! {
                _ = &mut end => return,
                accepted = listener.accept() => match accepted {
                    Ok((socket, remote)) => self.spawn(socket, remote),
                    Err(error) => self.recover(listener, &error).await,
                },
                Some(ended) = self.tasks.join_next() => match ended {
                    // The panic has dropped the connection's state, so its request is aborted.
                    Err(error) if error.is_panic() => {
                        tracing::error!(%error, "a connection's task panicked");
                    }
                    _ => {}
                }
            }
        }
    }

    fn spawn(&mut self, socket: Socket, remote: Remote) {
        let mut kinds = self.kinds.iter();
        let found = kinds.find_map(|(places, setup)| Some((places.take()?, setup)));
        let Some((seat, setup)) = found else { return };
        let connection =
            connection::run(setup.clone(), socket, remote, seat, self.graceful.watcher());
        self.tasks.spawn(connection);
    }

    /// Continues after the system returned an error for an accept.
    async fn recover(&mut self, listener: &Listener, error: &io::Error) {
        let code = error.raw_os_error().map(Errno::from_raw_os_error);
        if let Some(Spare(spare)) = &mut self.spare
            && matches!(code, Some(Errno::MFILE | Errno::NFILE))
        {
            // The listener stays readable while a connection waits, so the loop would spin if no
            // connection were closed.
            if let Some((places, _)) = self.kinds.first() {
                places.shed();
            }
            if spare.take().is_some() {
                // The accepted connection is dropped at once.
                let _ = poll_fn(|context| Poll::Ready(listener.poll_accept(context))).await;
                tracing::debug!("no descriptor left: a connection was turned away");
            }
            *spare = File::open(NOTHING).ok();
            if spare.is_some() {
                return;
            }
        }
        tracing::warn!(%error, "{} could not be accepted", self.name);
        sleep(ACCEPT_PAUSE).await;
    }

    /// Waits for all connections to close, and closes the remaining ones when `patience` completes.
    pub async fn close(self, patience: impl Future<Output = ()>) {
        let Self { graceful, mut tasks, kinds, .. } = self;
        // hyper's shutdown waits for the rest of a head that has begun, but has no time limit for
        // handshakes.
        kinds.iter().for_each(|(places, _)| places.shed_all());
        tokio::select! {
            () = graceful.shutdown() => {}
            () = patience => tracing::warn!("some connections did not end in time and are cut"),
        }
        tasks.shutdown().await;
    }
}
