//! A brain and its outposts over the loopback interface, with hands that compute nothing, and a
//! network between them that fails on demand.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use forebay_engine::{Executor, Payload, Payloads, Ready, Signal};
use forebay_hand::{Arena, HandConfig, HandExecutor, HandSpec, RankProcess, RankSpec, Site};
use forebay_outpost::{Credentials, Ended, HandOrder, JoinToken, Outposts, WorkSettings, work};
use forebay_protocol::{NewSlot, Row, SlotSpec, StepPlan, Want, tell_group};
use tokio::net::TcpSocket;
use tokio::sync::oneshot;

const MINUTE_US: u64 = 60_000_000;

/// A brain that takes outposts.
struct Brain {
    /// All replicas share it.
    site: Arc<dyn Site>,
    arena: Arena,
    address: SocketAddr,
    token: JoinToken,
    _stop: oneshot::Sender<()>,
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("it works")
}

impl Brain {
    fn start() -> Self {
        Self::of(None)
    }

    /// One whose groups may be on several outposts if an interface is named.
    fn of(interface: Option<&str>) -> Self {
        let credentials = Credentials::make().expect("it works");
        let listener = TcpListener::bind("127.0.0.1:0").expect("it works");
        let address = listener.local_addr().expect("it works");
        let (outposts, serving) = Outposts::listen(listener, &credentials).expect("it works");
        let (stop, stopped) = oneshot::channel();
        thread::spawn(move || {
            runtime().block_on(async {
                tokio::select! {
                    served = serving => served.expect("it works"),
                    _ = stopped => {}
                }
            });
        });
        let site = outposts.site("fake", interface);
        let arena = Arena::new(16 << 20).expect("it works");
        Self { site, arena, address, token: credentials.token().clone(), _stop: stop }
    }

    fn executor(&self, behaviour: &str, ranks: usize) -> HandExecutor {
        HandExecutor::new(self.spec(behaviour, ranks)).expect("it works")
    }

    /// A step group, each of whose ranks is a member.
    fn step_group(&self, behaviour: &str, ranks: usize) -> HandExecutor {
        let mut spec = self.spec(behaviour, ranks);
        spec.config.step_group = true;
        HandExecutor::new(spec).expect("it works")
    }

    fn spec(&self, behaviour: &str, ranks: usize) -> HandSpec {
        HandSpec {
            program: "/not/used".into(),
            args: Vec::new(),
            env: vec![("FAKE_BEHAVIOUR".into(), behaviour.into())],
            config: HandConfig { page_size: 16, ..HandConfig::default() },
            arena: self.arena.clone(),
            ranks: vec![RankSpec::default(); ranks],
            site: Some(Arc::clone(&self.site)),
        }
    }

    fn settings(&self, hands: u32) -> WorkSettings {
        let (brain, token) = (self.address.to_string(), self.token.clone());
        WorkSettings { brain, token, name: "here".into(), hands }
    }

    /// Settings with the certificate of this brain and the secret of another one.
    fn mixed_up(&self, other: &Credentials) -> WorkSettings {
        let (right, wrong) = (self.token.to_string(), other.token().to_string());
        let mixed = format!("{}{}", &right[..right.len() - 64], &wrong[wrong.len() - 64..]);
        WorkSettings { token: mixed.parse().expect("it works"), ..self.settings(1) }
    }
}

/// An outpost on a thread of its own. Dropping it ends it as a signal would.
struct Outpost {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<Result<(), Ended>>>,
}

fn spawn(
    order: &HandOrder,
    arena: &Arena,
) -> io::Result<(RankProcess, std::os::unix::net::UnixStream)> {
    assert_eq!(order.hand, "fake");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hand/tests/fake_hand.py");
    let mut command = Command::new("python3");
    command.arg(script).envs(order.env.iter().map(|(name, value)| (name, value)));
    command.env("FAKE_COLLECTIVES", format!("{:?}", order.collectives));
    if order.env.iter().any(|(_, value)| value == "no program") {
        command = Command::new("/no/such/program");
    }
    RankProcess::spawn(command, arena, None, &[])
}

