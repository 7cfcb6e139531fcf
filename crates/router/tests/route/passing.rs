//! Requests that are forwarded, and retried.

use std::time::Duration;

use forebay_router::Policy;

use crate::fake::{Act, Fake, Gate};
use crate::http::{Client, Message, ask, get, post};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";

fn code(message: &Message) -> (u16, String) {
    let body = message.json();
    let error = &body["error"];
    assert!(error["message"].is_string() && error["type"].is_string(), "{message:?}");
    (message.status(), error["code"].as_str().unwrap().to_owned())
}

#[test]
fn what_a_client_sends_arrives_and_what_is_answered_too() {
    let backend = Fake::other();
    let rig = Rig::new(&[&backend]);
    let body = " {\"model\" : \"m\", \"odd\":[1, 2],\n\"prompt\":\"é\"}";
    let headers = ["Authorization: Bearer k", "Connection: x-hop", "X-Hop: 1", "X-Forebay-Load: 1"];
    let answer = ask(rig.address, "POST", "/v1/completions?a=b", &headers, body.as_bytes());
    assert_eq!((answer.status(), answer.text()), (200, "{\"ok\":true}"));
    assert_eq!((answer.header("x-own"), answer.header("x-forebay-secret")), (Some("1"), None));
    let [seen] = &backend.seen()[..] else { panic!("one request") };
    assert_eq!((seen.path(), seen.text()), ("/v1/completions?a=b", body));
    assert_eq!(seen.header("authorization"), Some("Bearer k"));
    assert_eq!(seen.header("host"), Some(backend.address.to_string().as_str()));
    assert_eq!((seen.header("x-hop"), seen.header("x-forebay-load")), (None, None));
}

#[test]
fn a_large_answer_and_a_large_request_are_passed_on_whole() {
    let backend = Fake::other();
    let large = format!("{{\"prompt_embeds\":\"{}\"}}", "x".repeat(5 << 20));
    backend.will([Act::Answer(200, large.clone())]);
    let rig = Rig::new(&[&backend]);
    let answer = post(rig.address, CHAT, &large);
    assert!(answer.whole && answer.text() == large && backend.seen()[0].text() == large);
}

#[test]
fn what_has_produced_nothing_is_tried_elsewhere() {
    let stream = b"data: {}\n\ndata: [DONE]\n\n".to_vec();
    for act in [
        Act::DieFirst,
        Act::DieAfterHead,
        Act::DieAfter("application/json", b"{\"half\":".to_vec()),
        Act::Answer(503, "{}".into()),
        Act::Answer(429, "{}".into()),
        Act::Answer(502, "{}".into()),
    ] {
        let (one, two) = (Fake::other(), Fake::other());
        one.will([act.clone(), Act::Stream(stream.clone())]);
        two.will([act.clone(), Act::Stream(stream.clone())]);
        let rig = Rig::with(&[&one, &two], |config| config.breaker.failures = 0);
        for _ in 0..2 {
            let answer = post(rig.address, CHAT, "{}");
            assert_eq!((answer.status(), answer.whole), (200, true), "{act:?}");
            assert!(answer.body == stream, "{act:?}");
        }
        assert_eq!(one.seen().len() + two.seen().len(), 4, "{act:?}");
        assert_eq!(rig.metric("forebay_router_retries_total"), 2.0);
    }
}

#[test]
fn what_is_the_clients_fault_is_not_tried_again() {
    let (one, two) = (Fake::other(), Fake::other());
    let rig = Rig::new(&[&one, &two]);
    one.will([Act::Answer(400, "{\"error\":1}".into())]);
    two.will([Act::Answer(400, "{\"error\":1}".into())]);
    let answer = post(rig.address, CHAT, "{}");
    assert_eq!((answer.status(), answer.text()), (400, "{\"error\":1}"));
    assert_eq!(one.seen().len() + two.seen().len(), 1);
}

