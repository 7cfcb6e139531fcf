//! Access to the router, and limits on its memory for requests.

use std::io::Write;

use crate::fake::{Act, Fake, Gate};
use crate::http::{Client, Message, ask, get, post, read_head};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";
const KEY: &str = "Authorization: Bearer secret";
const ADMIN: &str = "Authorization: Bearer admin";

fn code(message: &Message) -> (u16, String) {
    (message.status(), message.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn keyed(backend: &Fake) -> Rig {
    Rig::with(&[backend], |config| {
        config.api_keys = vec!["secret".into(), "other".into()];
        config.router_key = Some("between us".into());
    })
}

#[test]
fn whoever_shows_no_key_is_refused_before_the_body_is_read() {
    let backend = Fake::other();
    let rig = keyed(&backend);
    let mut client = Client::connect(rig.address);
    // The test never sends the body.
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: test\r\nContent-Length: 1000000\r\n\r\n");
    client.0.get_mut().write_all(head.as_bytes()).unwrap();
    assert_eq!(code(&client.answer()), (401, "invalid_api_key".into()));
    for headers in [&[][..], &["Authorization: Bearer wrong"]] {
        assert_eq!(ask(rig.address, "POST", CHAT, headers, b"{}").status(), 401);
    }
    assert!(backend.seen().is_empty());
    assert_eq!(ask(rig.address, "POST", CHAT, &[KEY], b"{}").status(), 200);
    let [seen] = &backend.seen()[..] else { panic!("one request") };
    assert_eq!(seen.header("authorization"), Some("Bearer secret"), "the key is passed on");
    assert_eq!(seen.header("x-forebay-router-key"), Some("between us"));
}

#[test]
fn a_client_cannot_show_the_routers_key() {
    let backend = Fake::other();
    let rig = Rig::new(&[&backend]);
    let headers = ["X-Forebay-Router-Key: guessed"];
    assert_eq!(ask(rig.address, "POST", CHAT, &headers, b"{}").status(), 200);
    assert_eq!(backend.seen()[0].header("x-forebay-router-key"), None);
}

#[test]
fn what_is_known_of_backends_needs_a_key_too() {
    let backend = Fake::other();
    let clients = keyed(&backend);
    let operators = Rig::with(&[&backend], |config| config.admin_key = Some("admin".into()));
    for path in ["/backends", "/v1/loads", "/metrics"] {
        assert_eq!(get(clients.address, path).status(), 401, "{path}");
        assert_eq!(ask(clients.address, "GET", path, &[KEY], b"").status(), 200, "{path}");
        assert_eq!(ask(operators.address, "GET", path, &[KEY], b"").status(), 401, "{path}");
        assert_eq!(ask(operators.address, "GET", path, &[ADMIN], b"").status(), 200, "{path}");
    }
    for path in ["/health", "/ping", "/version"] {
        assert_eq!(get(clients.address, path).status(), 200, "{path}");
    }
    assert_eq!(post(operators.address, CHAT, "{}").status(), 200, "clients need no key");
}

#[test]
fn only_embeddings_may_be_large() {
    let backend = Fake::other();
    let rig = Rig::with(&[&backend], |config| {
        (config.bodies.json, config.bodies.whole) = (1000, 3000);
    });
    let body = |field: &str, size: usize| format!("{{\"{field}\":\"{}\"}}", "x".repeat(size));
    assert_eq!(
        code(&post(rig.address, CHAT, &body("prompt", 1000))),
        (413, "body_too_large".into())
    );
    assert_eq!(post(rig.address, CHAT, &body("prompt", 900)).status(), 200);
    assert_eq!(post(rig.address, CHAT, &body("prompt_embeds", 2900)).status(), 200);
    assert_eq!(post(rig.address, CHAT, &body("prompt_embeds", 3000)).status(), 413);
}

#[test]
fn all_bodies_together_have_a_bound() {
    let backend = Fake::other();
    let (gate, key) = Gate::new();
    backend.will([Act::Wait(gate)]);
    let rig = Rig::with(&[&backend], |config| config.bodies.all = 150_000);
    let large = format!("{{\"prompt\":\"{}\"}}", "x".repeat(60_000));
    let (address, body) = (rig.address, large.clone());
    let first = std::thread::spawn(move || post(address, CHAT, &body).status());
    eventually("the backend has the request", || backend.seen().len() == 1);
    assert_eq!(rig.metric("forebay_router_body_bytes"), large.len() as f64);
    let refused = post(rig.address, CHAT, &large);
    assert_eq!(refused.status(), 429);
    assert!(refused.header("retry-after").is_some());
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200, "small bodies fit");
    drop(key);
    assert_eq!(first.join().unwrap(), 200);
    eventually("the bytes are given back", || rig.metric("forebay_router_body_bytes") == 0.0);
    assert_eq!(post(rig.address, CHAT, &large).status(), 200);
}

#[test]
fn connections_beyond_the_limit_are_closed() {
    let backend = Fake::other();
    let rig = Rig::with(&[&backend], |config| config.max_connections = 1);
    let mut first = Client::connect(rig.address);
    first.send("POST", CHAT, &[], b"{}");
    assert_eq!(first.answer().status(), 200);
    let mut second = Client::connect(rig.address);
    assert!(read_head(&mut second.0).is_none(), "the connection is closed without an answer");
    first.send("POST", CHAT, &[], b"{}");
    assert_eq!(first.answer().status(), 200);
    drop(first);
    let again = || {
        let mut client = Client::connect(rig.address);
        // The router may have closed the connection already, so the result is ignored.
        let _ = client.0.get_mut().write_all(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n");
        read_head(&mut client.0).is_some()
    };
    eventually("a new connection is accepted", again);
}

#[test]
fn backends_register_for_a_while_and_from_where_they_may() {
    let backend = Fake::other();
    let rig = Rig::with(&[], |config| {
        config.sources.registration_key = Some("secret".into());
        config.sources.allowed = vec!["127.0.0.0/8".parse().unwrap()];
    });
    let register = |url: &str| {
        let body = format!("{{\"url\":\"{url}\"}}");
        ask(rig.address, "POST", "/backends", &[KEY], body.as_bytes())
    };
    assert_eq!(register(&backend.url()).json()["ttl"], 60.0);
    for url in ["http://192.0.2.1:80", "http://localhost:80", "http://[::1]:80"] {
        assert_eq!(code(&register(url)), (403, "backend_not_allowed".into()), "{url}");
    }
    let list = get(rig.address, "/backends").json();
    assert_eq!(list["backends"].as_array().unwrap().len(), 1);
}
