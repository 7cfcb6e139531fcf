//! The brain's side: the outposts that have joined, and the rank groups that run on them.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream as Socket;
use std::sync::Arc;
use std::time::Duration;

use forebay_hand::{Exit, RankOrder, Remote, Site};
use forebay_protocol::{Kind, Progress, encode_json};
use parking_lot::Mutex;
use subtle::ConstantTimeEq;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, split};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{info, warn};

use crate::aside::Aside;
use crate::claim::Claim;
use crate::credentials::Credentials;
use crate::messages::{
    Answer, Collectives, FromOutpost, HandOrder, KNOCK_BYTES, Knock, Purpose, ToOutpost, read,
    write,
};
use crate::mirror::Mirror;
use crate::rank::{Handle, Life};
use crate::relay::{OPENING, PING, SILENCE, Side, prepare, relay, said};
use crate::strangers::{Place, Strangers};
use crate::tls::acceptor;

type Stream = TlsStream<TcpStream>;

/// The largest time between the order for a hand and the outpost's connection for the rank.
const STARTING: Duration = Duration::from_secs(30);
/// How long to wait for an outpost's report on how a hand ended, after the rank's connection was
/// closed. The report arrives on another connection.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// The longest time for which a killed hand is assumed to occupy its device.
const BURIAL: Duration = Duration::from_secs(10);
/// The interval at which ranks that wait for an outpost send progress messages.
const WAITING: Duration = Duration::from_secs(1);
/// The largest number of hands of an outpost.
const MOST_HANDS: u32 = 256;
/// The longest name of an outpost, in characters.
const LONGEST_NAME: usize = 64;
/// The longest description of a hand's end, in characters.
const LONGEST_STATUS: usize = 1000;
/// The largest number of an outpost's messages that are queued before they are processed.
const UNREAD: usize = 64;

/// The outposts of one brain.
pub struct Outposts {
    groups: mpsc::UnboundedSender<Group>,
}

pub(crate) struct Shared {
    state: Mutex<State>,
    /// The thread that runs the tasks of bulk connections.
    aside: Aside,
    /// Signals that an outpost has joined, or that one of its hands is free again.
    pub(crate) changed: Notify,
}

#[derive(Default)]
struct State {
    members: Vec<Arc<Member>>,
    last_id: u64,
    ranks: HashMap<u64, OrderedRank>,
    /// The tasks that wait for bulk connections, by the id of the order.
    bulk: HashMap<u64, oneshot::Sender<Stream>>,
}

/// A rank, from its order until it has ended.
struct OrderedRank {
    life: Arc<Life>,
    /// The channel to the task that waits for the rank's connection; `None`: the channel was used.
    connection: Option<oneshot::Sender<Stream>>,
}

/// An outpost that has joined.
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) taken: Mutex<Vec<bool>>,
    orders: mpsc::UnboundedSender<ToOutpost>,
    mirror: Arc<Mirror>,
    gone: watch::Sender<bool>,
}

impl Member {
    pub(crate) fn free(&self) -> usize {
        self.taken.lock().iter().filter(|taken| !**taken).count()
    }

    /// Waits until the connection to the outpost is lost.
    async fn lost(&self) {
        let _ = self.gone.subscribe().wait_for(|gone| *gone).await;
    }
}

/// The ranks of a group that is to run on outposts.
struct Group {
    hand: String,
    /// The network interface for the ranks' collectives; `None`: all ranks have to be on one
    /// outpost.
    interface: Option<String>,
    ranks: Vec<Rank>,
    /// The relay's end of each rank's socket. The executor has the other end.
    near: Vec<Socket>,
}

struct Rank {
    life: Arc<Life>,
    env: Vec<(String, String)>,
    arena_bytes: u32,
}

impl Outposts {
    /// Accepts outposts that have the token. Also returns the future that serves them, which has to
    /// be polled on a Tokio runtime.
    ///
    /// # Errors
    /// The certificate can't be used.
    pub fn listen(
        listener: std::net::TcpListener,
        credentials: &Credentials,
    ) -> io::Result<(Self, impl Future<Output = io::Result<()>> + Send + use<>)> {
        let (groups, coming) = mpsc::unbounded_channel();
        let acceptor = acceptor(credentials)?;
        let serving = serve(listener, acceptor, credentials.token.secret, coming);
        Ok((Self { groups }, serving))
    }

