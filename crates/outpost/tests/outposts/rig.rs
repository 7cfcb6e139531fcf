//! A brain, its outposts, and hands that compute nothing.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay_engine::{Executor, Ready, Signal};
use forebay_hand::{
    Arena, HandConfig, HandExecutor, HandSpec, HostMemories, RankProcess, RankSpec, Site,
};
use forebay_outpost::{
    Credentials, HandOrder, JoinToken, OutpostEnd, Outposts, WorkSettings, work,
};
use forebay_protocol::{NewSlot, Row, SlotSpec, StepPlan, Want};
use tokio::sync::oneshot;

pub(crate) const MINUTE_US: u64 = 60_000_000;

/// A brain that accepts outposts.
pub(crate) struct Brain {
    /// The site that all replicas share.
    pub(crate) site: Arc<dyn Site>,
    pub(crate) arena: Arena,
    pub(crate) address: SocketAddr,
    pub(crate) token: JoinToken,
    pub(crate) _stop: oneshot::Sender<()>,
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("no error")
}

impl Brain {
    pub(crate) fn start() -> Self {
        Self::of(None)
    }

    /// Creates a brain. With an interface, its groups may run on several outposts.
    pub(crate) fn of(interface: Option<&str>) -> Self {
        let credentials = Credentials::make().expect("no error");
        let listener = TcpListener::bind("127.0.0.1:0").expect("no error");
        let address = listener.local_addr().expect("no error");
        let (outposts, serving) = Outposts::listen(listener, &credentials).expect("no error");
        let (stop, stopped) = oneshot::channel();
        thread::spawn(move || {
            runtime().block_on(async {
                tokio::select! {
                    served = serving => served.expect("no error"),
                    _ = stopped => {}
                }
            });
        });
        let site = outposts.site("fake", interface);
        let arena = Arena::new(16 << 20).expect("no error");
        Self { site, arena, address, token: credentials.token().clone(), _stop: stop }
    }

    pub(crate) fn executor(&self, behaviour: &str, ranks: usize) -> HandExecutor {
        HandExecutor::new(self.spec(behaviour, ranks)).expect("no error")
    }

    /// A step group with one member per rank.
    pub(crate) fn step_group(&self, behaviour: &str, ranks: usize) -> HandExecutor {
        let mut spec = self.spec(behaviour, ranks);
        spec.config.step_group = true;
        HandExecutor::new(spec).expect("no error")
    }

    pub(crate) fn spec(&self, behaviour: &str, ranks: usize) -> HandSpec {
        HandSpec {
            program: "/not/used".into(),
            args: Vec::new(),
            env: vec![("FAKE_BEHAVIOUR".into(), behaviour.into())],
            config: HandConfig { page_size: 16, ..HandConfig::default() },
            arena: self.arena.clone(),
            ranks: vec![RankSpec::default(); ranks],
            memories: HostMemories::default(),
            site: Some(Arc::clone(&self.site)),
        }
    }

    pub(crate) fn settings(&self, hands: u32) -> WorkSettings {
        let (brain, token) = (self.address.to_string(), self.token.clone());
        WorkSettings { brain, token, name: "here".into(), hands }
    }

    /// Settings with this brain's certificate and the secret of another brain.
    pub(crate) fn mixed_up(&self, other: &Credentials) -> WorkSettings {
        let (right, wrong) = (self.token.to_string(), other.token().to_string());
        let mixed = format!("{}{}", &right[..right.len() - 64], &wrong[wrong.len() - 64..]);
        WorkSettings { token: mixed.parse().expect("no error"), ..self.settings(1) }
    }
}

/// An outpost on a separate thread. Dropping it stops the outpost as a signal would.
pub(crate) struct Outpost {
    pub(crate) stop: Option<oneshot::Sender<()>>,
    pub(crate) thread: Option<thread::JoinHandle<Result<(), OutpostEnd>>>,
}

pub(crate) fn spawn(
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
    RankProcess::spawn(command, arena, &[], &[])
}

impl Outpost {
    pub(crate) fn start(settings: WorkSettings) -> Self {
        let (stop, stopped) = oneshot::channel();
        let stopping = async {
            let _ = stopped.await;
        };
        let thread =
            thread::spawn(move || runtime().block_on(work(settings, Arc::new(spawn), stopping)));
        Self { stop: Some(stop), thread: Some(thread) }
    }

    pub(crate) fn end(mut self) -> Result<(), OutpostEnd> {
        drop(self.stop.take());
        self.thread.take().expect("no error").join().expect("no error")
    }

    /// Waits until the outpost stops without being asked to.
    pub(crate) fn ended(mut self) -> OutpostEnd {
        let thread = self.thread.as_ref().expect("the thread was not joined");
        eventually("the outpost ends by itself", || thread.is_finished());
        self.thread
            .take()
            .expect("no error")
            .join()
            .expect("no error")
            .expect_err("the outpost ended with an error")
    }
}

pub(crate) fn next(executor: &mut HandExecutor) -> Signal {
    match executor.wait(Some(MINUTE_US)) {
        Signal::TimedOut => panic!("nothing happened for a minute"),
        signal => signal,
    }
}

pub(crate) fn ready(executor: &mut HandExecutor) -> Ready {
    executor.start();
    ready_at_last(executor)
}

/// Waits until the group has started. Returns what its hands report.
pub(crate) fn ready_at_last(executor: &mut HandExecutor) -> Ready {
    loop {
        match next(executor) {
            Signal::Ready(facts) => return *facts,
            Signal::Progress(_) => {}
            other => panic!("not ready: {other:?}"),
        }
    }
}

/// Waits for the group's death. Returns the reason and the time that it took.
pub(crate) fn death(executor: &mut HandExecutor) -> (String, Duration) {
    let began = Instant::now();
    loop {
        match next(executor) {
            Signal::Died(reason) => return (reason, began.elapsed()),
            Signal::Progress(_) | Signal::Result(_) => {}
            other => panic!("not dead: {other:?}"),
        }
    }
}

pub(crate) fn plan(step: u64, tokens: &[i32]) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    let prompt_len = tokens.len() as u32;
    plan.write_slot(&NewSlot {
        slot: 0,
        tokens,
        prompt_len,
        spec: &SlotSpec::default(),
        place: None,
    });
    plan.push_row(Row { slot: 0, start: 0, length: prompt_len, want: Want::TOKEN });
    plan
}

pub(crate) fn step(executor: &mut HandExecutor, step: u64, tokens: &[i32]) -> Vec<i32> {
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

/// The number of running hands that have `marker` in their environment.
pub(crate) fn hands_of(marker: &str) -> usize {
    environments(marker).len()
}

/// The environments of the running hands that have `marker` in their environment.
pub(crate) fn environments(marker: &str) -> Vec<String> {
    let wanted = format!("FAKE_BEHAVIOUR={marker}\0");
    let processes = std::fs::read_dir("/proc").expect("no error").flatten();
    let texts = processes.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
    let texts = texts.map(|text| String::from_utf8_lossy(&text).into_owned());
    texts.filter(|text| text.contains(&wanted)).collect()
}

pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "never: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}
