//! Backends that die, and requests that they may have died of.

use std::thread::{JoinHandle, spawn};

use forebay_router::Policy;

use crate::fake::{Act, Fake, Gate, POISON, TOKENS};
use crate::http::{Message, PATIENCE, get, post};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";

fn code(message: &Message) -> (u16, String) {
    (message.status(), message.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn dead(backends: &[Fake]) -> usize {
    backends.iter().filter(|backend| backend.is_dead()).count()
}

fn rig(backends: &[Fake]) -> Rig {
    Rig::with(&backends.iter().collect::<Vec<_>>(), |config| config.breaker.failures = 0)
}

fn others(count: usize) -> Vec<Fake> {
    (0..count).map(|_| Fake::other()).collect()
}

fn asked(rig: &Rig, body: &str) -> JoinHandle<Message> {
    let (address, body) = (rig.address, body.to_owned());
    spawn(move || post(address, CHAT, &body))
}

/// Has `one` hold these requests: the others take none until it has them all.
fn held_by(one: &Fake, rest: &[&Fake], rig: &Rig, bodies: &[&str]) -> Vec<JoinHandle<Message>> {
    let up = |count: usize| get(rig.address, "/health").json()["backends"] == count;
    rest.iter().for_each(|backend| backend.set_healthy(false));
    eventually("one is left", || up(1));
    one.will(vec![Act::Hang; bodies.len()]);
    let asked = bodies.iter().map(|body| asked(rig, body)).collect();
    eventually("all are there", || one.seen().len() == bodies.len());
    rest.iter().for_each(|backend| backend.set_healthy(true));
    eventually("all are up", || up(1 + rest.len()));
    asked
}

#[test]
fn what_kills_backends_kills_two_and_is_given_up() {
    // On new connections, and on such as were used before.
    for warm in [false, true] {
        let backends = others(4);
        let rig = rig(&backends);
        for _ in 0..4 * usize::from(warm) {
            assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
        }
        let answer = post(rig.address, CHAT, POISON);
        assert_eq!(code(&answer), (502, "backend_died_twice".into()), "warm: {warm}");
        assert_eq!(answer.header("x-should-retry"), Some("false"));
        assert_eq!(answer.header("retry-after"), None);
        assert_eq!(dead(&backends), 2, "warm: {warm}");
        assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
        assert_eq!(rig.metric("forebay_router_given_up_total"), 1.0);
    }
}

#[test]
fn a_stream_that_kills_brains_kills_two_and_ends_with_one_error() {
    let brains = Fake::brains(4);
    let rig = rig(&brains);
    eventually("all are known as brains", || {
        let loads = get(rig.address, "/v1/loads").json();
        loads["loads"].as_array().unwrap().iter().all(|backend| backend["forebay"] == true)
    });
    // The first one dies of it in the middle.
    brains[0].will([Act::HangAfterTokens(150)]);
    let asked = asked(&rig, POISON);
    eventually("it is there", || brains.iter().any(|brain| !brain.seen().is_empty()));
    brains.iter().filter(|brain| !brain.seen().is_empty()).for_each(Fake::die);
    let events = asked.join().unwrap().events();
    let (error, tokens) = events.split_last().unwrap();
    assert_eq!(error["error"]["code"], "backend_died_twice");
    assert_eq!((tokens.len(), dead(&brains)), (1, 2));
    let answer = post(rig.address, CHAT, "{}");
    assert_eq!(answer.events().len(), TOKENS as usize);
}

#[test]
fn suspects_are_tried_one_at_a_time() {
    let backends = others(2);
    let rig = rig(&backends);
    let [one, two] = &backends[..] else { panic!("two") };
    let asked = held_by(one, &[two], &rig, &["{}"; 5]);
    let (gates, keys): (Vec<_>, Vec<_>) = (0..5).map(|_| Gate::new()).unzip();
    two.will(gates.into_iter().map(Act::Wait));
    one.die();
    eventually("all are suspects", || rig.metric("forebay_router_suspects_total") == 5.0);
    for (count, key) in (1..).zip(keys) {
        eventually("the next one is tried", || two.seen().len() == count);
        drop(key);
    }
    assert!(asked.into_iter().all(|asked| asked.join().unwrap().status() == 200));
    assert_eq!(two.most_alive(), 1);
}

#[test]
fn whoever_was_beside_a_killer_is_served() {
    let backends = others(3);
    let rig = rig(&backends);
    let [one, two, three] = &backends[..] else { panic!("three") };
    let bodies = ["1", "2", POISON, "3", "4"];
    let asked = held_by(one, &[two, three], &rig, &bodies);
    one.die();
    let answers: Vec<u16> = asked.into_iter().map(|asked| asked.join().unwrap().status()).collect();
    assert_eq!(answers, [200, 200, 502, 200, 200]);
    assert_eq!(dead(&backends), 2, "the first one, and the one where it was tried");
}

#[test]
fn residents_are_not_blamed_for_what_is_tried_beside_them() {
    let backends = others(3);
    let rig = Rig::with(&backends.iter().collect::<Vec<_>>(), |config| {
        config.policy = Policy::ShortestQueue;
        config.breaker.failures = 0;
    });
    let [one, two, three] = &backends[..] else { panic!("three") };
    let killer = held_by(one, &[two, three], &rig, &[POISON]).remove(0);
    let resident = held_by(two, &[one, three], &rig, &["resident"]).remove(0);
    // So the second one has the least to do.
    let _others = held_by(three, &[one, two], &rig, &["1", "2"]);
    one.die();
    assert_eq!(code(&killer.join().unwrap()), (502, "backend_died_twice".into()));
    assert_eq!(resident.join().unwrap().status(), 200);
    assert!(two.is_dead() && !three.is_dead());
    three.die();
}

#[test]
fn a_backend_that_died_and_came_back_at_once_has_died() {
    let backend = Fake::brain();
    let rig = Rig::with(&[&backend], |config| {
        config.breaker.failures = 0;
        // A late answer says that it is another process, too.
        config.health.timeout = PATIENCE;
    });
    eventually("it is known as a brain", || {
        get(rig.address, "/v1/loads").json()["loads"][0]["forebay"] == true
    });
    backend.will([Act::Hang, Act::Die]);
    let asked = asked(&rig, "{}");
    eventually("it is there", || backend.seen().len() == 1);
    backend.restart();
    assert_eq!(code(&asked.join().unwrap()), (502, "backend_died_twice".into()));
}

#[test]
fn a_router_in_front_of_routers_does_not_carry_it_on() {
    let backends = others(6);
    let inner = [rig(&backends[..3]), rig(&backends[3..])];
    let outer = Rig::with(&[], |config| {
        config.sources.urls = inner.iter().map(|rig| rig.address.to_string()).collect();
    });
    let answer = post(outer.address, CHAT, POISON);
    assert_eq!(code(&answer), (502, "backend_died_twice".into()));
    assert_eq!(answer.header("x-forebay-deaths"), Some("2"));
    assert_eq!(dead(&backends), 2);
}
