//! Backends that die, and requests that may have killed them.

use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use forebay_router::Policy;

use crate::fake::{Act, Fake, Gate, POISON, TOKENS};
use crate::http::{Message, PATIENCE, ask, get, post};
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

/// Waits until the router counts this many backends as up.
fn await_up(rig: &Rig, count: usize) {
    eventually("the expected backends are up", || {
        get(rig.address, "/health").json()["backends"] == count
    });
}

/// Sends these requests to `one`, which holds them. The other backends are unhealthy meanwhile.
fn held_by(one: &Fake, rest: &[&Fake], rig: &Rig, bodies: &[&str]) -> Vec<JoinHandle<Message>> {
    rest.iter().for_each(|backend| backend.set_healthy(false));
    await_up(rig, 1);
    one.will(vec![Act::Hang; bodies.len()]);
    let asked = bodies.iter().map(|body| asked(rig, body)).collect();
    eventually("the backends have all requests", || one.seen().len() == bodies.len());
    rest.iter().for_each(|backend| backend.set_healthy(true));
    await_up(rig, 1 + rest.len());
    asked
}

#[test]
fn what_kills_backends_kills_two_and_is_given_up() {
    // Test with new connections, and with reused ones.
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
    eventually("all backends report as Forebay", || {
        let loads = get(rig.address, "/v1/loads").json();
        loads["loads"].as_array().unwrap().iter().all(|backend| backend["forebay"] == true)
    });
    // The server that gets this stream dies in the middle of it.
    brains[0].will([Act::HangAfterTokens(150)]);
    let asked = asked(&rig, POISON);
    eventually("the backend has the request", || {
        brains.iter().any(|brain| !brain.seen().is_empty())
    });
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
    eventually("all requests are suspects", || rig.metric("forebay_router_suspects_total") == 5.0);
    for (count, key) in (1..).zip(keys) {
        eventually("the next suspect is tried", || two.seen().len() == count);
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
    assert_eq!(dead(&backends), 2, "the first backend dies, and the one of the killer's trial");
}

/// Starts one stream per body, and kills the first two servers while they compute the streams. On
/// return the other servers are up.
fn twice_bereaved(brains: &[Fake], rig: &Rig, bodies: &[&str]) -> Vec<JoinHandle<Message>> {
    eventually("all backends report as Forebay", || {
        let loads = get(rig.address, "/v1/loads").json();
        loads["loads"].as_array().unwrap().iter().all(|backend| backend["forebay"] == true)
    });
    let (doomed, rest) = brains.split_at(2);
    brains[1..].iter().for_each(|brain| brain.set_healthy(false));
    await_up(rig, 1);
    // Each stream gets some tokens from the first server, and some from the second.
    doomed[0].will(vec![Act::HangAfterTokens(150); bodies.len()]);
    doomed[1].will(vec![Act::HangAfterTokens(150); bodies.len()]);
    let asked = bodies.iter().map(|body| asked(rig, body)).collect();
    eventually("the first server has all requests", || doomed[0].seen().len() == bodies.len());
    doomed[1].set_healthy(true);
    await_up(rig, 2);
    doomed[0].die();
    eventually("the second server has all requests", || doomed[1].seen().len() == bodies.len());
    // The trials end once each stream has produced output.
    let tried = || rig.metric("forebay_router_backend_on_trial");
    eventually("no backend has a trial", || tried() == 0.0);
    rest.iter().for_each(|brain| brain.set_healthy(true));
    await_up(rig, 1 + rest.len());
    doomed[1].die();
    asked
}

fn numbers(answer: &Message) -> Vec<String> {
    let texts = answer.events().into_iter().map(|event| event["text"].as_str().map(str::to_owned));
    texts.collect::<Option<_>>().unwrap_or_else(|| panic!("{answer:?}"))
}

fn whole() -> Vec<String> {
    (0..TOKENS).map(|position| format!("{} ", 3 * position)).collect()
}

#[test]
fn innocent_streams_survive_two_deaths() {
    let brains: Vec<Fake> = (0..3).map(|_| Fake::brain()).collect();
    let rig = rig(&brains);
    let bodies = ["{}"; 8];
    for answer in twice_bereaved(&brains, &rig, &bodies) {
        assert_eq!(numbers(&answer.join().unwrap()), whole());
    }
    assert_eq!(brains[2].most_alive(), 1, "one suspect at a time");
    assert_eq!(rig.metric("forebay_router_given_up_total"), 0.0);
    assert_eq!(rig.metric("forebay_router_suspects_total"), 16.0);
}

#[test]
fn a_killer_that_was_in_company_twice_kills_three_of_four() {
    let brains: Vec<Fake> = (0..4).map(|_| Fake::brain()).collect();
    let rig = rig(&brains);
    let bodies = ["{}", "{}", POISON, "{}", "{}"];
    let mut answers: Vec<Message> = twice_bereaved(&brains, &rig, &bodies)
        .into_iter()
        .map(|asked| asked.join().unwrap())
        .collect();
    let killer = answers.remove(2).events();
    assert_eq!(killer.last().unwrap()["error"]["code"], "backend_died_twice");
    assert!(answers.iter().all(|answer| numbers(answer) == whole()));
    assert_eq!(dead(&brains), 3);
    assert_eq!(rig.metric("forebay_router_given_up_total"), 1.0);
}

#[test]
fn a_suspect_waits_for_a_backend_but_not_for_long() {
    for wait in [PATIENCE, Duration::from_millis(50)] {
        let [one, two] = [Fake::brain(), Fake::brain()];
        let rig = Rig::with(&[&one, &two], |config| {
            config.trial_wait = wait;
            config.retry.retries = 1;
        });
        eventually("all backends report as Forebay", || {
            let loads = get(rig.address, "/v1/loads").json();
            loads["loads"].as_array().unwrap().iter().all(|backend| backend["forebay"] == true)
        });
        two.set_healthy(false);
        await_up(&rig, 1);
        one.will([Act::HangAfterTokens(150)]);
        let asked = asked(&rig, "{}");
        eventually("the backend has the request", || one.seen().len() == 1);
        one.die();
        if wait == PATIENCE {
            eventually("the request is a suspect", || {
                rig.metric("forebay_router_suspects_total") == 1.0
            });
            two.set_healthy(true);
            assert_eq!(numbers(&asked.join().unwrap()), whole());
        } else {
            let events = asked.join().unwrap().events();
            assert_eq!(events.last().unwrap()["error"]["code"], "no_backend");
            assert!(two.seen().is_empty());
        }
    }
}

#[test]
fn clients_take_turns_with_their_suspects() {
    let backends = others(2);
    let rig = Rig::with(&backends.iter().collect::<Vec<_>>(), |config| {
        config.api_keys = vec!["many".into(), "few".into()];
    });
    let [one, two] = &backends[..] else { panic!("two") };
    two.set_healthy(false);
    await_up(&rig, 1);
    let keys = [["many"; 15].as_slice(), &["few"; 1]].concat();
    one.will(vec![Act::Hang; keys.len()]);
    let (gates, mut opened): (Vec<_>, Vec<_>) = keys.iter().map(|_| Gate::new()).unzip();
    two.will(gates.into_iter().map(Act::Wait));
    let address = rig.address;
    let clients: Vec<_> = keys
        .iter()
        .map(|key| {
            let header = format!("Authorization: Bearer {key}");
            spawn(move || ask(address, "POST", CHAT, &[&header], b"{}").status())
        })
        .collect();
    eventually("the backends have all requests", || one.seen().len() == keys.len());
    two.set_healthy(true);
    await_up(&rig, 2);
    one.die();
    let suspects = || {
        let metrics = ask(address, "GET", "/metrics", &["Authorization: Bearer few"], b"");
        metrics.text().contains("forebay_router_suspects_total 16")
    };
    eventually("all requests are suspects", suspects);
    opened.clear();
    assert!(clients.into_iter().all(|client| client.join().unwrap() == 200));
    let few = |message: &Message| message.header("authorization") == Some("Bearer few");
    let place = two.seen().iter().position(few).unwrap();
    assert!(place <= 3, "{place}");
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
    // The second backend then has the fewest requests, so the trial takes place there.
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
        // Health checks may take long, so the new process has to be detected by its own report.
        config.health.timeout = PATIENCE;
    });
    eventually("the backend reports as Forebay", || {
        get(rig.address, "/v1/loads").json()["loads"][0]["forebay"] == true
    });
    backend.will([Act::Hang, Act::Die]);
    let asked = asked(&rig, "{}");
    eventually("the backend has the request", || backend.seen().len() == 1);
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
