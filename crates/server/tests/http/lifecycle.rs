//! Clients that disconnect, engines that die and servers that shut down: every request finishes.

use std::time::Duration;

use forebay_engine::{FinishReason, Output, RequestError, SampledToken};
use serde_json::{Value, json};

use crate::client::events;
use crate::fake::{Panic, TestServer};

const CHAT: &str = "/v1/chat/completions";

fn hello(stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream})
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_request() {
    let mut server = TestServer::driven().await;
    // The client disconnects in the middle of a stream.
    let mut pending = server.open(CHAT, hello(true).to_string()).await;
    let id = server.submitted().await.id;
    server.engine.token(id, 300, true, None);
    pending.frame().await.unwrap();
    drop(pending);
    assert_eq!(server.aborted().await, id);
    // The client disconnects before the first token of a stream.
    let pending = server.open(CHAT, hello(true).to_string()).await;
    let id = server.submitted().await.id;
    drop(pending);
    assert_eq!(server.aborted().await, id);
    // The client disconnects while it waits for a whole response with several choices.
    let mut body = hello(false);
    body["n"] = json!(2);
    let waiting = server.connect(CHAT, &body);
    let ids = [server.submitted().await.id, server.submitted().await.id];
    waiting.abort();
    assert_eq!([server.aborted().await, server.aborted().await], ids);
}

#[tokio::test]
async fn an_engine_that_ends_fails_every_request() {
    let mut server = TestServer::driven().await;
    let mut stream = server.open(CHAT, hello(true).to_string()).await;
    let id = server.submitted().await.id;
    let whole = server.connect(CHAT, &hello(false));
    server.submitted().await;
    let token = server.encode("a")[0];
    server.engine.token(id, token, true, None);
    let mut text = stream.frame().await.unwrap();
    server.engine.die();
    text.push_str(&stream.rest().await);
    let events = events(&text);
    let errors = events.iter().filter(|event| event.get("error").is_some());
    assert_eq!(errors.count(), 1);
    assert_eq!(events.last().unwrap()["error"]["code"], "failed");
    let (status, answer) = whole.await.unwrap();
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("failed")));
    // Later requests are rejected too.
    let (status, _) = server.post(CHAT, hello(false)).await;
    assert_eq!(status, 503);
}

#[tokio::test]
async fn a_request_that_cannot_be_served_gets_its_error() {
    let mut server = TestServer::driven().await;
    for (error, status, code) in [
        (RequestError::NotFinite, 500, "not_finite"),
        (RequestError::Poisoned, 500, "poisoned"),
        (RequestError::HandFailed("gone".into()), 503, "failed"),
    ] {
        // One of two choices fails: the other is aborted.
        let mut body = hello(false);
        body["n"] = json!(2);
        let whole = server.connect(CHAT, &body);
        let [id, other] = [server.submitted().await.id, server.submitted().await.id];
        let finish = Some(FinishReason::Error(error));
        server.engine.deliver(vec![Output {
            predicted: None,
            id,
            admission: None,
            token: None,
            pooled: None,
            prompt: None,
            finish,
        }]);
        let (got, answer) = whole.await.unwrap();
        assert_eq!((got, &answer["error"]["code"]), (status, &json!(code)));
        assert_eq!(server.aborted().await, other);
    }
}

#[tokio::test]
async fn a_slow_reader_gets_everything() {
    let mut server = TestServer::driven().await;
    let pending = server.open(CHAT, hello(true).to_string()).await;
    let id = server.submitted().await.id;
    let tokens = server.encode("the quick brown fox jumps over the lazy dog");
    for (index, &token) in tokens.iter().enumerate() {
        let finish = (index + 1 == tokens.len()).then_some(FinishReason::Length);
        server.engine.token(id, token, index == 0, finish);
    }
    // The client has read nothing so far.
    let (_, stream) = pending.read().await;
    let events = events(&String::from_utf8(stream).unwrap());
    let text: String =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "the quick brown fox jumps over the lazy dog");
    let finishes = events.iter().filter(|e| e["choices"][0]["finish_reason"].is_string());
    assert_eq!(finishes.count(), 1);
}

#[tokio::test]
async fn shutting_down_lets_running_requests_finish() {
    let mut server = TestServer::driven().await;
    let running = server.connect(CHAT, &hello(false));
    let id = server.submitted().await.id;
    server.shut_down();
    let draining = async {
        // The drain begins soon after the signal, so wait for it; requests before it are served.
        while server.get("/health").await.0 != 503 {}
        server.post(CHAT, hello(false)).await
    };
    let (status, answer) = draining.await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("draining")));
    let token = server.encode("a")[0];
    server.engine.token(id, token, true, Some(FinishReason::Length));
    assert_eq!(running.await.unwrap().0, 200);
    server.ended().await;
}