impl Outpost {
    fn start(settings: WorkSettings) -> Self {
        let (stop, stopped) = oneshot::channel();
        let stopping = async {
            let _ = stopped.await;
        };
        let thread =
            thread::spawn(move || runtime().block_on(work(settings, Arc::new(spawn), stopping)));
        Self { stop: Some(stop), thread: Some(thread) }
    }

    fn end(mut self) -> Result<(), Ended> {
        drop(self.stop.take());
        self.thread.take().expect("it works").join().expect("it works")
    }

    /// Waits until it ends by itself.
    fn ended(mut self) -> Ended {
        let thread = self.thread.as_ref().expect("it is there");
        eventually("the outpost ends by itself", || thread.is_finished());
        self.thread.take().expect("it works").join().expect("it works").expect_err("it goes on")
    }
}

fn next(executor: &mut HandExecutor) -> Signal {
    match executor.wait(Some(MINUTE_US)) {
        Signal::TimedOut => panic!("nothing happened for a minute"),
        signal => signal,
    }
}

fn ready(executor: &mut HandExecutor) -> Ready {
    executor.start();
    ready_at_last(executor)
}

/// The facts of a group that was started.
fn ready_at_last(executor: &mut HandExecutor) -> Ready {
    loop {
        match next(executor) {
            Signal::Ready(facts) => return facts,
            Signal::Progress(_) => {}
            other => panic!("not ready: {other:?}"),
        }
    }
}

/// The reason, and how long it took.
fn death(executor: &mut HandExecutor) -> (String, Duration) {
    let began = Instant::now();
    loop {
        match next(executor) {
            Signal::Died(reason) => return (reason, began.elapsed()),
            Signal::Progress(_) | Signal::Result(_) => {}
            other => panic!("not dead: {other:?}"),
        }
    }
}

fn plan(step: u64, tokens: &[i32]) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    let prompt_len = tokens.len() as u32;
    plan.write_slot(&NewSlot { slot: 0, tokens, prompt_len, spec: &SlotSpec::default() });
    plan.push_row(Row { slot: 0, start: 0, length: prompt_len, want: Want::TOKEN });
    plan
}

fn step(executor: &mut HandExecutor, step: u64, tokens: &[i32]) -> Vec<i32> {
    executor.submit(&[plan(step, tokens)]);
    match next(executor) {
        Signal::Result(mut results) => {
            let result = results.remove(0);
            assert_eq!(result.step, step);
            result.tokens
        }
        other => panic!("no result: {other:?}"),
    }
}

/// Hands below this process that are alive.
fn hands_of(marker: &str) -> usize {
    environments(marker).len()
}

/// The variables of those hands.
fn environments(marker: &str) -> Vec<String> {
    let wanted = format!("FAKE_BEHAVIOUR={marker}\0");
    let processes = std::fs::read_dir("/proc").expect("it works").flatten();
    let texts = processes.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
    let texts = texts.map(|text| String::from_utf8_lossy(&text).into_owned());
    texts.filter(|text| text.contains(&wanted)).collect()
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn plans_and_results_go_over_the_network() {
    let brain = Brain::start();
    let outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("echo", 1);
    assert_eq!(ready(&mut executor).page_count, 100);
    for number in 1..=50 {
        assert_eq!(step(&mut executor, number, &[number as i32; 3]), [number as i32]);
    }
    // Longer than what goes through the arena where there is one.
    assert_eq!(step(&mut executor, 51, &[4; 100_000]), [4]);
    drop(executor);
    assert_eq!(outpost.end(), Ok(()));
}

/// A payload of so many words, all the same.
fn payload(brain: &Brain, word: i32, words: usize) -> Arc<dyn Payload> {
    let payload: Arc<dyn Payload> = brain.arena.reserve(4 * words).expect("room").into();
    payload.write(0, &word.to_le_bytes().repeat(words)).expect("inside");
    payload
}

/// Brings a payload to the hands of the only member; whether it came there.
fn bring(executor: &mut HandExecutor, payload: &Arc<dyn Payload>) -> bool {
    bring_to(executor, 0, payload)
}

/// The same of a member.
fn bring_to(executor: &mut HandExecutor, member: usize, payload: &Arc<dyn Payload>) -> bool {
    let (sender, arrived) = channel();
    // A test that ends does not wait.
    executor.carry(member, payload, Box::new(move || _ = sender.send(())));
    match arrived.recv_timeout(Duration::from_secs(60)) {
        Ok(()) => true,
        Err(RecvTimeoutError::Disconnected) => false,
        Err(RecvTimeoutError::Timeout) => panic!("nobody was told"),
    }
}

/// The word that every rank finds where the payload is.
fn found(executor: &mut HandExecutor, step: u64, payload: &Arc<dyn Payload>) -> i32 {
    executor.submit(&[reading(step, payload)]);
    match next(executor) {
        Signal::Result(results) => results[0].tokens[0],
        other => panic!("no result: {other:?}"),
    }
}

/// A plan that reads the payload.
fn reading(step: u64, payload: &Arc<dyn Payload>) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    let spec = SlotSpec { embeds: Some(payload.offset()), ..SlotSpec::default() };
    plan.write_slot(&NewSlot { slot: 0, tokens: &[1, 2], prompt_len: 2, spec: &spec });
    plan.push_row(Row { slot: 0, start: 0, length: 2, want: Want::TOKEN });
    plan
}

