//! Writes tools into chats for templates that do not support tools: a system message lists the
//! tools, and calls and results become text.

use serde_json::{Map, Value, json};

use super::history::{self, has_calls};

/// The text before the tool descriptions.
const BEFORE: &str = "You can call functions. These are their descriptions, one on each line:";
/// The text after the tool descriptions. Calls have the form of the dialect `generic`.
const BEHIND: &str = "To call a function, answer with its name and its arguments as a JSON object \
                      between two marks, and with nothing else:
<tool_call>
{\"name\": \"NAME\", \"arguments\": {\"ARGUMENT\": \"VALUE\"}}
</tool_call>
If no function helps, answer without marks.";

/// Writes tools, calls and results into the content of the messages.
pub(super) fn write(messages: &[Value], tools: Option<&[Value]>) -> Vec<Value> {
    let mut written: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    let mut results = false;
    for message in messages {
        let Some(message) = message.as_object() else {
            written.push(message.clone());
            continue;
        };
        let mut message = message.clone();
        history::normalise(&mut message);
        let is_result = message.get("role").and_then(Value::as_str) == Some("tool");
        if is_result {
            let content =
                around("<tool_response>\n", message.remove("content"), "\n</tool_response>");
            match written.last_mut().filter(|_| results) {
                // Consecutive results become one message.
                Some(last) => last["content"] = joined(last["content"].take(), "\n", content),
                None => written.push(json!({"role": "user", "content": content})),
            }
        } else {
            if has_calls(&message) {
                write_calls(&mut message);
            }
            written.push(Value::Object(message));
        }
        results = is_result;
    }
    if let Some(tools) = tools {
        describe(&mut written, tools);
    }
    written
}

/// Writes the tool descriptions into the first system message, or into a new one.
fn describe(messages: &mut Vec<Value>, tools: &[Value]) {
    let tools: Vec<String> = tools.iter().map(Value::to_string).collect();
    let text = format!("{BEFORE}\n{}\n\n{BEHIND}", tools.join("\n"));
    let is_system =
        |message: &Value| matches!(message["role"].as_str(), Some("system" | "developer"));
    match messages.first_mut().filter(|message| is_system(message)) {
        Some(system) => system["content"] = joined(system["content"].take(), "\n\n", text.into()),
        None => messages.insert(0, json!({"role": "system", "content": text})),
    }
}

/// Appends the calls of a message to its content.
fn write_calls(message: &mut Map<String, Value>) {
    let Some(Value::Array(mut calls)) = message.remove("tool_calls") else { return };
    let calls: Vec<String> = calls
        .iter_mut()
        .filter_map(Value::as_object_mut)
        .map(|call| history::with_function(call, |function| call_text(function)))
        .collect();
    let content = message.remove("content").unwrap_or_default();
    let content = joined(content, "\n", calls.join("\n").into());
    message.insert("content".to_owned(), content);
}

/// Formats a call as the dialect `generic` does.
fn call_text(function: &Map<String, Value>) -> String {
    let name = function.get("name").cloned().unwrap_or_default();
    let arguments = match function.get("arguments") {
        // Clients send arguments back as they received them.
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
        None => "{}".to_owned(),
    };
    format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
}

/// Surrounds content with two texts.
fn around(before: &str, content: Option<Value>, after: &str) -> Value {
    match content.unwrap_or_default() {
        Value::Array(mut parts) => {
            parts.insert(0, json!({"type": "text", "text": before}));
            parts.push(json!({"type": "text", "text": after}));
            Value::Array(parts)
        }
        Value::String(text) => Value::String(format!("{before}{text}{after}")),
        Value::Null => Value::String(format!("{before}{after}")),
        other => Value::String(format!("{before}{other}{after}")),
    }
}

/// Joins two contents, separated by `between` unless the first is empty.
fn joined(first: Value, between: &str, second: Value) -> Value {
    match (first, second) {
        (Value::String(first), Value::String(second)) if !first.is_empty() => {
            Value::String(format!("{first}{between}{second}"))
        }
        (Value::Null, second) => second,
        (Value::String(first), second) if first.is_empty() => second,
        (first, second) => {
            let parts = |content| match content {
                Value::Array(parts) => parts,
                text => vec![json!({"type": "text", "text": text})],
            };
            let mut all = parts(first);
            all.push(json!({"type": "text", "text": between}));
            all.extend(parts(second));
            Value::Array(all)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(arguments: Value) -> Value {
        json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}})
    }

    #[test]
    fn tools_are_listed_in_the_first_system_message() {
        let tools = [json!({"type": "function", "function": {"name": "f"}}), json!({"name": "é"})];
        let user = json!({"role": "user", "content": "u"});
        let written = write(std::slice::from_ref(&user), Some(&tools));
        assert_eq!((written.len(), &written[1]), (2, &user));
        let text = written[0]["content"].as_str().expect("text");
        assert!(text.starts_with(BEFORE) && text.ends_with(BEHIND));
        assert!(text.contains(
            "\n{\"type\":\"function\",\"function\":{\"name\":\"f\"}}\n{\"name\":\"é\"}\n"
        ));
        for role in ["system", "developer"] {
            let system = json!({"role": role, "content": "s"});
            let with = write(&[system, user.clone()], Some(&tools));
            assert_eq!((with.len(), with[0]["role"].as_str()), (2, Some(role)));
            assert_eq!(with[0]["content"], format!("s\n\n{text}"));
        }
        let system = json!({"role": "system", "content": [{"type": "text", "text": "s"}]});
        let with = write(&[system], Some(&tools));
        assert_eq!(with[0]["content"][0]["text"], "s");
        assert_eq!(with[0]["content"][2]["text"], text);
        assert_eq!(write(std::slice::from_ref(&user), None), [user]);
    }

    #[test]
    fn calls_and_results_are_text() {
        let mark = |body: &str| format!("<tool_call>\n{body}\n</tool_call>");
        let one = mark(r#"{"name": "f", "arguments": {"a":1}}"#);
        let none = mark(r#"{"name": "f", "arguments": {}}"#);
        for (content, calls, expected) in [
            (Value::Null, json!([call(json!({"a": 1}))]), one.clone()),
            (json!(""), json!([call(json!("{\"a\":1}"))]), one.clone()),
            (
                json!("I look."),
                json!([call(json!({"a": 1})), call(Value::Null)]),
                format!("I look.\n{one}\n{none}"),
            ),
            (Value::Null, json!([{"name": "f"}]), none.clone()),
        ] {
            let message = json!({"role": "assistant", "content": content, "tool_calls": calls});
            let written = write(&[message], None);
            assert_eq!(written, [json!({"role": "assistant", "content": expected})]);
        }
        let result =
            |content: Value| json!({"role": "tool", "tool_call_id": "c", "content": content});
        let shown = |text: &str| format!("<tool_response>\n{text}\n</tool_response>");
        let user = json!({"role": "user", "content": "u"});
        let written = write(&[result(json!("r")), result(Value::Null), user.clone()], None);
        let both = format!("{}\n{}", shown("r"), shown(""));
        assert_eq!(written, [json!({"role": "user", "content": both}), user]);
        let parts = json!([{"type": "text", "text": "r"}]);
        let written = write(&[result(parts)], None);
        let texts = written[0]["content"].as_array().expect("parts").iter();
        let texts: String = texts.filter_map(|part| part["text"].as_str()).collect();
        assert_eq!(texts, shown("r"));
    }
}
