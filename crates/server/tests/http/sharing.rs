//! Which clients share cached blocks, and who may list the blocks.

use forebay_api::peer::{
    BLOCKS_HEADER, LOAD_HEADER, RESUME_HEADER, ROUTER_HEADER, ROUTER_KEY_HEADER, STREAM_HEADER,
};
use forebay_engine::Namer;
use forebay_server::{Keys, PoolingTask, ServerConfig};
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};

use crate::client::Pending;
use crate::fake::TestServer;

const COMPLETIONS: &str = "/v1/completions";
const TAG: &str = "router=1;seq=1;floor=1;seed=0;blocks=1";
const DIALECTS: [(&str, &str); 3] =
    [("/v1/chat/completions", "messages"), (COMPLETIONS, "prompt"), ("/generate", "text")];

fn body(field: &str, salt: Option<&str>) -> Value {
    let prompt = match field {
        "messages" => json!([{"role": "user", "content": "hi"}]),
        _ => json!("hi"),
    };
    let mut body = json!({field: prompt});
    if let Some(salt) = salt {
        body["cache_salt"] = json!(salt);
    }
    body
}

async fn salt(server: &mut TestServer, path: &str, body: Value) -> u64 {
    assert_eq!(server.post(path, body).await.0, 200);
    server.submitted().await.cache_salt
}

#[tokio::test]
async fn a_salt_keeps_blocks_apart_in_every_dialect() {
    let mut server = TestServer::scripted("a").await;
    for (path, field) in DIALECTS {
        assert_eq!(salt(&mut server, path, body(field, None)).await, 0, "{path}");
        let one = salt(&mut server, path, body(field, Some("one"))).await;
        assert_eq!(one, Namer::open().salt(&[&0u64.to_le_bytes(), b"one"]));
        assert_ne!(salt(&mut server, path, body(field, Some("two"))).await, one, "{path}");
        for wrong in ["", &"x".repeat(257)] {
            let (status, error) = server.post(path, body(field, Some(wrong))).await;
            assert_eq!((status, &error["error"]["param"]), (400, &json!("cache_salt")), "{path}");
        }
        let mut number = body(field, None);
        number["cache_salt"] = json!(7);
        assert_eq!(server.post(path, number).await.0, 400, "{path}");
    }
    for (task, path, body) in [
        (PoolingTask::Embed, "/v1/embeddings", json!({"input": "hi"})),
        (PoolingTask::Score, "/rerank", json!({"query": "hi", "documents": ["a"]})),
        (PoolingTask::Score, "/score", json!({"text_1": "hi", "text_2": "a"})),
    ] {
        let mut server = TestServer::pooling(task, true).await;
        assert_eq!(salt(&mut server, path, body.clone()).await, 0, "{path}");
        let mut salted = body;
        salted["cache_salt"] = json!("one");
        assert_ne!(salt(&mut server, path, salted).await, 0, "{path}");
    }
}

async fn send(server: &TestServer, headers: &[(&str, &str)], body: &Value) -> Pending {
    let request = Request::post(COMPLETIONS).header("host", "test");
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    server.send(request.body(Full::new(body.to_string().into())).unwrap()).await
}

async fn salt_of(server: &mut TestServer, key: &str, salt: Option<&str>) -> u64 {
    let key = format!("Bearer {key}");
    let answer = send(server, &[("authorization", &key)], &body("prompt", salt)).await;
    assert_eq!(answer.read().await.0, 200);
    server.submitted().await.cache_salt
}

#[tokio::test]
async fn clients_with_different_keys_share_nothing() {
    let keys = |config: &mut ServerConfig| config.api_keys = Keys::new(["one", "two"]);
    let mut server = TestServer::start(Some("a"), keys).await;
    let mut salts = Vec::new();
    for key in ["one", "two"] {
        for salt in [None, Some("x"), Some("y")] {
            salts.push(salt_of(&mut server, key, salt).await);
        }
    }
    assert_eq!(salt_of(&mut server, "two", Some("x")).await, salts[4]);
    assert!(!salts.contains(&0));
    salts.sort_unstable();
    salts.dedup();
    assert_eq!(salts.len(), 6);
}

#[tokio::test]
async fn with_one_key_or_by_the_flag_keys_make_no_difference() {
    let one = |config: &mut ServerConfig| config.api_keys = Keys::new(["one"]);
    let mut server = TestServer::start(Some("a"), one).await;
    assert_eq!(salt_of(&mut server, "one", None).await, 0);
    let shared = |config: &mut ServerConfig| {
        config.api_keys = Keys::new(["one", "two"]);
        config.sharing.share_cache_across_keys = true;
    };
    let mut server = TestServer::start(Some("a"), shared).await;
    for salt in [None, Some("x")] {
        let first = salt_of(&mut server, "one", salt).await;
        assert_eq!(salt_of(&mut server, "two", salt).await, first);
    }
}

