//! Tests hands on other machines, to which payloads have to be copied. No plan names a payload that
//! has not arrived, and requests without a payload do not wait for one.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::yield_now;
use std::time::Duration;

use forebay_engine::{
    EngineConfig, EngineRequest, Executor, FinishReason, Grid, ImageConfig, ImageId, Payload,
    Picture, Placement, PromptImage, Request, RequestId, Signal, There, Wake,
};
use forebay_protocol::{StepMasks, StepPlan};
use forebay_sim::testing::{
    self, Hook, PATIENCE, RigParts, Story, VOCAB, quiet, tell, text, wholes,
};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimExecutor, SimTower, Timing};

const PAD: i32 = 5;
const GRID: Grid = Grid { rows: 5, columns: 7 };

/// The number of payloads in the arena, and the next offset.
#[derive(Debug, Default)]
struct Arena {
    used: AtomicUsize,
    next: AtomicU32,
}

#[derive(Debug)]
struct Room(Arc<Arena>, u32);

impl Payload for Room {
    fn offset(&self) -> u32 {
        self.1
    }
    fn write(&self, _: usize, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn read(&self, _: usize, _: &mut [u8]) -> io::Result<usize> {
        Ok(0)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Arena {
    fn room(self: &Arc<Self>) -> Arc<dyn Payload> {
        self.used.fetch_add(1, Ordering::SeqCst);
        Arc::new(Room(Arc::clone(self), 64 * self.next.fetch_add(1, Ordering::SeqCst)))
    }
}

#[derive(Debug)]
struct Shown(Arc<Arena>);

impl Picture for Shown {
    fn place(&self, placement: Placement) {
        placement.done(Ok(self.0.room()));
    }
}

/// Payloads that have arrived at the live hands, each as the member and the arena offset.
type Reached = Arc<Mutex<HashSet<(usize, u32)>>>;

/// A payload that is being copied.
struct Cargo {
    member: usize,
    payload: Arc<dyn Payload>,
    there: There,
    reached: Reached,
}

impl Cargo {
    fn arrive(self) {
        self.reached.lock().expect("fine").insert((self.member, self.payload.offset()));
        drop(self.payload);
        (self.there)();
    }
}

/// A simulated hand on another machine.
struct Far {
    inner: SimExecutor,
    /// Payloads that have arrived since the last start.
    reached: Reached,
    cargo: Sender<Cargo>,
    carried: Arc<AtomicUsize>,
}

impl Executor for Far {
    fn start(&mut self) {
        self.reached = Arc::default();
        self.inner.start();
    }
    fn submit(&mut self, plans: &[StepPlan]) {
        for (member, plan) in plans.iter().enumerate() {
            let embeds = plan.new_slots().filter_map(|new| new.spec.embeds);
            let patches = plan.images().filter_map(|(work, _)| work.patches);
            for offset in embeds.chain(patches) {
                let reached = self.reached.lock().expect("fine").contains(&(member, offset));
                assert!(
                    reached,
                    "step {} names the payload at {offset}, which has not arrived",
                    plan.step()
                );
            }
        }
        self.inner.submit(plans);
    }
    fn masks(&mut self, member: usize, masks: &StepMasks) {
        self.inner.masks(member, masks);
    }
    fn is_near(&self) -> bool {
        false
    }
    fn carry(&mut self, member: usize, payload: &Arc<dyn Payload>, there: There) {
        self.carried.fetch_add(1, Ordering::SeqCst);
        let (payload, reached) = (Arc::clone(payload), Arc::clone(&self.reached));
        // The test may have ended.
        let _ = self.cargo.send(Cargo { member, payload, there, reached });
    }
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal {
        self.inner.wait(timeout_us)
    }
    fn stop(&mut self) {
        self.inner.stop();
    }
    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }
}

struct Rig {
    rig: testing::Rig,
    cargo: Receiver<Cargo>,
    carried: Arc<AtomicUsize>,
    arena: Arc<Arena>,
}

impl Deref for Rig {
    type Target = testing::Rig;

    fn deref(&self) -> &testing::Rig {
        &self.rig
    }
}

impl Rig {
    fn start(hook: Hook) -> Self {
        Self::group(vec![hook])
    }

    /// Starts one replica per hook. The replicas share a group of hands.
    fn group(hooks: Vec<Hook>) -> Self {
        let clock = SimClock::virtual_time();
        let sim = SimConfig {
            clock: clock.clone(),
            timing: Timing {
                model: DeviceModel { step_us: 1000.0, tower_us: 10.0, ..DeviceModel::INSTANT },
                ..Timing::default()
            },
            load_us: 1000,
            page_count: 500,
            vocab_size: VOCAB,
            text: text(),
            tower: Some(SimTower { layers: 6, pages: 16 }),
            ..SimConfig::default()
        };
        let config = EngineConfig {
            max_running_requests: 16,
            slots: 24,
            page_size: 4,
            chunked_prefill_size: 32,
            max_queued_requests: 1000,
            context_length: 1024,
            watchdog_timeout: Duration::from_secs(10),
            load_timeout: Duration::ZERO,
            mask_threads: 0,
            images: Some(ImageConfig {
                image_budget: 2 * u64::from(GRID.positions()),
                ..ImageConfig::default()
            }),
            ..EngineConfig::default()
        };
        let (cargo, coming) = channel();
        let counted = Arc::new(AtomicUsize::new(0));
        let carried = Arc::clone(&counted);
        let executor = Box::new(move |inner| -> Box<dyn Executor> {
            Box::new(Far { inner, reached: Arc::default(), cargo, carried: counted })
        });
        let parts = RigParts { hooks, executor, ..RigParts::default() };
        let rig = testing::Rig::start(config, sim, parts).held();
        Self { rig, cargo: coming, carried, arena: Arc::default() }
    }

    fn submit(&self, id: u64, kind: Kind, max_tokens: u32) {
        let mut entering = EngineRequest::default();
        let mut prompt = vec![id as i32 + 10; 9];
        match kind {
            Kind::Text => {}
            Kind::Embedded => {
                let payload = self.arena.room();
                entering.request.spec.embeds = Some(payload.offset());
                entering.payloads.push(payload);
            }
            Kind::Image => {
                let image = ImageId(u128::from(id % 3 + 1) << 80);
                let placed = [(image, prompt.len() as u32, GRID)];
                entering.request.images = PromptImage::place(placed);
                entering.pictures.push(Arc::new(Shown(Arc::clone(&self.arena))));
                prompt.extend(std::iter::repeat_n(PAD, GRID.positions() as usize));
                prompt.push(7);
            }
        }
        let request = Request { id, prompt: prompt.into(), max_tokens, ..entering.request };
        let handle = &self.handles[id as usize % self.handles.len()];
        handle.submit(EngineRequest { request, ..entering }).expect("room");
    }

    /// Waits until the copy of another payload begins, and returns the payload.
    fn next(&self) -> Cargo {
        self.cargo.recv_timeout(PATIENCE).expect("no payload was carried")
    }

    /// Collects the outputs until `count` requests have ended.
    fn follow(&self, count: usize) -> HashMap<u64, (Vec<i32>, FinishReason)> {
        wholes(self.collect(count))
    }

    /// Checks that the arena is empty once the engine has ended.
    fn end(self) {
        let Self { rig, cargo, arena, .. } = self;
        rig.end();
        drop(cargo);
        assert_eq!(
            arena.used.load(Ordering::SeqCst),
            0,
            "the engine left room in the arena in use"
        );
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Embedded,
    Image,
}

/// The tokens that the simulated model generates for a request that runs alone.
fn alone(id: u64, kind: Kind, count: u32) -> Vec<i32> {
    let mut tokens = vec![id as i32 + 10; 9];
    if kind == Kind::Image {
        tokens.extend(std::iter::repeat_n(PAD, GRID.positions() as usize));
        tokens.push(7);
    }
    testing::alone(tokens, count)
}

fn check(ends: &HashMap<u64, (Vec<i32>, FinishReason)>, id: u64, kind: Kind, count: u32) {
    assert_eq!(ends[&id], (alone(id, kind, count), FinishReason::Length), "request {id}");
}

#[test]
fn whoever_has_no_payload_waits_for_nobody_s() {
    let rig = Rig::start(quiet());
    rig.submit(0, Kind::Embedded, 5);
    rig.submit(1, Kind::Image, 5);
    for id in 2..6 {
        rig.submit(id, Kind::Text, 5);
    }
    rig.control.release();
    let ends = rig.follow(4);
    (2..6).for_each(|id| check(&ends, id, Kind::Text, 5));
    let stats = rig.handles[0].stats().scheduler;
    assert_eq!(
        (stats.running, stats.waiting),
        (1, 1),
        "the image request runs, the other one is held"
    );
    rig.next().arrive();
    rig.next().arrive();
    let ends = rig.follow(2);
    check(&ends, 0, Kind::Embedded, 5);
    check(&ends, 1, Kind::Image, 5);
    rig.end();
}

#[test]
fn one_that_leaves_while_its_payload_is_on_its_way_leaves_nothing() {
    let rig = Rig::start(quiet());
    rig.submit(0, Kind::Embedded, 5);
    let late = rig.next();
    rig.handles[0].abort(RequestId(0));
    rig.control.release();
    assert_eq!(rig.follow(1)[&0].1, FinishReason::Abort);
    late.arrive();
    rig.submit(1, Kind::Embedded, 5);
    rig.next().arrive();
    check(&rig.follow(1), 1, Kind::Embedded, 5);
    rig.end();
}

#[test]
fn what_has_reached_a_hand_that_died_is_carried_to_the_next_one() {
    let rig = Rig::start(quiet());
    rig.submit(0, Kind::Embedded, 20);
    rig.submit(1, Kind::Embedded, 20);
    let (first, second) = (rig.next(), rig.next());
    first.arrive();
    rig.control.kill();
    rig.control.release();
    // The next hand needs both payloads. A payload that arrives too late for the first hand does
    // not count.
    let again = [rig.next(), rig.next()];
    second.arrive();
    rig.submit(2, Kind::Text, 5);
    check(&rig.follow(1), 2, Kind::Text, 5);
    again.into_iter().for_each(Cargo::arrive);
    let ends = rig.follow(2);
    check(&ends, 0, Kind::Embedded, 20);
    check(&ends, 1, Kind::Embedded, 20);
    assert_eq!(rig.carried.load(Ordering::SeqCst), 4);
    rig.end();
}

#[test]
fn a_payload_of_one_member_is_waited_for_by_its_request_alone() {
    let rig = Rig::group(vec![quiet(), quiet()]);
    // Two requests of the first member, whose payloads are late, and one of the second.
    rig.submit(0, Kind::Embedded, 5);
    rig.submit(2, Kind::Image, 5);
    rig.submit(1, Kind::Text, 5);
    rig.control.release();
    check(&rig.follow(1), 1, Kind::Text, 5);
    let late = [rig.next(), rig.next()];
    assert!(
        late.iter().all(|cargo| cargo.member == 0),
        "no payload is carried for the second member"
    );
    late.into_iter().for_each(Cargo::arrive);
    let ends = rig.follow(2);
    check(&ends, 0, Kind::Embedded, 5);
    check(&ends, 2, Kind::Image, 5);
    rig.end();
}

#[test]
fn everybody_ends_as_if_alone_while_hands_die_and_payloads_come_late() {
    for members in [1, 3] {
        end_as_if_alone(members);
    }
}

/// Runs requests of all kinds on `members` members. Their hands are killed now and then.
fn end_as_if_alone(members: u64) {
    let seen = Arc::new(AtomicUsize::new(0));
    let hook = |_| -> Hook {
        let seen = Arc::clone(&seen);
        Box::new(move |control, outputs| {
            if seen.fetch_add(outputs.len(), Ordering::SeqCst) + outputs.len() > 150 {
                seen.store(0, Ordering::SeqCst);
                control.kill();
            }
        })
    };
    let rig = Rig::group((0..members).map(hook).collect());
    let kind = |id: u64| [Kind::Text, Kind::Embedded, Kind::Image][id as usize % 3];
    let count = |id: u64| 1 + (id as u32 * 13) % 40;
    for id in 0..48 {
        rig.submit(id, kind(id), count(id));
    }
    rig.control.release();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (cargo, outputs) = (&rig.cargo, &rig.outputs);
        let (sender, moved) = channel();
        let over = &over;
        // Of the payloads that are being copied, the newest arrives first.
        let mut waiting: Vec<Cargo> = Vec::new();
        let carrier = move || {
            let moved: Receiver<Cargo> = moved;
            while !over.load(Ordering::SeqCst) {
                waiting.extend(moved.try_iter());
                match waiting.pop() {
                    Some(cargo) => cargo.arrive(),
                    None => yield_now(),
                }
            }
        };
        scope.spawn(carrier);
        let (mut stories, mut ended) = (HashMap::<u64, Story>::new(), 0);
        while ended < 48 {
            cargo.try_iter().for_each(|one| sender.send(one).expect("the channel is open"));
            ended += tell(&mut stories, outputs.try_iter().flatten().collect()).len();
            yield_now();
        }
        over.store(true, Ordering::SeqCst);
        for id in 0..48 {
            let story = &stories[&id];
            assert_eq!(story.end, Some(FinishReason::Length));
            assert_eq!(story.tokens, alone(id, kind(id), count(id)), "request {id}");
        }
    });
    assert!(rig.handles[0].stats().hand.deaths >= 2);
    rig.end();
}
