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

/// The pause after a failed accept that the client did not cause.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A file that is opened only to reserve a descriptor.
const NOTHING: &str = "/dev/null";

/// All open connections of a listener. Dropping it closes them.
pub struct Connections {
    /// The name of the listener's connections in logs.
    name: &'static str,
    /// The places and the setup of each kind of connection. A new connection gets the first free
    /// place.
    kinds: Vec<(Arc<Places>, ConnectionSetup)>,
    spare: Option<Spare>,
    graceful: GracefulShutdown,
    tasks: JoinSet<()>,
}

/// A file that is closed for a moment when there are no descriptors left, so that a waiting
/// connection can be refused.
struct Spare(Option<File>);

impl Connections {
    /// No connections, with this many places of each kind. Logs call a connection `name`.
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

    /// Enables refusing connections when there are no descriptors left. Without this, they wait
    /// until there is one.
    ///
    /// # Errors
    /// The spare descriptor cannot be opened.
    pub fn with_spare(self) -> io::Result<Self> {
        Ok(Self { spare: Some(Spare(Some(File::open(NOTHING)?))), ..self })
    }

    /// Accepts and answers connections until `end` is ready.
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

    /// Continues after the system returned an error instead of a connection.
    async fn recover(&mut self, listener: &Listener, error: &io::Error) {
        let code = error.raw_os_error().map(Errno::from_raw_os_error);
        if let Some(Spare(spare)) = &mut self.spare
            && matches!(code, Some(Errno::MFILE | Errno::NFILE))
        {
            // The listener stays readable while a connection waits, so without this the loop would
            // spin.
            if let Some((places, _)) = self.kinds.first() {
                places.shed();
            }
            if spare.take().is_some() {
                // Dropped at once.
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

    /// Waits for all connections to end, and closes the rest when `patience` is ready.
    pub async fn close(self, patience: impl Future<Output = ()>) {
        let Self { graceful, mut tasks, kinds, .. } = self;
        // hyper waits for the rest of a head that has begun, but handshakes have no such timeout.
        kinds.iter().for_each(|(places, _)| places.shed_all());
        tokio::select! {
            () = graceful.shutdown() => {}
            () = patience => tracing::warn!("some connections did not end in time and are cut"),
        }
        tasks.shutdown().await;
    }
}
