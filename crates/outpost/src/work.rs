//! The outpost's side: joins the brain, runs hands on its orders, and kills them when the
//! connection is lost.

use std::io;
use std::os::unix::net::UnixStream as Socket;
use std::sync::Arc;
use std::time::Duration;

use forebay_hand::{Arena, Exit, RankProcess};
use tokio::io::{AsyncWriteExt, ReadHalf, split};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::Error as TlsError;
use tracing::{info, warn};

use crate::aside::Aside;
use crate::bulk::receive;
use crate::messages::{Answer, FromOutpost, HandOrder, Knock, Purpose, ToOutpost, read, write};
use crate::relay::{OPENING, PING, SILENCE, Side, prepare, relay, said};
use crate::tls::{connector, name};
use crate::token::JoinToken;

type Stream = TlsStream<TcpStream>;

/// The pause between two attempts to join.
const PAUSE: Duration = Duration::from_secs(1);
/// The largest number of the brain's messages that are queued before they are processed.
const UNREAD: usize = 64;

/// The settings of an outpost, fixed at its start.
#[derive(Debug, Clone)]
pub struct WorkSettings {
    /// The address of the brain, `HOST:PORT`.
    pub brain: String,
    /// The token that the brain accepts.
    pub token: JoinToken,
    /// The name of this outpost in the brain's log.
    pub name: String,
    /// The largest number of hands that run here at the same time.
    pub hands: u32,
}

/// A function that starts a hand with this arena. Returns the process, and this end of the socket
/// to the process. The function is called on the thread that runs [`work`]. When that thread ends,
/// the kernel kills the process.
pub type Spawn = Arc<dyn Fn(&HandOrder, &Arena) -> io::Result<(RankProcess, Socket)> + Send + Sync>;

/// Why an outpost stops. Losing the connection is not a reason, because the outpost then joins
/// again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutpostEnd {
    /// The server at the brain's address has a different certificate from the one in the token.
    #[error("{0} has another certificate than the token names: the token is another server's")]
    Stranger(String),
    /// The brain refuses this outpost.
    #[error("{0} refuses: {1}")]
    Refused(String, String),
    /// The system can't start a thread.
    #[error("no thread: {0}")]
    Thread(String),
    /// TLS can't be set up.
    #[error("no TLS: {0}")]
    Tls(String),
}

/// Why an attempt to join, or the session after it, ended.
enum Over {
    Ended(OutpostEnd),
    Lost(String),
}

impl From<io::Error> for Over {
    fn from(error: io::Error) -> Self {
        Self::Lost(said(&error))
    }
}

/// Joins the brain, and joins again after each lost connection, until `stop` completes.
///
/// # Errors
/// The outpost can't join, and another attempt would fail in the same way.
pub async fn work(
    settings: WorkSettings,
    spawn: Spawn,
    stop: impl Future<Output = ()>,
) -> Result<(), OutpostEnd> {
    let connector = connector(settings.token.fingerprint)
        .map_err(|error| OutpostEnd::Tls(error.to_string()))?;
    let door = Door { connector, settings };
    let aside = Aside::start().map_err(|error| OutpostEnd::Thread(error.to_string()))?;
    tokio::pin!(stop);
    let mut said = String::new();
    loop {
        let over = tokio::select! {
            over = session(&door, &spawn, &aside) => over,
            () = &mut stop => return Ok(()),
        };
        match over {
            Over::Ended(ended) => return Err(ended),
            Over::Lost(why) if why == said => {}
            Over::Lost(why) => {
                warn!("not joined to {}: {why}; trying again", door.settings.brain);
                said = why;
            }
        }
        tokio::select! {
            () = sleep(PAUSE) => {}
            () = &mut stop => return Ok(()),
        }
    }
}

/// Opens connections to the brain.
#[derive(Clone)]
struct Door {
    connector: TlsConnector,
    settings: WorkSettings,
}

impl Door {
    /// Opens a connection, and waits until the brain has accepted it.
    async fn open(&self, purpose: &Purpose) -> Result<Stream, Over> {
        let opened = timeout(OPENING, self.knock(purpose)).await;
        opened.map_err(|_| Over::Lost("it does not answer".into()))?
    }

    async fn knock(&self, purpose: &Purpose) -> Result<Stream, Over> {
        let WorkSettings { brain, token, .. } = &self.settings;
        let stream = TcpStream::connect(brain).await?;
        prepare(&stream)?;
        let stream = self.connector.connect(name()?, stream).await;
        let mut stream = stream.map_err(|error| {
            let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<TlsError>());
            match inner {
                Some(TlsError::InvalidCertificate(_)) => {
                    Over::Ended(OutpostEnd::Stranger(brain.clone()))
                }
                _ => error.into(),
            }
        })?;
        stream.write_all(&Knock::bytes(&token.secret)).await?;
        write(&mut stream, purpose).await?;
        match read(&mut stream).await? {
            Answer::Welcome => Ok(stream),
            Answer::Refused(why) => Err(Over::Ended(OutpostEnd::Refused(brain.clone(), why))),
        }
    }
}

