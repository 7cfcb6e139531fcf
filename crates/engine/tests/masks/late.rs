//! Masks that take longer than a step waits: their rows sit out, and all other requests continue.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use forebay_engine::{
    Allowed, Clock, Constraint, ConstraintError, EngineConfig, EngineHandle, Executor,
    FinishReason, Orphan, Peers, QueuedRequest, RequestId, Signal, Wake,
};
use forebay_protocol::{StepMasks, StepPlan};
use forebay_sim::testing::{Hook, PATIENCE, RigParts, Story, quiet, tell};
use forebay_sim::{SimClock, SimExecutor};
use parking_lot::{Condvar, Mutex};

use crate::rig::{Few, Rig, allowed, check, config, length};

/// Virtual microseconds of an expensive mask. After the first one, only mask threads compute the
/// request's masks.
const DEAR_US: u64 = 5000;

/// A gate at which mask jobs wait until it is opened.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    opened: u64,
    /// The number of mask jobs that wait at the gate.
    waiting: usize,
    /// True if the gate stays open.
    over: bool,
}

/// A gate that is opened for good when it is dropped, so that a failed test does not hang.
#[derive(Debug, Default)]
struct OwnGate(Arc<Gate>);

impl Drop for OwnGate {
    fn drop(&mut self) {
        self.0.state.lock().over = true;
        self.0.open();
    }
}

impl Gate {
    fn open(&self) {
        self.state.lock().opened += 1;
        self.changed.notify_all();
    }

    /// Waits until the gate is opened the next time.
    fn pass(&self) {
        let mut state = self.state.lock();
        let opened = state.opened;
        state.waiting += 1;
        self.changed.notify_all();
        self.changed.wait_while(&mut state, |state| !state.over && state.opened == opened);
        state.waiting -= 1;
    }

    /// Waits until exactly this many mask jobs wait at the gate.
    fn wait_for(&self, waiting: usize) {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| state.waiting != waiting);
    }
}

/// A constraint that calls `before` ahead of computing each mask.
struct Slow<F> {
    few: Few,
    before: F,
}

impl<F> std::fmt::Debug for Slow<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.few.fmt(f)
    }
}

impl<F: FnMut(&[i32]) + Send> Constraint for Slow<F> {
    fn accept(&mut self, token: i32) -> Result<(), ConstraintError> {
        self.few.accept(token)
    }

    fn walk(
        &mut self,
        drafts: &[i32],
        masks: &mut [&mut [u32]],
    ) -> Result<Vec<Allowed>, ConstraintError> {
        (self.before)(&self.few.said);
        self.few.walk(drafts, masks)
    }
}

fn slow(few: Few, before: impl FnMut(&[i32]) + Send + 'static) -> Option<Box<dyn Constraint>> {
    Some(Box::new(Slow { few, before }))
}

/// Creates a constraint that waits at the gate before the mask after `at` tokens. The masks before
/// that one are expensive.
fn gated(rig: &Rig, gate: &Arc<Gate>, at: usize) -> Option<Box<dyn Constraint>> {
    let (gate, time) = (Arc::clone(gate), time_of(rig));
    let mut passed = false;
    slow(rig.few(), move |said| {
        if said.len() < at {
            time.fetch_add(DEAR_US, Ordering::SeqCst);
        } else if said.len() == at && !std::mem::replace(&mut passed, true) {
            gate.pass();
        }
    })
}

fn time_of(rig: &Rig) -> Arc<AtomicU64> {
    match &rig.clock {
        SimClock::Virtual(time) => Arc::clone(time),
        SimClock::Real(_) => panic!("time is virtual here"),
    }
}

fn own_thread() -> bool {
    thread::current().name() == Some("engine")
}

/// Checks that all tokens obey the constraint.
fn check_few(story: &Story, count: usize) {
    assert_eq!((story.end.as_ref(), story.tokens.len()), (Some(&FinishReason::Length), count));
    for (at, token) in story.tokens.iter().enumerate() {
        assert!(allowed(&story.tokens[..at]).is_none_or(|ids| ids.contains(token)));
    }
}

