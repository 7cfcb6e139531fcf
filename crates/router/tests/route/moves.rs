//! Queued requests that move to another server.

use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use crate::fake::{Act, Fake, Gate, TOKENS};
use crate::http::{Message, ask, get, post};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";
/// No headers.
const NONE: &[&str] = &[];
/// The number of prompt tokens of a long queue (`LONG`), and of one request (`SHORT`).
const LONG: u64 = 100_000;
const SHORT: u64 = 1000;
/// Several times the interval at which the router checks queues.
const LONG_ENOUGH: Duration = Duration::from_millis(400);

/// Starts Forebay servers, the first with a long queue, and a router that sends all requests to the
/// first until [`open`] is called.
fn rig(count: usize, queue_moves: bool) -> (Vec<Fake>, Rig) {
    let brains: Vec<Fake> = (0..count).map(|_| Fake::brain()).collect();
    brains.iter().for_each(|brain| brain.has_queue(0, 0));
    let rig = Rig::with(&brains.iter().collect::<Vec<_>>(), |config| {
        config.queue_moves = queue_moves;
    });
    eventually("all backends report as Forebay", || {
        let loads = get(rig.address, "/v1/loads").json();
        loads["loads"].as_array().unwrap().iter().all(|backend| backend["forebay"] == true)
    });
    brains[1..].iter().for_each(|brain| brain.set_healthy(false));
    await_up(&rig, 1);
    brains[0].has_queue(LONG, 0);
    (brains, rig)
}

fn await_up(rig: &Rig, count: usize) {
    eventually("the expected backends are up", || {
        get(rig.address, "/health").json()["backends"] == count
    });
}

fn open(brains: &[Fake], rig: &Rig) {
    brains.iter().for_each(|brain| brain.set_healthy(true));
    await_up(rig, brains.len());
}

fn asked(rig: &Rig, headers: &'static [&'static str], body: &str) -> JoinHandle<Message> {
    let (address, body) = (rig.address, body.to_owned());
    spawn(move || ask(address, "POST", CHAT, headers, body.as_bytes()))
}

fn moved(rig: &Rig) -> f64 {
    rig.metric("forebay_router_backend_moved_total")
}

/// Sends a request that runs at a server until the returned sender is dropped.
fn resident(brain: &Fake, rig: &Rig) -> (std::sync::mpsc::Sender<()>, JoinHandle<Message>) {
    let (gate, key) = Gate::new();
    brain.will([Act::Wait(gate)]);
    let before = brain.seen().len();
    let asked = asked(rig, NONE, "{}");
    eventually("the backend has the request", || brain.seen().len() == before + 1);
    (key, asked)
}

/// Sends requests with these headers and bodies, one by one, so that they wait in a server's queue.
fn queue(
    brain: &Fake,
    rig: &Rig,
    requests: &[(&'static [&'static str], &str)],
) -> Vec<JoinHandle<Message>> {
    let (mut waiting, before) = (Vec::new(), brain.queued());
    for (count, (headers, body)) in (1..).zip(requests) {
        brain.will([Act::Queue(SHORT)]);
        waiting.push(asked(rig, headers, body));
        eventually("the request waits", || brain.queued() == before + count);
    }
    waiting
}

#[test]
fn queued_requests_move_to_a_brain_that_computes_them_sooner() {
    let (brains, rig) = rig(2, true);
    let (key, resident) = resident(&brains[0], &rig);
    let waiting = queue(&brains[0], &rig, &[(NONE, "{}"); 3]);
    open(&brains, &rig);
    // Each request gets exactly one answer, and it is complete.
    for waiting in waiting {
        assert_eq!(waiting.join().unwrap().events().len(), TOKENS as usize);
    }
    assert_eq!((moved(&rig), brains[1].seen().len(), brains[0].seen().len()), (3.0, 3, 4));
    eventually("the first server has no moved requests", || brains[0].queued() == 0);
    drop(key);
    assert_eq!(resident.join().unwrap().status(), 200);
    assert_eq!(rig.metric("forebay_router_retries_total"), 0.0);
    assert_eq!(rig.metric("forebay_router_backend_failed_total"), 0.0);
}

