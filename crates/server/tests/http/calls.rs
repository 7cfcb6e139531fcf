//! Forced tool calls: which constraint the engine gets for a request.

use forebay_api::peer::{RESUME_HEADER, ROUTER_HEADER, RouterTag, STREAM_HEADER, StreamName};
use forebay_engine::Constraint;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};

use crate::fake::{EOS, TestServer};

const CHAT: &str = "/v1/chat/completions";
const CALL: &str = "<tool_call>\n{\"name\": \"ping\", \"arguments\": {}}\n</tool_call>";

fn tool(name: &str) -> Value {
    let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
    json!({"type": "function", "function": {"name": name, "parameters": parameters}})
}

fn chat(more: Value) -> Value {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let mut body =
        json!({"messages": messages, "tools": [tool("ping"), tool("pong")], "max_tokens": 99});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns whether a constraint accepts a text, and whether the text may end there.
fn takes(constraint: &mut dyn Constraint, ids: &[i32], vocabulary: usize) -> (bool, bool) {
    let may = |constraint: &mut dyn Constraint, id: i32| {
        let mut words = vec![0; vocabulary.div_ceil(32)];
        constraint.mask(&mut words).unwrap();
        words[id as usize / 32] >> (id % 32) & 1 == 1
    };
    for &id in ids {
        if !may(constraint, id) {
            return (false, false);
        }
        constraint.accept(id).unwrap();
    }
    (true, may(constraint, EOS))
}

#[tokio::test]
async fn each_choice_has_to_call() {
    let mut server = TestServer::scripted("a").await;
    let vocabulary = server.tokenizer.vocab_size();
    let call = server.encode(CALL);
    let other = server.encode(&CALL.replace("ping", "pong"));
    let text = server.encode("It is");
    let strict =
        json!([{"type": "function", "function": {"name": "ping", "strict": true}}, tool("pong")]);
    let named = json!({"type": "function", "function": {"name": "ping"}});
    for (more, taken) in [
        (json!({"tool_choice": "required"}), [true, true, false]),
        (json!({"tool_choice": named}), [true, false, false]),
        (json!({"tools": strict}), [true, true, true]),
    ] {
        for (ids, taken) in [&call, &other, &text].into_iter().zip(taken) {
            let mut more = more.clone();
            more["n"] = json!(2);
            assert_eq!(server.post(CHAT, chat(more)).await.0, 200);
            for _ in 0..2 {
                let mut constraint = server.submitted().await.all.constraint.unwrap();
                assert_eq!(takes(&mut *constraint, ids, vocabulary), (taken, taken), "{ids:?}");
            }
        }
    }
    server.post(CHAT, chat(json!({}))).await;
    assert!(server.submitted().await.all.constraint.is_none());
}

#[tokio::test]
async fn a_stream_that_goes_on_elsewhere_is_as_bound_as_before() {
    let mut server = TestServer::driven().await;
    let (vocabulary, call) = (server.tokenizer.vocab_size(), server.encode(CALL));
    let tag = RouterTag { router: 7, seq: 1, floor: 1, seed: 99, blocks: false };
    let body = chat(json!({"stream": true, "tool_choice": "required"}));
    let mut streams = Vec::new();
    for (seq, cut) in (1..).zip(1..call.len()) {
        let tag = RouterTag { seq, ..tag };
        let name = StreamName { id: format!("chatcmpl-{cut:032x}"), created: 1 };
        let mut content: Vec<u8> =
            call[..cut].iter().flat_map(|id| format!("{id},").into_bytes()).collect();
        let request = Request::post(CHAT)
            .header("host", "test")
            .header(ROUTER_HEADER, tag.encode())
            .header(STREAM_HEADER, name.encode())
            .header(RESUME_HEADER, content.len());
        content.extend(body.to_string().into_bytes());
        // Awaits only the head of each response, and keeps all streams open.
        streams.push(server.send(request.body(Full::new(content.into())).unwrap()).await);
        let mut constraint = server.submitted().await.all.constraint.unwrap();
        assert_eq!(takes(&mut *constraint, &call[cut..], vocabulary), (true, true), "{cut}");
    }
}

#[tokio::test]
async fn a_named_call_ends_with_stop_and_one_that_was_chosen_does_not() {
    let server = TestServer::scripted(CALL).await;
    let named = json!({"type": "function", "name": "ping"});
    for (choice, reason) in [(json!("required"), "tool_calls"), (named, "stop")] {
        for stream in [false, true] {
            let more =
                json!({"tool_choice": choice, "parallel_tool_calls": false, "stream": stream});
            let (status, answer) = server.open(CHAT, chat(more).to_string()).await.read().await;
            let answer = String::from_utf8(answer).unwrap();
            assert_eq!(status, 200, "{answer}");
            let expected = format!("\"finish_reason\":\"{reason}\"");
            assert!(answer.contains(&expected), "{answer}");
            assert!(answer.contains("\"name\":\"ping\""), "{answer}");
        }
    }
}
