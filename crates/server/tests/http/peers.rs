//! The server's reports to a router, and streams that continue another server's streams.

use forebay_api::peer::{
    BLOCKS_HEADER, LOAD_HEADER, LoadReport, RESUME_HEADER, ROUTER_HEADER, RouterTag, STREAM_HEADER,
    decode_blocks, read_comment, read_ids,
};
use forebay_engine::{FinishReason, Namer};
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};

use crate::client::{Pending, events};
use crate::fake::TestServer;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "hello wörld, 日本 and more, and more of it";

fn tag(seq: u64) -> RouterTag {
    RouterTag { router: 7, seq, floor: 1, seed: 99, blocks: true }
}

/// Sends a router's request that continues `stream` after the tokens `ids`.
async fn routed(
    server: &TestServer,
    path: &str,
    body: &Value,
    seq: u64,
    resume: Option<(&str, &[i32])>,
) -> Pending {
    let mut request =
        Request::post(path).header("host", "test").header(ROUTER_HEADER, tag(seq).encode());
    let mut content = Vec::new();
    if let Some((stream, ids)) = resume {
        content.extend(ids.iter().flat_map(|id| format!("{id},").into_bytes()));
        request = request.header(STREAM_HEADER, stream).header(RESUME_HEADER, content.len());
    }
    content.extend(body.to_string().into_bytes());
    server.send(request.body(Full::new(content.into())).unwrap()).await
}

fn load(pending: &Pending) -> LoadReport {
    LoadReport::decode(pending.header(LOAD_HEADER).unwrap()).unwrap()
}

/// Returns a stream without its comments, and the token ids in the comments.
fn split(stream: &str) -> (String, Vec<i32>) {
    let (mut rest, mut ids) = (String::new(), Vec::new());
    for line in stream.split_inclusive('\n') {
        match read_comment(line.trim_end().as_bytes()) {
            Some(comment) => ids.extend(read_ids(comment.ids).unwrap()),
            None => rest.push_str(line),
        }
    }
    (rest, ids)
}

/// Returns the text of a stream's events, and the fields that are the same in all events.
fn said(path: &str, events: &[Value]) -> (String, Vec<Value>) {
    let text = |event: &Value| {
        let choice = &event["choices"][0];
        let text = if path == CHAT { &choice["delta"]["content"] } else { &choice["text"] };
        text.as_str().unwrap_or_default().to_owned()
    };
    let all = match path {
        "/generate" => events.last().map(|event| event["text"].as_str().unwrap().to_owned()),
        _ => Some(events.iter().map(text).collect()),
    };
    (all.unwrap_or_default(), events.iter().map(|event| event["id"].clone()).collect())
}

