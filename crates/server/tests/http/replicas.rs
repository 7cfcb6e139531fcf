//! Several replicas: requests that select one, reports about each, and draining one.

use forebay_engine::Preference;
use forebay_replicas::{Load, Role};
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};

use crate::fake::{Event, TestServer};

const PATHS: [&str; 3] = ["/v1/chat/completions", "/v1/completions", "/generate"];

async fn two_replicas() -> TestServer {
    let server = TestServer::scripted("a").await;
    let load = Load { requests: 3, peak: 9, dispatched: 40, ..Load::default() };
    *server.engine.loads.lock() = vec![Load::default(), load];
    server
}

fn body(path: &str, more: Value) -> Value {
    let mut body = match path {
        "/v1/chat/completions" => json!({"messages": [{"role": "user", "content": "a"}]}),
        "/v1/completions" => json!({"prompt": "a"}),
        _ => json!({"text": "a"}),
    };
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    body
}

impl TestServer {
    /// POSTs with headers; returns the status and the JSON of the response.
    pub(crate) async fn with_headers(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> (u16, Value) {
        let mut request = Request::post(path).header("host", "test");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.to_string().into())).unwrap();
        let (status, body) = self.send(request).await.read().await;
        (status, serde_json::from_slice(&body).unwrap())
    }
}

#[tokio::test]
async fn a_request_says_where_it_wants_to_go() {
    let mut server = two_replicas().await;
    let key = |key: &str| Preference { key: Some(key.into()), replica: None };
    let replica = |at| Preference { key: None, replica: Some(at) };
    type Case<'a> = (Value, &'a [(&'a str, &'a str)], Preference);
    let cases: [Case; 8] = [
        (json!({}), &[], Preference::default()),
        (json!({"routing_key": "me"}), &[], key("me")),
        (json!({"routed_dp_rank": 1}), &[], replica(1)),
        (json!({"data_parallel_rank": 0}), &[], replica(0)),
        (json!({}), &[("x-routing-key", "you")], key("you")),
        (json!({}), &[("x-smg-routing-key", "you")], key("you")),
        (json!({}), &[("x-data-parallel-rank", "1")], replica(1)),
        (json!({"routing_key": "me"}), &[("x-data-parallel-rank", "1")], key("me")),
    ];
    for path in PATHS {
        for (more, headers, expected) in &cases {
            let (status, answer) =
                server.with_headers(path, &body(path, more.clone()), headers).await;
            assert_eq!(status, 200, "{answer}");
            assert_eq!(
                server.submitted().await.all.preference,
                *expected,
                "{path} {more} {headers:?}"
            );
        }
    }
}

#[tokio::test]
async fn where_nobody_can_go_is_an_error_that_names_the_parameter() {
    let server = two_replicas().await;
    let long = "k".repeat(513);
    type Case<'a> = (Value, &'a [(&'a str, &'a str)], &'a str);
    let cases: [Case; 7] = [
        (json!({"routed_dp_rank": 2}), &[], "routed_dp_rank"),
        (json!({"routed_dp_rank": -1}), &[], "routed_dp_rank"),
        (json!({"routing_key": ""}), &[], "routing_key"),
        (json!({"routing_key": long}), &[], "routing_key"),
        (json!({}), &[("x-data-parallel-rank", "2")], "x-data-parallel-rank"),
        (json!({}), &[("x-data-parallel-rank", "one")], "x-data-parallel-rank"),
        (json!({}), &[("x-smg-routing-key", "")], "x-smg-routing-key"),
    ];
    for path in PATHS {
        for (more, headers, param) in &cases {
            let (status, answer) =
                server.with_headers(path, &body(path, more.clone()), headers).await;
            let error = &answer["error"];
            assert_eq!((status, &error["param"]), (400, &json!(param)), "{path}: {answer}");
            assert_eq!(error["type"], "invalid_request_error");
            assert!(error["message"].as_str().unwrap().contains(param));
        }
    }
}

#[tokio::test]
async fn each_replica_is_shown() {
    let server = two_replicas().await;
    server.engine.stats.lock().scheduler.steps = 9;
    let (_, info) = server.get_json("/server_info").await;
    let states = info["internal_states"].as_array().unwrap();
    assert_eq!(states.len(), 2);
    assert_eq!((&states[1]["requests"], &states[1]["requests_peak"]), (&json!(3), &json!(9)));
    assert_eq!((&states[1]["dispatched"], &states[1]["status"]), (&json!(40), &json!("ready")));
    let (_, health) = server.get_json("/health").await;
    assert_eq!(health, json!({"status": "ready", "replicas": ["ready", "ready"]}));
}

#[tokio::test]
async fn a_replica_is_taken_out_and_put_back() {
    let mut server = two_replicas().await;
    for (action, drained, taking) in [("drain", true, 1), ("resume", false, 2)] {
        let answer = server.post(&format!("/replicas/1/{action}"), json!(null)).await;
        let expected = json!({"replica": 1, "drained": drained, "taking": taking});
        assert_eq!(answer, (200, expected));
        match server.event().await {
            Event::Drain(1, told) => assert_eq!(told, drained),
            event => panic!("{event:?}"),
        }
    }
    for name in ["2", "x", "-1"] {
        let (status, answer) = server.post(&format!("/replicas/{name}/drain"), json!(null)).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("replica")), "{answer}");
    }
}

#[tokio::test]
async fn a_replica_gets_another_role_where_there_are_any() {
    let mut server = two_replicas().await;
    let post = async |server: &TestServer, at: &str, role: Value| {
        server.post(&format!("/replicas/{at}/role"), json!({"role": role})).await
    };
    let (status, answer) = post(&server, "1", json!("decode")).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("role")), "{answer}");
    assert!(answer["error"]["message"].as_str().unwrap().contains("--pd"), "{answer}");
    *server.engine.roles.lock() = vec![Role::Prefill, Role::Decode];
    let roles = json!(["prefill", "both"]);
    let expected = json!({"replica": 1, "role": "both", "roles": roles});
    assert_eq!(post(&server, "1", json!("both")).await, (200, expected));
    match server.event().await {
        Event::Role(1, Role::Both) => {}
        event => panic!("{event:?}"),
    }
    let (_, info) = server.get_json("/server_info").await;
    assert_eq!(info["internal_states"][0]["role"], json!("prefill"));
    for (at, role, param) in [
        ("2", json!("both"), "replica"),
        ("x", json!("both"), "replica"),
        ("0", json!("none"), "role"),
        ("0", json!(7), "body"),
    ] {
        let (status, answer) = post(&server, at, role).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    assert_eq!(server.post("/replicas/0/role", json!({})).await.0, 400);
}

#[tokio::test]
async fn a_server_whose_replicas_are_all_drained_is_not_ready_and_says_why() {
    let server = two_replicas().await;
    let chat = || server.post(PATHS[0], body(PATHS[0], json!({})));
    server.post("/replicas/0/drain", json!(null)).await;
    assert_eq!((server.get("/health").await.0, chat().await.0), (200, 200));
    let (status, last) = server.post("/replicas/1/drain", json!(null)).await;
    assert_eq!((status, &last["taking"]), (200, &json!(0)));
    let (status, health) = server.get_json("/health").await;
    assert_eq!((status, &health["error"]["code"]), (503, &json!("drained")), "{health}");
    let (status, refused) = chat().await;
    assert_eq!((status, &refused["error"]["code"]), (503, &json!("drained")), "{refused}");
    assert_eq!(server.get("/health_generate").await.0, 503);
    server.post("/replicas/0/resume", json!(null)).await;
    assert_eq!((server.get("/health").await.0, chat().await.0), (200, 200));
}