#[test]
fn when_all_refuse_the_last_refusal_is_passed_on() {
    let (one, two) = (Fake::other(), Fake::other());
    let refuse = || vec![Act::Answer(503, "{\"error\":\"full\"}".into()); 10];
    one.will(refuse());
    two.will(refuse());
    let rig = Rig::new(&[&one, &two]);
    let answer = post(rig.address, CHAT, "{}");
    assert_eq!((answer.status(), answer.text()), (503, "{\"error\":\"full\"}"));
    assert_eq!(one.seen().len() + two.seen().len(), 6, "the first attempt and five more");
}

#[test]
fn without_retries_the_first_refusal_is_passed_on() {
    let backend = Fake::other();
    backend.will([Act::Answer(503, "{}".into())]);
    let rig = Rig::with(&[&backend], |config| config.retry.retries = 0);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 503);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
}

#[test]
fn without_backends_there_is_an_error_in_the_usual_shape() {
    let backend = Fake::other();
    backend.set_healthy(false);
    let rig = Rig::new(&[&backend]);
    assert_eq!(code(&post(rig.address, CHAT, "{}")), (503, "no_backend".into()));
    assert_eq!(code(&get(rig.address, "/health")), (503, "no_backend".into()));
    backend.set_healthy(true);
    eventually("the backend is up", || get(rig.address, "/health").status() == 200);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
}

#[test]
fn nobody_listens_at_one_of_the_backends() {
    let (one, two) = (Fake::other(), Fake::other());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let rig = Rig::with(&[&one, &two], |config| config.sources.urls.push(free.to_string()));
    for _ in 0..9 {
        assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    }
}

#[test]
fn wrong_requests_are_told_so() {
    let backend = Fake::other();
    let rig = Rig::with(&[&backend], |config| config.bodies.json = 100);
    let large = "x".repeat(101);
    assert_eq!(code(&post(rig.address, CHAT, &large)), (413, "body_too_large".into()));
    assert_eq!(code(&post(rig.address, "/nothing", "{}")), (404, "unknown_url".into()));
    assert_eq!(code(&get(rig.address, CHAT)), (405, "method_not_allowed".into()));
    assert!(backend.seen().is_empty());
}

#[test]
fn connections_are_used_again_and_closed_ones_are_not() {
    let backend = Fake::other();
    let rig = Rig::with(&[&backend], |config| config.health.interval = Duration::from_secs(60));
    let mut client = Client::connect(rig.address);
    let mut post = || {
        client.send("POST", CHAT, &[], b"{}");
        client.answer().status()
    };
    assert_eq!(post(), 200);
    let before = backend.connections();
    assert_eq!((post(), post()), (200, 200));
    assert_eq!(backend.connections(), before);
    // The backend closes the connection when the next request arrives. The client does not see
    // this.
    backend.will([Act::DieFirst]);
    assert_eq!(post(), 200);
    assert_eq!(backend.connections(), before + 2, "one new connection, and one for a health check");
    assert_eq!(rig.metric("forebay_router_retries_total"), 0.0);
}

#[test]
fn equal_requests_are_spread_evenly_and_more_than_their_share_on_nobody() {
    let backends: Vec<Fake> = (0..4).map(|_| Fake::other()).collect();
    let rig = Rig::with(&backends.iter().collect::<Vec<_>>(), |config| {
        config.policy = Policy::ShortestQueue;
        config.threads = 2;
    });
    let mut keys = Vec::new();
    for backend in &backends {
        for _ in 0..25 {
            let (gate, key) = Gate::new();
            backend.will([Act::Wait(gate)]);
            keys.push(key);
        }
    }
    let address = rig.address;
    let clients: Vec<_> =
        (0..100).map(|_| std::thread::spawn(move || post(address, CHAT, "{}").status())).collect();
    eventually("the backends have all requests", || {
        backends.iter().map(|backend| backend.seen().len()).sum::<usize>() == 100
    });
    assert!(backends.iter().all(|backend| backend.seen().len() == 25));
    drop(keys);
    assert!(clients.into_iter().all(|client| client.join().unwrap() == 200));
    // The load stays balanced when new requests arrive as others end.
    let clients: Vec<_> = (0..40)
        .map(|_| {
            std::thread::spawn(move || (0..10).all(|_| post(address, CHAT, "{}").status() == 200))
        })
        .collect();
    assert!(clients.into_iter().all(|client| client.join().unwrap()));
    assert!(backends.iter().all(|backend| backend.most_alive() == 25));
}

