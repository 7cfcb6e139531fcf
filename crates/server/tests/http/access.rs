//! Access: API keys, allowed hosts, requests of web pages.

use forebay_engine::{SchedulerStats, Stats};
use forebay_server::{Access, Keys, ServerConfig};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::fake::TestServer;

const CHAT: &str = "/v1/chat/completions";

fn local(config: &mut ServerConfig) {
    config.access = Access {
        allowed_hosts: Some(vec!["localhost".into(), "127.0.0.1".into()]),
        allowed_origins: vec!["https://chat.example".into()],
        refuse_other_origins: true,
    };
}

/// Sends a request with these headers; returns the status, and the error's code if there is one.
async fn ask(
    server: &TestServer,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
) -> (u16, String) {
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
    let mut request = Request::builder().method(&method).uri(path);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", "localhost");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = if method == Method::POST { body.to_string() } else { String::new() };
    let request = request.body(Full::new(Bytes::from(body))).unwrap();
    let (status, body) = server.send(request).await.read().await;
    let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
    (status, answer["error"]["code"].as_str().unwrap_or_default().to_owned())
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

#[tokio::test]
async fn other_hosts_are_refused() {
    let server = TestServer::start(Some("a"), local).await;
    for host in ["localhost", "localhost:8000", "127.0.0.1:1"] {
        assert_eq!(ask(&server, Method::POST, CHAT, &[("host", host)]).await.0, 200, "{host}");
    }
    for path in [CHAT, "/flush_cache"] {
        let evil = ask(&server, Method::POST, path, &[("host", "evil.example:8000")]).await;
        assert_eq!(evil, refused(403, "host_not_allowed"));
    }
    let evil = ask(&server, Method::GET, "/v1/models", &[("host", "evil.example")]).await;
    assert_eq!(evil, refused(403, "host_not_allowed"));
}

#[tokio::test]
async fn other_pages_are_refused() {
    let server = TestServer::start(Some("a"), local).await;
    let json = ("content-type", "application/json");
    for origin in ["https://evil.example", "null", "http://localhost:3000"] {
        let headers = [("origin", origin), json];
        let evil = ask(&server, Method::POST, CHAT, &headers).await;
        assert_eq!(evil, refused(403, "origin_not_allowed"), "{origin}");
        let drained = ask(&server, Method::POST, "/replicas/0/drain", &headers).await;
        assert_eq!(drained.0, 403, "{origin}");
    }
    for origin in ["https://chat.example", "http://localhost"] {
        assert_eq!(ask(&server, Method::POST, CHAT, &[("origin", origin), json]).await.0, 200);
    }
}

#[tokio::test]
async fn a_page_that_may_ask_is_told_so() {
    let server = TestServer::start(Some("a"), |config| {
        config.access.allowed_origins = vec!["https://chat.example".into()];
    })
    .await;
    let preflight = async |origin: &'static str| {
        let request = Request::builder()
            .method(Method::OPTIONS)
            .uri(CHAT)
            .header("host", "x")
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type")
            .body(Full::default());
        let answer = server.send(request.unwrap()).await;
        let header = |name: &str| answer.header(name).map(str::to_owned);
        (
            answer.response.status().as_u16(),
            header("access-control-allow-origin"),
            header("access-control-allow-headers"),
        )
    };
    let (status, origin, headers) = preflight("https://chat.example").await;
    assert_eq!((status, origin.as_deref()), (200, Some("https://chat.example")));
    assert_eq!(headers.as_deref(), Some("authorization,content-type"));
    assert_eq!(preflight("https://evil.example").await.1, None);
}

#[tokio::test]
async fn a_browser_has_to_ask_first() {
    let server = TestServer::scripted("a").await;
    for browser in [("origin", "https://a.example"), ("sec-fetch-site", "cross-site")] {
        for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
            let headers = [browser, ("content-type", kind)];
            let answer = ask(&server, Method::POST, CHAT, &headers).await;
            assert_eq!(answer, refused(415, "unsupported_media_type"), "{browser:?} {kind}");
        }
        let headers = [browser, ("content-type", "application/json; charset=utf-8")];
        assert_eq!(ask(&server, Method::POST, CHAT, &headers).await.0, 200);
        assert_eq!(ask(&server, Method::POST, "/flush_cache", &[browser]).await.0, 415);
    }
    // A client that is not a browser may send any content type.
    assert_eq!(ask(&server, Method::POST, CHAT, &[("content-type", "text/plain")]).await.0, 200);
}

