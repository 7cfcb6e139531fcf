//! Tests that payloads are copied to the outposts whose hands read them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use forebay_engine::{Executor, Payload, Payloads, Signal};
use forebay_hand::HandExecutor;
use forebay_outpost::WorkSettings;
use forebay_protocol::{NewSlot, Row, SlotSpec, StepPlan, Want, tell_group};

use crate::network::{CUT, Network};
use crate::rig::*;

/// Reserves a payload of `words` equal words.
fn payload(brain: &Brain, word: i32, words: usize) -> Arc<dyn Payload> {
    let payload: Arc<dyn Payload> = brain.arena.reserve(4 * words).expect("room").into();
    payload.write(0, &word.to_le_bytes().repeat(words)).expect("inside");
    payload
}

/// Copies a payload to the outposts of the only member. Returns true if it arrived.
fn bring(executor: &mut HandExecutor, payload: &Arc<dyn Payload>) -> bool {
    bring_to(executor, 0, payload)
}

/// Copies a payload to the outposts of a member. Returns true if it arrived.
fn bring_to(executor: &mut HandExecutor, member: usize, payload: &Arc<dyn Payload>) -> bool {
    let (sender, arrived) = channel();
    // The receiver is dropped if the test has ended.
    executor.carry(member, payload, Box::new(move || _ = sender.send(())));
    match arrived.recv_timeout(Duration::from_secs(60)) {
        Ok(()) => true,
        Err(RecvTimeoutError::Disconnected) => false,
        Err(RecvTimeoutError::Timeout) => panic!("no end of the copy was reported"),
    }
}

/// The word that every rank reads at the payload's offset.
fn found(executor: &mut HandExecutor, step: u64, payload: &Arc<dyn Payload>) -> i32 {
    executor.submit(&[reading(step, payload)]);
    match next(executor) {
        Signal::Result(results) => results[0].tokens[0],
        other => panic!("no result: {other:?}"),
    }
}

/// A plan whose request reads the payload.
fn reading(step: u64, payload: &Arc<dyn Payload>) -> StepPlan {
    let mut plan = StepPlan::default();
    plan.begin(step);
    let spec = SlotSpec { embeds: Some(payload.offset()), ..SlotSpec::default() };
    plan.write_slot(&NewSlot { slot: 0, tokens: &[1, 2], prompt_len: 2, spec: &spec, place: None });
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
    // The region of the first payload is reused.
    let offset = first.offset();
    drop(first);
    let second = payload(&brain, 78, 1000);
    assert_eq!(second.offset(), offset, "the first free bytes are taken");
    assert!(bring(&mut executor, &second));
    assert_eq!(found(&mut executor, 2, &second), 78);
    outpost.end().expect("no error");
    death(&mut executor);
    let late = payload(&brain, 79, 1000);
    assert!(!bring(&mut executor, &late), "no group is running");
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
    assert_eq!(swapped, [0, 0], "each machine has a mirror of its own");
    assert!(bring_to(&mut executor, 0, &second));
    assert_eq!(words(&mut executor, 3, [&second, &second]), [78, 78]);
    executor.stop();
    assert!(!bring_to(&mut executor, 1, &first), "no group is running");
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
    // The callbacks of payloads that did not arrive are dropped without being called.
    assert!(arrived.iter().count() < 3, "the connection was cut too late");
    eventually("all room has come back", || brain.arena.used() == 0);
}
