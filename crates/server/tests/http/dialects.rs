//! Parameters, responses and errors that only one of the APIs has.

use std::io::Write;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use forebay_engine::{FinishReason, Output, PictureError, RequestError};
use forebay_server::PoolingTask;
use http_body_util::Full;
use hyper::Request;
use serde_json::{Value, json};

use crate::fake::{EOS, IMAGE, ModelKind, TestServer};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";
const IGNORED: &str = "x-forebay-ignored";
const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn messages(more: Value) -> Value {
    with(json!({"max_tokens": 40, "messages": [{"role": "user", "content": "hi"}]}), more)
}

/// Returns the status, the response, and the header that lists the ignored parameters.
async fn told(server: &TestServer, path: &str, body: &Value) -> (u16, Value, Option<String>) {
    let pending = server.open(path, body.to_string()).await;
    let ignored = pending.header(IGNORED).map(str::to_owned);
    let (status, body) = pending.read().await;
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null), ignored)
}

#[tokio::test]
async fn a_forced_call_of_a_loose_tool_is_made_and_what_is_not_kept_is_named() {
    let server = TestServer::scripted(CALL).await;
    let strict_params = TestServer::start(Some(CALL), |config| config.strict_params = true).await;
    let schema = |x: &Value| json!({"type": "object", "properties": {"x": x}});
    for (x, key) in [
        (json!({"not": {}}), "not"),
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (json!({"type": "string", "format": "uri-reference"}), "format"),
        (json!({"type": "string", "pattern": "^(?!a)b"}), "pattern"),
    ] {
        let chat = |strict: bool| {
            let function = json!({"name": "f", "parameters": schema(&x), "strict": strict});
            json!({
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 40,
                "tools": [
                    {"type": "function", "function": {"name": "g"}},
                    {"type": "function", "function": function},
                ],
                "tool_choice": "required",
            })
        };
        let tool = json!({"name": "f", "input_schema": schema(&x)});
        let searches = json!({"type": "web_search_20250305", "name": "w"});
        let message = messages(json!({"tools": [searches, tool], "tool_choice": {"type": "any"}}));
        let function = json!({"type": "function", "name": "f", "parameters": schema(&x)});
        let namespace = json!({"type": "namespace", "name": "n", "tools": [function]});
        let response = json!({
            "input": "hi",
            "tools": [{"type": "function", "name": "g"}, namespace],
            "tool_choice": "required",
            "max_output_tokens": 40,
        });
        for (path, body, schema) in [
            (CHAT, chat(false), "tools[1].function.parameters"),
            (MESSAGES, message, "tools[1].input_schema"),
            (RESPONSES, response, "tools[1].tools[0].parameters"),
        ] {
            let place = format!("{schema}.properties.x.{key}");
            let (status, answer, ignored) = told(&server, path, &body).await;
            assert_eq!(status, 200, "{path} {x}: {answer}");
            let ignored = ignored.expect("a header");
            assert!(ignored.split(", ").any(|name| name == place), "{path} {x}: {ignored}");
            let (status, answer, _) = told(&strict_params, path, &body).await;
            assert_eq!(status, 400, "{path} {x}: {answer}");
        }
        let (status, answer, _) = told(&server, CHAT, &chat(true)).await;
        let place = format!("tools[1].function.parameters.properties.x.{key}");
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(place)), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("`{place}`: ")) && message.len() > place.len() + 9);
    }
}

#[tokio::test]
async fn errors_of_forms_have_the_names_of_the_api() {
    let server = TestServer::scripted("a").await;
    let bad = json!({"type": "object", "properties": {"x": {"type": "string", "pattern": "a["}}});
    let endless = json!({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]});
    let format = |schema: &Value| json!({"type": "json_schema", "name": "n", "schema": schema});
    let in_chat =
        |schema: &Value| json!({"type": "json_schema", "json_schema": {"schema": schema}});
    for (schema, place) in [(&bad, "properties.x.pattern"), (&endless, "properties.x")] {
        let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
        let tool = json!({"name": "f", "input_schema": schema, "strict": true});
        for (path, body, prefix) in [
            (
                CHAT,
                with(chat.clone(), json!({"response_format": in_chat(schema)})),
                "response_format.json_schema.schema",
            ),
            (
                CHAT,
                with(chat, json!({"structured_outputs": {"json": schema}})),
                "structured_outputs.json",
            ),
            (MESSAGES, messages(json!({"output_format": format(schema)})), "output_format.schema"),
            (
                MESSAGES,
                messages(json!({"output_config": {"format": format(schema)}})),
                "output_config.format.schema",
            ),
            (MESSAGES, messages(json!({"tools": [tool]})), "tools[0].input_schema"),
            (
                RESPONSES,
                json!({"input": "hi", "text": {"format": format(schema)}}),
                "text.format.schema",
            ),
            (
                "/api/chat",
                json!({"messages": [{"role": "user", "content": "hi"}], "format": schema}),
                "format",
            ),
        ] {
            let (status, answer, _) = told(&server, path, &body).await;
            assert_eq!(status, 400, "{path}: {answer}");
            let message = match &answer["error"] {
                Value::String(message) => message.clone(),
                error => error["message"].as_str().unwrap().to_owned(),
            };
            assert!(message.starts_with(&format!("`{prefix}.{place}`: ")), "{path}: {message}");
        }
    }
    let choice = json!({"type": "tool", "name": "h"});
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let body = messages(json!({"tools": tools, "tool_choice": choice}));
    let (_, answer, _) = told(&server, MESSAGES, &body).await;
    assert_eq!(answer["error"]["message"], "`tool_choice.name`: no tool has this name");
}

