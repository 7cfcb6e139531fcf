//! Every error has the right status and the format of OpenAI's errors.

use std::time::Duration;

use forebay_engine::{Status, SubmitError};
use forebay_server::Keys;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fake::TestServer;

const CHAT: &str = "/v1/chat/completions";

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
}

/// Checks the error's format; returns (type, param, code).
fn error(answer: &Value) -> (&str, Option<&str>, &str) {
    let error = &answer["error"];
    assert!(!error["message"].as_str().unwrap().is_empty());
    let [kind, code] = ["type", "code"].map(|key| error[key].as_str().unwrap());
    (kind, error["param"].as_str(), code)
}

#[tokio::test]
async fn bodies_that_are_not_requests() {
    let server = TestServer::scripted("a").await;
    let invalid = "invalid_request_error";
    type Case = (&'static [u8], (Option<&'static str>, &'static str), &'static str);
    let cases: [Case; 7] = [
        (b"{\"messages\": [}", (None, "malformed_json"), "line 1 column 15"),
        (b"", (None, "malformed_json"), "EOF"),
        (b"{\"messages\": \"\xff\"}", (None, "invalid_utf8"), "byte 14"),
        (b"{}", (Some("messages"), "invalid_value"), "missing"),
        (b"[]", (Some("body"), "invalid_value"), "body"),
        (
            b"{\"messages\": [{\"role\": \"user\", \"content\": 3}]}",
            (Some("messages[0].content"), "invalid_value"),
            "messages[0].content",
        ),
        (
            b"{\"messages\": [], \"temperature\": \"x\"}",
            (Some("temperature"), "invalid_value"),
            "temperature",
        ),
    ];
    for (body, (param, code), part) in cases {
        let (status, answer) = server.post_bytes(CHAT, body).await;
        assert_eq!((status, error(&answer)), (400, (invalid, param, code)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(part), "{answer}");
    }
}

#[tokio::test]
async fn requests_that_cannot_be_served() {
    let server = TestServer::scripted("a").await;
    let with = |key: &str, value: Value| {
        let mut body = hello();
        body[key] = value;
        body
    };
    let long = json!([{"role": "user", "content": "word ".repeat(100)}]);
    let refused = json!([{"role": "user", "content": "refuse"}]);
    let invalid = "invalid_request_error";
    let cases = [
        (with("model", json!("gpt")), 404, ("not_found_error", Some("model"), "model_not_found")),
        (with("messages", long), 400, (invalid, Some("messages"), "context_length_exceeded")),
        (with("messages", refused), 400, (invalid, Some("messages"), "invalid_value")),
        (with("tools", json!([{}])), 400, (invalid, Some("tools[0].function"), "invalid_value")),
        (
            with("functions", json!([{}])),
            400,
            (invalid, Some("functions"), "unsupported_parameter"),
        ),
    ];
    for (body, expected_status, expected) in cases {
        let (status, answer) = server.post(CHAT, body).await;
        assert_eq!((status, error(&answer)), (expected_status, expected), "{answer}");
    }
    let long = json!([{"role": "user", "content": "word ".repeat(80)}]);
    let (_, answer) = server.post(CHAT, with("messages", long)).await;
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("This model's maximum context length is 64 tokens. However,"));
    let (status, answer) = server.post("/v1/completions", json!({"prompt": [1_000_000]})).await;
    assert_eq!((status, error(&answer).1), (400, Some("prompt[0]")));
    let (status, answer) = server.post("/detokenize", json!({"tokens": [-1]})).await;
    assert_eq!((status, error(&answer).1), (400, Some("tokens[0]")));
    let (status, answer) = server.post("/generate", json!({"text": "", "input_ids": [1]})).await;
    assert_eq!((status, error(&answer).1), (400, Some("text")));
}

/// Returns the status of a response, and the header that lists the ignored parameters.
async fn ignored(server: &TestServer, path: &str, body: &Value) -> (u16, Option<String>) {
    let pending = server.open(path, body.to_string()).await;
    let header = pending.header("x-forebay-ignored").map(str::to_owned);
    (pending.read().await.0, header)
}

