//! The bytes that responses write, compared to the bytes that are charged for their requests.

use forebay_server::ServerConfig;
use serde_json::{Value, json};

use crate::counting::{mark, peak};
use crate::fake::{ModelKind, TestServer};
use crate::{SLACK, alone, charged};

/// The maximum number of bytes written per charged byte.
const WRITTEN: usize = 2;
const PROMPT: usize = 40;

/// Returns requests whose parameters multiply the response, and the number of their choices.
fn multiplying() -> Vec<(&'static str, Value, usize)> {
    let prompt = vec![10; PROMPT];
    let text = "a ".repeat(PROMPT / 4);
    let messages = json!([{"role": "user", "content": "a"}]);
    let native = json!({"n": 8, "max_new_tokens": 20});
    vec![
        (
            "/v1/completions",
            json!({"prompt": prompt, "n": 128, "prompt_logprobs": 20, "max_tokens": 1}),
            128,
        ),
        (
            "/v1/completions",
            json!({"prompt": prompt, "n": 128, "echo": true, "logprobs": 20, "max_tokens": 1}),
            128,
        ),
        (
            "/v1/completions",
            json!({"prompt": vec![&prompt; 64], "echo": true, "logprobs": 20, "prompt_logprobs": 20,
                   "n": 4, "max_tokens": 0}),
            // With `max_tokens` 0, only the log-probabilities of each prompt are computed.
            64,
        ),
        (
            "/v1/completions",
            json!({"prompt": vec![&text; 128], "n": 16, "echo": true, "max_tokens": 1}),
            2048,
        ),
        (
            "/v1/completions",
            json!({"prompt": prompt, "best_of": 64, "n": 32, "logprobs": 5, "prompt_logprobs": 5,
                   "max_tokens": 8}),
            64,
        ),
        (
            "/v1/completions",
            json!({"prompt": prompt, "n": 128, "return_token_ids": true, "max_tokens": 20}),
            128,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "n": 128, "logprobs": true, "top_logprobs": 20,
                   "prompt_logprobs": 20, "max_tokens": 20}),
            128,
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "n": 128, "return_token_ids": true, "max_tokens": 20}),
            128,
        ),
        (
            "/generate",
            json!({"text": vec![&text; 32], "sampling_params": native, "return_logprob": true,
                   "top_logprobs_num": 20, "logprob_start_len": 0, "return_text_in_logprobs": true}),
            256,
        ),
        ("/completion", json!({"prompt": vec![&text; 32], "n_predict": 20, "n_probs": 20}), 32),
        ("/v1/responses", json!({"input": "a", "max_output_tokens": 40, "store": false}), 1),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 40, "model": "tiny"}), 1),
        ("/api/chat", json!({"messages": messages, "stream": false, "model": "tiny"}), 1),
    ]
}

/// Returns the bytes charged once all choices were submitted, the status, and the whole response.
async fn answered(route: &str, body: &Value, choices: usize) -> (usize, u16, Vec<u8>) {
    let mut server = TestServer::driven().await;
    let script = server.encode("a");
    let mut pending = server.begin(route, body);
    let mut requests = Vec::new();
    while requests.len() < choices {
        tokio::select! {
            request = server.submitted() => requests.push(request),
            early = &mut pending => {
                let (status, answer) = early.unwrap().read().await;
                let answer = String::from_utf8_lossy(&answer).into_owned();
                panic!("{route}: {status} after {} choices: {answer:.300}", requests.len());
            }
        }
    }
    let charged = charged(&server).await;
    for request in &requests {
        server.engine.play(request, &script);
    }
    let (status, answer) = pending.await.unwrap().read().await;
    (charged, status, answer)
}