impl Rig {
    /// Runs virtual time until all of these requests have ended.
    fn until_ended(&self, stories: &mut HashMap<u64, Story>, ids: &[u64]) {
        self.control.release();
        let mut left: HashSet<u64> = ids.iter().copied().collect();
        left.retain(|id| stories.get(id).is_none_or(|story| story.end.is_none()));
        while !left.is_empty() {
            let outputs = self.outputs.recv_timeout(PATIENCE).expect("outputs");
            for id in tell(stories, outputs) {
                left.remove(&id);
            }
        }
    }
}

#[test]
fn everybody_else_goes_on_while_a_mask_is_made() {
    for (lookahead, at) in [(0, 0), (0, 2), (1, 0), (1, 2), (1, 5)] {
        let rig = Rig::start(config(lookahead, 2), 2000, 1, quiet());
        let gate = OwnGate::default();
        rig.submit_of(1, 100, 30, gated(&rig, &gate.0, at));
        let others: Vec<u64> = (0..15).step_by(3).collect();
        others.iter().for_each(|&id| rig.submit(id, length(id), None));
        let mut stories = HashMap::new();
        rig.until_ended(&mut stories, &others);
        gate.0.wait_for(1);
        // On a busy machine the request's first masks may come after the other requests have ended.
        while stories.entry(100).or_default().tokens.len() < at {
            tell(&mut stories, rig.outputs.recv_timeout(PATIENCE).expect("outputs"));
        }
        let late = stories.remove(&100).unwrap_or_default();
        assert_eq!((late.tokens.len(), &late.end), (at, &None), "lookahead {lookahead}");
        check(&stories);
        // A request whose mask is late gets no row until the mask is ready. So few rows sit out:
        // one, or more on a busy machine, where earlier masks may have been late too.
        let stats = rig.handle.stats().hand;
        assert!((1..=at as u64 + 1).contains(&stats.sat_out), "{stats:?}");
        gate.0.open();
        stories.insert(100, late);
        rig.until_ended(&mut stories, &[100]);
        check_few(&stories[&100], 30);
    }
}

/// A clock that stands still on mask threads, so that masks computed there count as cheap.
struct OwnTime(SimClock);

impl Clock for OwnTime {
    fn now_us(&self) -> u64 {
        if thread::current().name() == Some("masks") { 0 } else { self.0.now_us() }
    }
}