#[tokio::test]
async fn what_has_no_effect_is_named() {
    let server = TestServer::scripted("a").await;
    let with = |more: Value| {
        let mut body = hello();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let cases = [
        (json!({}), None),
        (json!({"user": "u", "metadata": {"a": "b"}, "store": true, "service_tier": "auto"}), None),
        (json!({"new": null, "newer": [], "newest": false, "": 0}), None),
        (
            json!({"verbosity": "low", "top_a": 0.2, "verbosity2": 1}),
            Some("verbosity, top_a, verbosity2"),
        ),
        (
            json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
            Some("stream_options.include_obfuscation"),
        ),
        (
            json!({"messages": [{"role": "user", "content": "hi", "mood": "good", "refusal": null}]}),
            Some("messages.mood"),
        ),
        (json!({"max_tokens": 64}), Some("max_tokens=")),
        (json!({"reasoning_effort": "high"}), Some("reasoning_effort")),
        (json!({"tools": [{"type": "web_search"}]}), Some("tools[0].type=web_search")),
        (json!({"a, b\r\nc: d": 1}), Some("abc:d")),
    ];
    for (more, expected) in cases {
        let (status, header) = ignored(&server, CHAT, &with(more.clone())).await;
        assert_eq!(status, 200, "{more}");
        match (header, expected) {
            (Some(header), Some(expected)) => assert!(header.starts_with(expected), "{header}"),
            (header, expected) => assert_eq!(header.as_deref(), expected, "{more}"),
        }
    }
    let many: serde_json::Map<_, _> =
        (0..100).map(|n| (format!("{n:03}{}", "x".repeat(100)), json!(1))).collect();
    let (status, header) = ignored(&server, CHAT, &with(Value::Object(many))).await;
    assert!(status == 200 && header.is_some_and(|header| (500..=1024).contains(&header.len())));
}

#[tokio::test]
async fn strict_servers_refuse_what_has_no_effect() {
    let server = TestServer::start(Some("a"), |config| config.strict_params = true).await;
    let with = |key: &str, value: Value| {
        let mut body = hello();
        body[key] = value;
        body
    };
    for (body, param) in [
        (with("verbosity", json!("low")), "verbosity"),
        (with("max_tokens", json!(64)), "messages"),
        (with("reasoning_effort", json!("high")), "reasoning_effort"),
        (with("tools", json!([{"type": "web_search"}])), "tools[0].type=web_search"),
    ] {
        let (status, answer) = server.post(CHAT, body).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some(param)), "{answer}");
    }
    let (status, _) = server.post(CHAT, with("user", json!("u"))).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn tokenizing_has_a_bound_of_its_own() {
    let server = TestServer::scripted("a").await;
    let (status, answer) = server.post("/tokenize", json!({"prompt": "word ".repeat(1000)})).await;
    assert_eq!(status, 200, "more than the context: {answer}");
    let (status, answer) =
        server.post("/tokenize", json!({"prompt": "word ".repeat(70_000)})).await;
    let invalid = "invalid_request_error";
    assert_eq!((status, error(&answer)), (400, (invalid, Some("prompt"), "invalid_value")));
    assert!(answer["error"]["message"].as_str().unwrap().contains("--max-tokenize-tokens"));
    let (status, answer) = server.post("/detokenize", json!({"tokens": vec![1; 65_537]})).await;
    assert_eq!((status, error(&answer)), (400, (invalid, Some("tokens"), "invalid_value")));
}

#[tokio::test]
async fn a_prompt_that_is_far_too_long() {
    let server = TestServer::scripted("a").await;
    let long = "a".repeat(1 << 20);
    let messages = json!([{"role": "user", "content": long}]);
    let cases = [
        (CHAT, json!({"messages": messages}), "messages"),
        ("/v1/completions", json!({"prompt": long}), "prompt"),
        ("/v1/completions", json!({"prompt": ["a", long]}), "prompt[1]"),
        ("/generate", json!({"text": long}), "text"),
    ];
    for (route, body, param) in cases {
        let (status, answer) = server.post(route, body).await;
        let expected = ("invalid_request_error", Some(param), "context_length_exceeded");
        assert_eq!((status, error(&answer)), (400, expected), "{answer}");
    }
}

#[tokio::test]
async fn routes_and_methods_that_do_not_exist() {
    let server = TestServer::scripted("a").await;
    let (status, answer) = server.get_json("/v1/nothing").await;
    assert_eq!((status, error(&answer).2), (404, "unknown_url"));
    let (status, answer) = server.get_json(CHAT).await;
    assert_eq!((status, error(&answer).2), (405, "method_not_allowed"));
    let (status, answer) = server.get_json("/v1/models/gpt").await;
    assert_eq!((status, error(&answer).2), (404, "model_not_found"));
}

