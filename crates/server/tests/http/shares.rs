//! Fair shares of clients, and the errors of requests that wait too long.

use forebay_engine::{FinishReason, Output, RequestError, SubmitError};
use forebay_server::PoolingTask;
use serde_json::{Value, json};

use crate::fake::TestServer;

const CHAT: &str = "/v1/chat/completions";

fn hello(stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": "hello"}], "stream": stream, "max_tokens": 5})
}

fn ended(id: forebay_engine::RequestId, finish: FinishReason) -> Vec<Output> {
    vec![Output {
        predicted: None,
        id,
        admission: None,
        token: None,
        pooled: None,
        prompt: None,
        finish: Some(finish),
    }]
}

#[tokio::test]
async fn who_waited_too_long_is_told_when_to_come_back() {
    let mut server = TestServer::driven().await;
    for stream in [false, true] {
        let pending = server.begin(CHAT, &hello(stream));
        let id = server.submitted().await.id;
        let error = RequestError::QueueTimeout { seconds: 600, retry_after: 9 };
        server.engine.deliver(ended(id, FinishReason::Error(error)));
        let pending = pending.await.unwrap();
        let retry_after = pending.header("retry-after").map(str::to_owned);
        let (status, answer) = pending.read().await;
        let text = String::from_utf8(answer).unwrap();
        assert_eq!(text.matches("queue_timeout").count(), 1, "{text}");
        if !stream {
            assert_eq!((status, retry_after.as_deref()), (503, Some("9")));
            assert!(text.contains("service_unavailable_error"), "{text}");
        }
    }
}

#[tokio::test]
async fn a_request_that_no_step_can_carry_is_the_client_s_mistake() {
    let server = TestServer::driven().await;
    let error = SubmitError::TooLarge { param: "logit_bias", words: 99, limit: 9 };
    server.engine.refuse_after(0, error);
    let (status, answer) = server.post(CHAT, hello(false)).await;
    let error = &answer["error"];
    assert_eq!((status, &error["param"]), (400, &json!("logit_bias")));
    assert!(error["message"].as_str().unwrap().contains("99 words"), "{answer}");
}

#[tokio::test]
async fn requests_carry_their_client_and_health_requests_none() {
    let mut server = TestServer::start(None, |config| {
        config.health_timeout = std::time::Duration::from_millis(20);
    })
    .await;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let pending = server.connect(CHAT, &hello(false));
        let request = server.submitted().await;
        assert!(!request.probe);
        clients.push(request.client);
        server.engine.token(request.id, 5, true, Some(FinishReason::Length));
        assert_eq!(pending.await.unwrap().0, 200);
    }
    assert!(clients[0] != 0 && clients[0] == clients[1], "one address: {clients:?}");
    server.get("/health_generate").await;
    let probe = server.submitted().await;
    assert!(probe.probe, "the probe is marked as the server's own");
    assert_eq!(probe.priority, 0, "the probe's priority is 0, whatever the order of priorities");
}

#[tokio::test]
async fn a_priority_beyond_the_bound_is_refused() {
    let server = TestServer::start(Some("a"), |config| config.max_client_priority = Some(10)).await;
    for (priority, expected) in [(10, 200), (-10, 200), (11, 400), (i32::MIN, 400)] {
        let mut body = hello(false);
        body["priority"] = json!(priority);
        let (status, answer) = server.post(CHAT, body).await;
        assert_eq!(status, expected, "{answer}");
        if expected == 400 {
            assert_eq!(answer["error"]["param"], "priority");
            assert!(answer["error"]["message"].as_str().unwrap().contains("max-client-priority"));
        }
    }
}

#[tokio::test]
async fn the_header_of_the_standard_asks_for_the_background() {
    let generates = TestServer::scripted("a").await;
    let pools = TestServer::pooling(PoolingTask::Embed, true).await;
    let input = json!({"input": "hello"});
    for (mut server, path, body) in
        [(generates, CHAT, hello(false)), (pools, "/v1/embeddings", input)]
    {
        for (headers, expected) in
            [(&[][..], false), (&[("priority", "u=7")], true), (&[("priority", "u=1, i")], false)]
        {
            let (status, answer) = server.with_headers(path, &body, headers).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(server.submitted().await.background, expected, "{path} {headers:?}");
        }
    }
}
