//! Pairs of prefill and decode servers that fail in many ways.

mod ours;
mod sglang;
mod storm;
mod vllm;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use forebay_router::{
    HealthConfig, PairConfig, PairEngine, Policy, PrefillServer, Router, RouterConfig,
};
use serde_json::{Value, json};

use crate::fake::{Act, Fake};
use crate::http::{Client, get, post};
use crate::{Rig, eventually};

const CHAT: &str = "/v1/chat/completions";
/// The longest time for which one server of a pair may continue after the other has failed.
const OUTLIVED: Duration = Duration::from_secs(1);
/// A complete stream.
const STREAM: &[u8] = b"data: {\"a\":1}\n\ndata: [DONE]\n\n";

fn fine() -> Act {
    Act::Answer(200, "{\"ok\":true}".into())
}

/// Starts SGLang servers: for prefill, and for decode.
fn sglang(prefill: usize, decode: usize) -> (Vec<Fake>, Vec<Fake>) {
    let of = |mode: &str, count| -> Vec<Fake> {
        let servers = (0..count).map(|_| Fake::other());
        let info = json!({"disaggregation_mode": mode, "disaggregation_bootstrap_port": 7777});
        servers.inspect(|server| server.tells(&info)).collect()
    };
    (of("prefill", prefill), of("decode", decode))
}

/// Starts vLLM servers.
fn vllm(count: usize) -> Vec<Fake> {
    (0..count).map(|_| Fake::other()).inspect(|server| server.is_of("m", "vllm")).collect()
}

fn named(prefill: &[Fake], decode: &[Fake]) -> PairConfig {
    let server = |fake: &Fake| PrefillServer { url: fake.url(), bootstrap_port: None };
    PairConfig {
        prefill: prefill.iter().map(server).collect(),
        decode: decode.iter().map(Fake::url).collect(),
        ..PairConfig::default()
    }
}

fn rig_with((prefill, decode): (&[Fake], &[Fake]), change: impl FnOnce(&mut RouterConfig)) -> Rig {
    let rig = Rig::with(&[], |config| {
        config.pairs = named(prefill, decode);
        config.breaker.failures = 0;
        change(config);
    });
    let all = prefill.len() + decode.len();
    eventually("all backends are up", || get(rig.address, "/health").json()["backends"] == all);
    rig
}

fn rig(prefill: &[Fake], decode: &[Fake]) -> Rig {
    rig_with((prefill, decode), |_| {})
}

/// Returns the error message of a router that refuses to start.
fn refused(change: impl FnOnce(&mut PairConfig)) -> String {
    let mut pairs = PairConfig::default();
    change(&mut pairs);
    let health = HealthConfig { interval: Duration::from_millis(20), ..HealthConfig::default() };
    let config = RouterConfig { pairs, health, ..RouterConfig::default() };
    let started = Router::start(config, TcpListener::bind("127.0.0.1:0").unwrap());
    started.err().expect("no router starts").to_string()
}

/// Waits until the servers have received `count` bodies, and returns them. A prefill server may
/// receive its request after the client has its answer.
fn asked(fakes: &[Fake], count: usize) -> Vec<Value> {
    let all = || fakes.iter().flat_map(bodies).collect::<Vec<_>>();
    eventually("all requests have arrived", || all().len() == count);
    all()
}

/// Returns the bodies of clients' requests that a server received.
fn bodies(fake: &Fake) -> Vec<Value> {
    let seen = fake.seen();
    let posted = seen.iter().filter(|message| message.first.starts_with("POST"));
    posted.map(|message| message.json()).collect()
}

#[test]
fn servers_that_are_no_pair_are_refused() {
    let ((prefill, decode), other) = (sglang(1, 1), vllm(1));
    let said = refused(|pairs| *pairs = named(&prefill, &other));
    assert!(said.contains("SGLang") && said.contains("vLLM"), "{said}");
    let said = refused(|pairs| *pairs = named(&decode, &decode[..0]));
    assert!(said.contains("--disaggregation-mode decode"), "{said}");
    let said = refused(|pairs| {
        *pairs = named(&other, &other);
    });
    assert!(said.contains("named twice"), "{said}");
    let silent = vec![Fake::other()];
    let said = refused(|pairs| *pairs = named(&silent, &other));
    assert!(said.contains("--pd-engine"), "{said}");
}

#[test]
fn the_engine_may_be_named_where_servers_do_not_tell() {
    let (prefill, decode) = (vec![Fake::other()], vec![Fake::other()]);
    let rig = rig_with((&prefill, &decode), |config| {
        config.pairs.engine = Some(PairEngine::SgLang);
        config.pairs.prefill[0].bootstrap_port = Some(4321);
    });
    assert_eq!(post(rig.address, CHAT, "{}").status(), 200);
    assert_eq!(asked(&prefill, 1)[0]["bootstrap_port"], 4321);
    let loads = get(rig.address, "/v1/loads").json();
    assert_eq!(loads["loads"][0]["duty"], "prefill");
    assert_eq!(loads["loads"][1]["engine"], "SGLang");
}

