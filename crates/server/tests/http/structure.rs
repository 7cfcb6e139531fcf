//! Structured output: which constraint the engine gets for a request.

use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{Allowed, Constraint, FinishReason, RequestError};
use forebay_grammar::{CompileHook, Form, GrammarConfig, Source};
use forebay_server::Keys;
use http_body_util::Full;
use hyper::Request;
use hyper::body::Bytes;
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};

use crate::fake::{EOS, TestServer};

const COMPLETIONS: &str = "/v1/completions";

/// Returns the ids that the constraint allows next.
fn allowed(constraint: &mut dyn Constraint, vocabulary: usize) -> Vec<i32> {
    let mut words = vec![0; vocabulary.div_ceil(32)];
    let all = 0..i32::try_from(vocabulary).unwrap();
    match constraint.mask(&mut words).unwrap() {
        Allowed::Everything => all.collect(),
        Allowed::Some => all.filter(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1).collect(),
    }
}

fn completion(more: Value) -> Value {
    let mut body = json!({"prompt": "once", "max_tokens": 8});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn each_choice_has_a_constraint_of_its_own() {
    let mut server = TestServer::scripted("a").await;
    let vocabulary = server.tokenizer.vocab_size();
    let body = completion(json!({"regex": "[ab]{2}", "n": 2}));
    assert_eq!(server.post(COMPLETIONS, body).await.0, 200);
    let (a, b) = (server.encode("a")[0], server.encode("b")[0]);
    for first in [a, b] {
        let mut constraint = server.submitted().await.all.constraint.unwrap();
        let ids = allowed(&mut *constraint, vocabulary);
        assert!(ids.contains(&a) && ids.contains(&b) && !ids.contains(&EOS), "{ids:?}");
        constraint.accept(first).unwrap();
        constraint.accept(a).unwrap();
        assert_eq!(allowed(&mut *constraint, vocabulary), [EOS]);
    }
}

#[tokio::test]
async fn what_has_no_form_has_no_constraint() {
    let mut server = TestServer::scripted("a").await;
    let text = json!({"type": "text"});
    for more in
        [json!({}), json!({"response_format": text, "bad_words": [], "allowed_token_ids": [5]})]
    {
        server.post(COMPLETIONS, completion(more)).await;
        assert!(server.submitted().await.all.constraint.is_none());
    }
}

#[tokio::test]
async fn the_parameters_of_sampling_go_along() {
    let mut server = TestServer::scripted("a").await;
    let vocabulary = server.tokenizer.vocab_size();
    let (a, b) = (server.encode("a")[0], server.encode("b")[0]);
    let more = json!({
        "regex": "[abc]+", "allowed_token_ids": [a, b, EOS], "bad_words": ["b"], "min_tokens": 2, "stop_token_ids": [a],
    });
    server.post(COMPLETIONS, completion(more)).await;
    let mut constraint = server.submitted().await.all.constraint.unwrap();
    // Tokens that end the answer too soon, and bad words, are not allowed as long as another token
    // is allowed.
    assert_eq!(allowed(&mut *constraint, vocabulary), [a]);
    constraint.accept(b).unwrap();
    constraint.accept(b).unwrap();
    let ids = allowed(&mut *constraint, vocabulary);
    assert!(ids.contains(&EOS) && ids.contains(&a) && !ids.contains(&b), "{ids:?}");
}

#[tokio::test]
async fn a_form_that_cannot_be_compiled_names_its_place_and_is_not_submitted() {
    let mut server = TestServer::scripted("a").await;
    let schema = json!({"properties": {"x": {"uniqueItems": true}}});
    for (more, param) in [
        (json!({"guided_json": schema}), "guided_json.properties.x.uniqueItems"),
        (json!({"regex": "("}), "regex"),
        (json!({"thinking_budget": 3}), "thinking_budget"),
    ] {
        for stream in [false, true] {
            let mut body = completion(more.clone());
            body["stream"] = stream.into();
            let (status, answer) = server.post(COMPLETIONS, body).await;
            assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        }
    }
    assert!(server.try_event().is_none());
}

#[tokio::test]
async fn a_constraint_that_breaks_is_the_requests_fault() {
    let mut server = TestServer::driven().await;
    let answer = server.connect(COMPLETIONS, &completion(json!({"regex": "[ab]+"})));
    let id = server.submitted().await.id;
    let why = RequestError::Constraint("the grammar: it is too complex".into());
    server.engine.token(id, 5, true, Some(FinishReason::Error(why)));
    let (status, answer) = answer.await.unwrap();
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("response_format")), "{answer}");
}

const HOUR: Duration = Duration::from_secs(3600);

/// Creates a request with an API key.
fn keyed(key: &str, body: &Value) -> Request<Full<Bytes>> {
    let request = Request::post(COMPLETIONS)
        .header("host", "test")
        .header("content-type", "application/json")
        .header("authorization", format!("Bearer {key}"));
    request.body(Full::new(body.to_string().into())).unwrap()
}