    /// Returns a site that runs each group on one outpost with enough free hands for all of its
    /// ranks. If `interface` names a network interface, ranks may also be on several outposts, and
    /// communicate over this interface. `hand` is `rust` or `torch`. Replicas may share the site.
    #[must_use]
    pub fn site(&self, hand: &str, interface: Option<&str>) -> Arc<dyn Site> {
        let (groups, interface) = (self.groups.clone(), interface.map(str::to_owned));
        Arc::new(AnySite { groups, hand: hand.to_owned(), interface })
    }
}

/// A site whose groups run on any outposts with enough free hands.
struct AnySite {
    groups: mpsc::UnboundedSender<Group>,
    hand: String,
    interface: Option<String>,
}

impl Site for AnySite {
    fn spawn(&self, orders: Vec<RankOrder>) -> io::Result<Vec<Remote>> {
        let (mut ranks, mut sockets, mut remotes) = (Vec::new(), Vec::new(), Vec::<Remote>::new());
        for RankOrder { env, arena_bytes } in orders {
            let (executor, near) = Socket::pair()?;
            executor.set_nonblocking(true)?;
            near.set_nonblocking(true)?;
            let life = Arc::new(Life::default());
            remotes.push((executor, Box::new(Handle(Arc::clone(&life)))));
            ranks.push(Rank { life, env, arena_bytes });
            sockets.push(near);
        }
        let (hand, interface) = (self.hand.clone(), self.interface.clone());
        let group = Group { hand, interface, ranks, near: sockets };
        let over = |_| io::Error::other("nothing listens for outposts any more");
        self.groups.send(group).map_err(over)?;
        Ok(remotes)
    }
}

async fn serve(
    listener: std::net::TcpListener,
    acceptor: TlsAcceptor,
    secret: [u8; 32],
    mut groups: mpsc::UnboundedReceiver<Group>,
) -> io::Result<()> {
    let (state, changed) = (Mutex::default(), Notify::new());
    let shared = Arc::new(Shared { state, aside: Aside::start()?, changed });
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let strangers = Arc::new(Strangers::default());
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, from) = match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        warn!("no outpost can be accepted: {error}");
                        sleep(WAITING).await;
                        continue;
                    }
                };
                // At the limit of unauthenticated connections, the connection is dropped, and the
                // peer has to reconnect.
                let Some(place) = strangers.place(from.ip()) else { continue };
                let (acceptor, shared) = (acceptor.clone(), Arc::clone(&shared));
                tokio::spawn(async move {
                    if let Err(error) = greet(stream, from, acceptor, secret, shared, place).await {
                        warn!("{from} did not join: {}", said(&error));
                    }
                });
            }
            Some(group) = groups.recv() => {
                tokio::spawn(run(group, Arc::clone(&shared)));
            }
        }
    }
}

/// Authenticates a new connection, and handles it according to its purpose.
async fn greet(
    stream: TcpStream,
    from: SocketAddr,
    acceptor: TlsAcceptor,
    secret: [u8; 32],
    shared: Arc<Shared>,
    place: Place,
) -> io::Result<()> {
    prepare(&stream)?;
    let opened = timeout(OPENING, async {
        let mut stream = acceptor.accept(stream).await?;
        let mut knock = [0; KNOCK_BYTES];
        stream.read_exact(&mut knock).await?;
        if let Err(reason) = admit(&knock, &secret) {
            write(&mut stream, &Answer::Refused(reason.clone())).await?;
            stream.shutdown().await?;
            return Err(io::Error::other(reason));
        }
        let purpose: Purpose = read(&mut stream).await?;
        Ok((stream, purpose))
    });
    let (mut stream, purpose) = opened.await.map_err(|_| io::Error::other("it was too slow"))??;
    drop(place);
    match purpose {
        Purpose::Join { name, hands } => {
            if !(1..=MOST_HANDS).contains(&hands) {
                let reason = format!("{hands} hands: an outpost has 1 to {MOST_HANDS}");
                write(&mut stream, &Answer::Refused(reason.clone())).await?;
                return Err(io::Error::other(reason));
            }
            write(&mut stream, &Answer::Welcome).await?;
            let name = format!("{} ({from})", line(&name, LONGEST_NAME));
            member(stream, name, hands as usize, shared).await;
        }
        Purpose::Rank { id } | Purpose::Bulk { id } => {
            let Some(waiting) = shared.connection(&purpose) else {
                let reason = format!("nobody waits for connection {id}");
                return write(&mut stream, &Answer::Refused(reason)).await;
            };
            write(&mut stream, &Answer::Welcome).await?;
            // The waiting task may have timed out.
            let _ = waiting.send(stream);
        }
    }
    Ok(())
}

