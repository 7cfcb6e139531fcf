//! Adding and removing backends, and shutting down the router.

use std::time::Duration;

use crate::fake::{Act, Fake, Gate};
use crate::http::{Client, Message, ask, get, post, read_body};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";
const KEY: &str = "Authorization: Bearer secret";

fn urls(rig: &Rig) -> Vec<String> {
    let list = get(rig.address, "/backends").json();
    list["backends"]
        .as_array()
        .unwrap()
        .iter()
        .map(|url| url.as_str().unwrap().to_owned())
        .collect()
}

fn registering() -> Rig {
    Rig::with(&[], |config| config.sources.registration_key = Some("secret".into()))
}

fn register(rig: &Rig, method: &str, body: &str) -> Message {
    ask(rig.address, method, "/backends", &[KEY], body.as_bytes())
}

#[test]
fn a_backend_registers_and_goes() {
    let (rig, backend) = (registering(), Fake::other());
    let body = format!("{{\"url\":\"{}\"}}", backend.url());
    assert_eq!(register(&rig, "POST", &body).status(), 200);
    assert_eq!(urls(&rig), [backend.url()]);
    eventually("the backend is up", || get(rig.address, "/health").status() == 200);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    assert_eq!(register(&rig, "DELETE", &body).json()["removed"], true);
    assert_eq!(register(&rig, "DELETE", &body).json()["removed"], false);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 503);
}

#[test]
fn a_lease_that_is_not_renewed_ends() {
    let (rig, backend) = (registering(), Fake::other());
    let body = |ttl: &str| format!("{{\"url\":\"{}\",\"ttl\":{ttl}}}", backend.url());
    assert_eq!(register(&rig, "POST", &body("0.01")).status(), 200);
    eventually("the backend is removed", || urls(&rig).is_empty());
    assert_eq!(register(&rig, "POST", &body("1000")).status(), 200);
    assert_eq!(urls(&rig).len(), 1);
}

#[test]
fn a_registration_has_to_be_right() {
    let rig = registering();
    let param = |body: &str| register(&rig, "POST", body).json()["error"]["param"].clone();
    assert_eq!(param("{\"url\":\"https://a\"}"), "url");
    assert_eq!(param("{}"), "url");
    assert_eq!(param("{\"url\":\"http://a:1\",\"ttl\":-1}"), "ttl");
    let wrong = ask(rig.address, "POST", "/backends", &["Authorization: Bearer x"], b"{}");
    assert_eq!(wrong.status(), 401);
    let closed = Rig::new(&[&Fake::other()]);
    assert_eq!(register(&closed, "POST", "{}").status(), 404);
}

#[test]
fn a_file_is_followed() {
    let (one, two) = (Fake::other(), Fake::other());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("backends");
    std::fs::write(&file, format!("# first\n{}\n", one.url())).unwrap();
    let path = file.clone();
    let rig = Rig::with(&[], |config| config.sources.file = Some(path));
    eventually("the file was read", || urls(&rig) == [one.url()]);
    std::fs::write(&file, format!("{}\n{}\n", one.url(), two.url())).unwrap();
    eventually("the file was read again", || urls(&rig).len() == 2);
    std::fs::write(&file, "nonsense://\n").unwrap();
    std::fs::write(&file, two.url()).unwrap();
    eventually("the file was read once more", || urls(&rig) == [two.url()]);
}

#[test]
fn a_name_is_resolved() {
    let backend = Fake::other();
    let name = format!("localhost:{}", backend.address.port());
    let rig = Rig::with(&[], |config| config.sources.dns = vec![name]);
    eventually("the backend has the request", || urls(&rig).contains(&backend.url()));
    eventually("the backend is up", || get(rig.address, "/health").status() == 200);
}

