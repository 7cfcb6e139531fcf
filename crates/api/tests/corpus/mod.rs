//! Fields of each API, with valid values and values just beyond a limit.

mod chat;
mod pooling;

use serde_json::{Value, json};

pub(crate) use chat::{chat, messages, responses};
pub(crate) use pooling::{classify, detokenize, embeddings, rerank, score, tokenize};

/// The fields of an API.
pub(crate) struct Fields {
    /// A body without optional fields.
    pub(crate) base: Value,
    /// The paths of the fields, each with values to test.
    pub(crate) fields: Vec<(String, Vec<Value>)>,
    /// Whole bodies, as text.
    pub(crate) bodies: Vec<String>,
}

/// Values that every field is tested with.
pub(crate) fn faults() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(""),
        json!("x"),
        json!("x".repeat(65)),
        json!(-1),
        json!(0),
        json!(1),
        json!(0.5),
        json!(1e12),
        json!([]),
        json!([1]),
        json!(["x"]),
        json!([[1]]),
        json!({}),
        json!({"a": 1}),
    ]
}

fn text(bytes: usize) -> Value {
    json!("x".repeat(bytes))
}

fn list(count: usize, entry: Value) -> Value {
    json!(vec![entry; count])
}

fn ids(count: usize) -> Value {
    list(count, json!(7))
}