/// Makes an outpost's text safe for logs and errors: shortens it and removes control characters.
fn line(text: &str, characters: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(characters).collect()
}

/// Checks the first bytes of a connection. Returns an error message, for the logs of both sides, if
/// the sender is not admitted.
fn admit(bytes: &[u8; KNOCK_BYTES], secret: &[u8; 32]) -> Result<(), String> {
    let knock = Knock::read(bytes).ok_or("the other end is not an outpost")?;
    if !bool::from(knock.secret[..].ct_eq(&secret[..])) {
        return Err("the token has another secret".into());
    }
    if knock.versions != Knock::VERSIONS {
        return Err(format!(
            "the outpost speaks versions {:?} and the brain {:?}: they are of different releases",
            knock.versions,
            Knock::VERSIONS
        ));
    }
    Ok(())
}

/// Serves an outpost from its joining until its connection is lost.
async fn member(stream: Stream, name: String, hands: usize, shared: Arc<Shared>) {
    let (reading, mut writing) = split(stream);
    let (orders, mut ordered) = mpsc::unbounded_channel();
    let member = Arc::new(Member {
        name,
        taken: Mutex::new(vec![false; hands]),
        orders,
        mirror: Arc::default(),
        gone: watch::Sender::new(false),
    });
    info!(hands, "outpost {} has joined", member.name);
    shared.state.lock().members.push(Arc::clone(&member));
    shared.changed.notify_waiters();
    let (sender, mut heard) = mpsc::channel(UNREAD);
    let listening = tokio::spawn(listen(reading, sender));
    let mut pings = interval(PING);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = Instant::now();
    let why = loop {
        let message = tokio::select! {
            biased;
            message = heard.recv() => {
                last = Instant::now();
                match message {
                    Some(Ok(FromOutpost::Pong)) => {}
                    Some(Ok(FromOutpost::Ended { id, status, out_of_memory })) => {
                        let text = line(&status, LONGEST_STATUS);
                        shared.ended(id, Exit { text, out_of_memory });
                    }
                    Some(Err(error)) => break said(&error),
                    None => break "its connection ended".to_owned(),
                }
                continue;
            }
            () = member.mirror.closed() => break "its bulk connection ended".to_owned(),
            Some(order) = ordered.recv() => order,
            _ = pings.tick() => {
                if last.elapsed() > SILENCE {
                    break format!("it has been silent for {SILENCE:?}");
                }
                ToOutpost::Ping
            }
        };
        match timeout(SILENCE, write(&mut writing, &message)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => break said(&error),
            Err(_) => break "it reads no more messages".to_owned(),
        }
    };
    listening.abort();
    shared.state.lock().members.retain(|other| !Arc::ptr_eq(other, &member));
    warn!("outpost {} is lost: {why}", member.name);
    member.mirror.close();
    member.gone.send_replace(true);
}

/// Sends an outpost's messages to `heard`, up to and including the first error.
async fn listen(mut reading: ReadHalf<Stream>, heard: mpsc::Sender<io::Result<FromOutpost>>) {
    loop {
        let message = read(&mut reading).await;
        let ends = message.is_err();
        if heard.send(message).await.is_err() || ends {
            return;
        }
    }
}