/// Returns the number of bytes of text whose encoding was cached, after `key` has sent a text of 12
/// KB.
async fn found_for(server: &TestServer, key: &str) -> u64 {
    let hits = async || {
        let (status, metrics) = server.get("/metrics").await;
        assert_eq!(status, 200);
        let name = "forebay:text_cache_hits_total";
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let before = hits().await;
    let body = json!({"prompt": "A few words of which there are many. ".repeat(330)});
    let request = Request::post("/tokenize").header("host", "test");
    let request = request.header("authorization", format!("Bearer {key}"));
    let answer = server.send(request.body(Full::new(body.to_string().into())).unwrap()).await;
    assert_eq!(answer.read().await.0, 200);
    hits().await - before
}

#[tokio::test]
async fn what_another_key_has_sent_is_encoded_again() {
    let keys = |config: &mut ServerConfig| config.api_keys = Keys::new(["one", "two"]);
    let server = TestServer::start(Some("a"), keys).await;
    assert_eq!(found_for(&server, "one").await, 0);
    let own = found_for(&server, "one").await;
    assert!(own > 8_000);
    assert_eq!(found_for(&server, "two").await, 0);
    assert_eq!(found_for(&server, "two").await, own);

    let shared = |config: &mut ServerConfig| {
        config.api_keys = Keys::new(["one", "two"]);
        config.sharing.share_cache_across_keys = true;
    };
    let server = TestServer::start(Some("a"), shared).await;
    assert_eq!(found_for(&server, "one").await, 0);
    assert_eq!(found_for(&server, "two").await, own);
}

fn router_key(config: &mut ServerConfig) {
    config.router_key = Some("between us".into());
}

async fn get(server: &TestServer, path: &str, headers: &[(&str, &str)]) -> (u16, Value) {
    let request = Request::get(path).header("host", "test");
    let request =
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    let (status, body) = server.send(request.body(Full::default()).unwrap()).await.read().await;
    (status, serde_json::from_slice(&body).unwrap())
}

#[tokio::test]
async fn names_of_blocks_are_for_routers_with_the_key() {
    let prompt: Vec<i32> = (10..50).collect();
    let asked = json!({"prompt": prompt, "max_tokens": 2});
    let key = (ROUTER_KEY_HEADER, "between us");
    let keys: fn(&mut ServerConfig) = |config| config.api_keys = Keys::new(["client"]);
    let admin: fn(&mut ServerConfig) = |config| config.admin_keys = Keys::new(["admin"]);
    for change in [router_key as fn(&mut ServerConfig), keys, admin] {
        let server = TestServer::start(Some("a"), change).await;
        for wrong in [None, Some("guessed"), Some("")] {
            let mut headers = vec![("authorization", "Bearer client"), (ROUTER_HEADER, TAG)];
            headers.extend(wrong.map(|wrong| (ROUTER_KEY_HEADER, wrong)));
            let (status, error) = get(&server, "/v1/blocks?after=0", &headers).await;
            assert_eq!((status, &error["error"]["code"]), (403, &json!("router_key_needed")));
            let answer = send(&server, &headers, &asked).await;
            for name in [BLOCKS_HEADER, LOAD_HEADER] {
                assert_eq!(answer.header(name), None);
            }
            assert_eq!(answer.read().await.0, 200, "served like any client's request");
            headers.extend([(STREAM_HEADER, "5;name"), (RESUME_HEADER, "0")]);
            assert_eq!(send(&server, &headers, &asked).await.read().await.0, 403);
        }
    }
    let server = TestServer::start(Some("a"), |config| {
        router_key(config);
        config.api_keys = Keys::new(["client"]);
        config.admin_keys = Keys::new(["admin"]);
    })
    .await;
    let headers = [key, (ROUTER_HEADER, TAG), ("authorization", "Bearer client")];
    let answer = send(&server, &headers, &asked).await;
    assert!(answer.header(BLOCKS_HEADER).is_some() && answer.header(LOAD_HEADER).is_some());
    assert_eq!(answer.read().await.0, 200);
    // A router key does not replace an API key.
    assert_eq!(send(&server, &[key], &asked).await.read().await.0, 401);
    // With the router key the request reaches the route, which has no cache to report.
    assert_eq!(get(&server, "/v1/blocks", &[key]).await.0, 503);
    assert_eq!(get(&server, "/v1/loads", &[key]).await.0, 200);
    assert_eq!(get(&server, "/v1/loads", &[("authorization", "Bearer client")]).await.0, 401);
    assert_eq!(get(&server, "/v1/loads", &[("authorization", "Bearer admin")]).await.0, 200);
}

#[tokio::test]
async fn what_was_cached_may_be_kept_from_clients() {
    let hide = |config: &mut ServerConfig| config.hide_cached_tokens = true;
    let server = TestServer::start(Some("a"), hide).await;
    for (path, field) in DIALECTS {
        let (status, answer) = server.post(path, body(field, None)).await;
        assert!(status == 200 && !answer.to_string().contains("cached"), "{answer}");
    }
    let mut streamed = body("prompt", None);
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let events = server.events(COMPLETIONS, streamed).await;
    assert!(events.iter().any(|event| event["usage"]["prompt_tokens"].is_number()));
    assert!(events.iter().all(|event| !event.to_string().contains("cached")));
}