#[tokio::test]
async fn anthropic_s_clients_are_told_of_calls_lengths_and_thinking() {
    let server = TestServer::scripted(CALL).await;
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    for choice in [
        json!({"type": "tool", "name": "f"}),
        json!({"type": "any", "disable_parallel_tool_use": true}),
    ] {
        let more = json!({"tools": tools, "tool_choice": choice});
        let (status, answer, _) = told(&server, MESSAGES, &messages(more.clone())).await;
        assert_eq!((status, &answer["stop_reason"]), (200, &json!("tool_use")), "{answer}");
        let more = with(more, json!({"stream": true}));
        let (_, stream) = server.open(MESSAGES, messages(more).to_string()).await.read().await;
        let stream = String::from_utf8(stream).unwrap();
        assert!(stream.contains("\"stop_reason\":\"tool_use\""), "{stream}");
    }
    for words in [70, 5000] {
        let body = messages(json!({"system": "word ".repeat(words)}));
        let (status, answer, _) = told(&server, MESSAGES, &body).await;
        let message = answer["error"]["message"].as_str().unwrap();
        let rest = message.strip_prefix("prompt is too long: ").expect(message);
        let (tokens, most) = rest.split_once(" tokens > ").expect(message);
        let most: u32 = most.strip_suffix(" maximum").expect(message).parse().unwrap();
        assert!(status == 400 && tokens.parse::<u32>().unwrap() > most, "{message}");
    }
    for (thinking, ignored) in [
        (json!({"type": "enabled", "budget_tokens": 2048}), "thinking.budget_tokens, thinking"),
        (json!({"type": "adaptive"}), "thinking"),
    ] {
        let (status, answer, header) =
            told(&server, MESSAGES, &messages(json!({"thinking": thinking}))).await;
        assert_eq!((status, header.as_deref()), (200, Some(ignored)), "{answer}");
    }
    let (status, answer, _) = told(&server, "/v1/messages/batches", &json!({})).await;
    assert_eq!(
        (status, &answer["type"], &answer["error"]["type"]),
        (404, &json!("error"), &json!("not_found_error"))
    );
}

#[tokio::test]
async fn items_that_are_named_are_in_the_prompt_or_an_error() {
    let mut server = TestServer::scripted("sure").await;
    let prompt = async |server: &mut TestServer, body: Value| {
        let (status, answer) = server.post(RESPONSES, body).await;
        assert_eq!(status, 200, "{answer}");
        let request = server.submitted().await;
        (server.tokenizer.decode(&request.prompt, false).unwrap(), answer)
    };
    let named = json!([{"type": "message", "id": "msg_mine", "role": "user", "content": "seven"}]);
    let (_, first) = prompt(&mut server, json!({"input": named, "max_output_tokens": 1})).await;
    let said = first["output"][0]["id"].as_str().expect("a message").to_owned();
    for reference in
        [json!({"type": "item_reference", "id": "msg_mine"}), json!({"id": "msg_mine"})]
    {
        let body = json!({"input": [reference, {"role": "user", "content": "two"}], "max_output_tokens": 1});
        let (text, _) = prompt(&mut server, body).await;
        assert!(text.contains("user: seven\nuser: two"), "{text}");
    }
    let body = json!({"input": [{"type": "item_reference", "id": said}, {"role": "user", "content": "x"}], "max_output_tokens": 1});
    let (text, _) = prompt(&mut server, body).await;
    assert!(text.starts_with("assistant: "), "{text}");
    for (body, code, param) in [
        (
            json!({"input": [{"type": "item_reference", "id": "msg_none"}]}),
            "item_not_found",
            "input[0].id",
        ),
        (
            json!({"input": "x", "previous_response_id": "resp_none"}),
            "response_not_found",
            "previous_response_id",
        ),
    ] {
        let (status, answer) = server.post(RESPONSES, body).await;
        let error = &answer["error"];
        assert_eq!((status, &error["code"], &error["param"]), (404, &json!(code), &json!(param)));
    }
    let (status, answer) =
        server.post("/v1/responses/input_tokens", json!({"input": "one two"})).await;
    assert!(status == 200 && answer["input_tokens"].as_u64() > Some(1), "{answer}");
    assert_eq!(answer["object"], "response.input_tokens");
}