/// Sends a request with an API key; returns the status, the header `Retry-After`, and the response.
async fn ask_as(server: &TestServer, key: &str, body: Value) -> (u16, Option<String>, Value) {
    let pending = server.send(keyed(key, &body)).await;
    let retry_after = pending.header("retry-after").map(str::to_owned);
    let (status, body) = pending.read().await;
    (status, retry_after, serde_json::from_slice(&body).unwrap())
}

/// Returns a closed gate and a hook. The hook delays compilations of regular expressions that start
/// with `held`, until `release` opens the gate.
fn gate() -> (Arc<(Mutex<bool>, Condvar)>, CompileHook) {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let held = Arc::clone(&gate);
    let hook = move |source: &Source| {
        if matches!(&source.form, Form::Regex(pattern) if pattern.starts_with("held")) {
            held.1.wait_while(&mut held.0.lock(), |open| !*open);
        }
    };
    (gate, Arc::new(hook))
}

fn release(gate: &(Mutex<bool>, Condvar)) {
    *gate.0.lock() = true;
    gate.1.notify_all();
}

#[tokio::test]
async fn a_compiler_that_is_stuck_turns_health_red_until_a_compile_comes_back() {
    let (gate, hook) = gate();
    // Each compilation that the hook delays exceeds its time limit at once.
    let forms =
        GrammarConfig { grammar_timeout: Duration::from_millis(1), ..GrammarConfig::default() };
    let keys = |config: &mut forebay_server::ServerConfig| config.api_keys = Keys::new(["a", "b"]);
    let server = TestServer::with_grammars(Some("a"), keys, (forms, hook)).await;
    let held = |n: usize| completion(json!({"regex": format!("held{n}")}));
    for n in 0..2 {
        assert_eq!(server.get("/health").await.0, 200);
        let (status, _, answer) = ask_as(&server, "a", held(n)).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("regex")), "{answer}");
    }
    // The first client has two abandoned compilations that still run, the maximum for one client.
    let (status, retry, answer) = ask_as(&server, "a", held(2)).await;
    assert_eq!((status, retry.is_some()), (429, true), "{answer}");
    for n in 3..5 {
        assert_eq!(ask_as(&server, "b", held(n)).await.0, 400);
    }
    let (status, health) = server.get_json("/health").await;
    assert_eq!((status, &health["error"]["code"]), (503, &json!("grammar_stuck")), "{health}");
    let (status, retry, answer) = ask_as(&server, "b", completion(json!({"regex": "x"}))).await;
    assert_eq!((status, retry.is_some()), (503, true));
    assert_eq!(answer["error"]["code"], "grammar_stuck", "{answer}");
    assert_eq!(ask_as(&server, "b", completion(json!({}))).await.0, 200, "it needs no compiler");
    let (_, metrics) = server.get("/metrics").await;
    for line in ["grammars_running_on", "grammars_abandoned_total"] {
        let line = format!("forebay:{line}{{engine=\"0\",model_name=\"tiny\"}} 4");
        assert!(metrics.lines().any(|found| found == line), "{line}");
    }
    release(&gate);
    while server.get("/health").await.0 != 200 {}
}

#[tokio::test]
async fn a_wait_that_is_too_long_is_the_servers_fault() {
    let (gate, hook) = gate();
    let patience = Duration::from_millis(1);
    let forms = GrammarConfig { grammar_timeout: HOUR, patience, ..GrammarConfig::default() };
    let server = TestServer::with_grammars(Some("a"), |_| {}, (forms, hook)).await;
    let (status, retry, answer) = ask_as(&server, "", completion(json!({"regex": "held"}))).await;
    assert_eq!((status, retry.as_deref()), (503, Some("1")), "{answer}");
    assert_eq!(answer["error"]["code"], "queue_timeout");
    release(&gate);
}

/// Returns a grammar whose matcher needs some megabytes.
fn heavy() -> Value {
    let doubled = |n: usize| format!("T{n}: T{} T{}\n", n + 1, n + 1);
    let lines: String = (0..13).map(doubled).collect();
    json!(format!("start: T0\n{lines}T13: /[ab]/\n"))
}

#[tokio::test]
async fn each_choices_matcher_is_charged_before_it_is_submitted() {
    let change = |config: &mut forebay_server::ServerConfig| {
        config.max_request_bytes_in_flight = 32 << 20;
        config.api_keys = Keys::new(["a", "b"]);
    };
    let mut server = TestServer::start(None, change).await;
    let form = |n: usize| completion(json!({"guided_grammar": heavy(), "n": n, "stream": true}));
    let (status, retry, answer) = ask_as(&server, "a", form(128)).await;
    assert_eq!((status, retry), (413, None), "{answer}");
    assert!(server.try_event().is_none(), "none of them was submitted");
    // The budget suffices for one client. While its choices run, the other client's request is
    // rejected.
    let address = server.address;
    let begin =
        |key: &str, body: Value| tokio::spawn(crate::client::send(address, keyed(key, &body)));
    let running = begin("a", form(40));
    for _ in 0..40 {
        server.submitted().await;
    }
    let (status, retry, answer) = ask_as(&server, "b", form(40)).await;
    assert_eq!((status, retry.is_some()), (429, true), "{answer}");
    // A request without a grammar is charged less.
    let plain = begin("b", completion(json!({"stream": true})));
    server.submitted().await;
    running.abort();
    plain.abort();
}