#[test]
fn a_request_moves_twice_at_most() {
    let (brains, rig) = rig(3, true);
    brains[0].has_queue(LONG, 5);
    let mut waiting = queue(&brains[0], &rig, &[(NONE, "{}")]);
    // The request may come back to the first server, so that server also queues it.
    brains.iter().for_each(|brain| {
        brain.will([Act::Queue(SHORT)]);
    });
    let mut at = 0;
    open(&brains, &rig);
    for moves in 1..=2 {
        eventually("the request has moved", || moved(&rig) == f64::from(moves));
        eventually("the request is at another server", || {
            brains.iter().map(Fake::queued).sum::<usize>() == 1 && brains[at].queued() == 0
        });
        at = brains.iter().position(|brain| brain.queued() == 1).unwrap();
        for (number, brain) in brains.iter().enumerate() {
            let (ahead, others) = if number == at { (LONG, 5) } else { (0, 0) };
            brain.has_queue(ahead, others);
        }
    }
    sleep(LONG_ENOUGH);
    assert_eq!((moved(&rig), brains[at].queued()), (2.0, 1));
    brains[at].compute_queue();
    assert_eq!(waiting.pop().unwrap().join().unwrap().status(), 200);
    assert_eq!(brains.iter().map(|brain| brain.seen().len()).sum::<usize>(), 3);
}

#[test]
fn who_is_pinned_or_has_said_something_stays() {
    let (brains, rig) = rig(2, true);
    brains[0].has_queue(LONG, 5);
    let mut waiting = queue(
        &brains[0],
        &rig,
        &[
            (&["X-Routing-Key: ann"], "{}"),
            (NONE, "{\"routing_key\": \"ann\"}"),
            (NONE, "{\"routed_dp_rank\": 0}"),
        ],
    );
    brains[0].will([Act::HangAfterTokens(150)]);
    let said = asked(&rig, NONE, "{}");
    eventually("the backend has the request", || brains[0].seen().len() == 4);
    brains[0].claims(4, SHORT);
    // Unlike the others, this request may move. Once it has moved, the others would have had time
    // to move too.
    waiting.extend(queue(&brains[0], &rig, &[(NONE, "{}")]));
    open(&brains, &rig);
    assert_eq!(waiting.pop().unwrap().join().unwrap().events().len(), TOKENS as usize);
    sleep(LONG_ENOUGH);
    assert_eq!((moved(&rig), brains[1].seen().len()), (1.0, 1));
    brains[0].compute_queue();
    assert!(waiting.into_iter().all(|waiting| waiting.join().unwrap().status() == 200));
    brains[0].die();
    // After the death of the first server, the stream that has begun continues at another server.
    assert_eq!(said.join().unwrap().events().len(), TOKENS as usize);
}

#[test]
fn a_request_moves_only_where_its_model_is() {
    let (brains, rig) = rig(3, true);
    brains[0].has_queue(LONG, 5);
    brains[2].has_queue(SHORT, 0);
    brains[0].lists(&[("base", None), ("tone", Some("1"))]);
    brains[1].lists(&[("base", None)]);
    brains[2].lists(&[("base", None), ("tone", Some("1"))]);
    let waiting = queue(&brains[0], &rig, &[(NONE, "{\"model\": \"tone\"}")]);
    open(&brains, &rig);
    // The second server would compute the request sooner, but it lacks the model.
    for waiting in waiting {
        assert_eq!(waiting.join().unwrap().events().len(), TOKENS as usize);
    }
    assert_eq!((moved(&rig), brains[1].seen().len(), brains[2].seen().len()), (1.0, 0, 1));
}

#[test]
fn nothing_moves_where_it_does_not_halve_what_comes_first() {
    for (queue_moves, ahead) in [(true, LONG / 2), (false, 0)] {
        let (brains, rig) = rig(2, queue_moves);
        brains[0].has_queue(LONG, 5);
        brains[1].has_queue(ahead, 0);
        let waiting = queue(&brains[0], &rig, &[(NONE, "{}"); 2]);
        open(&brains, &rig);
        sleep(LONG_ENOUGH);
        assert_eq!((moved(&rig), brains[1].seen().len()), (0.0, 0));
        brains[0].compute_queue();
        assert!(waiting.into_iter().all(|waiting| waiting.join().unwrap().status() == 200));
        assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    }
}
