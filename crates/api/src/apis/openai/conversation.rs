//! The messages of a chat request, and their parts.

use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::chat::{ChatPrompt, Effort};
use crate::content::TextOr;
use crate::error::ApiError;
use crate::images::{IMAGE, ImageUrl, Images};
use crate::limits::bounds::{WORD, param};
use crate::limits::{Bound, Param};
use crate::parameter::component;

/// One message of a conversation.
#[derive(Debug, Clone, serde::Deserialize, ToSchema)]
pub(crate) struct ChatMessage {
    /// `system`, `user`, `assistant`, `tool`, or another role of the chat template.
    pub role: String,
    /// A string, or a list of parts.
    #[schema(value_type = Option<String>)]
    pub content: Option<MessageContent>,
    /// The name of the speaker, for templates that use it.
    pub name: Option<String>,
    /// Reasoning of an earlier turn, for templates that use it.
    pub reasoning_content: Option<String>,
    /// The reasoning before the message, under another name.
    pub reasoning: Option<String>,
    /// The reasoning before the message, under another name.
    pub thinking: Option<String>,
    /// Tool calls of an earlier turn, for templates that use them.
    #[schema(value_type = Option<Vec<Object>>)]
    pub tool_calls: Option<Vec<Value>>,
    /// The id of the call that a `tool` message answers.
    pub tool_call_id: Option<String>,
    /// The assistant's text if it refused to answer.
    pub refusal: Option<String>,
    /// The older form of `tool_calls`: one call.
    #[schema(value_type = Option<Object>)]
    pub function_call: Option<Value>,
}

/// The content of a message.
pub(crate) type MessageContent = TextOr<ContentPart>;

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub(crate) struct ContentPart {
    /// `text`, `refusal`, or `image_url` if the model takes images.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    pub text: Option<String>,
    /// The text of a part of type `refusal`.
    pub refusal: Option<String>,
    /// The image.
    pub image_url: Option<ImageUrl>,
}

pub(crate) const MESSAGE: &[Param] = &[
    param("role", WORD),
    param("content", Bound::Content(&[PART])),
    param("name", WORD),
    param("reasoning_content", Bound::Prompt),
    param("reasoning", Bound::Prompt),
    param("thinking", Bound::Prompt),
    param("tool_calls", Bound::Tree),
    param("tool_call_id", WORD),
    param("refusal", Bound::Prompt),
    param("function_call", Bound::Tree),
];

pub(crate) const PART: &[Param] = &[
    param("type", WORD),
    param("text", Bound::Prompt),
    param("refusal", Bound::Prompt),
    param("image_url", Bound::Image(&[IMAGE])),
];

component!(ChatMessage);

/// The client's options for rendering the conversation.
#[derive(Debug, Default)]
pub(crate) struct Rendering {
    /// Whether the template appends the header of the assistant's message.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Whether the last message is left unclosed, so that the model continues it.
    pub(crate) continue_final_message: Option<bool>,
    /// Additional variables for the template.
    pub(crate) kwargs: Option<Map<String, Value>>,
    /// Descriptions of the tools.
    pub(crate) tools: Vec<Value>,
    /// The effort of the model's reasoning.
    pub(crate) effort: Effort,
    /// The largest number of images; 0 means that the model takes none.
    pub(crate) images: u32,
}

