//! LoRA adapters by name: which request uses which adapter, and who may load and unload them.

use forebay_engine::AdapterOrder;
use forebay_server::{Keys, ServerConfig};
use serde_json::{Value, json};

use crate::fake::{Event, ModelKind, TestServer};

const COMPLETIONS: &str = "/v1/completions";
const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

async fn server(open: bool, change: fn(&mut ServerConfig)) -> TestServer {
    let mut server = TestServer::of_model(ModelKind::Adapts(open), Some("a"), change).await;
    let Event::Adapter(AdapterOrder::Know { id: 1, manifest }) = server.event().await else {
        panic!("the adapter reaches the engine before any request");
    };
    assert_eq!(manifest, json!({"of": "first"}));
    server
}

fn named(model: &str) -> Value {
    json!({"prompt": "a", "model": model})
}

/// Returns the adapter and the cache salt of a request.
async fn asked(server: &mut TestServer, path: &str, body: Value) -> (Option<u32>, u64) {
    let (status, answer) = server.post(path, body).await;
    assert_eq!(status, 200, "{answer}");
    loop {
        if let Event::Submit(request) = server.event().await {
            return (request.request.adapter, request.request.cache_salt);
        }
    }
}

async fn code(server: &TestServer, path: &str, body: Value) -> (u16, String) {
    let (status, answer) = server.post(path, body).await;
    (status, answer["error"]["code"].as_str().unwrap_or_default().to_owned())
}

/// Returns the status of a response whose body may be text.
async fn status(server: &TestServer, path: &str, body: &Value) -> u16 {
    server.open(path, body.to_string()).await.read().await.0
}

#[tokio::test]
async fn a_request_has_the_adapter_that_it_names() {
    let mut server = server(true, |_| {}).await;
    let base = asked(&mut server, COMPLETIONS, json!({"prompt": "a"})).await;
    assert_eq!(base, (None, 0));
    assert_eq!(asked(&mut server, COMPLETIONS, named("tiny")).await, base);
    let (id, salt) = asked(&mut server, COMPLETIONS, named("tone")).await;
    assert_eq!(id, Some(1));
    assert_ne!(salt, 0, "requests with an adapter share no blocks with others");
    for (path, body) in [
        (COMPLETIONS, named("tiny:tone")),
        (COMPLETIONS, named("org/tiny:tone")),
        (
            "/v1/chat/completions",
            json!({"model": "tone", "messages": [{"role": "user", "content": "a"}]}),
        ),
        (
            "/v1/messages",
            json!({"model": "tone", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}),
        ),
        ("/generate", json!({"text": "a", "lora_path": "tone"})),
    ] {
        assert_eq!(asked(&mut server, path, body).await, (Some(1), salt), "{path}");
    }
    let salted = json!({"prompt": "a", "model": "tone", "cache_salt": "mine"});
    assert_ne!(asked(&mut server, COMPLETIONS, salted).await.1, salt);
    for name in ["ton", "tone:tiny", "tiny:", "tiny:other", ":tone"] {
        let found = code(&server, COMPLETIONS, named(name)).await;
        assert_eq!(found, (404, "model_not_found".into()), "{name}");
    }
    let unknown = code(&server, "/generate", json!({"text": "a", "lora_path": "ton"})).await;
    assert_eq!(unknown, (404, "model_not_found".into()));
    let (_, answer) = server.post(COMPLETIONS, named("tone")).await;
    assert_eq!(answer["model"], "tone");
}