#[tokio::test]
async fn what_is_written_was_charged() {
    let _alone = alone().await;
    for (route, body, choices) in multiplying() {
        let (charged, status, answer) = answered(route, &body, choices).await;
        let text = String::from_utf8_lossy(&answer);
        assert_eq!(status, 200, "{route}: {}", &text[..text.len().min(300)]);
        let written = answer.len();
        println!("{route}: {written} bytes for {charged} charged, {:.60}", body.to_string());
        assert!(
            written <= WRITTEN * charged,
            "{route}: {written} bytes for {charged} charged: {:.200}",
            body.to_string()
        );
    }
}

/// All choices are built from one list, and only one choice is in memory at a time.
#[tokio::test]
async fn choices_share_what_is_told_of_their_prompt() {
    let _alone = alone().await;
    let body =
        json!({"prompt": vec![10; PROMPT], "n": 128, "prompt_logprobs": 20, "max_tokens": 1});
    let start = mark();
    let (_, status, answer) = answered("/v1/completions", &body, 128).await;
    assert_eq!(status, 200);
    let written = answer.len();
    assert!(written > 4 << 20, "the answer repeats the prompt: {written} bytes");
    // The response is in memory while it grows, while it is sent, and as this test reads it.
    let bytes = peak(start);
    assert!(bytes <= 5 * written + SLACK, "{bytes} bytes for {written}");
}

fn little_unread(config: &mut ServerConfig) {
    config.max_unread_bytes = 1 << 20;
}

/// A response that would be too large is rejected before anything is computed, streamed or not.
#[tokio::test]
async fn what_repeats_too_much_is_refused_at_once() {
    let _alone = alone().await;
    let server = TestServer::start(None, little_unread).await;
    let prompt = vec![10; PROMPT];
    let echo = json!({"prompt": prompt, "n": 128, "echo": true, "logprobs": 20});
    let mut streamed = echo.clone();
    streamed["stream"] = json!(true);
    let told = json!({"prompt": prompt, "n": 128, "prompt_logprobs": 20});
    let native = json!({
        "input_ids": vec![&prompt; 128], "return_logprob": true, "top_logprobs_num": 20,
        "logprob_start_len": 0,
    });
    for (route, body) in [
        ("/v1/completions", echo),
        ("/v1/completions", streamed),
        ("/v1/completions", told),
        ("/generate", native),
    ] {
        let (status, answer) = server.post(route, body).await;
        assert_eq!(
            (status, &answer["error"]["code"]),
            (413, &json!("answer_too_large")),
            "{route}"
        );
        assert_eq!(server.engine.submitted(), 0, "{route}");
    }
    assert_eq!(charged(&server).await, 0);
}

/// The limit applies to the bytes that are written, not only to their estimate.
#[tokio::test]
async fn a_whole_answer_is_held_to_the_bytes_that_may_wait() {
    let _alone = alone().await;
    let server = TestServer::start(Some("a"), |config| config.max_unread_bytes = 10_000).await;
    let messages = json!([{"role": "user", "content": "a"}]);
    let body = json!({"messages": messages, "n": 128, "max_tokens": 2});
    let (status, answer) = server.post("/v1/chat/completions", body).await;
    assert_eq!((status, &answer["error"]["code"]), (413, &json!("answer_too_large")), "{answer}");
}

/// A response that the client does not read stays charged.
#[tokio::test]
async fn what_waits_for_its_client_is_charged() {
    let _alone = alone().await;
    let server = TestServer::of_model(ModelKind::Text, Some("a"), |_| {}).await;
    let prompt = vec![10; PROMPT];
    let body = json!({
        "prompt": vec![&prompt; 3], "n": 128, "prompt_logprobs": 20, "echo": true, "logprobs": 20,
        "max_tokens": 1,
    });
    let pending = server.open("/v1/completions", body.to_string()).await;
    assert_eq!(pending.response.status(), 200);
    let length: usize = pending.header("content-length").unwrap().parse().unwrap();
    assert!(length > 12 << 20, "the sockets hold the whole answer: {length}");
    assert_eq!(charged(&server).await, length);
    drop(pending);
    while charged(&server).await > 0 {
        tokio::task::yield_now().await;
    }
}