/// The number of masks that the engine thread computed: in the current step, and the largest number
/// in one step.
#[derive(Debug, Default)]
struct Counts {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// Counts the masks of each step.
struct Counting(SimExecutor, Arc<Counts>);

impl Executor for Counting {
    fn start(&mut self) {
        self.0.start();
    }
    fn submit(&mut self, plans: &[StepPlan]) {
        self.0.submit(plans);
    }
    fn masks(&mut self, member: usize, masks: &StepMasks) {
        let made = self.1.now.swap(0, Ordering::SeqCst);
        self.1.most.fetch_max(made, Ordering::SeqCst);
        self.0.masks(member, masks);
    }
    fn wait(&mut self, timeout_us: Option<u64>) -> Signal {
        self.0.wait(timeout_us)
    }
    fn stop(&mut self) {
        self.0.stop();
    }
    fn waker(&self) -> Arc<dyn Wake> {
        self.0.waker()
    }
}

#[test]
fn the_engine_s_thread_does_no_more_than_fits_into_its_part_of_a_step() {
    const COST_US: u64 = 400;
    let counts = Arc::new(Counts::default());
    let counting = Arc::clone(&counts);
    // Once every request has a few tokens, virtual time is stopped until the test releases it.
    let mut said: HashMap<u64, usize> = HashMap::new();
    let (sender, held) = channel();
    let hook: Hook = Box::new(move |control, outputs| {
        outputs.iter().for_each(|output| *said.entry(output.id.0).or_default() += 1);
        if said.len() == 21 && said.values().all(|&count| count >= 4) {
            said.insert(0, 0);
            control.hold();
            sender.send(()).expect("the test listens");
        }
    });
    let parts = RigParts {
        hooks: vec![hook],
        clock: |clock| Arc::new(OwnTime(clock)),
        executor: Box::new(|executor| Box::new(Counting(executor, counting))),
        ..RigParts::default()
    };
    // Long answers: on a busy machine the requests get thousands of tokens before the mask thread
    // wakes up.
    let config = EngineConfig { context_length: 1 << 13, ..config(1, 1) };
    let rig = Rig::with(config, 1 << 16, 1, parts);
    let (cost, time) = (Arc::new(AtomicU64::new(0)), time_of(&rig));
    for id in 1..22 {
        let (cost, time, counts) = (Arc::clone(&cost), Arc::clone(&time), Arc::clone(&counts));
        let before = move |_: &[i32]| {
            let us = cost.load(Ordering::SeqCst);
            if own_thread() && us > 0 {
                counts.now.fetch_add(1, Ordering::SeqCst);
                time.fetch_add(us, Ordering::SeqCst);
            }
        };
        rig.submit_of(id, id, 8000, slow(rig.few(), before));
    }
    rig.control.release();
    held.recv_timeout(PATIENCE).expect("every request has tokens");
    // Keep the only mask thread busy.
    let gate = OwnGate::default();
    rig.submit_of(30, 100, 5, gated(&rig, &gate.0, 0));
    cost.store(COST_US, Ordering::SeqCst);
    rig.control.release();
    gate.0.wait_for(1);
    let sat_out = rig.handle.stats().hand.sat_out;
    let mut told = rig.outputs.try_iter().flatten().count();
    let goal = told + 100;
    while told < goal {
        told += rig.outputs.recv_timeout(PATIENCE).expect("outputs").len();
    }
    let stats = rig.handle.stats().hand;
    let (most, fits) = (counts.most.load(Ordering::SeqCst), stats.mask_budget_us / COST_US);
    assert!((1..=fits as usize + 1).contains(&most), "{most} in a step, and {fits} fit");
    assert!(stats.sat_out > sat_out, "{stats:?}");
    gate.0.open();
}

thread_local! {
    /// True if the thread has computed a mask since it last read the time.
    static MADE: Cell<bool> = const { Cell::new(false) };
    /// The time that the thread last read from the clock.
    static HEARD_US: Cell<u64> = const { Cell::new(0) };
}

/// A clock that can simulate a busy machine. While `HURRIES` is set, the engine thread finds that
/// the time for masks is over before it computes the first mask of a step. A mask itself takes no
/// time.
struct Hurried(SimClock);

static HURRIES: AtomicBool = AtomicBool::new(false);

impl Clock for Hurried {
    fn now_us(&self) -> u64 {
        if MADE.take() {
            return HEARD_US.get();
        }
        if own_thread()
            && HURRIES.load(Ordering::SeqCst)
            && let SimClock::Virtual(time) = &self.0
        {
            time.fetch_add(3000, Ordering::SeqCst);
        }
        let now_us = self.0.now_us();
        HEARD_US.set(now_us);
        now_us
    }
}

#[test]
fn cheap_masks_do_not_wait_for_a_busy_mask_thread_when_every_row_sat_out() {
    let mut said: HashMap<u64, usize> = HashMap::new();
    let (sender, held) = channel();
    let hook: Hook = Box::new(move |control, outputs| {
        outputs.iter().for_each(|output| *said.entry(output.id.0).or_default() += 1);
        if said.len() == 3 && said.values().all(|&count| count >= 4) {
            said.insert(0, 0);
            control.hold();
            sender.send(()).expect("the test listens");
        }
    });
    let parts = RigParts {
        hooks: vec![hook],
        clock: |clock| Arc::new(Hurried(clock)),
        ..RigParts::default()
    };
    let rig = Rig::with(config(1, 1), 2000, 1, parts);
    for id in 1..4 {
        rig.submit_of(id, id, 150, slow(rig.few(), |_| MADE.set(true)));
    }
    rig.control.release();
    held.recv_timeout(PATIENCE).expect("every request has tokens");
    HURRIES.store(true, Ordering::SeqCst);
    let gate = OwnGate::default();
    rig.submit_of(30, 100, 5, gated(&rig, &gate.0, 0));
    let mut stories = HashMap::new();
    rig.until_ended(&mut stories, &[1, 2, 3]);
    (1..4).for_each(|id| check_few(&stories[&id], 150));
    gate.0.wait_for(1);
    gate.0.open();
    rig.until_ended(&mut stories, &[100]);
}

#[test]
fn clients_take_turns_at_the_mask_threads() {
    // Requests are admitted in the order of arrival.
    let config = EngineConfig { fair_queueing: false, ..config(1, 1) };
    let rig = Rig::start(config, 2000, 1, quiet());
    let (gate, order) = (OwnGate::default(), Arc::new(Mutex::new(Vec::new())));
    rig.submit_of(3, 100, 3, gated(&rig, &gate.0, 0));
    let noted = |id: u64| {
        let order = Arc::clone(&order);
        slow(rig.few(), move |said| {
            if said.is_empty() {
                order.lock().push(id);
            }
        })
    };
    for id in 0..20 {
        rig.submit_of(1, id, 3, noted(id));
    }
    rig.submit_of(2, 50, 3, noted(50));
    // When this last request gets tokens, the first masks of all other requests are queued.
    rig.submit_of(4, 60, 2, None);
    let mut stories = HashMap::new();
    rig.until_ended(&mut stories, &[60]);
    gate.0.wait_for(1);
    gate.0.open();
    let all: Vec<u64> = (0..20).chain([50, 100]).collect();
    rig.until_ended(&mut stories, &all);
    let place = order.lock().iter().position(|&id| id == 50);
    // One mask of the other client may have been in progress, and one more may have come first.
    assert!(place.is_some_and(|place| place <= 2), "{:?}", order.lock());
    all.iter().for_each(|id| check_few(&stories[id], 3));
}

/// Another engine, which takes over the requests of this one.
struct Other(EngineHandle);

impl Peers for Other {
    fn up(&self, _: bool) {}
    fn others_up(&self) -> bool {
        true
    }
    fn others_live(&self) -> bool {
        true
    }
    fn adopt(&self, orphans: Vec<Orphan>) -> Vec<Orphan> {
        orphans.into_iter().for_each(|orphan| self.0.adopt(orphan));
        Vec::new()
    }
    fn move_pays(&self, _: usize, _: &QueuedRequest<'_>) -> bool {
        true
    }
    fn take(&self, _: usize, orphan: Orphan) -> Option<Orphan> {
        self.0.adopt(orphan);
        None
    }
    fn abort(&self, id: RequestId) {
        self.0.abort(id);
    }
}

#[test]
fn a_request_goes_to_another_engine_while_its_mask_is_made() {
    let taker = Rig::start(config(1, 1), 2000, 1, quiet());
    let peers = Some(Box::new(Other(taker.handle.clone())) as Box<dyn Peers>);
    let giver = Rig::with(config(1, 1), 2000, 1, RigParts { peers, ..RigParts::default() });
    let gate = OwnGate::default();
    giver.submit_of(1, 100, 30, gated(&giver, &gate.0, 4));
    // The next mask of this request is queued after the mask of request 100.
    giver.submit_of(2, 101, 30, gated(&giver, &gate.0, 1000));
    giver.submit_of(3, 0, 40, None);
    let mut stories = HashMap::new();
    giver.until_ended(&mut stories, &[0]);
    gate.0.wait_for(1);
    giver.control.kill();
    taker.control.release();
    while taker.handle.stats().scheduler.waiting + taker.handle.stats().scheduler.running == 0 {
        thread::yield_now();
    }
    // The tokens before the death come from the first engine.
    for output in giver.outputs.try_iter().flatten() {
        let story = stories.entry(output.id.0).or_default();
        story.tokens.extend(output.token.map(|token| token.id));
        story.end = output.finish.or(story.end.take());
    }
    let told = |id: &u64| stories.get(id).is_none_or(|story| story.end.is_none());
    let live: Vec<u64> = [100, 101].into_iter().filter(told).collect();
    assert!(live.contains(&100));
    let mut others = HashMap::new();
    gate.0.open();
    taker.until_ended(&mut others, &live);
    for id in [100, 101] {
        let mut story = stories.remove(&id).unwrap_or_default();
        let rest = others.remove(&id).unwrap_or_default();
        story.tokens.extend(rest.tokens);
        story.end = story.end.or(rest.end);
        check_few(&story, 30);
    }
}

#[test]
fn an_aborted_request_leaves_its_place_while_its_mask_is_made() {
    let rig = Rig::start(config(1, 1), 2000, 1, quiet());
    let gate = OwnGate::default();
    rig.submit_of(1, 100, 30, gated(&rig, &gate.0, 1));
    rig.submit_of(1, 101, 30, gated(&rig, &gate.0, 1));
    rig.submit(0, length(0) + 20, None);
    let mut stories = HashMap::new();
    rig.until_ended(&mut stories, &[0]);
    gate.0.wait_for(1);
    rig.handle.abort(RequestId(100));
    rig.handle.abort(RequestId(101));
    rig.until_ended(&mut stories, &[100, 101]);
    for id in [100, 101] {
        assert_eq!(stories[&id].end, Some(FinishReason::Abort));
    }
    assert_eq!(rig.handle.stats().scheduler.running, 0);
    gate.0.open();
    rig.submit_of(1, 7, 9, gated(&rig, &gate.0, 1000));
    rig.until_ended(&mut stories, &[7]);
    check_few(&stories[&7], 9);
}

/// Collects the outputs of requests whose masks are sometimes late. Opens the gate after each
/// delivery, and whenever no outputs come.
fn follow_late(rig: &Rig, gate: &Gate, count: usize) -> HashMap<u64, Story> {
    rig.control.release();
    let mut stories: HashMap<u64, Story> = HashMap::new();
    let (mut ended, mut quiet) = (0, 0);
    while ended < count {
        let outputs = match rig.outputs.recv_timeout(Duration::from_millis(5)) {
            Ok(outputs) => outputs,
            Err(RecvTimeoutError::Disconnected) => panic!("the engine has ended"),
            Err(RecvTimeoutError::Timeout) => {
                quiet += 1;
                assert!(quiet < 10_000, "no outputs come any more");
                gate.open();
                continue;
            }
        };
        quiet = 0;
        ended += tell(&mut stories, outputs).len();
    }
    stories
}

#[test]
fn the_tokens_are_the_same_whichever_rows_sit_out() {
    let reference = Rig::start(config(0, 0), 2000, 1, quiet());
    reference.submit_all(40);
    let expected = reference.follow(40);
    let mut sat_out = 0;
    for (lookahead, threads, pages, tokens_a_row, dies) in [
        (0, 1, 2000, 1, false),
        (1, 1, 2000, 1, false),
        (1, 3, 70, 1, false),
        (1, 2, 2000, 1, true),
        (0, 2, 70, 1, true),
        (1, 2, 2000, 3, true),
    ] {
        let gate = OwnGate::default();
        let opened = Arc::clone(&gate.0);
        let (mut kills, mut seen) = (0, 0);
        let hook: Hook = Box::new(move |control, outputs| {
            opened.open();
            seen += outputs.len();
            if dies && kills < 6 && seen > 150 {
                (kills, seen) = (kills + 1, 0);
                control.kill();
            }
        });
        let rig = Rig::start(config(lookahead, threads), pages, tokens_a_row, hook);
        for id in 0..40_u64 {
            let gate = Arc::clone(&gate.0);
            let constraint = slow(rig.few(), move |said| {
                let mix = said
                    .iter()
                    .fold(id, |mix, &token| mix.wrapping_mul(31).wrapping_add(token as u64));
                // The engine thread must not wait at the gate, because it would wait for itself.
                if mix % 13 == 0 && !own_thread() {
                    gate.pass();
                }
            });
            rig.submit_of(0, id, length(id), constraint.filter(|_| id % 3 != 0));
        }
        let stories = follow_late(&rig, &gate.0, 40);
        let what = format!("lookahead {lookahead}, {threads} threads, {pages} pages, {dies}");
        assert!(stories == expected, "{what}");
        let stats = rig.handle.stats();
        sat_out += stats.hand.sat_out;
        assert_eq!(stats.scheduler.preemptions > 0, pages == 70, "{what}: {stats:?}");
        assert_eq!(stats.hand.deaths >= 6, dies, "{what}: {stats:?}");
    }
    // On a busy machine the engine thread may compute all masks of some cases, so only the total is
    // checked.
    assert!(sat_out > 0, "no row sat out");
}

#[test]
fn a_constraint_that_panics_ends_its_request_alone() {
    for threads in [0, 1] {
        let rig = Rig::start(config(1, threads), 2000, 1, quiet());
        rig.submit_all(9);
        let before = |said: &[i32]| assert!(said.len() < 3, "the test makes the constraint panic");
        rig.submit_of(1, 100, 30, slow(rig.few(), before));
        let mut stories = HashMap::new();
        rig.until_ended(&mut stories, &(0..9).chain([100]).collect::<Vec<u64>>());
        let story = stories.remove(&100).unwrap_or_default();
        assert_eq!(story.tokens.len(), 3);
        assert!(matches!(story.end, Some(FinishReason::Error(_))), "{:?}", story.end);
        check(&stories);
    }
}