#[tokio::test]
async fn shutting_down_aborts_what_does_not_finish() {
    let mut server =
        TestServer::start(None, |config| config.drain_timeout = Duration::from_millis(20)).await;
    let mut stream = server.open(CHAT, hello(true).to_string()).await;
    let id = server.submitted().await.id;
    let whole = server.connect(CHAT, &hello(false));
    let other = server.submitted().await.id;
    server.shut_down();
    let text = stream.rest().await;
    assert_eq!(events(&text).last().unwrap()["error"]["code"], "aborted");
    let (status, answer) = whole.await.unwrap();
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("aborted")));
    let mut aborted = [server.aborted().await, server.aborted().await];
    aborted.sort();
    assert_eq!(aborted, [id, other]);
    server.ended().await;
}

#[tokio::test]
async fn being_told_twice_to_stop_aborts_at_once() {
    const HOUR: Duration = Duration::from_secs(3600);
    let mut server = TestServer::start(None, |config| config.drain_timeout = HOUR).await;
    let mut stream = server.open(CHAT, hello(true).to_string()).await;
    server.submitted().await;
    let whole = server.connect(CHAT, &hello(false));
    server.submitted().await;
    server.shut_down();
    while server.get("/health").await.0 != 503 {}
    server.hurry();
    let text = stream.rest().await;
    assert_eq!(events(&text).last().unwrap()["error"]["code"], "aborted");
    let (status, answer) = whole.await.unwrap();
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("aborted")));
    server.ended().await;
}

#[tokio::test]
async fn an_egress_thread_that_panics_ends_its_streams_and_turns_health_red() {
    let mut server = TestServer::driven().await;
    let mut body = hello(true);
    body["stop"] = json!("dog");
    let mut stream = server.open(CHAT, body.to_string()).await;
    let id = server.submitted().await.id;
    *server.engine.panic_at.lock() = Some(Panic::Abort);
    // The stop string makes the egress thread abort the request, and the abort panics.
    for (index, token) in server.encode("the lazy dog").into_iter().enumerate() {
        server.engine.token(id, token, index == 0, None);
    }
    let text = stream.rest().await;
    let events = events(&text);
    let errors = events.iter().filter(|event| event.get("error").is_some());
    assert_eq!(errors.count(), 1);
    assert_eq!(events.last().unwrap()["error"]["code"], "aborted");
    server.guard.failed().await;
    let (status, health) = server.get_json("/health").await;
    assert_eq!((status, &health["error"]["code"]), (503, &json!("failed")));
    let message = health["error"]["message"].as_str().unwrap();
    assert!(message.contains("egress panicked: as the test wants"), "{message}");
    assert_eq!(server.post(CHAT, hello(false)).await.0, 503);
    // The process can still shut down cleanly.
    server.shut_down();
    server.ended().await;
}

#[tokio::test]
async fn a_handler_that_panics_fails_its_request_alone() {
    let mut server = TestServer::driven().await;
    let mut body = hello(false);
    body["n"] = json!(3);
    *server.engine.panic_at.lock() = Some(Panic::Submit(1));
    let failed = server.connect(CHAT, &body);
    let id = server.submitted().await.id;
    assert_eq!(server.aborted().await, id, "the choices submitted before the panic are aborted");
    let (status, answer) = failed.await.unwrap();
    assert_eq!((status, &answer["error"]["code"]), (500, &json!("panic")));
    assert_eq!(server.guard.cause(), None);
    assert_eq!(server.get("/health").await.0, 200);
}

#[tokio::test]
async fn an_answer_that_grows_too_large_is_ended() {
    let small = |config: &mut forebay_server::ServerConfig| config.max_unread_bytes = 100_000;
    let mut server = TestServer::start(None, small).await;
    let whole = server.connect(CHAT, &hello(false));
    let id = server.submitted().await.id;
    let token = server.encode(" the")[0];
    // Each token counts eight bytes: its text in memory and in JSON. There are only a few steps, so
    // the engine does not wait for room in the egress queue.
    for _ in 0..5 {
        let token = || Some(SampledToken { id: token, logprobs: None });
        let output = || Output {
            predicted: None,
            id,
            admission: None,
            token: token(),
            pooled: None,
            prompt: None,
            finish: None,
        };
        server.engine.deliver((0..10_000).map(|_| output()).collect());
    }
    assert_eq!(server.aborted().await, id);
    let (status, answer) = whole.await.unwrap();
    assert_eq!((status, &answer["error"]["code"]), (413, &json!("answer_too_large")));
}