#[tokio::test]
async fn ollama_s_clients_get_vectors_of_nothing_and_of_one_text() {
    let server = TestServer::pooling(PoolingTask::Embed, true).await;
    for input in [json!({}), json!({"input": ""}), json!({"input": []}), json!({"input": null})] {
        let (status, answer) = server.post("/api/embed", input.clone()).await;
        assert_eq!((status, &answer["embeddings"]), (200, &json!([])), "{input}");
    }
    let (status, answer) = server.post("/api/embed", json!({"input": "a"})).await;
    assert_eq!((status, answer["embeddings"].as_array().map(Vec::len)), (200, Some(1)));
    for (body, numbers) in
        [(json!({"prompt": ""}), 0), (json!({}), 0), (json!({"prompt": "a b"}), 3)]
    {
        let body = with(body, json!({"model": "tiny:latest", "options": {"num_ctx": 4}}));
        let (status, answer) = server.post("/api/embeddings", body).await;
        assert_eq!((status, answer["embedding"].as_array().map(Vec::len)), (200, Some(numbers)));
    }
    let (_, answer) = server.post("/api/embeddings", json!({"prompt": "a b", "model": "x"})).await;
    assert_eq!(
        answer["error"],
        "The model `x` does not exist. This server has `tiny`, `org/tiny`."
    );
    let (_, version) = server.get_json("/api/version").await;
    let number = |text: &str| text.split('.').map(|n| n.parse().unwrap()).collect::<Vec<u32>>();
    assert!(number(version["version"].as_str().unwrap()) >= vec![0, 6, 4], "{version}");
}

#[tokio::test]
async fn ollama_s_clients_are_told_about_the_model() {
    let server = TestServer::start(None, |_| ()).await;
    let (_, tags) = server.get_json("/api/tags").await;
    let details = json!({
        "parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"],
        "parameter_size": "134.52M", "quantization_level": "Q4_K_M",
    });
    assert_eq!(tags["models"][0]["details"], details);
    let (_, loaded) = server.get_json("/api/ps").await;
    let context = loaded["models"][1]["context_length"].as_u64().expect("a number");
    let (status, shown) = server.post("/api/show", json!({"model": "tiny:latest"})).await;
    assert_eq!((status, &shown["details"]), (200, &details));
    let expected = json!({
        "general.architecture": "llama", "general.basename": "tiny", "general.parameter_count": 134_515_008,
        "llama.block_count": 30, "llama.context_length": context, "llama.embedding_length": 576,
        "tokenizer.ggml.eos_token_id": EOS,
    });
    assert_eq!(shown["model_info"], expected);
    assert_eq!(shown["capabilities"], json!(["completion", "tools"]));
    let parameters = shown["parameters"].as_str().expect("lines");
    let lines: Vec<Vec<&str>> =
        parameters.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines, [["num_ctx", &*context.to_string()], ["top_p", "0.9"]]);
    assert!(!shown["template"].as_str().expect("a template").is_empty());
}

#[tokio::test]
async fn raw_scores_and_vectors_come_where_they_are_asked_for() {
    let server = TestServer::pooling(PoolingTask::Score, true).await;
    let score = async |path: &str, more: Value| {
        let body = with(
            json!({"query": "a", "documents": ["b"], "text_1": "a", "text_2": "b", "input": "a"}),
            more,
        );
        let wanted: &[&str] = match path {
            "/rerank" => &["query", "documents"],
            "/score" => &["text_1", "text_2"],
            _ => &["input"],
        };
        let body: serde_json::Map<_, _> = body
            .as_object()
            .unwrap()
            .iter()
            .filter(|(key, _)| wanted.contains(&key.as_str()) || key.contains("activation"))
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let (status, answer, ignored) = told(&server, path, &Value::Object(body)).await;
        assert_eq!((status, ignored), (200, None), "{answer}");
        let scores = [
            &answer["results"][0]["relevance_score"],
            &answer["data"][0]["score"],
            &answer["data"][0]["data"][0],
        ];
        scores.into_iter().find_map(Value::as_f64).expect("a score")
    };
    for path in ["/rerank", "/score", "/pooling"] {
        let raw = score(path, json!({"use_activation": false})).await;
        let squeezed = score(path, json!({"use_activation": true})).await;
        assert!((squeezed - 1.0 / (1.0 + (-raw).exp())).abs() < 1e-6, "{path}: {raw} {squeezed}");
        assert_eq!(score(path, json!({})).await, squeezed, "{path}");
        assert!(raw != squeezed);
    }
}