#[test]
fn a_fleet_of_two_engines_makes_pairs_of_one_each() {
    let (mut prefill, mut decode) = sglang(1, 1);
    prefill.extend(vllm(1));
    decode.extend(vllm(1));
    let rig = rig(&prefill, &decode);
    for _ in 0..8 {
        assert_eq!(post(rig.address, CHAT, "{\"n\":1}").status(), 200);
    }
    // A request that vLLM pairs cannot compute goes to the SGLang pair.
    for _ in 0..4 {
        assert_eq!(post(rig.address, CHAT, "{\"n\":2}").status(), 200);
    }
    let rooms =
        |fake: &Fake| bodies(fake).iter().filter(|body| !body["bootstrap_room"].is_null()).count();
    asked(&prefill, 12);
    let counts = |fake: &Fake| (fake.seen().len(), rooms(fake));
    assert_eq!([counts(&prefill[0]), counts(&decode[0])], [(8, 8), (8, 8)]);
    assert_eq!([counts(&prefill[1]), counts(&decode[1])], [(4, 0), (4, 0)]);
}

#[test]
fn a_prompt_goes_where_it_was_before_at_both_servers() {
    let (prefill, decode) = sglang(3, 3);
    let rig = rig_with((&prefill, &decode), |config| {
        config.policy = Policy::CacheAware;
        config.pairs.decode_policy = Some(Policy::RoundRobin);
    });
    let prompt = |name: &str| format!("{{\"prompt\":\"{}\"}}", name.repeat(400));
    for _ in 0..6 {
        for name in ["a", "b", "c"] {
            assert_eq!(post(rig.address, "/v1/completions", &prompt(name)).status(), 200);
        }
    }
    let kinds = |fake: &Fake| {
        let mut prompts: Vec<String> =
            bodies(fake).iter().map(|body| body["prompt"].to_string()).collect();
        prompts.sort_unstable();
        prompts.dedup();
        (bodies(fake).len(), prompts.len())
    };
    asked(&prefill, 18);
    assert_eq!(prefill.iter().map(kinds).collect::<Vec<_>>(), [(6, 1); 3]);
    assert!(decode.iter().all(|fake| bodies(fake).len() == 6), "decode servers take turns");
}

#[test]
fn routes_and_models_are_those_of_pairs() {
    let (prefill, decode) = sglang(1, 1);
    prefill[0].lists(&[("m", None), ("only-prefill", None)]);
    decode[0].lists(&[("m", None), ("only-decode", None)]);
    let rig = rig(&prefill, &decode);
    let list = get(rig.address, "/v1/models").json();
    let names: Vec<&Value> =
        list["data"].as_array().unwrap().iter().map(|card| &card["id"]).collect();
    assert_eq!(names, ["m"]);
    assert_eq!(post(rig.address, "/tokenize", "{}").status(), 200);
    assert_eq!(
        (prefill[0].seen().len(), decode[0].seen().len()),
        (0, 1),
        "the decode server alone answers"
    );
    let refused = post(rig.address, "/v1/embeddings", "{}");
    assert_eq!(refused.status(), 501);
    assert!(refused.text().contains("/v1/completions"), "{refused:?}");
    for name in ["kv_transfer_params", "bootstrap_host"] {
        let answer = post(rig.address, CHAT, &format!("{{\"{name}\":\"x\"}}"));
        assert_eq!((answer.status(), &answer.json()["error"]["param"]), (400, &json!(name)));
    }
    assert_eq!(post(rig.address, CHAT, "{\"a\" 1}").status(), 400);
    assert_eq!(
        (prefill[0].seen().len(), decode[0].seen().len()),
        (0, 1),
        "no server gets a malformed body"
    );
    // Decode servers alone form no pair.
    prefill[0].set_healthy(false);
    eventually("a backend is down", || get(rig.address, "/health").status() == 503);
    let answer = post(rig.address, CHAT, "{}");
    assert_eq!(answer.status(), 503);
    assert!(answer.text().contains("no prefill server"), "{answer:?}");
}

#[test]
fn what_kills_prefill_servers_kills_two_and_is_given_up() {
    let (prefill, decode) = sglang(4, 2);
    let rig = rig(&prefill, &decode);
    // The decode servers wait for a KV cache that never arrives.
    decode.iter().for_each(|fake| {
        fake.will(vec![Act::Hang; 8]);
    });
    prefill[0].will([Act::Die]);
    prefill[1].will([Act::Die]);
    prefill[2].will([Act::Die]);
    prefill[3].will([Act::Die]);
    let answer = post(rig.address, CHAT, "{}");
    let code = answer.json()["error"]["code"].clone();
    assert_eq!((answer.status(), code), (502, json!("backend_died_twice")));
    assert_eq!(prefill.iter().filter(|fake| fake.is_dead()).count(), 2);
    eventually("no server has requests left", || decode.iter().all(|fake| fake.alive() == 0));
}

/// Sends a request, and disconnects once both servers have it.
fn leave(rig: &Rig, prefill: &Fake, decode: Option<&Fake>) -> Instant {
    let mut client = Client::connect(rig.address);
    client.send("POST", CHAT, &[], b"{\"stream\":true}");
    eventually("the backend has the request", || {
        prefill.alive() == 1 && decode.is_none_or(|decode| decode.alive() == 1)
    });
    drop(client);
    Instant::now()
}
