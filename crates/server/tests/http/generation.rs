//! Generated responses of all APIs.

use forebay_engine::FinishReason;
use serde_json::{Value, json};

use crate::client::events;
use crate::fake::{EOS, TestServer};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "hello wörld, 日本 and more";

fn chat(more: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn content(events: &[Value], index: u64) -> String {
    let of_choice = events.iter().filter_map(|event| event["choices"].get(0));
    of_choice
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice["delta"]["content"].as_str())
        .collect()
}

#[tokio::test]
async fn a_chat_in_one_piece() {
    let mut server = TestServer::scripted(TEXT).await;
    let length = server.encode(TEXT).len();
    let body = chat(json!({"max_tokens": length, "seed": 7, "priority": 3, "stop_token_ids": [9]}));
    let (status, answer) = server.post(CHAT, body).await;
    assert_eq!(status, 200, "{answer}");
    let request = server.submitted().await;
    assert_eq!(request.spec.stop_ids[..], [EOS, 9]);
    assert_eq!(
        (request.spec.sampling.seed, request.spec.sampling.top_p, request.priority),
        (7, 0.9, 3)
    );
    assert_eq!(request.prompt[..], server.encode("user: hi\nassistant:"));
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": TEXT, "refusal": null}));
    assert_eq!(choice["finish_reason"], "length");
    let prompt = request.prompt.len();
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": prompt, "completion_tokens": length,
               "total_tokens": prompt + length, "prompt_tokens_details": {"cached_tokens": 1}})
    );
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
}

#[tokio::test]
async fn a_chat_as_a_stream() {
    let server = TestServer::scripted(TEXT).await;
    let length = server.encode(TEXT).len();
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = chat(json!({"max_tokens": length, "stream": true, "stream_options": options}));
    let events = server.events(CHAT, body).await;
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(content(&events, 0), TEXT);
    let [.., last, usage] = &events[..] else { panic!("{events:?}") };
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], length);
    for event in &events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], events[0]["id"]);
        assert!(event["usage"].is_object());
    }
}

#[tokio::test]
async fn choices_are_requests_with_seeds_of_their_own() {
    let mut server = TestServer::scripted(TEXT).await;
    let body = chat(json!({"max_tokens": 3, "n": 3, "seed": 7, "stream": true}));
    let events = server.events(CHAT, body).await;
    let mut seeds = Vec::new();
    for index in 0..3 {
        assert_eq!(content(&events, index), content(&events, 0));
        seeds.push(server.submitted().await.spec.sampling.seed);
    }
    assert_eq!(seeds[0], 7);
    assert!(seeds[1] != seeds[2] && seeds[1] != 7 && seeds[2] != 7);
    let (_, answer) = server.post(CHAT, chat(json!({"max_tokens": 3, "n": 3}))).await;
    assert_eq!(answer["choices"].as_array().unwrap().len(), 3);
    assert_eq!(answer["usage"]["completion_tokens"], 9);
}

#[tokio::test]
async fn a_stop_string_ends_the_stream_at_once_and_never_leaks() {
    let mut server = TestServer::driven().await;
    let body = chat(json!({"stop": ["world"], "stream": true}));
    let mut pending = server.open(CHAT, body.to_string()).await;
    let id = server.submitted().await.id;
    for (index, id_of) in server.encode("hello world").into_iter().enumerate() {
        server.engine.token(id, id_of, index == 0, None);
    }
    let stream = pending.rest().await;
    let events = events(&stream);
    assert_eq!(content(&events, 0), "hello ");
    let last = &events.last().unwrap()["choices"][0];
    assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&json!("stop"), &json!("world")));
    assert_eq!(server.aborted().await, id);
}

