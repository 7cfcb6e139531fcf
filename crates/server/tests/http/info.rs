//! Models, health, metrics, and the OpenAPI description.

use forebay_engine::FinishReason;
use http_body_util::Full;
use hyper::Request;
use serde_json::json;

use crate::fake::{EOS, TestServer};

#[tokio::test]
async fn models_and_versions() {
    let server = TestServer::scripted("a").await;
    let (_, models) = server.get_json("/v1/models").await;
    let ids: Vec<_> = models["data"].as_array().unwrap().iter().map(|m| &m["id"]).collect();
    assert_eq!(ids, ["tiny", "org/tiny"]);
    let (status, model) = server.get_json("/v1/models/org/tiny").await;
    assert_eq!((status, &model["max_model_len"]), (200, &json!(64)));
    assert_eq!(server.get_json("/health").await, (200, json!({"status": "ready"})));
    assert_eq!(server.get_json("/ping").await, (200, json!({})));
    let (_, version) = server.get_json("/version").await;
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn server_info_has_configuration_and_live_numbers() {
    let server = TestServer::scripted("a").await;
    server.engine.stats.lock().scheduler.steps = 9;
    let (_, info) = server.get_json("/server_info").await;
    assert_eq!(info["config"], json!({"port": 1}));
    assert_eq!(info["facts"]["page_size"], 16);
    assert_eq!(info["internal_states"][0]["steps"], 9);
    assert_eq!(info["status"], "ready");
}

#[tokio::test]
async fn the_cache_is_flushed_only_while_nothing_runs() {
    let mut server = TestServer::driven().await;
    assert_eq!(server.post("/flush_cache", json!({})).await, (200, json!({"flushed": true})));
    let body = json!({"text": "a"});
    let running = server.connect("/generate", &body);
    let id = server.submitted().await.id;
    let (status, answer) = server.post("/flush_cache", json!({})).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("cache_in_use")));
    server.engine.token(id, EOS, true, Some(FinishReason::Stop { token: EOS }));
    let (_, answer) = running.await.unwrap();
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "stop", "matched": EOS}));
    assert_eq!(server.post("/flush_cache", json!({})).await.0, 200);
}

#[tokio::test]
async fn health_generate_asks_for_a_token() {
    let mut server = TestServer::start(None, |config| {
        config.health_timeout = std::time::Duration::from_millis(20);
    })
    .await;
    let (status, answer) = server.get_json("/health_generate").await;
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("unresponsive")));
    let request = server.submitted().await;
    assert_eq!((request.max_tokens, request.prompt.len()), (1, 1));
    assert_eq!(server.aborted().await, request.id);

    let server = TestServer::scripted("a").await;
    assert_eq!(server.get("/health_generate").await.0, 200);
}

#[tokio::test]
async fn metrics_count_requests() {
    let server = TestServer::scripted("a b c d").await;
    server.engine.stats.lock().scheduler.generated_tokens = 4;
    let body = json!({"text": "a", "sampling_params": {"max_new_tokens": 4}});
    assert_eq!(server.post("/generate", body).await.0, 200);
    let (_, text) = server.get("/metrics").await;
    let labels = "engine=\"0\",model_name=\"tiny\"";
    for line in [
        format!("vllm:generation_tokens_total{{{labels}}} 4"),
        format!("vllm:time_to_first_token_seconds_count{{{labels}}} 1"),
        format!("vllm:inter_token_latency_seconds_count{{{labels}}} 3"),
        format!("vllm:request_generation_tokens_sum{{{labels}}} 4"),
        "vllm:request_success_total{engine=\"0\",finished_reason=\"length\",model_name=\"tiny\"} 1"
            .to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn the_description_lists_every_route() {
    let server = TestServer::scripted("a").await;
    let (_, document) = server.get_json("/openapi.json").await;
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for (method, path) in [
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("get", "/v1/models"),
        ("get", "/v1/models/{id}"),
        ("post", "/generate"),
        ("post", "/tokenize"),
        ("post", "/detokenize"),
        ("get", "/server_info"),
        ("get", "/livez"),
        ("post", "/flush_cache"),
        ("get", "/health"),
        ("get", "/health_generate"),
        ("get", "/metrics"),
        ("get", "/version"),
        ("get", "/ping"),
        ("get", "/openapi.json"),
    ] {
        let operation = &document["paths"][path][method];
        assert!(operation["responses"]["200"].is_object(), "{method} {path}");
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"]["$ref"];
        if let Some(reference) = schema.as_str() {
            assert!(schemas.contains_key(reference.rsplit('/').next().unwrap()), "{reference}");
        } else {
            assert!(method == "get" || path == "/flush_cache", "{method} {path} has no schema");
        }
    }
    let chat = schemas["ChatRequest"]["properties"].as_object().unwrap();
    assert!(chat.contains_key("tools") && !chat.contains_key("functions"));
}

#[tokio::test]
async fn request_ids_are_echoed_or_made_up() {
    let server = TestServer::scripted("a").await;
    let ask = async |id: Option<&str>| {
        let mut request = Request::get("/nothing").header("host", "x");
        if let Some(id) = id {
            request = request.header("x-request-id", id);
        }
        let pending = server.send(request.body(Full::default()).unwrap()).await;
        pending.header("x-request-id").unwrap().to_owned()
    };
    assert_eq!(ask(Some("mine")).await, "mine");
    assert_eq!(ask(None).await.len(), 32);
    assert_ne!(ask(None).await, ask(None).await);
}