#[test]
fn a_session_stays_where_it_is() {
    let backends: Vec<Fake> = (0..3).map(|_| Fake::other()).collect();
    let rig =
        Rig::with(&backends.iter().collect::<Vec<_>>(), |config| config.policy = Policy::Session);
    for user in 0..8 {
        let body = format!("{{\"prompt\":\"p\",\"user\":\"u{user}\"}}");
        (0..3).for_each(|_| assert_eq!(post(rig.address, CHAT, &body).status(), 200));
    }
    for backend in &backends {
        for user in 0..8 {
            let of_user = |message: &Message| message.text().contains(&format!("u{user}"));
            let count = backend.seen().iter().filter(|message| of_user(message)).count();
            assert!(count == 0 || count == 3);
        }
    }
}

#[test]
fn equal_prompts_go_to_the_same_backend() {
    let backends: Vec<Fake> = (0..3).map(|_| Fake::other()).collect();
    let rig = Rig::with(&backends.iter().collect::<Vec<_>>(), |config| {
        config.policy = Policy::CacheAware;
    });
    let prompt = |which: char, end: &str| {
        format!("{{\"messages\":[{{\"content\":\"{}{end}\"}}]}}", which.to_string().repeat(2000))
    };
    for which in ['a', 'b', 'c'] {
        for end in ["1", "22", "333"] {
            assert_eq!(post(rig.address, CHAT, &prompt(which, end)).status(), 200);
        }
    }
    for which in ["aaa", "bbb", "ccc"] {
        let of_prompt = |message: &Message| message.text().contains(which);
        let asked = |backend: &Fake| backend.seen().iter().filter(|seen| of_prompt(seen)).count();
        let mut counts: Vec<usize> = backends.iter().map(asked).collect();
        counts.sort_unstable();
        assert_eq!(counts, [0, 0, 3]);
    }
}

#[test]
fn a_client_that_goes_away_ends_its_request_at_the_backend() {
    let backend = Fake::other();
    backend.will([Act::Hang]);
    let hung_up = backend.hung_up();
    let rig = Rig::new(&[&backend]);
    let mut client = Client::connect(rig.address);
    client.send("POST", CHAT, &[], b"{}");
    eventually("the backend has the request", || backend.seen().len() == 1);
    drop(client);
    hung_up.recv_timeout(crate::PATIENCE).unwrap();
    eventually("the load is back to zero", || {
        get(rig.address, "/v1/loads").json()["loads"][0]["own"] == 0
    });
}

#[test]
fn a_request_takes_no_longer_than_it_may() {
    let backend = Fake::other();
    backend.will([Act::Hang]);
    let rig = Rig::with(&[&backend], |config| config.request_timeout = Duration::from_millis(50));
    assert_eq!(code(&post(rig.address, CHAT, "{}")), (504, "timeout".into()));
}

#[test]
fn a_request_that_hangs_is_moved_when_its_backend_is_found_dead() {
    let (one, two) = (Fake::other(), Fake::other());
    one.will([Act::Hang]);
    let rig = Rig::new(&[&one, &two]);
    let address = rig.address;
    let asked: Vec<_> =
        (0..2).map(|_| std::thread::spawn(move || post(address, CHAT, "{}").status())).collect();
    eventually("both backends have a request", || one.seen().len() == 1 && two.seen().len() == 1);
    one.stop_listening();
    assert!(asked.into_iter().all(|asked| asked.join().unwrap() == 200));
    assert_eq!(two.seen().len(), 2);
}