#[tokio::test]
async fn a_held_back_beginning_of_a_stop_string_comes_out_at_the_end() {
    let server = TestServer::scripted("hello wor").await;
    let length = server.encode("hello wor").len();
    let body = chat(json!({"stop": "world", "max_tokens": length}));
    let (_, answer) = server.post(CHAT, body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "hello wor");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn stop_strings_do_not_count_before_min_tokens() {
    let server = TestServer::scripted("aXbX").await;
    let length = server.encode("aXbX").len();
    let ask = async |min_tokens: usize| {
        let more = json!({"stop": "X", "max_tokens": 2 * length, "min_tokens": min_tokens});
        server.post(CHAT, chat(more)).await.1["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(ask(0).await, "a");
    assert!(ask(length).await.as_str().unwrap().starts_with("aXbX"));
}

#[tokio::test]
async fn end_of_sequence_counts_but_has_no_text() {
    let mut server = TestServer::driven().await;
    for (include, more) in [
        (false, json!({"skip_special_tokens": false})),
        (true, json!({"skip_special_tokens": false, "include_stop_str_in_output": true})),
    ] {
        let letter = server.encode("a")[0];
        let pending = server.connect(CHAT, &chat(more));
        let id = server.submitted().await.id;
        server.engine.token(id, letter, true, None);
        server.engine.token(id, EOS, false, Some(FinishReason::Stop { token: EOS }));
        let (status, answer) = pending.await.unwrap();
        assert_eq!(status, 200);
        let choice = &answer["choices"][0];
        let text = choice["message"]["content"].as_str().unwrap();
        let eos = server.tokenizer.token_text(EOS);
        assert_eq!(text.ends_with(&eos), include, "{text}");
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(choice["stop_reason"], Value::Null);
        assert_eq!(answer["usage"]["completion_tokens"], 2);
    }
}

#[tokio::test]
async fn log_probabilities_stay_with_their_tokens() {
    let server = TestServer::scripted(TEXT).await;
    let length = server.encode(TEXT).len();
    let more = json!({"max_tokens": length, "logprobs": true, "top_logprobs": 2});
    let (_, whole) = server.post(CHAT, chat(more.clone())).await;
    let whole = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(whole.len(), length);
    assert_eq!(whole[0]["top_logprobs"].as_array().unwrap().len(), 2);
    let bytes = whole.iter().flat_map(|token| token["bytes"].as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| u8::try_from(byte.as_u64().unwrap()).unwrap()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap().trim_start(), TEXT);

    let mut more = more;
    more["stream"] = json!(true);
    let events = server.events(CHAT, chat(more)).await;
    let streamed: Vec<Value> = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, whole);
}

#[tokio::test]
async fn completions_of_several_prompts_with_echo() {
    let mut server = TestServer::scripted(TEXT).await;
    let path = "/v1/completions";
    let body = json!({"prompt": ["one", "two"], "max_tokens": 2, "n": 2, "echo": true});
    let (status, answer) = server.post(path, body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let choices = answer["choices"].as_array().unwrap();
    let indices: Vec<_> = choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let starts = ["one", "one", "two", "two"];
    for (choice, start) in choices.iter().zip(starts) {
        assert!(choice["text"].as_str().unwrap().starts_with(start));
    }
    let mut prompts = Vec::new();
    for _ in 0..4 {
        prompts.push(server.submitted().await.prompt.len() as u64);
    }
    assert_eq!(answer["usage"]["prompt_tokens"], prompts[0] + prompts[2]);

    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.events(path, streamed).await;
    for (index, choice) in choices.iter().enumerate() {
        let texts = events.iter().map(|event| &event["choices"][0]);
        let text: String = texts
            .filter(|choice| choice["index"] == index)
            .map(|choice| choice["text"].as_str().unwrap())
            .collect();
        assert_eq!(choice["text"], text);
    }
}

#[tokio::test]
async fn completions_of_tokens_with_log_probabilities() {
    let mut server = TestServer::scripted(TEXT).await;
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 4, "logprobs": 2});
    let (status, answer) = server.post("/v1/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(server.submitted().await.prompt[..], [5, 6, 7]);
    let lists = &answer["choices"][0]["logprobs"];
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[name].as_array().unwrap().len(), 4, "{name}");
    }
    assert_eq!(lists["token_logprobs"][0], -0.5);
    assert_eq!(lists["top_logprobs"][0].as_object().unwrap().len(), 3);
    // Without `max_tokens`, the legacy API generates 16 tokens.
    server.post("/v1/completions", json!({"prompt": "a"})).await;
    assert_eq!(server.submitted().await.max_tokens, 16);
}

#[tokio::test]
async fn the_native_dialect() {
    let server = TestServer::scripted(TEXT).await;
    let tokens = server.encode(TEXT);
    let length = tokens.len();
    let params = json!({"max_new_tokens": length});
    let body =
        json!({"text": "a", "sampling_params": params, "rid": "mine", "return_logprob": true});
    let (status, answer) = server.post("/generate", body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!((&answer["text"], &answer["output_ids"]), (&json!(TEXT), &json!(tokens)));
    let meta = &answer["meta_info"];
    assert_eq!(meta["id"], "mine");
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": length}));
    assert_eq!(meta["completion_tokens"], length);
    assert_eq!(meta["output_token_logprobs"][0], json!([-0.5, tokens[0], null]));

    let body = json!({"input_ids": [[5], [6, 7]], "sampling_params": params});
    let (_, answer) = server.post("/generate", body).await;
    assert_eq!(answer[1]["meta_info"]["prompt_tokens"], 2);

    let body = json!({"text": "a", "sampling_params": {"max_new_tokens": length, "stop": "world"}});
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = server.events("/generate", streamed).await;
    let mut so_far = "";
    for event in &events {
        let text = event["text"].as_str().unwrap();
        assert!(text.starts_with(so_far));
        so_far = text;
    }
    assert_eq!(so_far, TEXT);
    assert_eq!(events.last().unwrap()["meta_info"]["finish_reason"]["type"], "length");
}

#[tokio::test]
async fn tokens_and_back() {
    let server = TestServer::scripted(TEXT).await;
    let body = json!({"prompt": TEXT, "add_special_tokens": false, "return_token_strs": true});
    let (_, answer) = server.post("/tokenize", body).await;
    let tokens = server.encode(TEXT);
    assert_eq!((&answer["tokens"], &answer["count"]), (&json!(tokens), &json!(tokens.len())));
    assert_eq!(answer["max_model_len"], 64);
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), tokens.len());
    let (_, answer) = server.post("/detokenize", json!({"tokens": tokens})).await;
    assert_eq!(answer, json!({"prompt": TEXT, "text": TEXT, "content": TEXT}));
    let (_, answer) =
        server.post("/detokenize", json!({"tokens": tokens, "with_pieces": true})).await;
    let pieces: Vec<&str> =
        answer["pieces"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    // A token for one byte of a longer character has no text.
    let alone = |c: char| if c.is_ascii() { c.into() } else { "\u{fffd}".repeat(c.len_utf8()) };
    let texts: String = TEXT.chars().map(alone).collect();
    assert_eq!((pieces.len(), pieces.concat()), (tokens.len(), texts));
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let (_, answer) = server.post("/tokenize", body).await;
    assert_eq!(answer["tokens"], json!(server.encode("user: hi\nassistant:")));
}
