//! Large requests, and prompts as embeddings.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use forebay_engine::{FinishReason, Payloads, Request};
use serde_json::{Value, json};

use crate::fake::{CONTEXT, HIDDEN, IntakeKind, MEMORY, QUEUE, TestServer};

const COMPLETIONS: &str = "/v1/completions";
/// The size in bytes from which bodies are parsed on intake threads.
const LARGE: usize = 64 << 10;
/// Bytes of an embedding in bfloat16.
const ROW: usize = 2 * HIDDEN as usize;

/// Returns a safetensors file with one float32 matrix, in base64.
fn file(rows: usize, values: impl Fn(usize) -> f32) -> String {
    let data: Vec<u8> =
        (0..rows * HIDDEN as usize).flat_map(|at| values(at).to_le_bytes()).collect();
    let (shape, end) = (json!([rows, HIDDEN]), data.len());
    let header = json!({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}});
    let header = header.to_string().into_bytes();
    let length = (header.len() as u64).to_le_bytes();
    BASE64_STANDARD.encode([&length[..], &header, &data].concat())
}

pub(crate) fn rows(rows: usize) -> String {
    file(rows, |at| at as f32)
}

/// Returns the bytes that the hand reads for `rows(count)`; small whole numbers are exact in
/// bfloat16.
fn bytes(count: usize) -> Vec<u8> {
    let upper = |at: usize| ((at as f32).to_bits() >> 16) as u16;
    (0..count * HIDDEN as usize).flat_map(|at| upper(at).to_le_bytes()).collect()
}

fn ask(embeds: impl Into<Value>) -> Value {
    json!({"prompt_embeds": embeds.into(), "max_tokens": 1})
}

fn read(server: &TestServer, request: &Request) -> Vec<u8> {
    let offset = request.spec.embeds.expect("embeddings");
    server.memory.read(offset, request.prompt.len() * ROW)
}

#[tokio::test]
async fn embeddings_are_where_the_hand_reads_them() {
    for kind in [IntakeKind::Threads, IntakeKind::Inline] {
        let mut server = TestServer::with_intake(None, kind).await;
        // OpenAI's client always sends a prompt, so the body has an empty one.
        let mut body = ask(rows(3));
        body["prompt"] = json!("");
        let answer = server.connect(COMPLETIONS, &body);
        let request = server.submitted().await;
        assert_eq!((&request.prompt[..], request.max_tokens), (&[0; 3][..], 1));
        assert_eq!(read(&server, &request), bytes(3));
        server.engine.token(request.id, 5, true, Some(FinishReason::Length));
        let (status, answer) = answer.await.unwrap();
        assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(3)), "{answer}");
        assert_eq!(
            server.memory.used(),
            3 * ROW,
            "the payload stays while the engine has the request"
        );
        drop(request);
        assert_eq!(server.memory.used(), 0);
    }
}

#[tokio::test]
async fn prompts_and_choices_of_a_request_share_a_payload() {
    let mut server = TestServer::scripted("a").await;
    let mut body = ask(vec![rows(2), rows(5)]);
    body["n"] = json!(2);
    let (status, answer) = server.post(COMPLETIONS, body).await;
    assert_eq!((status, answer["choices"].as_array().unwrap().len()), (200, 4), "{answer}");
    let mut requests = Vec::new();
    for expected in [2, 2, 5, 5] {
        let request = server.submitted().await;
        assert_eq!(read(&server, &request), bytes(expected));
        requests.push(request);
    }
    assert_eq!(server.memory.used(), 7 * ROW);
    drop(requests);
    assert_eq!(server.memory.used(), 0);
}