#[test]
fn payloads_reach_every_rank_and_follow_the_group_to_another_outpost() {
    let brain = Brain::start();
    let outpost = Outpost::start(brain.settings(2));
    let mut executor = brain.executor("carried", 2);
    assert!(!executor.is_near());
    ready(&mut executor);
    let first = payload(&brain, 77, 360_000);
    assert!(bring(&mut executor, &first));
    assert_eq!(found(&mut executor, 1, &first), 77);
    // Its room is used again.
    let offset = first.offset();
    drop(first);
    let second = payload(&brain, 78, 1000);
    assert_eq!(second.offset(), offset, "the first free bytes are taken");
    assert!(bring(&mut executor, &second));
    assert_eq!(found(&mut executor, 2, &second), 78);
    outpost.end().expect("it works");
    death(&mut executor);
    let late = payload(&brain, 79, 1000);
    assert!(!bring(&mut executor, &late), "there is no group");
    let _other = Outpost::start(brain.settings(2));
    ready(&mut executor);
    for (step, word, payload) in [(1, 78, second), (2, 79, late)] {
        assert!(bring(&mut executor, &payload));
        assert_eq!(found(&mut executor, step, &payload), word);
    }
    drop(executor);
    eventually("all room has come back", || brain.arena.used() == 0);
}

#[test]
fn a_step_group_s_payloads_reach_the_rank_that_reads_them_and_no_other() {
    let brain = Brain::of(Some("eth8"));
    let _outposts = [Outpost::start(brain.settings(1)), Outpost::start(brain.settings(1))];
    let mut executor = brain.step_group("carried", 2);
    ready(&mut executor);
    let (first, second) = (payload(&brain, 77, 50_000), payload(&brain, 78, 1000));
    assert!(bring_to(&mut executor, 0, &first));
    assert!(bring_to(&mut executor, 1, &second));
    let words = |executor: &mut HandExecutor, step, of_ranks: [&Arc<dyn Payload>; 2]| {
        let mut plans = of_ranks.map(|payload| reading(step, payload));
        tell_group(&mut plans);
        executor.submit(&plans);
        match next(executor) {
            Signal::Result(results) => [results[0].tokens[0], results[1].tokens[0]],
            other => panic!("no result: {other:?}"),
        }
    };
    assert_eq!(words(&mut executor, 1, [&first, &second]), [77, 78]);
    let swapped = words(&mut executor, 2, [&second, &first]);
    assert_eq!(swapped, [0, 0], "the mirrors are of two machines");
    assert!(bring_to(&mut executor, 0, &second));
    assert_eq!(words(&mut executor, 3, [&second, &second]), [78, 78]);
    executor.stop();
    assert!(!bring_to(&mut executor, 1, &first), "there is no group");
}