/// Checks the messages and converts them to the form that templates expect.
///
/// # Errors
/// There is no message, a part is not supported, there are too many images, or both a generation
/// prompt and a continued message are requested.
pub(crate) fn chat_prompt(
    messages: Vec<ChatMessage>,
    rendering: Rendering,
) -> Result<ChatPrompt, ApiError> {
    let Rendering {
        add_generation_prompt,
        continue_final_message,
        kwargs,
        tools,
        effort,
        images: most,
    } = rendering;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages`: at least one is needed"));
    }
    let continue_final_message = continue_final_message.unwrap_or(false);
    if continue_final_message && add_generation_prompt == Some(true) {
        return Err(ApiError::invalid(
            "continue_final_message",
            "`continue_final_message` and `add_generation_prompt` exclude each other",
        ));
    }
    let mut images = Images::new(most);
    // The index of the message with the last call in the older format, in which results do not
    // contain the id of their call.
    let mut called = None;
    let messages = messages.into_iter().enumerate().map(|(index, mut message)| {
        if message.function_call.is_some() {
            called = Some(index);
        } else if let ("function", Some(call)) = (message.role.as_str(), called) {
            "tool".clone_into(&mut message.role);
            message.tool_call_id.get_or_insert_with(|| call_id(call));
        }
        flatten(index, message, &mut images)
    });
    Ok(ChatPrompt {
        messages: Value::Array(messages.collect::<Result<_, _>>()?),
        images: images.found,
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        tools: (!tools.is_empty()).then_some(Value::Array(tools)),
        kwargs: kwargs.unwrap_or_default(),
        effort,
    })
}

/// Records the image at `path`, and returns the part that represents it in the template.
fn take(path: &str, part: ContentPart, images: &mut Images) -> Result<Value, ApiError> {
    if images.are_unseen() || part.kind != "image_url" {
        return Err(ApiError::unsupported(format!("{path}.type={}", part.kind)));
    }
    let image = part.image_url.ok_or_else(|| {
        let param = format!("{path}.image_url");
        ApiError::invalid(param.clone(), format!("`{param}`: required and missing"))
    })?;
    images.take(path.to_owned(), image)?;
    Ok(json!({"type": "image"}))
}

/// Converts the message with this index to the template's form.
fn flatten(index: usize, message: ChatMessage, images: &mut Images) -> Result<Value, ApiError> {
    let mut map = Map::new();
    map.insert("role".into(), Value::String(message.role));
    let content = match message.content {
        // The refusal replaces the content.
        None => message.refusal.map_or(Value::Null, Value::String),
        Some(MessageContent::Text(text)) => Value::String(text),
        Some(MessageContent::List(parts)) => {
            let (mut texts, mut views) = (Vec::with_capacity(parts.len()), Vec::new());
            for (part_index, part) in parts.into_iter().enumerate() {
                let path = || format!("messages[{index}].content[{part_index}]");
                let (text, field) = match part.kind.as_str() {
                    "text" => (part.text, "text"),
                    "refusal" => (part.refusal, "refusal"),
                    _ => {
                        // All earlier parts were texts.
                        views.extend(texts.drain(..).map(text_view));
                        views.push(take(&path(), part, images)?);
                        continue;
                    }
                };
                texts.push(text.ok_or_else(|| {
                    let param = format!("{}.{field}", path());
                    ApiError::invalid(param.clone(), format!("`{param}`: required and missing"))
                })?);
            }
            if views.is_empty() {
                Value::String(texts.join("\n"))
            } else {
                views.extend(texts.drain(..).map(text_view));
                Value::Array(views)
            }
        }
    };
    map.insert("content".into(), content);
    let reasoning = message.reasoning_content.or(message.reasoning).or(message.thinking);
    let strings = [
        ("name", message.name),
        ("reasoning_content", reasoning),
        ("tool_call_id", message.tool_call_id),
    ];
    for (key, value) in strings {
        if let Some(value) = value {
            map.insert(key.into(), Value::String(value));
        }
    }
    let mut calls = message.tool_calls.unwrap_or_default();
    if let Some(function) = message.function_call {
        if !function["name"].is_string() {
            let param = format!("messages[{index}].function_call.name");
            let reason = format!("`{param}`: must be a string");
            return Err(ApiError::invalid(param, reason));
        }
        calls.push(json!({"type": "function", "id": call_id(index), "function": function}));
    }
    if !calls.is_empty() {
        check_calls(index, &calls)?;
        map.insert("tool_calls".into(), Value::Array(calls));
    }
    Ok(Value::Object(map))
}

/// Creates an id for the call in the message at `index`. The older format has no ids.
fn call_id(index: usize) -> String {
    format!("call_{index}")
}

fn text_view(text: String) -> Value {
    json!({"type": "text", "text": text})
}

/// Checks the calls of the message at `index`. Without this check, templates fail on wrong calls
/// with useless error messages.
fn check_calls(index: usize, calls: &[Value]) -> Result<(), ApiError> {
    for (number, call) in calls.iter().enumerate() {
        let path = format!("messages[{index}].tool_calls[{number}]");
        let wrong = |field: &str, reason: &str| {
            let param = format!("{path}{field}");
            Err(ApiError::invalid(param.clone(), format!("`{param}`: {reason}")))
        };
        let Value::Object(fields) = call else { return wrong("", "must be an object") };
        if fields.get("id").is_some_and(|id| !id.is_string() && !id.is_null()) {
            return wrong(".id", "must be a string");
        }
        let Some(Value::Object(function)) = fields.get("function") else {
            return wrong(".function", "must be an object");
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return wrong(".function.name", "must be a string");
        }
        match function.get("arguments") {
            None | Some(Value::Null | Value::String(_) | Value::Object(_)) => {}
            Some(_) => return wrong(".function.arguments", "must be a string or an object"),
        }
    }
    Ok(())
}
