//! A value over a limit is rejected, and the error names the parameter or the flag.

use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::fake::{EOS, TestServer};
use crate::intake::rows;

const CHAT: &str = "/v1/chat/completions";

fn param(answer: &Value) -> (&str, &str) {
    let error = &answer["error"];
    (error["param"].as_str().unwrap_or_default(), error["message"].as_str().unwrap())
}

/// The tokenizers of some fine-tunes have more tokens than the model has embeddings.
#[tokio::test]
async fn a_text_with_tokens_that_the_model_lacks_is_refused() {
    let server = TestServer::scripted("a").await;
    let text = "word";
    let messages = json!([{"role": "user", "content": text}]);
    let bodies = [
        ("/v1/completions", json!({"prompt": text}), "prompt"),
        ("/v1/completions", json!({"prompt": [1], "stop": text}), ""),
        ("/generate", json!({"text": text}), "text"),
        (CHAT, json!({"messages": messages}), "messages"),
    ];
    for (route, body, _) in &bodies {
        assert_eq!(server.post(route, body.clone()).await.0, 200, "{body}");
    }
    server.engine.vocab_size.store(4, Ordering::Relaxed);
    for (route, body, expected) in bodies {
        let (status, answer) = server.post(route, body.clone()).await;
        if expected.is_empty() {
            assert_eq!(status, 200, "{answer}");
            continue;
        }
        assert_eq!((status, param(&answer).0), (400, expected), "{body}: {answer}");
        assert!(param(&answer).1.contains("token"), "{answer}");
    }
}

#[tokio::test]
async fn an_end_of_sequence_that_the_model_lacks_never_reaches_it() {
    let mut server = TestServer::driven().await;
    let request = server.connect("/v1/completions", &json!({"prompt": [1], "max_tokens": 1}));
    assert_eq!(server.submitted().await.spec.stop_ids[..], [EOS]);
    server.engine.vocab_size.store(EOS as u32, Ordering::Relaxed);
    let without = server.connect("/v1/completions", &json!({"prompt": [1], "max_tokens": 1}));
    assert!(server.submitted().await.spec.stop_ids.is_empty());
    request.abort();
    without.abort();
}

#[tokio::test]
async fn only_embeddings_may_be_large() {
    let server = TestServer::start(Some("a"), |config| {
        config.max_json_bytes = 10_000;
        config.max_body_bytes = 100_000;
    })
    .await;
    let filler = "x".repeat(20_000);
    // The bytes of unknown parameters count too.
    for (route, body, flag) in [
        ("/v1/completions", json!({"prompt": "a", "x": filler}), "--max-json-bytes"),
        ("/v1/completions", json!({"prompt_embeds": rows(1), "x": filler}), "--max-json-bytes"),
        ("/v1/completions", json!({"prompt_embeds": filler.repeat(6)}), "--max-body-bytes"),
        (CHAT, json!({"messages": [], "prompt_embeds": filler}), "--max-json-bytes"),
        ("/generate", json!({"text": "a", "prompt_embeds": filler}), "--max-json-bytes"),
        ("/tokenize", json!({"prompt": filler}), "--max-json-bytes"),
    ] {
        let (status, answer) = server.post(route, body).await;
        assert_eq!((status, &answer["error"]["code"]), (413, &json!("body_too_large")), "{answer}");
        assert!(param(&answer).1.contains(flag), "{answer}");
    }
    // The body is read, and then rejected because it is not a file of embeddings.
    let (status, answer) = server.post("/v1/completions", json!({"prompt_embeds": filler})).await;
    assert_eq!((status, param(&answer).0), (400, "prompt_embeds"), "{answer}");
}

#[tokio::test]
async fn errors_show_little_of_what_was_sent() {
    let server = TestServer::scripted("a").await;
    let long = "é".repeat(400);
    let messages = json!([{"role": "user", "content": "a"}]);
    for body in [
        json!({"messages": messages, "model": long}),
        json!({"messages": messages, "model": "x".repeat(100_000)}),
        json!({"messages": messages, "max_tokens": "x".repeat(100_000)}),
        json!({"messages": messages, "max_tokens": "\u{7f}".repeat(100_000)}),
        json!({"messages": messages, "logit_bias": {"x".repeat(100_000): 1}}),
        json!({"messages": [{"role": "user", "content": [{"type": "x".repeat(200)}]}]}),
        json!({"messages": [{"role": "x".repeat(100_000), "content": "a"}]}),
    ] {
        let (status, answer) = server.post(CHAT, body).await;
        assert!(matches!(status, 400 | 404), "{status}");
        assert!(answer.to_string().len() < 2000, "{answer}");
    }
    let (status, answer) = server.get(&format!("/v1/models/{}", "m".repeat(5000))).await;
    assert!(status == 404 && answer.len() < 500, "{answer}");
    let (status, answer) = server.get(&format!("/nowhere/{}", "m".repeat(5000))).await;
    assert!(status == 404 && answer.len() < 2000, "{answer}");
}

#[tokio::test]
async fn limits_are_named_with_their_parameters() {
    let server = TestServer::scripted("a").await;
    let with = |name: &str, value: Value| json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, name: value});
    let mut deep = json!(0);
    for _ in 0..80 {
        deep = json!([deep]);
    }
    for (body, expected, part) in [
        (with("stop", json!(vec!["x"; 17])), "stop", "16"),
        (with("stop", json!("x".repeat(5000))), "stop", "4096"),
        (with("stop", json!(vec!["x".repeat(300); 16])), "stop", "4096"),
        (with("stop_token_ids", json!(vec![1; 1025])), "stop_token_ids", "1024"),
        (with("allowed_token_ids", json!(vec![1; 16_385])), "allowed_token_ids", "16384"),
        (with("allowed_token_ids", json!([])), "allowed_token_ids", "empty"),
        (with("n", json!(129)), "n", "128"),
        (with("n", json!(0)), "n", "1"),
        (with("temperature", json!(-1)), "temperature", "0"),
        (with("top_p", json!(-0.1)), "top_p", "at least 0"),
        (with("top_k", json!(-2)), "top_k", "-1"),
        (with("presence_penalty", json!(2.1)), "presence_penalty", "2"),
        (with("repetition_penalty", json!(1e-45)), "repetition_penalty", "0.001"),
        (with("repetition_penalty", json!(1e9)), "repetition_penalty", "1000"),
        (with("stream_interval", json!(0)), "stream_interval", "1"),
        (with("max_tokens", json!(0)), "max_tokens", "1"),
        (with("logit_bias", json!({"7": 101})), "logit_bias", "100"),
        (with("routing_key", json!("k".repeat(513))), "routing_key", "512"),
        (
            with("chat_template_kwargs", json!({"x": vec![0; 20_000]})),
            "chat_template_kwargs",
            "16384",
        ),
        (with("chat_template_kwargs", json!({"x": deep})), "chat_template_kwargs", "68"),
        (with("messages", json!(vec![json!({"role": "user"}); 4097])), "messages", "4096"),
    ] {
        let (status, answer) = server.post(CHAT, body).await;
        assert_eq!((status, param(&answer).0), (400, expected), "{answer}");
        assert!(param(&answer).1.contains(part), "{answer}");
    }
    let many = json!({"prompt": vec!["a"; 1025]});
    let (status, answer) = server.post("/v1/completions", many).await;
    assert_eq!((status, param(&answer).0), (400, "prompt"), "{answer}");
}