#[test]
fn an_outpost_that_is_lost_while_bytes_are_on_their_way_tells_nobody_and_keeps_no_room() {
    let brain = Brain::start();
    let network = Network::to(brain.address);
    let settings = WorkSettings { brain: network.address.to_string(), ..brain.settings(1) };
    let _outpost = Outpost::start(settings);
    let mut executor = brain.executor("cut off", 1);
    ready(&mut executor);
    let payloads: Vec<_> = (0..3).map(|word| payload(&brain, word, 1 << 20)).collect();
    let (sender, arrived) = channel();
    for payload in &payloads {
        let sender = sender.clone();
        executor.carry(0, payload, Box::new(move || _ = sender.send(())));
    }
    network.state.store(CUT, Ordering::SeqCst);
    death(&mut executor);
    drop((payloads, sender));
    // The duties of those that did not arrive are dropped.
    assert!(arrived.iter().count() < 3, "it was cut too late");
    eventually("all room has come back", || brain.arena.used() == 0);
}

#[test]
fn a_group_waits_for_an_outpost_with_room_for_all_of_it() {
    let brain = Brain::start();
    let _small = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("echo", 2);
    executor.start();
    let waits = "waits for an outpost with free hands: 1/2";
    eventually(
        "it says what is missing",
        || matches!(next(&mut executor), Signal::Progress(text) if text == waits),
    );
    let _large = Outpost::start(brain.settings(2));
    loop {
        match next(&mut executor) {
            Signal::Ready(facts) => break assert_eq!(facts.page_count, 100),
            Signal::Progress(_) => {}
            other => panic!("not ready: {other:?}"),
        }
    }
    assert_eq!(step(&mut executor, 1, &[7; 3]), [7]);
    // A hand is free again once its group has ended.
    executor.stop();
    assert_eq!(ready(&mut executor).page_count, 100);
}

#[test]
fn a_group_is_on_several_outposts_where_none_has_room_for_all_of_it() {
    let brain = Brain::of(Some("eth7"));
    let small = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("apart", 3);
    executor.start();
    let waits = "waits for outposts with free hands: 1/3";
    eventually(
        "it says what is missing",
        || matches!(next(&mut executor), Signal::Progress(text) if text == waits),
    );
    let _large = Outpost::start(brain.settings(2));
    ready_at_last(&mut executor);
    assert_eq!(step(&mut executor, 1, &[7; 3]), [0]);
    let ways = |wanted: &str| {
        let found = environments("apart");
        found.iter().filter(|text| text.contains(wanted)).count()
    };
    assert_eq!(ways("FAKE_COLLECTIVES=Network(\"eth7\")\0"), 3);

    // One outpost's end is that of all ranks. They are started again when there is room.
    small.end().expect("it works");
    let (reason, after) = death(&mut executor);
    assert!(reason.contains("outpost here"), "{reason}");
    assert!(after < Duration::from_secs(2), "{after:?}");
    eventually("all hands are gone", || hands_of("apart") == 0);
    executor.start();
    let _other = Outpost::start(brain.settings(3));
    ready_at_last(&mut executor);
    assert_eq!(step(&mut executor, 1, &[7; 3]), [0]);
    assert_eq!(ways("FAKE_COLLECTIVES=Machine\0"), 3, "one outpost suffices");
}

#[test]
fn a_hand_that_dies_says_how_and_is_started_again() {
    let brain = Brain::start();
    let _outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("crash", 1);
    ready(&mut executor);
    executor.submit(&[plan(1, &[5; 3])]);
    let (reason, after) = death(&mut executor);
    assert!(reason.starts_with("exit status"), "{reason}");
    assert!(after < Duration::from_secs(5), "{after:?}");
    ready(&mut executor);
}

#[test]
fn last_words_and_failures_to_start_reach_the_brain() {
    let brain = Brain::start();
    let _outpost = Outpost::start(brain.settings(1));
    for (behaviour, wanted) in [("fatal", "no such model"), ("no program", "outpost here: ")] {
        let mut executor = brain.executor(behaviour, 1);
        executor.start();
        let (reason, _) = death(&mut executor);
        assert!(reason.contains(wanted), "{reason}");
    }
}

