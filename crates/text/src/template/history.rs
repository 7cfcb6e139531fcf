//! Normalises message fields that clients leave out in different ways, before a chat is rendered.

use serde_json::{Map, Value, json};

/// Normalises a message: null fields are removed, calls have arguments, and a message without calls
/// has content, which may be empty.
///
/// The content of a message with calls stays null if it is null or missing. The
/// [`Shape`](super::shape::Shape) determines what the template needs there.
pub(super) fn normalise(message: &mut Map<String, Value>) {
    message.retain(|name, value| match name.as_str() {
        "tool_calls" => value.as_array().is_none_or(|calls| !calls.is_empty()) && !value.is_null(),
        _ => !value.is_null(),
    });
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(call) = call.as_object_mut() {
            call.retain(|_, value| !value.is_null());
            with_function(call, normalise_function);
        }
    }
    if !message.contains_key("content") {
        let content = if has_calls(message) { Value::Null } else { Value::String(String::new()) };
        message.insert("content".to_owned(), content);
    }
}

/// True if the message calls tools.
pub(super) fn has_calls(message: &Map<String, Value>) -> bool {
    message.contains_key("tool_calls")
}

/// Applies `change` to the function of a call. Some clients write the function's fields directly
/// into the call.
pub(super) fn with_function<R>(
    call: &mut Map<String, Value>,
    change: impl FnOnce(&mut Map<String, Value>) -> R,
) -> R {
    match call.get_mut("function") {
        Some(Value::Object(function)) => change(function),
        _ => change(call),
    }
}

/// Sets empty arguments to an empty object.
fn normalise_function(function: &mut Map<String, Value>) {
    function.retain(|_, value| !value.is_null());
    let blank = |value: &Value| value.as_str().is_some_and(|text| text.trim().is_empty());
    if function.get("arguments").is_none_or(blank) {
        function.insert("arguments".to_owned(), json!({}));
    }
}
