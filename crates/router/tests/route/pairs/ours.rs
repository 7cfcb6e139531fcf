//! Pairs of Forebay servers: the decode server contacts the prefill server that the router names.

use std::time::Duration;

use forebay_router::BreakerConfig;

use super::{CHAT, bodies, named, refused, rig, rig_with};
use crate::eventually;
use crate::fake::{Act, Fake, TOKENS};
use crate::http::{ask, get, post};

const PREFILL: &str = "x-forebay-prefill";
const CLIENTS: [&str; 2] = ["Authorization: Bearer one", "Authorization: Bearer two"];
const FAILED: Act = Act::Refuse(200, "X-Forebay-Prefill: failed");
const CAME: Act = Act::Refuse(200, "X-Forebay-Prefill: came");

fn brains(mode: &str, count: usize) -> Vec<Fake> {
    (0..count).map(|_| Fake::brain()).inspect(|brain| brain.has_mode(mode)).collect()
}

/// Returns the prefill server that each request to a decode server named; an empty string for none.
fn told(decode: &Fake) -> Vec<String> {
    let told = |message: &crate::http::Message| message.header(PREFILL).unwrap_or("").to_owned();
    decode.seen().iter().map(told).collect()
}

#[test]
fn a_decode_server_gets_the_request_and_the_name_of_a_prefill_server() {
    let (prefill, decode) = (brains("prefill", 2), brains("decode", 1));
    let rig = rig(&prefill, &decode);
    decode[0].will(vec![CAME; 4]);
    let own = format!("{PREFILL}: http://203.0.113.1:1");
    for path in [CHAT, "/v1/messages", "/v1/responses", "/generate"] {
        let answer = ask(rig.address, "POST", path, &[&own], b"{\"n\":2}");
        assert_eq!((answer.status(), answer.header(PREFILL)), (200, None), "{path}");
    }
    // The router names each prefill server in turn, and never the one that the client names.
    let urls = [prefill[0].url(), prefill[1].url()];
    let told = told(&decode[0]);
    assert!(told.iter().all(|url| urls.contains(url)) && urls.iter().all(|url| told.contains(url)));
    assert!(prefill.iter().all(|server| bodies(server).is_empty()), "the decode server asks");
    assert_eq!(bodies(&decode[0])[0], serde_json::json!({"n": 2}), "the body is the client's");
    // This route needs no model, so it names no prefill server.
    assert_eq!(post(rig.address, "/tokenize", "{}").status(), 200);
    assert_eq!(told_last(&decode[0]), "");
    let loads = get(rig.address, "/v1/loads").json();
    assert_eq!(
        (&loads["loads"][0]["engine"], &loads["loads"][2]["duty"]),
        (&"Forebay".into(), &"decode".into())
    );
}

fn told_last(decode: &Fake) -> String {
    told(decode).pop().expect("a request")
}

#[test]
fn servers_with_another_mode_are_refused_in_one_line() {
    let (plain, decode) = (vec![Fake::brain()], brains("decode", 1));
    let said = refused(|pairs| *pairs = named(&plain, &decode));
    assert!(
        said.contains(&plain[0].url()) && said.contains("--disaggregation-mode null"),
        "{said}"
    );
    let said = refused(|pairs| *pairs = named(&decode, &plain));
    assert!(said.contains("--disaggregation-mode decode") && said.lines().count() == 1, "{said}");
    // A server with a router key does not report its load to a router without that key.
    let keyed = vec![Fake::other()];
    keyed[0].is_of("m", "forebay");
    let said = refused(|pairs| *pairs = named(&keyed, &decode));
    assert!(said.contains("--router-key") && said.lines().count() == 1, "{said}");
    let theirs = super::sglang(1, 0).0;
    let said = refused(|pairs| *pairs = named(&theirs, &decode));
    assert!(said.contains("SGLang") && said.contains("Forebay"), "{said}");
}

#[test]
fn a_prefill_server_that_fails_is_left_alone_and_the_decode_server_is_not() {
    let (prefill, decode) = (brains("prefill", 1), brains("decode", 1));
    let rig = rig_with((&prefill, &decode), |config| {
        let hour = Duration::from_secs(3600);
        config.breaker = BreakerConfig { failures: 3, pause: hour, window: hour, successes: 1 };
        config.api_keys = vec!["one".into(), "two".into()];
    });
    decode[0].will(vec![FAILED; 3]);
    for client in [0, 1, 0] {
        assert_eq!(ask(rig.address, "POST", CHAT, &[CLIENTS[client]], b"{}").status(), 200);
    }
    let loads = ask(rig.address, "GET", "/v1/loads", &[CLIENTS[0]], b"").json();
    let breakers = [&loads["loads"][0]["breaker"], &loads["loads"][1]["breaker"]];
    assert_eq!(breakers, ["open", "closed"]);
    for client in [0, 1] {
        assert_eq!(ask(rig.address, "POST", CHAT, &[CLIENTS[client]], b"{}").status(), 200);
        assert_eq!(told_last(&decode[0]), "", "no prefill server is named");
    }
}

#[test]
fn one_client_opens_no_breaker_of_a_prefill_server() {
    let (prefill, decode) = (brains("prefill", 1), brains("decode", 1));
    let rig = rig_with((&prefill, &decode), |config| config.breaker.failures = 3);
    decode[0].will(vec![FAILED; 12]);
    for _ in 0..12 {
        assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    }
    assert_eq!(told_last(&decode[0]), prefill[0].url());
}

#[test]
fn without_a_prefill_server_decode_servers_compute_all() {
    let (prefill, decode) = (brains("prefill", 1), brains("decode", 1));
    let rig = rig(&prefill, &decode);
    prefill[0].die();
    eventually("a backend is down", || get(rig.address, "/health").json()["backends"] == 1);
    assert_eq!(get(rig.address, "/health").status(), 200);
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    assert_eq!(told_last(&decode[0]), "");
}

#[test]
fn a_stream_goes_on_at_another_decode_server_which_may_ask_too() {
    let (prefill, decode) = (brains("prefill", 1), brains("decode", 2));
    let rig = rig(&prefill, &decode);
    decode.iter().for_each(|server| _ = server.will([Act::Tokens(TOKENS, 150)]));
    let answer = post(rig.address, CHAT, "{\"stream\":true}");
    let said: Vec<_> = answer.events().iter().map(|event| event["text"].clone()).collect();
    let expected: Vec<serde_json::Value> =
        (0..TOKENS).map(|at| format!("{} ", 3 * at).into()).collect();
    assert_eq!(said, expected);
    for server in &decode {
        assert_eq!(told(server).first(), Some(&prefill[0].url()));
    }
}