#[test]
fn an_outpost_that_ends_takes_its_hands_along_and_may_come_back() {
    let brain = Brain::start();
    let outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("comes back", 1);
    ready(&mut executor);
    assert_eq!(hands_of("comes back"), 1);
    outpost.end().expect("it works");
    eventually("the hand is gone", || hands_of("comes back") == 0);
    let (reason, after) = death(&mut executor);
    assert!(reason.contains("outpost here"), "{reason}");
    assert!(after < Duration::from_secs(2), "{after:?}");
    executor.start();
    let _again = Outpost::start(brain.settings(1));
    loop {
        match next(&mut executor) {
            Signal::Ready(_) => break,
            Signal::Progress(_) => {}
            other => panic!("not ready: {other:?}"),
        }
    }
    assert_eq!(step(&mut executor, 1, &[3; 2]), [0]);
}

#[test]
fn a_brain_that_goes_leaves_no_hand_behind() {
    let brain = Brain::start();
    let outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("goodbye", 1);
    ready(&mut executor);
    assert_eq!(hands_of("goodbye"), 1);
    drop(brain);
    let (reason, _) = death(&mut executor);
    assert!(!reason.is_empty());
    eventually("the hand is gone", || hands_of("goodbye") == 0);
    drop(executor);
    assert_eq!(outpost.end(), Ok(()));
}

const CUT: u8 = 1;
const SILENT: u8 = 2;
/// Only the connection that was made last breaks, which is a rank's.
const LAST_CUT: u8 = 3;

/// A network between an outpost and the brain.
struct Network {
    address: SocketAddr,
    state: Arc<AtomicU8>,
}

impl Network {
    fn to(brain: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("it works");
        let address = listener.local_addr().expect("it works");
        let state = Arc::new(AtomicU8::new(0));
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            let newest = Arc::new(AtomicUsize::new(0));
            for near in listener.incoming().flatten() {
                let number = newest.fetch_add(1, Ordering::SeqCst) + 1;
                let Ok(far) = TcpStream::connect(brain) else { continue };
                for (from, to) in [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))] {
                    let (from, to) = (from.expect("it works"), to.expect("it works"));
                    let (state, newest) = (Arc::clone(&shared), Arc::clone(&newest));
                    let is_last = move || newest.load(Ordering::SeqCst) == number;
                    thread::spawn(move || carry(from, to, &state, is_last));
                }
            }
        });
        Self { address, state }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, state: &AtomicU8, is_last: impl Fn() -> bool) {
    from.set_read_timeout(Some(Duration::from_millis(5))).expect("it works");
    let mut buffer = [0; 4096];
    loop {
        let state = match state.load(Ordering::SeqCst) {
            LAST_CUT if is_last() => CUT,
            state => state,
        };
        match state {
            CUT => {
                let _ = to.shutdown(std::net::Shutdown::Both);
                return;
            }
            // Both ends stay open, and nothing arrives any more.
            SILENT => thread::sleep(Duration::from_millis(5)),
            _ => match from.read(&mut buffer) {
                Ok(0) => {
                    let _ = to.shutdown(std::net::Shutdown::Write);
                    return;
                }
                Ok(count) => {
                    if to.write_all(&buffer[..count]).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            },
        }
    }
}

#[test]
fn a_network_that_breaks_or_falls_silent_ends_the_hands_on_both_sides() {
    for (state, behaviour, limit) in [
        (CUT, "cut", Duration::from_secs(1)),
        (LAST_CUT, "last-cut", Duration::from_secs(1)),
        (SILENT, "silent", Duration::from_secs(7)),
    ] {
        let brain = Brain::start();
        let network = Network::to(brain.address);
        let settings = WorkSettings { brain: network.address.to_string(), ..brain.settings(1) };
        let _outpost = Outpost::start(settings);
        let mut executor = brain.executor(behaviour, 1);
        ready(&mut executor);
        assert_eq!(step(&mut executor, 1, &[3; 2]), [0]);
        assert_eq!(hands_of(behaviour), 1);
        network.state.store(state, Ordering::SeqCst);
        let (reason, after) = death(&mut executor);
        assert!(reason.contains("outpost here"), "{reason}");
        assert!(after < limit, "{behaviour}: {after:?}");
        eventually("the hand is gone", || hands_of(behaviour) == 0);
        // And the outpost is used again.
        network.state.store(0, Ordering::SeqCst);
        ready(&mut executor);
    }
}

#[test]
fn strangers_are_few_and_have_little_time() {
    let brain = Brain::start();
    let began = Instant::now();
    let mut strangers: Vec<TcpStream> = Vec::new();
    for _ in 0..16 {
        strangers.push(TcpStream::connect(brain.address).unwrap());
    }
    // One more is dropped at once, the others when their time is over.
    let mut late = TcpStream::connect(brain.address).unwrap();
    assert!(ended(&mut late), "the 17th has to come again");
    assert!(began.elapsed() < Duration::from_secs(3));
    assert!(strangers.iter_mut().all(ended));
    let waited = began.elapsed();
    assert!(waited > Duration::from_secs(4) && waited < Duration::from_secs(10), "{waited:?}");
    let _outpost = Outpost::start(brain.settings(1));
    ready(&mut brain.executor("echo", 1));
}

/// A connection from another address of this machine.
fn connect_from(address: &str, to: SocketAddr) -> TcpStream {
    let stream = runtime().block_on(async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(address.parse().expect("an address"), 0))?;
        socket.connect(to).await?.into_std()
    });
    let stream = stream.expect("a connection");
    stream.set_nonblocking(false).expect("it works");
    stream
}

