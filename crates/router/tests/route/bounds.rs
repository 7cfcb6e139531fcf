//! Limits on the memory that a backend can make the router use.

use crate::fake::{Act, Fake, TOKENS};
use crate::http::{Message, get, post};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";
/// The largest number of bytes that the router holds of a stream (`MOST`), and an allowance for
/// socket buffers (`SOCKETS`).
const MOST: usize = 8 << 20;
const SOCKETS: usize = 24 << 20;
/// Bytes that an endless stream repeats after its last comment with token ids.
const ENDLESS: [&[u8]; 3] = [b"x", b"\n\n", b"x\nx: forebay 1\n"];

fn code(message: &Message) -> (u16, String) {
    (message.status(), message.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn all_are_brains(rig: &Rig) {
    eventually("all backends report as Forebay", || {
        let loads = get(rig.address, "/v1/loads").json();
        loads["loads"].as_array().unwrap().iter().all(|backend| backend["forebay"] == true)
    });
}

#[test]
fn a_brain_whose_stream_never_says_how_far_it_may_go_is_cut_off() {
    for pattern in ENDLESS {
        let backend = Fake::brain();
        let rig = Rig::with(&[&backend], |config| config.retry.retries = 0);
        backend.will([Act::Flood(0, pattern)]);
        let answer = post(rig.address, CHAT, "{}");
        assert_eq!(code(&answer), (502, "backend_answer_too_large".into()));
        assert!(backend.flooded() <= MOST + SOCKETS, "{}", backend.flooded());
        eventually("no bytes of streams are held", || {
            rig.metric("forebay_router_backend_held_bytes") == 0.0
        });
        assert_eq!(rig.metric("forebay_router_backend_failed_total"), 1.0);
        assert_eq!(post(rig.address, CHAT, "{}").events().len(), TOKENS as usize);
    }
}

#[test]
fn what_a_flood_holds_is_told_and_bounded() {
    let backend = Fake::brain();
    let rig = Rig::with(&[&backend], |config| config.retry.retries = 0);
    backend.will([Act::Flood(0, b"x")]);
    let address = rig.address;
    let asked = std::thread::spawn(move || post(address, CHAT, "{}").status());
    let mut most = 0.0f64;
    while !asked.is_finished() {
        most = most.max(rig.metric("forebay_router_backend_held_bytes"));
    }
    assert_eq!(asked.join().unwrap(), 502);
    assert!(most <= MOST as f64, "{most}");
}

#[test]
fn a_stream_that_turns_into_a_flood_goes_on_elsewhere() {
    let brains = Fake::brains(2);
    let rig = Rig::with(&[&brains[0], &brains[1]], |_| {});
    all_are_brains(&rig);
    brains[0].will([Act::Flood(150, b"x")]);
    let events = post(rig.address, CHAT, "{}").events();
    assert_eq!(events.len(), TOKENS as usize);
    assert!(events.iter().all(|event| event["error"].is_null()), "{events:?}");
    assert_eq!(rig.metric("forebay_router_failovers_total"), 1.0);
    let flooded: usize = brains.iter().map(Fake::flooded).sum();
    assert!(flooded > 0 && flooded <= MOST + SOCKETS);
}

#[test]
fn a_long_head_is_not_held() {
    let (bad, good) = (Fake::other(), Fake::other());
    bad.will([Act::LongHead(100 << 10), Act::LongHead(100 << 10)]);
    let alone = Rig::with(&[&bad], |config| config.retry.retries = 0);
    assert_eq!(code(&post(alone.address, CHAT, "{}")), (502, "backend_answer_garbled".into()));
    drop(alone);
    let rig = Rig::new(&[&bad, &good]);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    assert_eq!(good.seen().len() + bad.seen().len(), 4);
}

#[test]
fn a_long_refusal_is_not_held_while_others_are_asked() {
    let backend = Fake::other();
    let rig = Rig::with(&[&backend], |config| config.retry.retries = 0);
    for (length, expected) in [(60 << 10, 503), (1 << 20, 502)] {
        backend.will([Act::Answer(503, " ".repeat(length))]);
        assert_eq!(post(rig.address, CHAT, "{}").status(), expected);
    }
    // A response with any other status is forwarded completely.
    backend.will([Act::Answer(500, " ".repeat(3 << 20))]);
    let answer = post(rig.address, CHAT, "{}");
    assert_eq!((answer.status(), answer.whole, answer.body.len()), (500, true, 3 << 20));
}

#[test]
fn a_report_is_short_and_of_a_health_check_only_the_status_is_read() {
    let backend = Fake::brain();
    backend.pad(1 << 20);
    let rig = Rig::new(&[&backend]);
    eventually("the router asked for load reports", || backend.reports() >= 2);
    let load = &get(rig.address, "/v1/loads").json()["loads"][0];
    assert_eq!((&load["up"], &load["forebay"]), (&true.into(), &false.into()));
    backend.pad(0);
    all_are_brains(&rig);
}
