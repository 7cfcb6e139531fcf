//! Held requests, whose payloads are not yet at the worker. They are not scheduled, and delay no
//! other request. All requests generate the same tokens as alone.

use forebay_scheduler::{Phase, Request};
use proptest::prelude::*;

use crate::harness::{Harness, config, request};

/// A request whose embeddings have not arrived at the worker yet.
fn held(id: u64, prompt: Vec<i32>, max_tokens: u32) -> Request {
    let mut held = Request { held: true, ..request(id, prompt, max_tokens) };
    held.spec.embeds = Some(64 * id as u32);
    held
}

fn phase(harness: &Harness, id: u64) -> Option<Phase> {
    harness.scheduler.views().find(|view| view.id == id).map(|view| view.phase)
}

/// Kills the worker, which loses its payloads.
fn kill(harness: &mut Harness) {
    harness.reset();
    let embedded: Vec<u64> = harness
        .clients
        .iter()
        .filter(|(_, client)| client.end.is_none() && client.request.spec.embeds.is_some())
        .map(|(&id, _)| id)
        .collect();
    embedded.into_iter().for_each(|id| harness.scheduler.hold(id));
}

fn release(harness: &mut Harness, at: usize) {
    let held: Vec<u64> = harness.scheduler.held().collect();
    if !held.is_empty() {
        assert!(harness.scheduler.release(held[at % held.len()]));
    }
}

#[test]
fn who_is_held_has_no_turn_keeps_its_place_and_may_be_aborted() {
    let mut harness = Harness::new(config(), 1);
    harness.was_reset = true;
    harness.submit(held(0, vec![1; 9], 3));
    harness.submit(held(1, vec![2; 9], 3));
    assert!(!harness.plan(), "no request can be planned");
    harness.submit(request(2, vec![3; 9], 3));
    assert!(harness.plan());
    assert_eq!(phase(&harness, 0), Some(Phase::Queued));
    assert_eq!(phase(&harness, 2), Some(Phase::Decode));
    assert_eq!(harness.scheduler.stats().waiting, 2);
    harness.abort(1);
    assert!(!harness.scheduler.release(1), "request 1 was aborted");
    assert!(!harness.scheduler.release(2), "request 2 was never held");
    assert!(harness.scheduler.release(0));
    harness.drain();
}

#[test]
fn a_suspect_whose_payload_is_on_its_way_keeps_nobody_waiting() {
    let mut harness = Harness::new(config(), 1);
    harness.submit(held(0, vec![1; 9], 30));
    harness.submit(request(1, vec![2; 9], 30));
    assert!(harness.scheduler.release(0));
    while phase(&harness, 0) != Some(Phase::Decode) {
        assert!(harness.plan());
        assert!(harness.apply());
    }
    assert!(harness.plan());
    kill(&mut harness);
    // Request 1 was in flight too. It is tried alone before request 0, which is earlier in the
    // order but held.
    for _ in 0..3 {
        assert!(harness.plan());
        assert!(harness.apply());
    }
    assert_eq!(phase(&harness, 0), Some(Phase::Queued));
    assert_ne!(phase(&harness, 1), Some(Phase::Queued));
    assert!(harness.scheduler.release(0));
    harness.drain();
}

#[derive(Debug, Clone)]
enum Op {
    Submit {
        embedded: bool,
        length: usize,
        tokens: u32,
        client: u64,
    },
    Release(usize),
    Abort(usize),
    Plan,
    Apply,
    Kill,
    /// The worker dies, and another replica takes its requests.
    Move,
}

fn op() -> impl Strategy<Value = Op> {
    let submit = (any::<bool>(), 1..30_usize, 1..20_u32, 0..3_u64).prop_map(
        |(embedded, length, tokens, client)| Op::Submit { embedded, length, tokens, client },
    );
    prop_oneof![
        5 => submit,
        5 => any::<usize>().prop_map(Op::Release),
        1 => any::<usize>().prop_map(Op::Abort),
        12 => Just(Op::Plan),
        12 => Just(Op::Apply),
        1 => Just(Op::Kill),
        1 => Just(Op::Move),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn everybody_ends_as_if_alone_behind_a_hand_that_gets_payloads_late(
        depth in 1..=2_usize, ops in prop::collection::vec(op(), 1..150),
    ) {
        let mut pair = [Harness::new(config(), depth), Harness::new(config(), depth)];
        pair.iter_mut().for_each(|harness| harness.was_reset = true);
        let mut submitted = 0;
        for op in ops {
            let [here, there] = &mut pair;
            match op {
                Op::Submit { embedded, length, tokens, client } => {
                    let prompt = (0..length as i32).map(|at| (at * 7 + client as i32) % 50).collect();
                    let made = if embedded { held(submitted, prompt, tokens) } else { request(submitted, prompt, tokens) };
                    here.submit(Request { client, ..made });
                    submitted += 1;
                }
                Op::Release(at) => release(here, at),
                Op::Abort(at) => {
                    let id = here.clients.keys().copied().nth(at % here.clients.len().max(1));
                    id.into_iter().for_each(|id| here.abort(id));
                }
                Op::Plan => _ = here.plan(),
                Op::Apply => _ = here.apply(),
                Op::Kill => kill(here),
                Op::Move => {
                    kill(here);
                    here.move_to(there);
                    pair.swap(0, 1);
                }
            }
            for harness in &pair {
                let queued = |id| phase(harness, id) == Some(Phase::Queued);
                prop_assert!(harness.scheduler.held().all(queued), "a held request has no slot");
            }
        }
        for harness in &mut pair {
            while harness.scheduler.held().next().is_some() {
                release(harness, 0);
            }
            harness.drain();
        }
    }
}