#[test]
fn strangers_at_one_address_leave_places_to_others() {
    let brain = Brain::start();
    let strangers: Vec<TcpStream> =
        (0..16).map(|_| connect_from("127.0.0.2", brain.address)).collect();
    let mut late = connect_from("127.0.0.2", brain.address);
    assert!(ended(&mut late), "the 17th of an address has to come again");
    let other = Credentials::make().expect("it works");
    // Its secret is read, and the places at the other address are all taken still.
    let refused = Outpost::start(brain.mixed_up(&other)).ended();
    assert!(matches!(&refused, Ended::Refused(..)), "{refused}");
    for stranger in &strangers {
        stranger.set_nonblocking(true).expect("it works");
        let waits = stranger.peek(&mut [0]).expect_err("nothing has come");
        assert_eq!(waits.kind(), io::ErrorKind::WouldBlock);
    }
}

/// Waits until the other side has closed a connection.
fn ended(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a time limit");
    match stream.read(&mut [0; 64]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn an_outpost_with_too_many_hands_is_refused() {
    let brain = Brain::start();
    for hands in [0, 257, u32::MAX] {
        let ended = Outpost::start(brain.settings(hands)).ended();
        assert!(matches!(&ended, Ended::Refused(_, why) if why.contains("1 to 256")), "{ended}");
    }
}

#[test]
fn groups_that_start_together_are_not_mixed_up() {
    let brain = Brain::start();
    let _outposts: Vec<Outpost> = (0..4).map(|_| Outpost::start(brain.settings(2))).collect();
    // Each replica's thread starts its group.
    thread::scope(|scope| {
        for _ in 0..4 {
            let mut executor = brain.executor("echo", 2);
            scope.spawn(move || {
                assert_eq!(ready(&mut executor).page_count, 100);
                assert_eq!(step(&mut executor, 1, &[7; 3]), [7]);
            });
        }
    });
}

#[test]
fn strangers_stay_outside() {
    let brain = Brain::start();
    let other = Credentials::make().expect("it works");
    // Another server's token, whole.
    let stranger = WorkSettings { token: other.token().clone(), ..brain.settings(1) };
    assert!(matches!(Outpost::start(stranger).ended(), Ended::Stranger(_)));
    // The right certificate with another secret.
    let ended = Outpost::start(brain.mixed_up(&other)).ended();
    assert!(matches!(&ended, Ended::Refused(_, why) if why.contains("secret")), "{ended}");

    // Bytes that are no TLS, and connections that say nothing, hold up nobody.
    let silent: Vec<_> =
        (0..8).map(|_| TcpStream::connect(brain.address).expect("it works")).collect();
    for seed in 0..200_u32 {
        let mut garbage = TcpStream::connect(brain.address).expect("it works");
        let bytes: Vec<u8> = (0..512).map(|at| (seed.wrapping_mul(at + 7) >> 3) as u8).collect();
        let _ = garbage.write_all(&bytes);
    }
    let _outpost = Outpost::start(brain.settings(1));
    let mut executor = brain.executor("echo", 1);
    ready(&mut executor);
    assert_eq!(step(&mut executor, 1, &[3; 2]), [3]);
    drop(silent);
}
