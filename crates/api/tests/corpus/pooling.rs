//! Fields of the APIs for embeddings, scores and tokenization.

use serde_json::json;

use super::*;

fn pooling() -> Vec<Row> {
    vec![
        row("model", json!([text(1025)])),
        row("truncate_prompt_tokens", json!([5, 101, -2])),
        row("priority", json!([3])),
        row("user", json!([text(1025)])),
        row("cache_salt", json!(["s", text(257)])),
        row("more", json!([])),
    ]
}

pub(crate) fn embeddings() -> Fields {
    let first = r#""input": "once""#;
    let mut fields = pooling();
    fields.extend([
        row("input", prompts()),
        row("input", json!([list(2048, json!("a")), list(2049, json!("a"))])),
        row("encoding_format", json!(["float", "base64", text(257)])),
        row("dimensions", json!([8, 9])),
        row("normalize", json!([false])),
        row("add_special_tokens", json!([false])),
        row("task", json!(["embed", text(257)])),
    ]);
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

pub(crate) fn classify() -> Fields {
    let first = r#""input": "once""#;
    let mut fields = pooling();
    fields.extend([
        row("input", prompts()),
        row("use_activation", json!([false])),
        row("activation", json!([false])),
        row("softmax", json!([false])),
        row("add_special_tokens", json!([false])),
    ]);
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

pub(crate) fn rerank() -> Fields {
    let first = r#""query": "q", "documents": ["a", {"text": "b"}]"#;
    let mut fields = pooling();
    fields.extend([
        row("query", json!([text(5000)])),
        row("documents", json!([[{"text": 3}], [{}], [{"text": "a", "x": 1}], list(2048, json!("a")), list(2049, json!("a")), ["a", {"text": "b", "text2": ""}]])),
        row("documents.1.text", json!([])),
        row("top_n", json!([1, 9])),
        row("return_documents", json!([false])),
    ]);
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

pub(crate) fn score() -> Fields {
    let first = r#""text_1": "a", "text_2": ["b", "c"]"#;
    let mut fields = pooling();
    for name in ["text_1", "text_2", "queries", "documents", "data_1", "data_2", "query", "items"] {
        fields.push(row(name, json!([["x", "y"], list(2049, json!("a"))])));
    }
    fields.extend([row("use_activation", json!([false])), row("label_token_ids", json!([]))]);
    let mut bodies = bodies(first);
    bodies.extend([
        r#"{"queries": "a", "documents": ["b"]}"#.to_owned(),
        r#"{"data_1": "a", "data_2": ["b"]}"#.to_owned(),
        r#"{"query": "a", "items": "b"}"#.to_owned(),
    ]);
    Fields { base: parsed(first), fields, bodies }
}

pub(crate) fn tokenize() -> Fields {
    let first = r#""prompt": "once""#;
    let mut fields = vec![
        row("model", json!([text(1025)])),
        row("prompt", json!([["a", "b"], list(1025, json!("a"))])),
        row("content", json!([])),
        row("add_special_tokens", json!([false])),
        row("add_special", json!([false])),
        row("return_token_strs", json!([false])),
        row("with_pieces", json!([false])),
        row("more", json!([])),
    ];
    fields.extend(conversation());
    let mut bodies = bodies(first);
    bodies.extend([
        format!("{{{MESSAGES}}}"),
        format!(r#"{{{MESSAGES}, "add_special_tokens": true}}"#),
        format!(r#"{{{MESSAGES}, "tools": [{{"function": {{"name": "f"}}}}]}}"#),
        r#"{"content": "a"}"#.to_owned(),
    ]);
    Fields { base: parsed(first), fields, bodies }
}

pub(crate) fn detokenize() -> Fields {
    let first = r#""tokens": [1]"#;
    let fields = vec![
        row("model", json!([text(1025)])),
        row("tokens", json!([[0, 999], [1000], ids((1 << 18) + 1), ["x"], [1e12]])),
        row("with_pieces", json!([false])),
        row("more", json!([])),
    ];
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}