#[test]
fn a_backend_that_drains_keeps_what_it_has_and_gets_nothing_new() {
    let (one, two) = (Fake::other(), Fake::other());
    let (gate, key) = Gate::new();
    one.will([Act::Wait(gate.clone())]);
    two.will([Act::Wait(gate)]);
    let rig = Rig::new(&[&one, &two]);
    let address = rig.address;
    let asked = std::thread::spawn(move || post(address, CHAT, "{}").status());
    eventually("the backend has the request", || one.seen().len() + two.seen().len() == 1);
    let (busy, other) = if one.seen().is_empty() { (&two, &one) } else { (&one, &two) };
    busy.set_healthy(false);
    eventually("the unhealthy backend is down", || get(address, "/health").json()["backends"] == 1);
    drop(key);
    assert_eq!(asked.join().unwrap(), 200);
    (0..4).for_each(|_| assert_eq!(post(address, CHAT, "{}").status(), 200));
    assert_eq!((busy.seen().len(), other.seen().len()), (1, 4));
}

#[test]
fn what_runs_may_finish_when_the_router_stops() {
    let backend = Fake::other();
    let (gate, key) = Gate::new();
    backend.will([Act::Wait(gate)]);
    let mut rig = Rig::new(&[&backend]);
    let address = rig.address;
    let asked = std::thread::spawn(move || post(address, CHAT, "{}"));
    eventually("the backend has the request", || backend.seen().len() == 1);
    let router = rig.router.take().unwrap();
    let stopping = std::thread::spawn(move || router.stop(std::future::pending()));
    eventually("the drain has begun", || get(address, "/health").status() == 503);
    assert_eq!(post(address, CHAT, "{}").json()["error"]["code"], "draining");
    drop(key);
    assert_eq!(asked.join().unwrap().status(), 200);
    stopping.join().unwrap();
    assert_eq!(backend.seen().len(), 1);
}

#[test]
fn what_does_not_finish_in_time_is_ended_with_an_error() {
    let backend = Fake::other();
    // The second half of the stream never arrives.
    let half = b"data: {\"name\":1}\n\n".to_vec();
    backend.will([Act::HangAfter(half)]);
    let mut rig = Rig::with(&[&backend], |config| config.drain_timeout = Duration::from_millis(1));
    let address = rig.address;
    let mut client = Client::connect(address);
    client.send("POST", CHAT, &[], b"{}");
    let mut answer = client.head();
    rig.router.take().unwrap().stop(std::future::pending());
    read_body(&mut client.0, &mut answer);
    let events = answer.events();
    assert_eq!((events.len(), &events[1]["error"]["code"]), (2, &"aborted".into()));
}

#[test]
fn what_runs_is_ended_at_once_when_there_is_no_more_patience() {
    let backend = Fake::other();
    let half = b"data: {\"name\":1}\n\n".to_vec();
    backend.will([Act::HangAfter(half)]);
    let hour = std::time::Duration::from_secs(3600);
    let mut rig = Rig::with(&[&backend], |config| config.drain_timeout = hour);
    let mut client = Client::connect(rig.address);
    client.send("POST", CHAT, &[], b"{}");
    let mut answer = client.head();
    assert!(rig.router.take().unwrap().stop(std::future::ready(())));
    read_body(&mut client.0, &mut answer);
    let events = answer.events();
    assert_eq!((events.len(), &events[1]["error"]["code"]), (2, &"aborted".into()));
}

#[test]
fn a_router_without_backends_does_not_start() {
    use forebay_router::{Router, RouterConfig, StartError};
    let start = |change: fn(&mut RouterConfig)| {
        let mut config = RouterConfig::default();
        change(&mut config);
        Router::start(config, std::net::TcpListener::bind("127.0.0.1:0").unwrap()).err()
    };
    assert!(matches!(start(|_| {}), Some(StartError::NoBackends)));
    assert!(matches!(
        start(|config| config.sources.urls = vec!["x/".repeat(2)]),
        Some(StartError::Url(_))
    ));
    let missing = |config: &mut RouterConfig| config.sources.file = Some("/nothing/here".into());
    assert!(matches!(start(missing), Some(StartError::File(_))));
}