#[tokio::test]
async fn nobody_else_sees_any_of_it() {
    let server = TestServer::scripted(TEXT).await;
    let body = json!({"prompt": "hi", "max_tokens": 8, "stream": true});
    let plain = server.open("/v1/completions", body.to_string()).await;
    assert_eq!((plain.header(LOAD_HEADER), plain.header(STREAM_HEADER)), (None, None));
    let (_, plain) = plain.read().await;
    assert!(!String::from_utf8(plain).unwrap().contains(": forebay"));
    let (_, stream) = routed(&server, "/v1/completions", &body, 1, None).await.read().await;
    let (events, ids) = split(std::str::from_utf8(&stream).unwrap());
    // The last token comes with the end of the stream, which has no comment.
    let all = server.encode(TEXT);
    assert!(ids.len() < 8 && all.starts_with(&ids), "{ids:?}");
    assert!(events.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_stream_goes_on_wherever_it_broke() {
    let mut server = TestServer::driven().await;
    let tokens = server.encode(TEXT);
    // "more" is held back each time, because a stop string may begin with it.
    let stop = json!({"stop": ["more of no", "it and"], "max_tokens": tokens.len()});
    let requests = [
        (CHAT, json!({"messages": [{"role": "user", "content": "hi"}]})),
        ("/v1/completions", json!({"prompt": "hi", "echo": true})),
        ("/generate", json!({"text": "hi"})),
    ];
    let mut seq = 0;
    for (path, mut body) in requests {
        body["stream"] = json!(true);
        if path == "/generate" {
            body["sampling_params"] = json!({"stop": stop["stop"], "max_new_tokens": tokens.len()});
        } else {
            body["stop"] = stop["stop"].clone();
            body["max_tokens"] = stop["max_tokens"].clone();
        }
        for cut in 1..tokens.len() {
            seq += 1;
            let mut first = routed(&server, path, &body, seq, None).await;
            let name = first.header(STREAM_HEADER).unwrap().to_owned();
            let request = server.submitted().await;
            assert_eq!((request.generated.len(), request.spec.sampling.seed), (0, 99));
            let mut stream = String::new();
            for (index, &token) in tokens[..cut].iter().enumerate() {
                server.engine.token(request.id, token, index == 0, None);
                while split(&stream).1.len() <= index {
                    stream.push_str(&first.frame().await.unwrap());
                }
            }
            drop(first);
            assert_eq!(server.aborted().await, request.id);
            let (begun, ids) = split(&stream);
            assert_eq!(ids, tokens[..cut]);

            seq += 1;
            let second = routed(&server, path, &body, seq, Some((&name, &ids))).await;
            assert_eq!(second.header(STREAM_HEADER), Some(name.as_str()));
            let request = server.submitted().await;
            assert_eq!((&request.generated, request.spec.sampling.seed), (&ids, 99));
            for (index, &token) in tokens.iter().enumerate().skip(cut) {
                let finish = (index + 1 == tokens.len()).then_some(FinishReason::Length);
                server.engine.token(request.id, token, index == cut, finish);
            }
            let (_, rest) = second.read().await;
            let (rest, _) = split(std::str::from_utf8(&rest).unwrap());
            let all = events(&(begun + &rest));
            let (text, names) = said(path, &all);
            let expected =
                if path == "/v1/completions" { format!("hi{TEXT}") } else { TEXT.into() };
            assert_eq!(text, expected, "{path} cut after {cut}");
            assert!(names.windows(2).all(|pair| pair[0] == pair[1]), "{names:?}");
            let last = all.last().unwrap();
            let count = match path {
                "/generate" => &last["meta_info"]["completion_tokens"],
                _ => &json!(tokens.len()),
            };
            assert_eq!(*count, tokens.len());
        }
    }
}

#[tokio::test]
async fn streams_that_nobody_can_go_on_with_have_no_name() {
    let server = TestServer::scripted(TEXT).await;
    for (path, body) in [
        (CHAT, json!({"messages": [{"role": "user", "content": "hi"}], "n": 2})),
        ("/v1/completions", json!({"prompt": ["a", "b"]})),
        ("/generate", json!({"text": "hi", "return_logprob": true})),
    ] {
        let mut body = body;
        body["stream"] = json!(true);
        let pending = routed(&server, path, &body, 1, None).await;
        assert_eq!(pending.header(STREAM_HEADER), None);
        assert!(pending.header(LOAD_HEADER).is_some());
        let (_, stream) = pending.read().await;
        assert!(split(std::str::from_utf8(&stream).unwrap()).1.is_empty());
    }
}

#[tokio::test]
async fn reports_say_what_they_count() {
    let mut server = TestServer::driven().await;
    let body = json!({"prompt": "hi", "stream": true});
    let open = server.open("/v1/completions", body.to_string()).await;
    let first = routed(&server, "/v1/completions", &body, 1, None).await;
    let third = routed(&server, "/v1/completions", &body, 3, None).await;
    let report = load(&third);
    assert_eq!((report.own, report.requests, report.seen), (2, 3, 1));
    assert!(report.at > load(&first).at);
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(server.submitted().await.id);
    }
    drop((open, first, third));
    let mut aborted = Vec::new();
    for _ in 0..3 {
        aborted.push(server.aborted().await);
    }
    aborted.sort();
    assert_eq!(aborted, ids);
}

#[tokio::test]
async fn who_waits_hears_of_a_change() {
    let mut server = TestServer::driven().await;
    let (status, loads) = server.get_json("/v1/loads?requests=3&wait=60").await;
    assert_eq!((status, &loads["requests"]), (200, &json!(0)));
    assert_eq!(loads["loads"].as_array().unwrap().len(), 1);
    let request = Request::get("/v1/loads?requests=0&wait=60").header("host", "test");
    let request = request.body(Full::default()).unwrap();
    let asked = server.send(request);
    let opened = async {
        let body = json!({"prompt": "hi", "stream": true}).to_string();
        server.open("/v1/completions", body).await
    };
    let (answer, open) = tokio::join!(asked, opened);
    let (_, body) = answer.read().await;
    assert_eq!(serde_json::from_slice::<Value>(&body).unwrap()["requests"], 1);
    drop(open);
    server.submitted().await;
}

#[tokio::test]
async fn a_prompts_blocks_are_named_to_who_asks() {
    let server = TestServer::scripted(TEXT).await;
    let prompt: Vec<i32> = (10..10 + 40).collect();
    let body = json!({"prompt": prompt, "max_tokens": 2});
    let pending = routed(&server, "/v1/completions", &body, 1, None).await;
    let names = decode_blocks(pending.header(BLOCKS_HEADER).unwrap()).unwrap();
    let chain = Namer::open().chain(0, &prompt, 16);
    assert_eq!(names, chain.iter().map(|name| name.number() as u64 & !3).collect::<Vec<_>>());
    assert_eq!(names.len(), 2);
    let (status, error) = server.get_json("/v1/blocks").await;
    assert_eq!((status, &error["error"]["code"]), (503, &json!("no_prefix_cache")));
}