impl Shared {
    /// Returns an id that no other order has had.
    fn next_id(&self) -> u64 {
        let mut state = self.state.lock();
        state.last_id += 1;
        state.last_id
    }

    /// Takes the channel to the task that waits for a connection; only the first caller gets it.
    fn connection(&self, purpose: &Purpose) -> Option<oneshot::Sender<Stream>> {
        let mut state = self.state.lock();
        match purpose {
            Purpose::Join { .. } => None,
            Purpose::Rank { id } => state.ranks.get_mut(id)?.connection.take(),
            Purpose::Bulk { id } => state.bulk.remove(id),
        }
    }

    /// Orders an outpost to mirror an arena of `bytes` bytes, unless this was ordered before. Must
    /// be called before the outpost's first hand is ordered.
    fn mirror(&self, member: &Member, bytes: u32) {
        if bytes == 0 || !member.mirror.is_to_be_ordered() {
            return;
        }
        let id = self.next_id();
        let (sender, connection) = oneshot::channel();
        let mut state = self.state.lock();
        state.bulk.retain(|_, waiting| !waiting.is_closed());
        state.bulk.insert(id, sender);
        drop(state);
        self.aside.run(Arc::clone(&member.mirror).run(connection));
        // This fails only if the outpost is lost, which also closes the mirror.
        let _ = member.orders.send(ToOutpost::Mirror { id, bytes });
    }

    /// Records an outpost's report that a hand has ended.
    fn ended(&self, id: u64, exit: Exit) {
        let life = self.state.lock().ranks.get(&id).map(|rank| Arc::clone(&rank.life));
        // A report about a rank that was removed is ignored.
        if let Some(life) = life {
            life.report.send_replace(Some(exit));
        }
    }

    /// Claims `count` hands; `None`: too few are free. The hands may be on several outposts only if
    /// `apart` is true.
    fn claim(self: &Arc<Self>, count: usize, apart: bool) -> Option<Claim> {
        Claim::take(&self.state.lock().members, count, apart, self)
    }

    /// The number of free hands on all outposts if a group may be `apart`, otherwise on the outpost
    /// with the most free hands.
    fn free(&self, apart: bool) -> usize {
        let state = self.state.lock();
        let free = state.members.iter().map(|member| member.free());
        if apart { free.sum() } else { free.max().unwrap_or(0) }
    }
}

/// Runs a group: waits for free hands, and starts its ranks.
async fn run(group: Group, shared: Arc<Shared>) {
    let Group { hand, interface, ranks, near } = group;
    let apart = interface.is_some();
    let lives: Vec<Arc<Life>> = ranks.iter().map(|rank| Arc::clone(&rank.life)).collect();
    let registered: io::Result<Vec<_>> = near.into_iter().map(UnixStream::from_std).collect();
    let mut near = match registered {
        Ok(near) => near,
        Err(error) => {
            lives.iter().for_each(|life| life.end(&error.to_string().into()));
            return;
        }
    };
    let claim = loop {
        let changed = shared.changed.notified();
        if let Some(claim) = shared.claim(ranks.len(), apart) {
            break claim;
        }
        let told = say_that_it_waits(&mut near, &shared, apart).await;
        let over = told.is_err();
        let over = over
            || tokio::select! {
                () = changed => false,
                () = sleep(WAITING) => false,
                () = lives[0].doom.notified() => true,
            };
        if over {
            let how = Exit::from("it was ended before an outpost was there");
            lives.iter().for_each(|life| life.end(&how));
            return;
        }
    };
    info!(ranks = ranks.len(), "hands run on outpost {}", claim.names());
    let collectives = match interface {
        _ if ranks.len() == 1 => Collectives::None,
        Some(interface) if claim.is_apart() => Collectives::Network(interface),
        _ => Collectives::Machine,
    };
    let claim = Arc::new(claim);
    for ((rank, near), (member, place)) in ranks.into_iter().zip(near).zip(&claim.hands) {
        let Rank { life, env, arena_bytes } = rank;
        let (id, hand, collectives) = (shared.next_id(), hand.clone(), collectives.clone());
        let order = HandOrder { id, place: *place, hand, env, collectives };
        let (member, claim) = (Arc::clone(member), Arc::clone(&claim));
        // Only this call sets the mirror, since a rank runs on one outpost only.
        let _ = life.mirror.set(Arc::clone(&member.mirror));
        shared.mirror(&member, arena_bytes);
        tokio::spawn(run_rank(order, life, near, member, claim, Arc::clone(&shared)));
    }
}

