//! Tests of the conversion of Anthropic's requests to requests of the chat API.

use super::*;
use crate::sampling::MaxTokens;
use crate::trial;

const LIMITS: Limits = Limits { images: 2, ..trial::LIMITS };

fn validate(body: &Value) -> Result<(ValidChat, Vec<String>), ApiError> {
    let mut ignored = Vec::new();
    let request = trial::request::<MessagesRequest>(body)?;
    let chat = request.validate(&GenerationDefaults::default(), LIMITS, &mut ignored)?;
    Ok((chat, ignored))
}

fn with(more: Value) -> Value {
    trial::with(json!({"max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]}), &more)
}

#[test]
fn a_conversation_with_tools_is_that_of_the_chat_api() {
    let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}});
    let body = with(json!({
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=9f"},
            {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                {"type": "server_tool_use", "id": "t2"},
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "well?"},
                {"type": "tool_result", "tool_use_id": "t1", "is_error": true, "content": [{"type": "text", "text": "no"}, image]},
            ]},
        ],
    }));
    let (chat, ignored) = validate(&body).unwrap();
    let call = json!({"type": "function", "id": "t1", "function": {"name": "look", "arguments": {"at": 1}}});
    let text = |text: &str| json!({"type": "text", "text": text});
    let expected = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [text("what is it?"), {"type": "image"}]},
        {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": [text("Error:"), text("no"), {"type": "image"}]},
        {"role": "user", "content": "well?"},
    ]);
    assert_eq!(chat.prompt.messages, expected);
    assert_eq!(ignored, ["messages[1].content[4].type=server_tool_use"]);
    let params: Vec<&str> = chat.prompt.images.iter().map(|image| &*image.param).collect();
    assert_eq!(params, ["messages[0].content[1]", "messages[2].content[1].content[1]"]);
    assert_eq!(chat.prompt.images[0].url, "data:image/png;base64,aGk=");
    assert!(chat.prompt.add_generation_prompt);
    assert_eq!(chat.generation.max_tokens, MaxTokens::Exactly(7));
}

#[test]
fn tools_and_choices_have_the_chat_api_s_words() {
    let tool = json!({"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}});
    let search = json!({"type": "web_search_20250305", "name": "web_search"});
    let ask =
        |choice: Value| validate(&with(json!({"tools": [tool, search], "tool_choice": choice})));
    let (chat, ignored) = ask(json!({"type": "auto", "disable_parallel_tool_use": true})).unwrap();
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
    assert_eq!(chat.tools.described, [json!({"type": "function", "function": function})]);
    assert_eq!((chat.tools.parallel, ignored.len()), (false, 1));
    for (choice, demanded) in [
        (json!({"type": "any"}), true),
        (json!({"type": "tool", "name": "f"}), true),
        (json!({"type": "auto"}), false),
    ] {
        assert_eq!(ask(choice).unwrap().0.tools.demand.is_some(), demanded);
    }
    assert!(ask(json!({"type": "none"})).unwrap().0.tools.functions.is_empty());
}

#[test]
fn thinking_has_a_budget_or_is_off() {
    let of = |thinking: Value| validate(&with(json!({"thinking": thinking}))).unwrap().0;
    let on = of(json!({"type": "enabled", "budget_tokens": 5}));
    assert_eq!((on.prompt.effort.thinks, on.generation.thinking_budget), (Some(true), Some(5)));
    assert_eq!(of(json!({"type": "disabled"})).prompt.effort.thinks, Some(false));
    let effort = json!({"output_config": {"effort": "low"}});
    let (chat, _) = validate(&with(effort)).unwrap();
    assert_eq!(chat.prompt.effort.level.as_deref(), Some("low"));
    let form = json!({"output_format": {"type": "json_schema", "schema": {"type": "object"}}});
    assert!(validate(&with(form)).unwrap().0.generation.structure.is_some());
}

#[test]
fn a_begun_answer_is_gone_on_with() {
    let said = |content: Value| {
        let messages =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]);
        validate(&with(json!({"messages": messages}))).unwrap().0.prompt
    };
    assert!(said(json!("so")).continue_final_message);
    let call = json!([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]);
    assert!(said(call).add_generation_prompt);
    let billed = with(json!({"system": "x-anthropic-billing-header: a\nbe brief"}));
    assert_eq!(validate(&billed).unwrap().0.prompt.messages[0]["content"], "be brief");
}

