//! Pauses, and reloads of weights, in virtual time.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use forebay_engine::{
    EngineConfig, FinishReason, HostConfig, Output, PauseMode, Reload, RequestId, Status,
};
use forebay_sim::testing::{PATIENCE, Rig, RigParts, VOCAB, alone, prompt, request, text, wholes};
use forebay_sim::{DeviceModel, SimClock, SimConfig, SimControl, Timing};
use serde_json::json;

const COUNT: u64 = 9;
const TOKENS: u32 = 60;
const COMMON: i32 = 40;
/// The number of tokens after which virtual time is stopped.
const BEGUN: usize = 20;

fn start(host_pages: u32) -> Rig {
    let clock = SimClock::virtual_time();
    let config = EngineConfig {
        max_running_requests: 4,
        slots: 6,
        page_size: 4,
        chunked_prefill_size: 32,
        max_queued_requests: 64,
        context_length: 400,
        load_timeout: Duration::from_secs(20),
        mask_threads: 0,
        host_tier: (host_pages > 0).then(HostConfig::default),
        ..EngineConfig::default()
    };
    let sim = SimConfig {
        clock: clock.clone(),
        timing: Timing {
            model: DeviceModel { step_us: 10_000.0, ..DeviceModel::INSTANT },
            ..Timing::default()
        },
        load_us: 1_000_000,
        page_count: 200,
        host_pages,
        vocab_size: VOCAB,
        text: text(),
        ..SimConfig::default()
    };
    // Virtual time stops once the requests have this many tokens in total.
    let (mut tokens, mut is_done) = (0, false);
    let hook = move |control: &SimControl, outputs: &[Output]| {
        let own = |output: &&Output| output.token.is_some() && output.id.0 < COUNT;
        tokens += outputs.iter().filter(own).count();
        if tokens >= BEGUN && !std::mem::replace(&mut is_done, true) {
            control.hold();
        }
    };
    Rig::start(config, sim, RigParts { hooks: vec![Box::new(hook)], ..RigParts::default() }).held()
}

/// Submits requests, and runs virtual time until they have some tokens.
fn begin(rig: &Rig) -> Vec<Output> {
    for id in 0..COUNT {
        rig.handle.submit(request(id, prompt(id, COMMON), TOKENS)).expect("room");
    }
    rig.control.release();
    let mut outputs = Vec::new();
    while outputs.iter().filter(|output: &&Output| output.token.is_some()).count() < BEGUN {
        outputs.extend(rig.outputs.recv_timeout(PATIENCE).expect("outputs"));
    }
    outputs
}

fn pause(rig: &Rig, mode: PauseMode) -> Receiver<usize> {
    let paused = ask_to_pause(rig, mode);
    rig.control.release();
    paused
}

fn ask_to_pause(rig: &Rig, mode: PauseMode) -> Receiver<usize> {
    let (sender, paused) = channel();
    rig.handle.pause(mode, Box::new(move |left| sender.send(left).expect("the test waits")));
    paused
}

fn reload(rig: &Rig, id: u64) -> Receiver<Result<(), String>> {
    let reloaded = ask_for(rig, id);
    rig.control.release();
    reloaded
}

fn ask_for(rig: &Rig, id: u64) -> Receiver<Result<(), String>> {
    let (sender, reloaded) = channel();
    let reply = Box::new(move |outcome| sender.send(outcome).expect("the test waits"));
    rig.handle.reload(Reload { id, model: json!({"weights": id}), reply });
    reloaded
}

/// Returns the tokens and finish reasons of requests, from `before` and from all later outputs.
fn rest(rig: &Rig, before: Vec<Output>, count: usize) -> HashMap<u64, (Vec<i32>, FinishReason)> {
    let mut stories = HashMap::new();
    let mut ended = forebay_sim::testing::tell(&mut stories, before).len();
    while ended < count {
        let outputs = rig.outputs.recv_timeout(PATIENCE).expect("outputs");
        ended += forebay_sim::testing::tell(&mut stories, outputs).len();
    }
    wholes(stories)
}

fn check_all(told: &HashMap<u64, (Vec<i32>, FinishReason)>) {
    for id in 0..COUNT {
        let expected = (alone(prompt(id, COMMON), TOKENS), FinishReason::Length);
        assert_eq!(told[&id], expected, "request {id}");
    }
}

#[test]
fn a_pause_that_keeps_requests_changes_nothing_but_the_time() {
    for mode in [PauseMode::Keep, PauseMode::Retract] {
        let rig = start(0);
        let mut before = begin(&rig);
        let left = pause(&rig, mode).recv_timeout(PATIENCE).expect("paused");
        assert!(left > 4, "{left} requests");
        before.extend(rig.outputs.try_iter().flatten());
        let (sender, flushed) = channel();
        rig.handle.flush_cache(Box::new(move |all| sender.send(all).expect("the test waits")));
        // With `Keep`, requests keep their pages, so the cache cannot be flushed.
        assert_eq!(flushed.recv_timeout(PATIENCE), Ok(mode == PauseMode::Retract));
        let used = rig.handle.stats().scheduler.running;
        assert_eq!(used == 0, mode == PauseMode::Retract, "{used} run");
        assert_eq!(rig.outputs.try_iter().flatten().count(), 0, "nothing is computed");
        rig.handle.resume();
        check_all(&rest(&rig, before, COUNT as usize));
    }
}