#[tokio::test]
async fn an_engine_that_takes_nothing() {
    let mut server = TestServer::driven().await;
    server.engine.refuse_after(0, SubmitError::QueueFull { limit: 3, retry_after: 17 });
    let pending = server.open(CHAT, hello().to_string()).await;
    assert_eq!(pending.header("retry-after"), Some("17"));
    let (status, answer) = pending.read().await;
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    assert_eq!((status, error(&answer)), (429, ("rate_limit_error", None, "queue_full")));

    server.engine.refuse_nothing();
    let cases = [
        (Status::Draining, "draining", "shutting down"),
        (Status::Failed("no such file".into()), "failed", "no such file"),
        (Status::Starting("weights 3/9".into()), "starting", "weights 3/9"),
    ];
    for (status, code, part) in cases {
        *server.engine.status.lock() = status;
        for (status, answer) in [server.post(CHAT, hello()).await, server.get_json("/health").await]
        {
            assert_eq!((status, error(&answer).2), (503, code));
            assert!(answer["error"]["message"].as_str().unwrap().contains(part), "{answer}");
        }
    }

    // Requests wait while the hand restarts.
    *server.engine.status.lock() = Status::Recovering("it died".into());
    let (status, answer) = server.get_json("/health").await;
    assert_eq!((status, error(&answer).2), (503, "recovering"));
    let pending = server.connect(CHAT, &hello());
    let id = server.submitted().await.id;
    server.engine.token(id, 5, true, Some(forebay_engine::FinishReason::Length));
    assert_eq!(pending.await.unwrap().0, 200);
}

#[tokio::test]
async fn one_choice_refused_takes_the_others_back() {
    let mut server = TestServer::driven().await;
    server.engine.refuse_after(1, SubmitError::QueueFull { limit: 1, retry_after: 1 });
    let body = json!({"prompt": ["a", "b", "c"]});
    let (status, answer) = server.post("/v1/completions", body).await;
    assert_eq!((status, error(&answer).2), (429, "queue_full"));
    let first = server.submitted().await.id;
    assert_eq!(server.aborted().await, first);
}

#[tokio::test]
async fn large_bodies_are_refused_unread() {
    let server = TestServer::start(Some("a"), |config| config.max_body_bytes = 1000).await;
    let declared = "x".repeat(5_000_000);
    let (status, answer) = server.post_bytes(CHAT, declared).await;
    assert_eq!((status, error(&answer).2), (413, "body_too_large"));

    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    // The body never ends, so the response has to come before the end of the body.
    let chunk = format!("400\r\n{}\r\n", "x".repeat(0x400));
    stream.write_all(chunk.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn slow_clients_are_not_waited_for() {
    let server = TestServer::start(Some("a"), |config| {
        config.receive_timeout = Duration::from_millis(50);
    })
    .await;
    let mut slow_head = TcpStream::connect(server.address).await.unwrap();
    slow_head.write_all(b"POST / HTTP/1.1\r\nhost:").await.unwrap();
    let mut answer = Vec::new();
    slow_head.read_to_end(&mut answer).await.unwrap();
    assert!(!answer.starts_with(b"HTTP/1.1 200"));

    let mut slow_body = TcpStream::connect(server.address).await.unwrap();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{");
    slow_body.write_all(head.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    slow_body.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("body_timeout"));
}

#[tokio::test]
async fn the_api_key() {
    let server =
        TestServer::start(Some("a"), |config| config.api_keys = Keys::new(["secret"])).await;
    let ask = async |path: &str, key: Option<&str>| {
        let mut request = Request::get(path).header("host", "x");
        if let Some(key) = key {
            request = request.header("authorization", key);
        }
        server.send(request.body(Full::default()).unwrap()).await.read().await
    };
    let (status, answer) = ask("/v1/models", None).await;
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    assert_eq!((status, error(&answer).2), (401, "invalid_api_key"));
    assert_eq!(ask("/v1/models", Some("Bearer wrong")).await.0, 401);
    assert_eq!(ask("/v1/models", Some("Bearer secret")).await.0, 200);
    assert_eq!(server.post(CHAT, hello()).await.0, 401);
    for open in ["/health", "/metrics", "/version"] {
        assert_eq!(ask(open, None).await.0, 200, "{open}");
    }
}
