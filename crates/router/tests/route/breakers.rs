//! Circuit breakers, and to what extent one client can open them for others.

use std::time::Duration;

use forebay_router::BreakerConfig;

use crate::Rig;
use crate::fake::{Act, Fake};
use crate::http::{Message, ask, get};

const CHAT: &str = "/v1/chat/completions";
const CLIENTS: [&str; 2] = ["Authorization: Bearer one", "Authorization: Bearer two"];
const FAILURES: usize = 3;
/// The number of attempts at a request if all fail.
const ATTEMPTS: usize = 6;

/// Starts a router whose breakers open after a few failures, for an hour.
fn rig(backends: &[&Fake]) -> Rig {
    Rig::with(backends, |config| {
        let hour = Duration::from_secs(3600);
        config.breaker =
            BreakerConfig { failures: FAILURES, pause: hour, window: hour, successes: 1 };
        config.api_keys = vec!["one".into(), "two".into()];
    })
}

fn post(rig: &Rig, client: usize) -> Message {
    ask(rig.address, "POST", CHAT, &[CLIENTS[client]], b"{}")
}

fn breakers(rig: &Rig) -> Vec<String> {
    let loads = ask(rig.address, "GET", "/v1/loads", &[CLIENTS[0]], b"").json();
    let breakers = loads["loads"].as_array().unwrap().iter().map(|load| load["breaker"].clone());
    breakers.map(|breaker| breaker.as_str().unwrap().to_owned()).collect()
}

#[test]
fn one_client_closes_no_backend_to_others() {
    for act in [
        Act::Answer(503, "{}".into()),
        Act::Answer(429, "{}".into()),
        Act::Answer(502, "{}".into()),
        Act::Answer(504, "{}".into()),
        Act::DieFirst,
        Act::DieAfterHead,
    ] {
        let backend = Fake::other();
        let rig = rig(&[&backend]);
        for _ in 0..4 * FAILURES {
            backend.will(vec![act.clone(); ATTEMPTS]);
            assert_ne!(post(&rig, 0).status(), 200, "{act:?}");
        }
        assert_eq!(
            backend.seen().len(),
            4 * FAILURES * ATTEMPTS,
            "each attempt reached the backend"
        );
        assert_eq!(breakers(&rig), ["closed"], "{act:?}");
        assert_eq!(post(&rig, 1).status(), 200, "{act:?}");
    }
}

#[test]
fn refusals_of_many_clients_open_no_breaker() {
    let backend = Fake::other();
    let rig = rig(&[&backend]);
    for round in 0..4 * FAILURES {
        backend.will(vec![Act::Answer(503, "{}".into()); ATTEMPTS]);
        assert_eq!(post(&rig, round % 2).status(), 503);
    }
    assert_eq!(post(&rig, 0).status(), 200);
}

#[test]
fn failures_of_two_clients_open_it_once_for_each_request() {
    let backend = Fake::other();
    let rig = rig(&[&backend]);
    for client in [0, 1, 0] {
        assert_eq!(breakers(&rig), ["closed"]);
        backend.will(vec![Act::DieFirst; ATTEMPTS]);
        assert_eq!(post(&rig, client).status(), 503);
    }
    assert_eq!(breakers(&rig), ["open"]);
    let before = backend.seen().len();
    assert_eq!(post(&rig, 1).json()["error"]["code"], "no_backend");
    assert_eq!(
        backend.seen().len(),
        before,
        "the backend gets no requests while its breaker is open"
    );
}

#[test]
fn successes_take_failures_off() {
    let backend = Fake::other();
    let rig = rig(&[&backend]);
    for round in 0..4 * FAILURES {
        backend.will(vec![Act::Answer(502, "{}".into()); ATTEMPTS]);
        assert_eq!(post(&rig, round % 2).status(), 502);
        assert_eq!(post(&rig, round % 2).status(), 200);
    }
    assert_eq!(breakers(&rig), ["closed"]);
}

#[test]
fn what_fails_at_several_backends_is_the_requests_own_fault() {
    let backends = [Fake::other(), Fake::other()];
    let rig = rig(&[&backends[0], &backends[1]]);
    for round in 0..4 * FAILURES {
        backends.iter().for_each(|backend| {
            backend.will(vec![Act::Answer(502, "{}".into()); ATTEMPTS / 2]);
        });
        assert_eq!(post(&rig, round % 2).status(), 502);
    }
    assert_eq!(breakers(&rig), ["closed", "closed"]);
}

#[test]
fn a_backend_that_fails_again_and_again_is_left_alone() {
    for clients in [1, 2] {
        let (bad, good) = (Fake::other(), Fake::other());
        bad.will(vec![Act::DieFirst; 50]);
        let rig = rig(&[&bad, &good]);
        (0..20).for_each(|round| assert_eq!(post(&rig, round % clients).status(), 200));
        let (seen, breaker) = (bad.seen().len(), &breakers(&rig)[0]);
        match clients {
            1 => assert!(seen > 2 * FAILURES && breaker == "closed", "{seen}"),
            _ => assert!(seen == FAILURES && breaker == "open", "{seen}"),
        }
    }
}

#[test]
fn a_backend_is_asked_again_when_it_said_and_no_sooner() {
    let backend = Fake::other();
    let rig = rig(&[&backend]);
    backend.will([Act::Refuse(503, "Retry-After: 3600")]);
    let answer = post(&rig, 0);
    // The router does not wait that long, so the client gets the `Retry-After` header.
    assert_eq!((answer.status(), answer.header("retry-after")), (503, Some("3600")));
    assert_eq!(backend.seen().len(), 1);
    for (header, seen) in [("Retry-After: 0", 3), ("Retry-After: soon", 5)] {
        backend.will([Act::Refuse(503, header)]);
        assert_eq!(post(&rig, 0).status(), 200);
        assert_eq!(backend.seen().len(), seen);
    }
    let other = Fake::other();
    let rig = self::rig(&[&backend, &other]);
    backend.will([Act::Refuse(429, "Retry-After: 3600"), Act::Refuse(503, "Retry-After: 3600")]);
    (0..4).for_each(|_| assert_eq!(post(&rig, 0).status(), 200));
    assert_eq!(backend.seen().len() + other.seen().len(), 5 + 4 + 2);
    let text = ask(rig.address, "GET", "/metrics", &[CLIENTS[0]], b"");
    let refused = format!("refused_total{{backend=\"{}\"}} 2", backend.url());
    assert!(text.text().contains(&refused), "{}", text.text());
    assert_eq!(get(rig.address, "/health").status(), 200);
}