/// Writes a progress message for the executor to each rank's socket. Fails once the executor has
/// closed the sockets.
async fn say_that_it_waits(
    near: &mut [UnixStream],
    shared: &Shared,
    apart: bool,
) -> io::Result<()> {
    let total = near.len() as u64;
    let stage = if apart && total > 1 { "outposts" } else { "an outpost" };
    let stage = format!("waits for {stage} with free hands:");
    let progress = Progress { stage, done: (shared.free(apart) as u64).min(total), total };
    let frame = encode_json(Kind::Progress, &serde_json::to_string(&progress)?);
    let frame = frame.map_err(io::Error::other)?;
    for socket in near {
        socket.write_all(&frame).await?;
    }
    Ok(())
}

/// Runs a rank from its order until it has ended.
async fn run_rank(
    order: HandOrder,
    life: Arc<Life>,
    mut near: UnixStream,
    member: Arc<Member>,
    claim: Arc<Claim>,
    shared: Arc<Shared>,
) {
    let (sender, connection) = oneshot::channel();
    let id = order.id;
    let ordered = OrderedRank { life: Arc::clone(&life), connection: Some(sender) };
    shared.state.lock().ranks.insert(id, ordered);
    // If the outpost is lost, the `select!` below reports it.
    let _ = member.orders.send(ToOutpost::Spawn(order));
    let lost = || Exit::from(format!("outpost {} is lost", member.name));
    let far = tokio::select! {
        far = timeout(STARTING, connection) => {
            far.ok().and_then(Result::ok).ok_or_else(|| {
                Exit::from(format!("outpost {} did not start it in {STARTING:?}", member.name))
            })
        }
        status = life.reported() => Err(status),
        () = member.lost() => Err(lost()),
        () = life.doom.notified() => Err("it was ended".into()),
    };
    let how = match far {
        Err(how) => how,
        Ok(far) => {
            let side = tokio::select! {
                side = relay(&mut near, far) => Ok(side),
                () = member.lost() => Err(lost()),
                () = life.doom.notified() => Ok(Side::Near),
            };
            match side {
                Ok(Side::Near) => "it was ended".into(),
                Ok(Side::Far) => tokio::select! {
                    status = life.reported() => status,
                    () = member.lost() => lost(),
                    () = sleep(LAST_WORDS) => {
                        format!("the connection to outpost {} broke", member.name).into()
                    }
                },
                Err(lost) => lost,
            }
        }
    };
    life.end(&how);
    drop(near);
    // The rank's device is free once the outpost has reported that the hand has ended.
    tokio::select! {
        _ = timeout(BURIAL, life.reported()) => {}
        () = member.lost() => {}
    }
    shared.state.lock().ranks.remove(&id);
    drop(claim);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_secret_and_the_same_release_come_in() {
        let secret = [7; 32];
        let right = Knock::bytes(&secret);
        assert_eq!(admit(&right, &secret), Ok(()));
        let with = |at: usize| {
            let mut other = right;
            other[at] ^= 1;
            admit(&other, &secret).expect_err("refused")
        };
        assert_eq!(with(0), "the other end is not an outpost");
        for version in [4, 6] {
            assert!(with(version).contains("they are of different releases"), "{version}");
        }
        for secret in [8, 39] {
            assert!(with(secret).contains("the token has another secret"), "{secret}");
        }
    }

    #[test]
    fn texts_of_outposts_are_short_lines() {
        assert_eq!(line("a\nb\u{1b}[31mc", 5), "ab[31");
        assert_eq!(line(&"é".repeat(1000), LONGEST_NAME).chars().count(), LONGEST_NAME);
    }
}
