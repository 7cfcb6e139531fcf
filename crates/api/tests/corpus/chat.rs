//! Fields of the chat APIs.

use serde_json::json;

use super::*;

pub(crate) fn chat() -> Fields {
    let mut fields = openai();
    fields.extend(conversation());
    fields.extend([
        row("max_completion_tokens", json!([7])),
        row("logprobs", json!([false])),
        row("top_logprobs", json!([5, 21])),
        row("tool_choice", json!(["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, {"type": "allowed_tools", "tools": []}])),
        row("parallel_tool_calls", json!([false])),
        row("reasoning_effort", json!(["low", "none", text(257)])),
        row("enable_thinking", json!([false])),
        row("reasoning", json!([{"effort": "low", "max_tokens": 7, "enabled": true, "exclude": true}, {"max_tokens": -2}, {"effort": text(257)}, {"other": 1}])),
        row("reasoning.effort", json!([])),
        row("reasoning.max_tokens", json!([])),
        row("reasoning.enabled", json!([])),
        row("reasoning.exclude", json!([])),
        row("include_reasoning", json!([false])),
        row("separate_reasoning", json!([false])),
        row("functions", json!([])),
        row("function_call", json!(["auto", "none", "f"])),
        row("modalities", json!([["text"], ["text", "audio"], list(17, json!("text")), [text(257)]])),
        row("audio", json!([])),
        row("prediction", json!([{"type": "content", "content": "x"}, {"type": "content", "content": [{"type": "text", "text": "x"}]}, {"type": "content", "content": 1}])),
        row("web_search_options", json!([])),
        row("documents", json!([])),
        row("chat_template", json!([])),
        row("echo", json!([])),
    ]);
    let mut bodies = bodies(MESSAGES);
    bodies.extend([
        format!(r#"{{{MESSAGES}, "stream": true, "stream_options": {{"include_usage": true, "continuous_usage_stats": true}}}}"#),
        format!(r#"{{{MESSAGES}, "logprobs": true, "top_logprobs": 3}}"#),
        format!(r#"{{{MESSAGES}, "max_tokens": 5, "max_completion_tokens": 7}}"#),
        format!(r#"{{{MESSAGES}, "thinking_budget": 1, "reasoning_budget": 2}}"#),
        format!(r#"{{{MESSAGES}, "min_tokens": 9, "max_tokens": 5}}"#),
        format!(r#"{{{MESSAGES}, "regex": "a", "ebnf": "b"}}"#),
        format!(r#"{{{MESSAGES}, "add_generation_prompt": true, "continue_final_message": true}}"#),
        r#"{"messages": [{"role": "user", "role": "user"}]}"#.to_owned(),
    ]);
    Fields { base: parsed(MESSAGES), fields, bodies }
}

pub(crate) fn messages() -> Fields {
    let first = r#""max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]"#;
    let source = |source: Value| json!([{"type": "image", "source": source}]);
    let blocks = json!([
        [{"type": "text", "text": "a"}], [{"type": "text"}], [{"text": "a"}], [{"type": text(257)}],
        source(json!({"type": "base64", "media_type": "image/png", "data": "aGk="})), source(json!({"type": "url", "url": "http://a"})),
        source(json!({"type": "url"})), source(json!({"type": "file"})), source(json!({"type": "base64", "media_type": text(257)})), source(json!(3)),
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "no"}], "is_error": true}],
        [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "x": "no"}]}], [{"type": "tool_result"}],
        [{"type": "server_tool_use", "id": "t"}], [{"type": "thinking", "thinking": "t", "signature": "s"}],
        [{"type": "tool_use", "id": "t", "name": "f", "input": {"x": nested(40)}}], [{"type": "text", "text": "a", "cache_control": {"type": "e"}}],
        [{"type": "text", "text": "a", "cache_control": {}}],
    ]);
    let mut fields = own_numbers(&["temperature", "top_p", "top_k"]);
    fields.extend([
        row("model", json!([text(1025)])),
        row("messages", json!([[{"role": "root", "content": "a"}], [{"role": "user"}], list(4097, json!({"role": "user", "content": "a"}))])),
        row("messages.0.role", json!(["assistant", text(257)])),
        row("messages.0.content", blocks.clone()),
        row("messages.0.more", json!([])),
        row("system", blocks),
        row("max_tokens", json!([0, 5])),
        row("stop_sequences", json!([["a", "b"], list(17, json!("s")), text(4097)])),
        row("stream", json!([])),
        row("thinking", json!([{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, {"type": "adaptive"}, {"type": "x"}, {"budget_tokens": 5}, {"type": "enabled", "budget_tokens": -1}, {"type": "enabled", "z": 1}])),
        row("tools", json!([[{"name": "f", "description": "d", "input_schema": {"type": "object"}}], [3], [{"name": ""}], [{"type": "web_search_20250305", "name": "w"}]])),
        row("tool_choice", json!([{"type": "auto", "disable_parallel_tool_use": true}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "tool"}, {"type": "none"}, {"type": "x"}, {"type": "tool", "name": text(257)}])),
        row("output_config", json!([{"effort": "low"}, {"format": {"type": "json_schema", "schema": {"type": "object"}}}, {"effort": text(257)}, {"q": 1}])),
        row("output_format", json!([{"type": "json_schema", "schema": {"type": "object"}}, {"type": "json_schema", "schema": text((1 << 20) + 1)}, {"type": "xml"}])),
        row("cache_salt", json!(["s", text(257)])),
        row("mcp_servers", json!([])),
        row("container", json!([])),
        row("metadata", json!([])),
        row("more", json!([])),
    ]);
    Fields { base: parsed(first), fields, bodies: bodies(first) }
}

pub(crate) fn responses() -> Fields {
    let first = r#""input": "hi""#;
    let mut fields = own_numbers(&["temperature", "top_p"]);
    fields.extend([
        row("model", json!([text(1025)])),
        row("input", json!([
            [{"role": "user", "content": "a"}], [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://a", "detail": "low"}]}],
            [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}], [{"type": "function_call", "name": "f"}],
            [{"type": "function_call_output", "call_id": "c", "output": "4"}], [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}],
            [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}], [{"type": "web_search_call"}],
            [{"role": "user", "content": [{"type": "input_file"}]}], [{"role": "user", "content": [{"type": "input_text", "text": 3}]}],
            [{"role": text(257), "content": "a"}], [{"role": "user", "content": "a", "more": 1}], [{"role": "user", "content": [{"type": "input_text", "text": "a", "more": 1}]}],
            [{"type": "reasoning", "summary": "x"}], [{"type": "message", "role": "user", "call_id": text(257)}],
        ])),
        row("instructions", json!(["be brief"])),
        row("previous_response_id", json!([text(1025)])),
        row("store", json!([false])),
        row("background", json!([false])),
        row("stream", json!([])),
        row("max_output_tokens", json!([7])),
        row("tools", json!([[{"type": "function", "name": "f", "parameters": {"type": "object"}}], [{"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}], [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}], [{"type": "web_search"}], [3], [{}]])),
        row("tool_choice", json!(["auto", "none", "required", {"type": "function", "name": "f"}])),
        row("parallel_tool_calls", json!([false])),
        row("reasoning", json!([{"effort": "low", "summary": "auto"}, {"effort": "none"}, {"effort": text(257)}, {"x": 1}])),
        row("text", json!([{"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true}}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, {"format": {"type": "xml"}}, {"format": {}}, {"format": {"type": "json_schema", "schema": text((1 << 20) + 1)}}, {"verbosity": "low"}])),
        row("metadata", json!([{"a": "b"}])),
        row("include", json!([["reasoning.encrypted_content"], ["x"], list(17, json!("x")), [text(257)]])),
        row("cache_salt", json!(["s", text(257)])),
        row("conversation", json!([])),
        row("prompt", json!([])),
        row("truncation", json!(["auto"])),
    ]);
    let mut bodies = bodies(first);
    bodies.extend([
        r#"{"input": "a", "background": true, "stream": true}"#.to_owned(),
        r#"{"input": "a", "background": true, "store": false}"#.to_owned(),
    ]);
    Fields { base: parsed(first), fields, bodies }
}