#[tokio::test]
async fn nothing_changes_by_get() {
    let server = TestServer::scripted("a").await;
    for path in ["/flush_cache", "/replicas/0/drain", "/replicas/0/resume", "/replicas/0/role"] {
        assert_eq!(ask(&server, Method::GET, path, &[]).await.0, 405, "{path}");
    }
}

#[tokio::test]
async fn several_keys_and_keys_for_the_rest() {
    const ADMIN: [(Method, &str); 5] = [
        (Method::GET, "/server_info"),
        (Method::GET, "/v1/loads"),
        (Method::POST, "/replicas/0/drain"),
        (Method::POST, "/replicas/0/resume"),
        (Method::POST, "/flush_cache"),
    ];
    let server = TestServer::start(Some("a"), |config| {
        config.api_keys = Keys::new(["one", "two"]);
        config.admin_keys = Keys::new(["root"]);
    })
    .await;
    let with = async |method: &Method, path: &str, key: &str| {
        let header = format!("Bearer {key}");
        ask(&server, method.clone(), path, &[("authorization", &header)]).await.0
    };
    for (key, generates, administers) in
        [("one", 200, 401), ("two", 200, 401), ("root", 200, 200), ("three", 401, 401)]
    {
        assert_eq!(with(&Method::POST, CHAT, key).await, generates, "{key}");
        assert_eq!(with(&Method::GET, "/health_generate", key).await, generates, "{key}");
        for (method, path) in &ADMIN {
            assert_eq!(with(method, path, key).await, administers, "{key} {path}");
        }
        // The request names no role, so an admin key gets a 400.
        let told = if administers == 200 { 400 } else { administers };
        assert_eq!(with(&Method::POST, "/replicas/0/role", key).await, told, "{key}");
    }
    assert_eq!(ask(&server, Method::POST, CHAT, &[("x-api-key", "two")]).await.0, 200);
    for path in ["/v1/models", "/health_generate", "/server_info"] {
        assert_eq!(ask(&server, Method::GET, path, &[]).await.0, 401, "{path}");
    }
    for open in ["/livez", "/health", "/metrics"] {
        assert_eq!(ask(&server, Method::GET, open, &[]).await.0, 200, "{open}");
    }
    // Without admin keys, these routes accept the API keys.
    let server = TestServer::start(Some("a"), |config| config.api_keys = Keys::new(["one"])).await;
    for (method, path) in ADMIN {
        assert_eq!(ask(&server, method.clone(), path, &[]).await.0, 401, "{path}");
        let key = [("authorization", "Bearer one")];
        assert_eq!(ask(&server, method, path, &key).await.0, 200, "{path}");
    }
}

#[tokio::test]
async fn a_loaded_server_is_healthy_while_it_computes() {
    let server = TestServer::driven().await;
    let busy = |steps| {
        let scheduler = SchedulerStats { running: 256, waiting: 4096, steps, ..Default::default() };
        Stats { scheduler, ..Stats::default() }
    };
    *server.engine.stats.lock() = busy(7);
    let probe = async { ask(&server, Method::GET, "/health_generate", &[]).await.0 };
    let step = async {
        // Waits until the server has read the engine's counters three times; then a step is
        // completed.
        while server.engine.looks() < 3 {
            tokio::task::yield_now().await;
        }
        *server.engine.stats.lock() = busy(8);
    };
    assert_eq!(tokio::join!(probe, step).0, 200);
    assert_eq!(server.engine.submitted(), 0, "the probe submitted a request");
}

#[tokio::test]
async fn paths_may_have_a_proxys_prefix() {
    let server = TestServer::start(Some("a"), |config| config.root_path = "/llm".into()).await;
    for path in ["/llm/v1/models", "/v1/models", "/llm/health"] {
        assert_eq!(ask(&server, Method::GET, path, &[]).await.0, 200, "{path}");
    }
    assert_eq!(ask(&server, Method::GET, "/llmx/health", &[]).await.0, 404);
    let (_, document) = server.get_json("/llm/openapi.json").await;
    assert_eq!(document["servers"], json!([{"url": "/llm"}]));
}

#[tokio::test]
async fn heads_that_two_servers_could_read_differently() {
    let server = TestServer::scripted("a").await;
    for (head, status) in [
        ("GET /health HTTP/1.1\r\n", "400"),
        ("GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n", "400"),
        ("GET /health HTTP/1.0\r\n", "200"),
        ("GET /health HTTP/1.1\r\nhost: a\r\n", "200"),
    ] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let request = format!("{head}connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(answer.split(' ').nth(1), Some(status), "{head}");
    }
}