#[tokio::test]
async fn what_is_wrong_is_named_and_leaves_nothing_behind() {
    let server = TestServer::scripted("a").await;
    let not_finite = file(2, |at| if at == 5 { f32::INFINITY } else { 0.0 });
    let context = CONTEXT as usize;
    let cases = [
        (json!({"prompt_embeds": "*"}), 400, "prompt_embeds", "not base64"),
        (json!({"prompt_embeds": "AAAA"}), 400, "prompt_embeds", "not the bytes of safetensors"),
        (json!({"prompt_embeds": [rows(1), "AAAA"]}), 400, "prompt_embeds[1]", "safetensors"),
        (json!({"prompt_embeds": 7}), 400, "prompt_embeds", "expected safetensors bytes"),
        (json!({"prompt_embeds": rows(1), "prompt": "a"}), 400, "prompt_embeds", "exclude"),
        (json!({"prompt_embeds": not_finite}), 400, "prompt_embeds", "position 1 is not finite"),
        (json!({"prompt_embeds": rows(context)}), 400, "prompt_embeds", "maximum context length"),
        (json!({"prompt_embeds": [], "prompt": null}), 400, "prompt", "one of"),
        (
            json!({"prompt_embeds": vec![rows(context - 1); 1 + MEMORY / ROW / (context - 1)]}),
            413,
            "prompt_embeds",
            "bytes of the arena, which has",
        ),
    ];
    for (body, expected, param, message) in cases {
        let (status, answer) = server.post(COMPLETIONS, body).await;
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (expected, &json!(param)), "{answer}");
        assert!(error["message"].as_str().unwrap().contains(message), "{answer}");
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(server.memory.used(), 0);
    }
}

#[tokio::test]
async fn rows_of_another_model_are_refused() {
    let server = TestServer::scripted("a").await;
    let header = json!({"x": {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 12]}});
    let header = header.to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &[0; 12]].concat();
    let (status, answer) = server.post(COMPLETIONS, ask(BASE64_STANDARD.encode(file))).await;
    assert_eq!(status, 400);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("rows of 3 elements, and the model has 4"), "{message}");
}

#[tokio::test]
async fn a_full_arena_makes_requests_wait_and_then_refuses_them() {
    let mut server = TestServer::with_intake(Some("a"), IntakeKind::Threads).await;
    let hold = server.memory.reserve(MEMORY).unwrap();
    let mut asked: Vec<_> =
        (0..=QUEUE).map(|_| server.connect(COMPLETIONS, &ask(rows(2)))).collect();
    // There is one request too many. The order in which the server reads the sockets determines
    // which one is rejected.
    let refused = loop {
        tokio::task::yield_now().await;
        if let Some(at) = asked.iter().position(|answer| answer.is_finished()) {
            break asked.swap_remove(at).await.unwrap();
        }
    };
    assert_eq!((refused.0, &refused.1["error"]["code"]), (429, &json!("queue_full")));
    let message = refused.1["error"]["message"].as_str().unwrap();
    assert!(message.contains("wait for room in the arena"), "{message}");
    drop(hold);
    for answer in asked {
        assert_eq!(answer.await.unwrap().0, 200);
        drop(server.submitted().await);
    }
    assert_eq!(server.memory.used(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_the_line_makes_room_in_it() {
    let mut server = TestServer::with_intake(Some("a"), IntakeKind::Threads).await;
    let hold = server.memory.reserve(MEMORY).unwrap();
    let in_line = async |count: usize| {
        let wanted =
            format!("forebay:intake_requests_waiting{{engine=\"0\",model_name=\"tiny\"}} {count}");
        while !server.get("/metrics").await.1.contains(&wanted) {
            tokio::task::yield_now().await;
        }
    };
    let gone = server.connect(COMPLETIONS, &ask(rows(2)));
    in_line(1).await;
    gone.abort();
    in_line(0).await;
    let stays = server.connect(COMPLETIONS, &ask(rows(3)));
    in_line(1).await;
    drop(hold);
    assert_eq!(stays.await.unwrap().0, 200);
    assert_eq!(server.submitted().await.prompt.len(), 3, "the abandoned request was not submitted");
    assert_eq!(server.memory.used(), 0);
}

#[tokio::test]
async fn large_bodies_are_parsed_like_small_ones() {
    for kind in [IntakeKind::Threads, IntakeKind::Inline] {
        let mut server = TestServer::with_intake(Some("a"), kind).await;
        let body = json!({"prompt": "a", "max_tokens": 1, "user": "x".repeat(2 * LARGE)});
        let (status, answer) = server.post(COMPLETIONS, body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(server.submitted().await.prompt[..], server.encode("a"));
        let wrong = json!({"user": "x".repeat(2 * LARGE), "prompt": "a", "max_tokens": "many"});
        let (status, answer) = server.post(COMPLETIONS, wrong).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("max_tokens")));
        let (status, answer) = server.post_bytes(COMPLETIONS, " ".repeat(2 * LARGE)).await;
        assert_eq!((status, &answer["error"]["code"]), (400, &json!("malformed_json")));
    }
}