#[test]
fn a_pause_waits_for_those_that_are_there_and_holds_others_back() {
    let rig = start(0);
    let before = begin(&rig);
    let paused = ask_to_pause(&rig, PauseMode::Wait);
    rig.handle.submit(request(COUNT, vec![1, 2, 3], 5)).expect("room");
    rig.handle.submit(request(COUNT + 1, vec![1, 2, 3], 5)).expect("room");
    rig.handle.abort(RequestId(COUNT + 1));
    rig.control.release();
    let told = rest(&rig, before, COUNT as usize + 1);
    check_all(&told);
    assert_eq!(
        told[&(COUNT + 1)],
        (Vec::new(), FinishReason::Abort),
        "a held request can be aborted"
    );
    assert_eq!(paused.recv_timeout(PATIENCE), Ok(1), "one request is held back");
    rig.handle.resume();
    let told = rest(&rig, Vec::new(), 1);
    assert_eq!(told[&COUNT], (alone(vec![1, 2, 3], 5), FinishReason::Length));
}

#[test]
fn a_pause_that_aborts_lets_later_requests_wait() {
    let rig = start(0);
    let before = begin(&rig);
    let left = pause(&rig, PauseMode::Abort).recv_timeout(PATIENCE).expect("paused");
    assert_eq!(left, 0);
    let told = rest(&rig, before, COUNT as usize);
    assert!(told.values().all(|(_, finish)| *finish == FinishReason::Abort));
    rig.handle.submit(request(COUNT, vec![1, 2, 3], 5)).expect("room");
    rig.handle.resume();
    assert_eq!(rest(&rig, Vec::new(), 1)[&COUNT].1, FinishReason::Length);
}

#[test]
fn requests_go_on_with_other_weights_and_find_nothing_of_the_old() {
    let rig = start(400);
    // Save the blocks of the prompt to the host too.
    rig.handle.submit(request(100, prompt(0, COMMON), 1)).expect("room");
    let _ = rig.follow(1);
    rig.control.hold();
    let before = begin(&rig);
    let cached = |outputs: &[Output]| {
        let admissions = outputs.iter().filter_map(|output| output.admission);
        admissions.map(|admission| admission.cached_tokens).max().unwrap_or_default()
    };
    assert!(cached(&before) >= 40, "the prompt's blocks are found");
    assert_eq!(reload(&rig, 1).recv_timeout(PATIENCE), Ok(Ok(())));
    check_all(&rest(&rig, before, COUNT as usize));
    let stats = rig.handle.stats();
    assert_eq!(stats.hand.deaths, 0, "the worker did not die");
    rig.handle.flush_cache(Box::new(|_| {}));
    // Each reload drops the blocks of the old weights, even if no request is running.
    rig.handle.submit(request(101, prompt(0, COMMON), 1)).expect("room");
    rest(&rig, Vec::new(), 1);
    assert_eq!(reload(&rig, 2).recv_timeout(PATIENCE), Ok(Ok(())));
    rig.handle.submit(request(102, prompt(0, COMMON), 1)).expect("room");
    let outputs = rig.outputs.recv_timeout(PATIENCE).expect("outputs");
    assert_eq!(cached(&outputs), 0);
}

#[test]
fn weights_that_cannot_be_loaded_leave_the_last_ones() {
    let rig = start(0);
    let before = begin(&rig);
    rig.control.fail_starts(1);
    let failed = ask_for(&rig, 1);
    let second = reload(&rig, 2);
    let reason = failed.recv_timeout(PATIENCE).expect("an answer").unwrap_err();
    assert!(reason.contains("start refused"), "{reason}");
    assert!(
        second.recv_timeout(PATIENCE).expect("an answer").is_err(),
        "only one reload may run at a time"
    );
    check_all(&rest(&rig, before, COUNT as usize));
    rig.settled(|status| *status == Status::Ready);
    assert_eq!(reload(&rig, 3).recv_timeout(PATIENCE), Ok(Ok(())));
    // Another member of a step group may send the same reload later.
    assert_eq!(reload(&rig, 3).recv_timeout(PATIENCE), Ok(Ok(())));
}

#[test]
fn a_hand_that_dies_before_its_steps_end_still_gets_other_weights() {
    let rig = start(0);
    let before = begin(&rig);
    rig.control.kill();
    let reloaded = reload(&rig, 1);
    assert_eq!(reloaded.recv_timeout(PATIENCE), Ok(Ok(())));
    check_all(&rest(&rig, before, COUNT as usize));
}