#[test]
fn what_is_wrong_is_named_by_its_path() {
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (more, param) in [
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "root", "content": "a"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (user(json!([{"type": "text"}])), "messages[0].content[0].text"),
        (user(json!([{"type": "tool_result"}])), "messages[0].content[0].tool_use_id"),
        (user(json!([{"type": "image"}])), "messages[0].content[0].source"),
        (json!({"thinking": {"type": "x"}}), "thinking.type"),
        (json!({"tool_choice": {"type": "x"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"tools": [3]}), "tools[0]"),
        (json!({"tools": [{"name": ""}]}), "tools[0].name"),
        (json!({"output_format": {"type": "xml"}}), "output_format.type"),
        (json!({"max_tokens": -1}), "max_tokens"),
    ] {
        match validate(&with(more.clone())) {
            Err(ApiError::Invalid { param: found, .. }) => assert_eq!(found, param, "{more}"),
            other => panic!("{more}: {other:?}"),
        }
    }
    let servers = with(json!({"mcp_servers": [{"url": "x"}]}));
    assert_eq!(validate(&servers).unwrap_err(), ApiError::unsupported("mcp_servers"));
}

/// Content from the client reaches the prompt, in whichever block type it was sent.
#[test]
fn documents_and_results_of_searches_are_in_the_prompt() {
    let document = |source: Value| json!({"type": "document", "title": "Report", "context": "draft", "source": source});
    let plain = document(json!({"type": "text", "media_type": "text/plain", "data": "seven"}));
    let blocks = json!([{"type": "text", "text": "eight"}, {"type": "text", "text": "nine"}]);
    let listed = document(json!({"type": "content", "content": blocks}));
    let text = document(json!({"type": "content", "content": "ten"}));
    let search = json!({"type": "search_result", "source": "https://a.b", "title": "Found", "content": blocks});
    for (block, said) in [
        (plain, "Report\ndraft\nseven"),
        (listed, "Report\ndraft\neight\nnine"),
        (text, "Report\ndraft\nten"),
        (search, "Found\nhttps://a.b\neight\nnine"),
    ] {
        let result = json!({"type": "tool_result", "tool_use_id": "t1", "content": [block]});
        for (content, role) in [(block.clone(), "user"), (result, "tool")] {
            let body = with(json!({"messages": [{"role": "user", "content": [content]}]}));
            let (chat, ignored) = validate(&body).unwrap();
            let message = &chat.prompt.messages[0];
            assert_eq!((&message["role"], &message["content"]), (&json!(role), &json!(said)));
            assert_eq!(ignored, [""; 0], "{block}");
        }
    }
}

/// The type of a block determines its fields. Blocks of skipped types may have fields of any type.
#[test]
fn blocks_of_other_kinds_are_skipped_whatever_is_in_them() {
    for block in [
        json!({"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error", "error_code": "x"}}),
        json!({"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "e"}]}),
        json!({"type": "code_execution_tool_result", "content": {"stdout": "a", "content": []}}),
        json!({"type": "other", "source": "text", "content": 7}),
        json!({"type": "other", "source": ["x"], "content": true, "input": [1]}),
        json!({"type": "other", "content": [{"stdout": "no type"}]}),
    ] {
        for role in ["user", "assistant"] {
            let text = json!({"type": "text", "text": "a"});
            let body = with(json!({"messages": [{"role": role, "content": [text, block]}]}));
            let (chat, ignored) =
                validate(&body).unwrap_or_else(|error| panic!("{block}: {error}"));
            assert_eq!(chat.prompt.messages[0]["content"], "a");
            let kind = block["type"].as_str().unwrap();
            assert_eq!(ignored, [format!("messages[0].content[1].type={kind}")]);
        }
    }
    // The fields of a block of a supported type must have the right types.
    for (block, param) in [
        (json!({"type": "image", "source": "x"}), "source"),
        (json!({"type": "document", "source": {"type": "url", "url": "u"}}), "source.type=url"),
        (json!({"type": "tool_result", "tool_use_id": "t", "content": {"a": 1}}), "content"),
        (json!({"type": "search_result", "content": [{"type": "image"}]}), "content[0].type=image"),
    ] {
        let body = with(json!({"messages": [{"role": "user", "content": [block]}]}));
        let error = validate(&body).unwrap_err().body().error;
        assert_eq!(error.param, Some(format!("messages[0].content[0].{param}")), "{block}");
    }
}

#[test]
fn an_answer_may_be_empty() {
    for empty in [json!({"role": "assistant", "content": null}), json!({"role": "assistant"})] {
        let question = json!({"role": "user", "content": "hi"});
        let body = with(json!({"messages": [question, empty, question]}));
        let (chat, _) = validate(&body).unwrap();
        assert_eq!(chat.prompt.messages[1], json!({"role": "assistant", "content": ""}));
    }
    let body = with(json!({"messages": [{"role": "user", "content": null}]}));
    let error = validate(&body).unwrap_err().body().error;
    assert_eq!(error.param.as_deref(), Some("messages[0].content"));
}