/// Joins the brain, and runs hands until the connection is lost. All hands are then killed.
async fn session(door: &Door, spawn: &Spawn, aside: &Aside) -> Over {
    let WorkSettings { brain, name, hands, .. } = &door.settings;
    let purpose = Purpose::Join { name: name.clone(), hands: *hands };
    let stream = match door.open(&purpose).await {
        Ok(stream) => stream,
        Err(over) => return over,
    };
    info!(hands, "joined to {brain}");
    let (reading, mut writing) = split(stream);
    let (sender, mut heard) = mpsc::channel(UNREAD);
    let (said, mut saying) = mpsc::unbounded_channel();
    let gone = watch::Sender::new(false);
    let mut ranks = JoinSet::new();
    ranks.spawn(listen(reading, sender));
    let mut mirror = None;
    let (bulk, mut bulk_ended) = mpsc::channel(1);
    let over = loop {
        let message = tokio::select! {
            message = timeout(SILENCE + PING, heard.recv()) => match message {
                Err(_) => break Over::Lost("it is silent".into()),
                Ok(None) => break Over::Lost("the connection ended".into()),
                Ok(Some(Err(error))) => break error.into(),
                Ok(Some(Ok(ToOutpost::Ping))) => FromOutpost::Pong,
                Ok(Some(Ok(ToOutpost::Spawn(order)))) => {
                    let (door, spawn) = (door.clone(), Arc::clone(spawn));
                    let (said, gone) = (said.clone(), gone.subscribe());
                    let arena = match &mirror {
                        Some(mirror) => Arena::clone(mirror),
                        None => match Arena::new(0) {
                            Ok(none) => none,
                            Err(error) => break error.into(),
                        },
                    };
                    ranks.spawn(async move {
                        let id = order.id;
                        let exit = run(&door, &spawn, &order, &arena, gone).await;
                        let Exit { text: status, out_of_memory } = exit;
                        // The session may have ended.
                        let _ = said.send(FromOutpost::Ended { id, status, out_of_memory });
                    });
                    continue;
                }
                Ok(Some(Ok(ToOutpost::Mirror { bytes, .. }))) if mirror.is_some() => {
                    break Over::Lost(format!("a second mirror, of {bytes} bytes"));
                }
                Ok(Some(Ok(ToOutpost::Mirror { id, bytes }))) => {
                    let arena = match Arena::new(bytes) {
                        Ok(arena) => mirror.insert(arena).clone(),
                        Err(error) => break error.into(),
                    };
                    let (door, bulk, gone) = (door.clone(), bulk.clone(), gone.subscribe());
                    aside.run(async move {
                        let over = reflect(&door, id, &arena, gone).await;
                        // The session may have ended.
                        let _ = bulk.send(over).await;
                    });
                    continue;
                }
            },
            Some(over) = bulk_ended.recv() => break over,
            Some(message) = saying.recv() => message,
        };
        match timeout(SILENCE, write(&mut writing, &message)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => break error.into(),
            Err(_) => break Over::Lost("it reads no more messages".into()),
        }
    };
    gone.send_replace(true);
    drop(heard);
    drop(writing);
    // Each task waits until its hand has exited.
    while ranks.join_next().await.is_some() {}
    over
}

/// Sends the brain's messages to `heard`, up to and including the first error.
async fn listen(mut reading: ReadHalf<Stream>, heard: mpsc::Sender<io::Result<ToOutpost>>) {
    loop {
        let message = tokio::select! {
            message = read(&mut reading) => message,
            () = heard.closed() => return,
        };
        let ends = message.is_err();
        if heard.send(message).await.is_err() || ends {
            return;
        }
    }
}

/// Receives bytes from the brain and writes them to the mirror, until the bulk connection is closed
/// or the session ends.
async fn reflect(door: &Door, id: u64, arena: &Arena, mut gone: watch::Receiver<bool>) -> Over {
    let receiving = async {
        match door.open(&Purpose::Bulk { id }).await {
            Ok(stream) => {
                let (reading, writing) = split(stream);
                let over = receive(reading, writing, arena).await;
                over.map_or_else(Over::from, |()| Over::Lost("the bulk connection ended".into()))
            }
            // The brain no longer expects this connection, because it has ended the session: start
            // a new session.
            Err(Over::Ended(ended)) => Over::Lost(ended.to_string()),
            Err(over) => over,
        }
    };
    tokio::select! {
        over = receiving => over,
        _ = gone.wait_for(|gone| *gone) => Over::Lost("the session is over".into()),
    }
}

/// Runs a hand from its order until it has exited. Returns a description of how it ended.
async fn run(
    door: &Door,
    spawn: &Spawn,
    order: &HandOrder,
    arena: &Arena,
    mut gone: watch::Receiver<bool>,
) -> Exit {
    let started = spawn(order, arena).and_then(|(process, near)| {
        near.set_nonblocking(true)?;
        Ok((process, UnixStream::from_std(near)?))
    });
    let (process, mut near) = match started {
        Ok(started) => started,
        Err(error) => return format!("outpost {}: {error}", door.settings.name).into(),
    };
    let alone = async { drop(gone.wait_for(|gone| *gone).await) };
    let relayed = async {
        let far = door.open(&Purpose::Rank { id: order.id }).await;
        let Ok(mut far) = far else { return Side::Far };
        let side = relay(&mut near, &mut far).await;
        // Sends everything that the hand has written before the connection is closed.
        let _ = timeout(SILENCE, far.shutdown()).await;
        side
    };
    let side = tokio::select! {
        side = relayed => side,
        () = alone => Side::Far,
    };
    let by_itself = side == Side::Near;
    // The brain gets this description unless it has closed the connection itself.
    let ended = format!("outpost {}: the connection to the brain broke", door.settings.name);
    let buried = tokio::task::spawn_blocking(move || {
        if by_itself {
            return process.bury();
        }
        drop(process);
        ended.into()
    });
    buried.await.unwrap_or_else(|_| "its exit status is unknown".into())
}