#[tokio::test]
async fn compressed_bodies_and_keys_of_other_clients_are_read() {
    let server = TestServer::start(Some("a"), |config| {
        config.api_keys = forebay_server::Keys::new(["secret"]);
    })
    .await;
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let gzip = |text: &str| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let ask = async |headers: &[(&str, &str)], body: Vec<u8>| {
        let mut request = Request::post("/v1/completions").header("host", "test");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        server.send(request.body(Full::new(body.into())).unwrap()).await.read().await.0
    };
    let plain = || body.clone().into_bytes();
    for key in [("authorization", "Bearer secret"), ("x-api-key", "secret"), ("api-key", "secret")]
    {
        assert_eq!(ask(&[key], plain()).await, 200, "{key:?}");
        assert_eq!(ask(&[key, ("content-encoding", "gzip")], gzip(&body)).await, 200);
        assert_eq!(ask(&[key, ("content-encoding", "gzip")], plain()).await, 400);
        assert_eq!(ask(&[key, ("content-encoding", "zstd")], plain()).await, 415);
        assert_eq!(ask(&[key], format!("\u{feff}{body}").into_bytes()).await, 200);
    }
    assert_eq!(ask(&[("api-key", "wrong")], plain()).await, 401);
}

/// An image of 40 x 40 pixels.
fn bitmap() -> String {
    let side = 40_u32;
    let bytes = side * side * 3;
    let mut file = b"BM".to_vec();
    for number in [54 + bytes, 0, 54, 40, side, side, 1 | 24 << 16, 0, bytes, 0, 0, 0, 0] {
        file.extend(number.to_le_bytes());
    }
    file.resize((54 + bytes) as usize, 77);
    format!("data:image/bmp;base64,{}", BASE64_STANDARD.encode(file))
}

#[tokio::test]
async fn an_image_that_can_not_be_decoded_is_named_by_its_place() {
    let mut server = TestServer::of_model(ModelKind::Sees, None, |_| {}).await;
    let images = json!([{"url": bitmap(), "detail": "original"}, bitmap()]);
    let body = json!({"input_ids": [IMAGE, IMAGE], "image_data": images});
    let answer = server.connect("/generate", &body);
    let id = server.submitted().await.id;
    let error = PictureError::Unreadable("the file is damaged".into());
    let finish = Some(FinishReason::Error(RequestError::Image { index: 1, error }));
    let (admission, token, pooled, prompt) = (None, None, None, None);
    server.engine.deliver(vec![Output {
        id,
        admission,
        token,
        predicted: None,
        pooled,
        prompt,
        finish,
    }]);
    let (status, answer) = answer.await.unwrap();
    let error = &answer["error"];
    assert_eq!((status, &error["param"]), (400, &json!("image_data[1]")), "{answer}");
    assert_eq!(error["message"], "`image_data[1]`: the file is damaged");
}

#[tokio::test]
async fn routes_that_are_nearly_right_are_told() {
    let server = TestServer::scripted("a").await;
    for (path, meant) in [("/chat/completions", CHAT), ("/v1/v1/messages", MESSAGES)] {
        let (status, answer) = server.post(path, json!({})).await;
        let said = answer["error"]["message"].as_str().unwrap();
        assert!(status == 404 && said.contains(&format!("Did you mean {meant}?")), "{said}");
    }
    let (_, answer) = server.post(CHAT, json!({"model": "gpt-4o", "messages": []})).await;
    let said = answer["error"]["message"].as_str().unwrap();
    assert_eq!(said, "The model `gpt-4o` does not exist. This server has `tiny`, `org/tiny`.");
    let (_, models) = server.get_json("/v1/models").await;
    let (_, model) = server.get_json("/v1/models/tiny").await;
    assert_eq!(models["data"][0], model);
    assert_eq!((&model["type"], &model["display_name"]), (&json!("model"), &json!("tiny")));
    assert!(model["created_at"].as_str().is_some_and(|time| time.ends_with('Z')), "{model}");
    assert_eq!((&models["first_id"], &models["has_more"]), (&json!("tiny"), &json!(false)));
}