fn biases(count: usize) -> Value {
    (0..count).map(|id| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into()
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(json!(1), |inner, _| json!([inner]))
}

type Row = (String, Vec<Value>);

fn row(path: &str, values: Value) -> Row {
    (path.to_owned(), values.as_array().expect("a list").clone())
}

fn within(prefix: &str, rows: Vec<Row>) -> Vec<Row> {
    rows.into_iter().map(|(path, values)| (format!("{prefix}.{path}"), values)).collect()
}

/// Numeric fields that have the same name in every API.
fn numbers() -> Vec<Row> {
    vec![
        row("n", json!([1, 2, 128, 129])),
        row("temperature", json!([0, 1.5, 1e38, 1e39, -0.001])),
        row("top_p", json!([1, 0.1, 1e-30, 1.001])),
        row("top_k", json!([5, -2, 2147483647, 2147483648_u64])),
        row("min_p", json!([0.1, 1.01])),
        row("seed", json!([42, i64::MIN, u64::MAX])),
        row("presence_penalty", json!([2, -2, 2.01, -2.01])),
        row("frequency_penalty", json!([2, -2, 2.01, -2.01])),
        row("repetition_penalty", json!([1.2, 0.001, 1000, 0.0009, 1000.1])),
        row("ignore_eos", json!([false])),
        row("skip_special_tokens", json!([false])),
        row("spaces_between_special_tokens", json!([false])),
        row("stream_interval", json!([4])),
        row(
            "logit_bias",
            json!([{"5": 1.5, "3": -2}, {"1000": 1}, {"5": 101}, {"5": "x"}, {"5": null}, biases(1025), {"x".repeat(65): 1}]),
        ),
        row(
            "stop",
            json!([
                "end",
                ["a", "b"],
                ["a", ""],
                list(16, json!("s")),
                list(17, json!("s")),
                text(4096),
                text(4097),
                [text(4000), text(97)],
                ["a", 1],
                ["a", text(4097)]
            ]),
        ),
        row(
            "stop_token_ids",
            json!([[5, 2, 5], [1000], [-1], ids(1024), ids(1025), [1e12], [0.5], ["x"]]),
        ),
    ]
}

fn own_numbers(rows: &[&str]) -> Vec<Row> {
    numbers().into_iter().filter(|(name, _)| rows.contains(&&**name)).collect()
}

/// Schemas as JSON objects and as text, and texts near the size limit.
fn forms() -> Value {
    json!([{"type": "object"}, "{\"type\": \"object\"}", text(1 << 20), text((1 << 20) + 1), text(1 << 16), text((1 << 16) + 1), "\u{1}x", "\u{e9}\n"])
}

fn structures() -> Vec<Row> {
    vec![
        row("json_schema", forms()),
        row(
            "regex",
            json!(["a+", text(4096), text(1 << 16), text((1 << 16) + 1), text((1 << 20) + 1)]),
        ),
        row("ebnf", json!(["root ::= \"a\"", text(1 << 18), text((1 << 20) + 1)])),
        row("structural_tag", json!([{"format": {"type": "any_text"}}])),
    ]
}

fn openai() -> Vec<Row> {
    let mut rows = numbers();
    rows.extend(structures());
    rows.extend([
        row("model", json!(["m", text(1024), text(1025)])),
        row("max_tokens", json!([7, 4294967295_u64, 4294967296_u64])),
        row("min_tokens", json!([7])),
        row("allowed_token_ids", json!([[7, 5, 7], [1000], ids(16384), ids(16385)])),
        row("include_stop_str_in_output", json!([false])),
        row("add_special_tokens", json!([false])),
        row("priority", json!([3, -2147483648_i64, 2147483648_u64])),
        row("stream", json!([false])),
        row("stream_options", json!([{"include_usage": true}])),
        row("stream_options.include_usage", json!([true])),
        row("stream_options.more", json!([true])),
        row("routing_key", json!([text(512), text(513)])),
        row("cache_salt", json!(["s", text(256), text(257)])),
        row("routed_dp_rank", json!([1, 2])),
        row("data_parallel_rank", json!([1, 2])),
        row("return_token_ids", json!([])),
        row("return_tokens_as_token_ids", json!([])),
        row("response_format", json!([
            {"type": "text"}, {"type": "json_object"}, {"type": "xml"}, {"type": text(257)},
            {"type": "json_object", "schema": {"type": "object"}},
            {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": {"type": "object"}}},
            {"type": "json_schema", "json_schema": {"name": text(1025)}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": text((1 << 20) + 1)}},
            {"type": "json_schema", "json_schema": {"name": "n", "other": 1}},
            {"type": "structural_tag", "format": {"type": "any_text"}},
            {"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["a"]},
            {"kind": "text"},
        ])),
        row("response_format.type", json!([])),
        row("response_format.schema", json!([])),
        row("response_format.json_schema.schema", json!([])),
        row("response_format.json_schema.strict", json!([])),
        row("structured_outputs", json!([
            {"json": {"type": "object"}}, {"regex": "a+"}, {"choice": ["x", "y"]}, {"grammar": "root ::= \"a\""},
            {"json_object": true}, {"structural_tag": "{}"}, {"json": {}, "whitespace_pattern": " "},
            {"json": {}, "disable_any_whitespace": true}, {"regex": "a", "choice": ["x"]}, {"choice": list(20000, json!("x"))},
            {"regex": text((1 << 20) + 1)},
        ])),
        row("structured_outputs.json", json!([])),
        row("structured_outputs.choice", json!([])),
        row("structured_outputs.whitespace_pattern", json!([text(257)])),
        row("structured_outputs.disable_fallback", json!([])),
        row("structured_outputs.disable_additional_properties", json!([])),
        row("guided_json", forms()),
        row("guided_regex", json!(["a+", text((1 << 20) + 1)])),
        row("guided_choice", json!([["x", "y"], list(20000, json!("x")), ["x", 1]])),
        row("guided_grammar", json!(["root ::= \"a\"", text((1 << 20) + 1)])),
        row("guided_whitespace_pattern", json!([" ", text(257)])),
        row("bad_words", json!(["a", ["a", ""], list(257, json!("w")), text(4097), list(5, text(4096))])),
        row("thinking_budget", json!([5, -2, 4294967296_u64])),
        row("thinking_token_budget", json!([5, -2])),
        row("reasoning_budget", json!([5, -2])),
        row("prompt_logprobs", json!([20, 21])),
        row("verbosity", json!(["high"])),
        row("user", json!(["u"])),
        row(&"n".repeat(100), json!([1])),
    ]);
    rows.extend(
        [
            "logits_processors",
            "truncate_prompt_tokens",
            "use_beam_search",
            "lora_path",
            "stop_regex",
            "grammar",
            "custom_logit_processor",
            "kv_transfer_params",
        ]
        .map(|name| row(name, json!([]))),
    );
    rows
}

fn message(path: &str) -> Vec<Row> {
    let image = |url: Value| json!([{"type": "image_url", "image_url": url}]);
    let part = |values: Value| values;
    within(
        path,
        vec![
            row("role", json!(["assistant", text(256), text(257)])),
            row(
                "content",
                part(json!([
                    [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], [{"type": "text"}], [{"type": "audio"}],
                    [{"type": "text", "text": 3}], [{"text": "a"}], [{"type": text(257)}], [{"type": "text", "text": "a", "x": 1}],
                    image(json!("data:,a")), image(json!({"url": "http://a"})), image(json!({"url": "http://a", "detail": "low"})),
                    image(json!({"url": "http://a", "detail": "x"})), image(json!({"url": 3})), image(json!(3)), image(json!({"detail": "low"})),
                    image(json!({"url": "http://a", "y": 1})),
                    [{"type": "image_url"}], list(16385, json!({"type": "text", "text": ""})),
                ])),
            ),
            row("name", json!(["n", text(257)])),
            row("reasoning_content", json!([text(5000)])),
            row("reasoning", json!([])),
            row("thinking", json!([])),
            row(
                "tool_calls",
                json!([
                    [{"id": "c", "function": {"name": "f", "arguments": "{}"}}], [{"id": 3}], [{"function": {}}], nested(40), list(16384, json!(0)),
                ]),
            ),
            row("tool_call_id", json!(["c", text(257)])),
            row("more", json!([])),
        ],
    )
}

fn conversation() -> Vec<Row> {
    let mut rows = vec![
        row(
            "messages",
            json!([list(4096, json!({"role": "user", "content": "a"})), list(4097, json!({"role": "user", "content": "a"})), [{"content": "hi"}], [{"role": "user"}], [["user", "hi"]]]),
        ),
        row("add_generation_prompt", json!([false])),
        row("continue_final_message", json!([])),
        row(
            "chat_template_kwargs",
            json!([{"x": {"y": [1, "z"]}}, {"x": nested(30)}, {"x": nested(40)}, {"x": list(16384, json!(0))}, {"x": "y".repeat(100)}]),
        ),
        row(
            "tools",
            json!([[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], [{"type": "web_search"}], [{"type": 3}], [{"function": {"name": "a b"}}]]),
        ),
    ];
    rows.extend(message("messages.0"));
    rows
}

fn bodies(first: &str) -> Vec<String> {
    let around = |more: &str| format!("{{{first}, {more}}}");
    vec![
        String::new(),
        "3".into(),
        "null".into(),
        "\"x\"".into(),
        "{}".into(),
        format!("{{{first}"),
        format!("{{{first}}} x"),
        format!("{{{first},\n  \"x\": nope}}"),
        format!("{{{first},}}"),
        format!(" {{ {first} }} "),
        around(r#""stream": false, "stream": false"#),
        around(r#""cache_salt": "a", "cache_salt": "b""#),
        around(r#""cache_salt": 1e999"#),
        around("\n\"cache_salt\": \"\\ud800\""),
        around(r#""model": "\u0061\n""#),
        around(r#""other": 1, "other": 2, "metadata": 3, "thing": [[[1]]]"#),
        around(&format!(r#""deep": {}1{}"#, "[".repeat(300), "]".repeat(300))),
        around(&(0..40).map(|at| format!(r#""more{at}": 1"#)).collect::<Vec<_>>().join(",")),
    ]
}

const MESSAGES: &str = r#""messages": [{"role": "user", "content": "hi"}]"#;

fn parsed(first: &str) -> Value {
    serde_json::from_str(&format!("{{{first}}}")).expect("JSON")
}

fn prompts() -> Value {
    json!([
        ["a", "b"],
        [1, 2],
        [[1], [2, 3]],
        ["a", 1],
        [1, {}],
        [[1, "x"]],
        [1000],
        [[1], [1000]],
        list(1024, json!("a")),
        list(1025, json!("a")),
        ids(2000),
        list(1025, json!([1])),
        [1e12],
        [[1e12]],
        text(9000),
    ])
}

pub(crate) fn completions() -> Fields {
    let first = r#""prompt": "once""#;
    let mut fields = openai();
    fields.extend([
        row("prompt", prompts()),
        row("prompt_embeds", json!([["*"], list(1025, json!("a")), "AAAA"])),
        row("echo", json!([false])),
        row("logprobs", json!([20, 21])),
        row("best_of", json!([2, 128, 129])),
        row("suffix", json!([])),
    ]);
    let mut bodies = bodies(first);
    bodies.extend([
        format!(r#"{{{first}, "best_of": 3, "n": 2, "stream": true}}"#),
        format!(r#"{{{first}, "echo": true, "logprobs": 2, "max_tokens": 0}}"#),
        r#"{"prompt": "", "prompt_embeds": "x"}"#.to_owned(),
    ]);
    Fields { base: parsed(first), fields, bodies }
}

pub(crate) fn generate() -> Fields {
    let first = r#""text": "once""#;
    let mut params = numbers();
    params.extend(structures());
    params.extend([
        row("max_new_tokens", json!([7])),
        row("min_new_tokens", json!([7])),
        row("sampling_seed", json!([9])),
        row("no_stop_trim", json!([])),
        row("stop_regex", json!([])),
        row("custom_params", json!([])),
        row("more", json!([])),
    ]);
    let mut fields = within("sampling_params", params);
    fields.extend([
        row("text", prompts()),
        row("input_ids", prompts()),
        row("sampling_params", json!([[{"top_p": 0.5}], [{}, {}], [{"max_new_tokens": "x"}], [{"top_p": 2}], list(1025, json!({})), [{"more": 1}], [{"lora": 1, "regex": 3}]])),
        row("stream", json!([])),
        row("return_logprob", json!([])),
        row("top_logprobs_num", json!([20, 21])),
        row("return_text_in_logprobs", json!([])),
        row("logprob_start_len", json!([5, -2])),
        row("rid", json!(["r", ["r"], ["a", "b"], text(1025), list(1025, json!("r"))])),
        row("priority", json!([3])),
        row("routing_key", json!([text(513)])),
        row("lora_path", json!(["tone", 3])),
        row("cache_salt", json!(["s", text(257)])),
        row("routed_dp_rank", json!([1, 2])),
        row("data_parallel_rank", json!([1])),
        row("image_data", json!(["http://a/b", ["http://a", null, ["http://b"]], {"url": "a", "detail": "low"}, [[["a"]]], {"url": 3}, {"url": "a", "z": 1}, list(3, json!("a"))])),
        row("model", json!([])),
    ]);
    fields.extend(
        [
            "input_embeds",
            "audio_data",
            "video_data",
            "session_params",
            "token_ids_logprob",
            "return_hidden_states",
            "custom_logit_processor",
        ]
        .map(|name| row(name, json!([]))),
    );
    let mut bodies = bodies(first);
    bodies.extend([
        r#"{"input_ids": [[1], [2, 3]], "sampling_params": [{"max_new_tokens": 4}, {"seed": 9}], "rid": ["x", "y"], "return_logprob": true, "top_logprobs_num": 3, "logprob_start_len": 0}"#.to_owned(),
        r#"{"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}"#.to_owned(),
        r#"{"text": "a", "sampling_params": {"n": 1, "n": 2}}"#.to_owned(),
        r#"{"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 5}}"#.to_owned(),
        r#"{"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}"#.to_owned(),
        r#"{"text": "a", "sampling_params": {"temperature": 1e999}}"#.to_owned(),
    ]);
    Fields { base: parsed(first), fields, bodies }
}

const OLLAMA_NUMBERS: &[&str] = &[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "stop",
];

pub(crate) fn llama() -> Fields {
    let first = r#""prompt": "once""#;
    let mut fields = own_numbers(OLLAMA_NUMBERS);
    fields.extend([
        row("prompt", prompts()),
        row("n_predict", json!([7, -1, -2, 1e9 as i64 * 10])),
        row("repeat_penalty", json!([1.1, 0, 1001])),
        row("ignore_eos", json!([])),
        row("logit_bias", json!([{"5": -1}, [[5, 1.5], [7, false]], [[5]], [["x", 1]], [[5, "x"]], [[5000, 1]], [[5, 101]], list(1025, json!([5, 1])), biases(1025), nested(40)])),
        row("n_probs", json!([20, 21])),
        row("stream", json!([])),
        row("return_tokens", json!([])),
        row("cache_prompt", json!([])),
        row("cache_salt", json!(["s", text(257)])),
        row("grammar", json!([])),
        row("json_schema", json!([])),
        row("image_data", json!([])),
        row("lora", json!([])),
        row("more", json!([])),
    ]);
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

fn ollama() -> Vec<Row> {
    let mut options = own_numbers(OLLAMA_NUMBERS);
    options.extend([
        row("num_predict", json!([7, -1])),
        row("repeat_penalty", json!([1.1, 0])),
        row("num_ctx", json!([9])),
    ]);
    let mut fields = within("options", options);
    fields.extend([
        row("options", json!([{"seed": 1, "x": 2}])),
        row("model", json!(["m:latest", text(1025)])),
        row("stream", json!([false])),
        row("format", json!(["json", "", {"type": "object"}, text((1 << 20) + 1)])),
        row("think", json!(["low", text(100)])),
        row("keep_alive", json!(["0", "5m"])),
        row("more", json!([])),
    ]);
    fields
}

pub(crate) fn ollama_chat() -> Fields {
    let mut fields = ollama();
    fields.extend([
        row("messages", json!([[{"content": "a"}], list(4097, json!({"role": "user", "content": "a"}))])),
        row("messages.0.role", json!([text(257)])),
        row("messages.0.content", json!([text(5000)])),
        row("messages.0.thinking", json!([])),
        row("messages.0.images", json!(["aGk=", ["aGk=", "data:,a"], ["a", "b", "c"]])),
        row("messages.0.tool_calls", json!([[{"function": {"name": "f", "arguments": {"x": 1}}}], [{"function": {"name": "f", "arguments": 3}}], [{"function": {"name": text(257)}}], [{"id": "a"}], list(4097, json!({}))])),
        row("messages.0.tool_call_id", json!([text(257)])),
        row("messages.0.tool_name", json!([text(257)])),
        row("messages.0.more", json!([])),
        row("tools", json!([[{"type": "function", "function": {"name": "f"}}]])),
    ]);
    let mut bodies = bodies(MESSAGES);
    bodies.push(r#"{"messages": [{"role": "assistant", "thinking": "t", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"role": "tool", "tool_name": "f", "content": "4"}]}"#.to_owned());
    Fields { base: parsed(MESSAGES), fields, bodies }
}

pub(crate) fn ollama_generate() -> Fields {
    let first = r#""prompt": "once""#;
    let mut fields = ollama();
    fields.extend([
        row("prompt", json!([text(5000)])),
        row("system", json!([])),
        row("images", json!(["aGk=", ["aGk=", "data:,a"]])),
        row("raw", json!([false])),
        row("suffix", json!([])),
        row("template", json!([])),
        row("context", json!([])),
    ]);
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

pub(crate) fn ollama_embed() -> Fields {
    let first = r#""input": "once""#;
    let fields = vec![
        row("model", json!([text(1025)])),
        row("input", prompts()),
        row("truncate", json!([false])),
        row("dimensions", json!([8, 9])),
        row("options", json!([])),
        row("keep_alive", json!([])),
        row("more", json!([])),
    ];
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

pub(crate) fn ollama_embeddings() -> Fields {
    let first = r#""prompt": "once""#;
    let fields = vec![
        row("model", json!([text(1025)])),
        row("prompt", json!(["a"])),
        row("options", json!([])),
        row("keep_alive", json!([])),
        row("more", json!([])),
    ];
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

pub(crate) fn ollama_show() -> Fields {
    let first = r#""model": "m""#;
    let fields = vec![
        row("model", json!([text(1025)])),
        row("name", json!([text(1025)])),
        row("more", json!([])),
    ];
    Fields { base: parsed(first), fields, bodies: bodies(r#""name": "m""#) }
}