#[tokio::test]
async fn names_are_listed_with_their_model() {
    let server = server(true, |_| {}).await;
    let (_, list) = server.get_json("/v1/models").await;
    let cards = list["data"].as_array().unwrap();
    let of =
        |at: usize| (cards[at]["id"].as_str(), cards[at].get("parent"), cards[at]["root"].as_str());
    assert_eq!(of(0), (Some("tiny"), None, Some("tiny")));
    assert_eq!(of(2), (Some("tone"), Some(&json!("tiny")), Some("first")));
    let (status, card) = server.get_json("/v1/models/tone").await;
    assert_eq!((status, &card["parent"]), (200, &json!("tiny")));
    let (_, list) = server.get_json("/lora-adapters").await;
    assert_eq!(list, json!([{"id": 1, "name": "tone", "path": "first", "scale": 0.0}]));
    server.post(COMPLETIONS, named("tone")).await;
    let (_, metrics) = server.get("/metrics").await;
    assert!(metrics.contains("forebay:adapter_requests_total{adapter=\"tone\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_name_moves_to_another_content_and_the_old_one_is_forgotten() {
    let mut server = server(true, |_| {}).await;
    let load = |path: &str, more: Value| {
        let mut body = json!({"lora_name": "tone", "lora_path": path});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let old = asked(&mut server, COMPLETIONS, named("tone")).await;
    assert_eq!(status(&server, LOAD, &load("first", json!({}))).await, 200, "the same content");
    assert_eq!(code(&server, LOAD, load("second", json!({}))).await, (409, "conflict".into()));
    assert_eq!(asked(&mut server, COMPLETIONS, named("tone")).await, old);
    assert_eq!(status(&server, LOAD, &load("second", json!({"load_inplace": true}))).await, 200);
    assert!(matches!(server.event().await, Event::Adapter(AdapterOrder::Know { id: 2, .. })));
    assert!(matches!(server.event().await, Event::Adapter(AdapterOrder::Forget { id: 1 })));
    let (id, salt) = asked(&mut server, COMPLETIONS, named("tone")).await;
    assert_eq!(id, Some(2));
    assert_ne!(salt, old.1, "blocks of the old content are not reused");
    // Two names with the same content share one adapter. It stays loaded as long as either name is
    // loaded.
    let copy = json!({"lora_name": "copy", "lora_path": "second-copy"});
    let (status, listed) = server.post("/load_lora_adapter", copy).await;
    assert_eq!(status, 200, "{listed}");
    let paths = json!({"copy": "second-copy", "tone": "second"});
    assert_eq!(listed, json!({"success": true, "loaded_adapters": paths}));
    assert_eq!(asked(&mut server, COMPLETIONS, named("copy")).await, (Some(2), salt));
    let (_, listed) = server.post("/unload_lora_adapter", json!({"lora_name": "tone"})).await;
    assert_eq!(listed["loaded_adapters"], json!({"copy": "second-copy"}));
    assert_eq!(code(&server, COMPLETIONS, named("tone")).await.0, 404);
    assert_eq!(asked(&mut server, COMPLETIONS, named("copy")).await.0, Some(2));
    assert_eq!(crate::adapters::status(&server, UNLOAD, &json!({"lora_name": "copy"})).await, 200);
    assert!(matches!(server.event().await, Event::Adapter(AdapterOrder::Forget { id: 2 })));
    let gone = code(&server, UNLOAD, json!({"lora_name": "copy"})).await;
    assert_eq!(gone, (404, "model_not_found".into()));
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_and_changes_nothing() {
    let mut server = server(true, |_| {}).await;
    for (body, param) in [
        (json!({"lora_name": "x", "lora_path": "bad file"}), "lora_path"),
        (json!({"lora_name": "x", "lora_path": "other modules"}), "lora_path"),
        (json!({"lora_name": "tiny", "lora_path": "second"}), "lora_name"),
        (json!({"lora_name": "", "lora_path": "second"}), "lora_name"),
        (json!({"lora_name": "a b", "lora_path": "second"}), "lora_name"),
        (json!({"lora_name": "x".repeat(129), "lora_path": "second"}), "lora_name"),
        (json!({"lora_name": "x"}), "body"),
        (json!({"lora_name": "x", "lora_path": "y".repeat(20_000)}), "body"),
    ] {
        let (status, answer) = server.post(LOAD, body.clone()).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{body}: {answer}");
    }
    assert!(server.try_event().is_none(), "no refused adapter reaches the engine");
    let (_, metrics) = server.get("/metrics").await;
    assert!(metrics.contains("forebay:lora_reads_total{result=\"refused\"} 1"), "{metrics}");
}

#[tokio::test]
async fn names_are_bounded() {
    let server = server(true, |_| {}).await;
    for at in 1..1024 {
        let body = json!({"lora_name": format!("a{at}"), "lora_path": "first"});
        assert_eq!(status(&server, LOAD, &body).await, 200);
    }
    let more = json!({"lora_name": "more", "lora_path": "first"});
    let (status, answer) = server.post(LOAD, more).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("lora_name")));
}

#[tokio::test]
async fn loads_need_a_key_of_administrators_or_a_server_that_nobody_else_reaches() {
    let body = json!({"lora_name": "x", "lora_path": "second"});
    let open = server(true, |_| {}).await;
    assert_eq!(status(&open, LOAD, &body).await, 200);
    let reached = server(false, |_| {}).await;
    for path in [LOAD, UNLOAD, "/load_lora_adapter", "/unload_lora_adapter"] {
        let found = code(&reached, path, body.clone()).await;
        assert_eq!(found, (403, "admin_key_needed".into()), "{path}");
    }
    let keyed = |config: &mut ServerConfig| {
        config.api_keys = Keys::new(["user"]);
        config.admin_keys = Keys::new(["admin"]);
    };
    let keyed = server(false, keyed).await;
    for (key, status) in [("user", 401), ("admin", 200)] {
        let bearer = format!("Bearer {key}");
        let body = json!({"lora_name": "x", "lora_path": "second"});
        let headers = [("authorization", bearer.as_str())];
        let answer = keyed.with_headers("/load_lora_adapter", &body, &headers).await;
        assert_eq!(answer.0, status, "{key}: {}", answer.1);
    }
    let without = TestServer::scripted("a").await;
    assert_eq!(code(&without, LOAD, body).await, (403, "lora_not_enabled".into()));
}
