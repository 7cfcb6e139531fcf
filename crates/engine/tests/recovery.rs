//! Hands that do not start, requests that kill them, and requests that wait, in virtual time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_engine::{
    Clock, EngineConfig, FinishReason, Orphan, Peers, QueuedRequest, RequestError, RequestId,
    Status, SubmitError,
};
use forebay_sim::testing::{PATIENCE, Rig, RigParts, VOCAB, request, wholes};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimControl, SimText, Timing};

const POISON: i32 = 777;
const SECOND: u64 = 1_000_000;

/// Other replicas that never take a request. They are live while the flag is set.
struct Others(Arc<AtomicBool>);

impl Peers for Others {
    fn up(&self, _: bool) {}
    fn others_up(&self) -> bool {
        false
    }
    fn others_live(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
    fn adopt(&self, orphans: Vec<Orphan>) -> Vec<Orphan> {
        orphans
    }
    fn move_pays(&self, _: usize, _: &QueuedRequest<'_>) -> bool {
        false
    }
    fn take(&self, _: usize, orphan: Orphan) -> Option<Orphan> {
        Some(orphan)
    }
    fn abort(&self, _: RequestId) {}
}

fn config() -> EngineConfig {
    EngineConfig {
        max_running_requests: 4,
        slots: 6,
        page_size: 4,
        chunked_prefill_size: 32,
        max_queued_requests: 64,
        context_length: 400,
        watchdog_timeout: Duration::from_secs(10),
        load_timeout: Duration::from_secs(20),
        hand_restarts: 1,
        mask_threads: 0,
        ..EngineConfig::default()
    }
}

fn start(config: EngineConfig) -> Rig {
    broken(config, None, |_| {}).held()
}

fn broken(
    config: EngineConfig,
    others: Option<Arc<AtomicBool>>,
    breaking: impl FnOnce(&SimControl) + 'static,
) -> Rig {
    let clock = SimClock::virtual_time();
    let sim = SimConfig {
        clock: clock.clone(),
        timing: Timing {
            model: DeviceModel { step_us: 10_000.0, ..DeviceModel::INSTANT },
            ..Timing::default()
        },
        load_us: SECOND,
        page_count: 500,
        vocab_size: VOCAB,
        text: SimText::endless((0..VOCAB as i32 / 2).collect()),
        ..SimConfig::default()
    };
    let peers = others.map(|live| -> Box<dyn Peers> { Box::new(Others(live)) });
    let breaking = Box::new(|control: &SimControl| {
        control.poison(POISON);
        breaking(control);
    });
    Rig::start(config, sim, RigParts { peers, breaking, ..RigParts::default() })
}

/// Runs virtual time until `count` requests have ended. Returns the number of tokens and the finish
/// reason of each.
fn follow(rig: &Rig, count: usize) -> HashMap<u64, (usize, FinishReason)> {
    let wholes = wholes(rig.follow(count)).into_iter();
    wholes.map(|(id, (tokens, end))| (id, (tokens.len(), end))).collect()
}

fn failed(reason: &str) -> FinishReason {
    FinishReason::Error(RequestError::HandFailed(reason.into()))
}

#[test]
fn however_many_requests_kill_the_hand_it_is_never_given_up() {
    let rig = start(EngineConfig { hand_restarts: 0, ..config() });
    for id in 0..40 {
        let prompt = if id % 4 == 3 { vec![1, 2, 3] } else { vec![1, POISON] };
        rig.handle.submit(request(id, prompt, 10)).expect("room");
    }
    for (id, (tokens, finish)) in follow(&rig, 40) {
        if id % 4 == 3 {
            assert_eq!((tokens, finish), (10, FinishReason::Length), "request {id}");
        } else {
            assert_eq!(finish, FinishReason::Error(RequestError::Poisoned), "request {id}");
        }
    }
    rig.settled(|status| *status == Status::Ready);
    assert!(
        rig.handle.stats().hand.deaths >= 31,
        "each suspect but the first dies in a step of its own"
    );
}

#[test]
fn a_hand_that_hangs_while_it_comes_back_is_started_again() {
    let rig = start(config());
    rig.handle.submit(request(0, vec![1, 2], 50)).expect("room");
    rig.control.hang_starts(1);
    rig.control.kill();
    assert_eq!(follow(&rig, 1)[&0], (50, FinishReason::Length));
    assert_eq!(rig.handle.stats().hand.deaths, 2);
    assert!(rig.clock.now_us() >= 20 * SECOND, "the worker's start was not waited for");
}

#[test]
fn a_first_start_that_fails_or_hangs_is_final() {
    for (hangs, reason) in
        [(false, "start refused"), (true, "no sign of life for 20 s while it started")]
    {
        let rig = broken(config(), None, move |control| {
            if hangs { control.hang_starts(1) } else { control.fail_starts(1) }
        });
        rig.exit.recv_timeout(PATIENCE).expect("the engine ends");
        assert_eq!(rig.handle.status(), Status::Failed(reason.to_owned()));
        let refused = rig.handle.submit(request(0, vec![1], 1));
        assert_eq!(refused, Err(SubmitError::Unavailable(reason.to_owned())));
    }
}

#[test]
fn when_the_only_hand_is_given_up_every_request_is_told_and_the_engine_ends() {
    let rig = start(config());
    for id in 0..20 {
        rig.handle.submit(request(id, vec![1, 2], 50)).expect("room");
    }
    rig.control.fail_starts(1000);
    rig.control.kill();
    let ends = follow(&rig, 20);
    assert!(ends.values().all(|(_, finish)| *finish == failed("start refused")));
    rig.exit.recv_timeout(PATIENCE).expect("the engine ends");
}

#[test]
fn a_hand_that_was_given_up_is_tried_again_as_long_as_another_serves() {
    for first_start in [false, true] {
        let others = Arc::new(AtomicBool::new(true));
        let starts = if first_start { 3 } else { 0 };
        let rig = broken(config(), Some(Arc::clone(&others)), move |control| {
            control.fail_starts(starts);
        });
        if !first_start {
            rig.settled(|status| *status == Status::Ready);
            rig.control.hold();
            rig.handle.submit(request(0, vec![1, 2], 5)).expect("room");
            rig.control.fail_starts(4);
            rig.control.kill();
            // The request waits at this replica, because no other replica is up.
            assert_eq!(follow(&rig, 1)[&0], (5, FinishReason::Length));
        }
        rig.settled(|status| *status == Status::Ready);
        let waited = if first_start { 30 + 60 + 120 } else { 30 + 60 };
        assert!(rig.clock.now_us() >= waited * SECOND, "{} us", rig.clock.now_us());
        others.store(false, Ordering::SeqCst);
        rig.control.fail_starts(1000);
        rig.control.kill();
        rig.control.release();
        rig.exit.recv_timeout(PATIENCE).expect("the engine ends once no other replica serves");
        assert_eq!(rig.handle.status(), Status::Failed("start refused".into()));
    }
}

#[test]
fn who_waits_too_long_is_told_once_and_the_others_are_served() {
    let config =
        EngineConfig { max_running_requests: 1, queue_timeout: Duration::from_secs(1), ..config() };
    let rig = start(config);
    // A step takes 10 ms.
    for (id, tokens) in [(0, 60), (1, 20), (2, 50), (3, 50)] {
        rig.handle.submit(request(id, vec![1, 2], tokens)).expect("room");
    }
    let ends = follow(&rig, 4);
    assert_eq!(ends[&0], (60, FinishReason::Length));
    assert_eq!(ends[&1], (20, FinishReason::Length));
    assert_eq!(
        ends[&2],
        (50, FinishReason::Length),
        "a request that is admitted in time may take longer"
    );
    let (tokens, finish) = &ends[&3];
    let FinishReason::Error(RequestError::QueueTimeout { seconds: 1, retry_after }) = finish else {
        panic!("{finish:?}")
    };
    assert_eq!((*tokens, *retry_after), (0, 1), "no request waits any more");
    rig.control.hold();
    for id in 4..64 + 4 {
        rig.handle.submit(request(id, vec![1], 1)).expect("the place in the queue was given back");
    }
    rig.control.release();
    follow(&rig, 64);
}

#[test]
fn a_full_queue_has_room_for_other_clients_and_for_probes() {
    let rig = start(EngineConfig { max_running_requests: 1, slots: 2, ..config() });
    let mut crowd = 0;
    let refused = loop {
        match rig.handle.submit(request(crowd, vec![1], 100)) {
            Ok(()) => crowd += 1,
            Err(error) => break error,
        }
        assert!(crowd < 1000, "no request was refused");
    };
    assert!(matches!(refused, SubmitError::QueueFull { limit: 64, .. }), "{refused:?}");
    let mut other = request(1000, vec![1], 2);
    other.request.client = 2;
    rig.handle.submit(other).expect("another client has filled the queue, not this one");
    let mut probe = request(1001, vec![1], 1);
    probe.request.probe = true;
    rig.handle.submit(probe).expect("there is always room for a probe");
    rig.control.release();
    let mut order = Vec::new();
    while order.len() < crowd as usize + 2 {
        let outputs = rig.outputs.recv_timeout(PATIENCE).expect("outputs");
        order.extend(outputs.iter().filter(|o| o.finish.is_some()).map(|o| o.id.0));
    }
    assert_eq!(order[0], 1001, "the probe ends before the running request");
    let turn = order.iter().position(|&id| id == 1000).expect("the request ended");
    assert!(turn < 4, "its turn came after {turn} others");
}

#[test]
fn what_no_plan_can_carry_is_refused_at_the_door() {
    let rig = start(config());
    let refused = rig.handle.submit(request(0, vec![1], u32::MAX));
    let Err(SubmitError::TooLarge { param, words, limit }) = refused else { panic!("{refused:?}") };
    assert_eq!(param, "logit_bias");
    assert!(words > limit && limit < 1 << 26);
}

/// Submits `count` requests of the largest length. A hand with more than `enough` pages runs out of
/// memory. Returns the outcomes as `follow` does.
fn starved(rig: &Rig, enough: u32, count: u64) -> HashMap<u64, (usize, FinishReason)> {
    rig.control.starve(enough);
    let room = rig.handle.facts().expect("ready").context_length;
    for id in 0..count {
        rig.handle.submit(request(id, vec![1, 2], room - 2)).expect("room");
    }
    follow(rig, count as usize)
}

#[test]
fn a_hand_without_memory_comes_back_with_fewer_pages_and_nobody_is_blamed() {
    let rig = start(config());
    for (tokens, finish) in starved(&rig, 300, 6).into_values() {
        assert_eq!((tokens, finish), (398, FinishReason::Length));
    }
    rig.settled(|status| *status == Status::Ready);
    let stats = rig.handle.stats();
    assert_eq!((stats.hand.deaths, stats.hand.memory_kills), (2, 2), "500, 375, 281 pages");
    let pages = stats.scheduler;
    assert_eq!(pages.pages_free + pages.pages_cached + pages.pages_held, 281);
    let facts = rig.handle.facts().expect("ready");
    assert_eq!((facts.hand.page_count, facts.context_length), (281, 400));
}

#[test]
fn a_hand_that_can_not_do_with_less_says_so_and_ends() {
    let rig = start(config());
    let reason = "memory ran out; it can't do with fewer than 100 KV pages, because a request may \
        have 400 tokens: give it more memory, or lower --context-length";
    for (_, finish) in starved(&rig, 99, 3).into_values() {
        assert_eq!(finish, failed(reason));
    }
    rig.exit.recv_timeout(PATIENCE).expect("the engine ends");
    assert_eq!(rig.handle.status(), Status::Failed(reason.into()));
    assert_eq!(rig.handle.stats().hand.memory_kills, 7, "375, 281, 210, 157, 117, 100 pages");
}

#[test]
fn a_hand_comes_back_with_less_a_few_times_only() {
    let rig = start(EngineConfig { context_length: 8, ..config() });
    let reason = "memory ran out; memory has run out 7 times, the last time with 87 KV pages: give \
        it more memory, or lower --max-total-tokens";
    for (_, finish) in starved(&rig, 0, 3).into_values() {
        assert_eq!(finish, failed(reason));
    }
    rig.exit.recv_timeout(PATIENCE).expect("the engine ends");
}

#[test]
fn what_memory_does_between_other_deaths_is_no_failed_start() {
    let rig = start(EngineConfig { hand_restarts: 0, ..config() });
    assert_eq!(starved(&rig, 400, 1)[&0].1, FinishReason::Length);
    rig.control.hold();
    rig.handle.submit(request(7, vec![3, 4], 50)).expect("room");
    rig.control.kill();
    assert_eq!(follow(&rig, 1)[&7], (50, FinishReason::Length));
    let stats = rig.handle.stats().hand;
    assert_eq!((stats.deaths, stats.memory_kills), (2, 1));
}
