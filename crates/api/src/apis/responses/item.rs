//! The items of a conversation in the Responses API.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use super::{CUSTOM_INPUT, invalid, required};
use crate::content::{Loose, TextOr};
use crate::error::ApiError;
use crate::images::ImageUrl;
use crate::inert::Inert;
use crate::limits::bounds::{WORD, param};
use crate::limits::{Bound, Param};
use crate::turns::{Content, Turns};

/// An item of a conversation: a type, and the fields of that type. The type defaults to `message`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct Item {
    /// The kind of the item.
    #[serde(rename = "type", default = "message", deserialize_with = "kind")]
    kind: String,
    /// The id of the item, by which a later request may refer to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Loose<TextOr<ItemPart>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<Loose<TextOr<ItemPart>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<Loose<TextOr<ItemPart>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<Loose<TextOr<ItemPart>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Loose<Vec<ItemPart>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypted_content: Option<String>,
}

/// The prefix of sealed reasoning, which is not encrypted: clients only store it and send it back.
const SEAL: &str = "forebay.1.";

/// Seals reasoning: encodes it in an opaque form that clients send back.
#[must_use]
pub fn sealed(reasoning: &str) -> String {
    format!("{SEAL}{}", STANDARD.encode(reasoning))
}

/// Returns the sealed text, or `None` if another server sealed it.
fn unsealed(sealed: &str) -> Option<String> {
    let bytes = STANDARD.decode(sealed.strip_prefix(SEAL)?).ok()?;
    String::from_utf8(bytes).ok()
}

fn message() -> String {
    "message".to_owned()
}

/// Reads the type of an item. `null` means `message`.
fn kind<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(message))
}

/// A part of an item.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct ItemPart {
    /// The type of the part; may be empty, because the parts of skipped items need not have a type.
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    image_url: Option<String>,
    /// Accepted without an effect.
    #[serde(default, rename = "detail", skip_serializing)]
    _detail: Inert,
}

pub(crate) const ITEM: &[Param] = &[
    param("type", WORD),
    param("id", WORD),
    param("role", WORD),
    param("content", Bound::Content(&[ITEM_PART])),
    param("call_id", WORD),
    param("name", WORD),
    param("namespace", WORD),
    param("arguments", Bound::Prompt),
    param("input", Bound::Prompt),
    param("output", Bound::Content(&[ITEM_PART])),
    param("summary", Bound::Content(&[ITEM_PART])),
    param("encrypted_content", Bound::Prompt),
];

pub(crate) const ITEM_PART: &[Param] = &[
    param("type", WORD),
    param("text", Bound::Prompt),
    param("refusal", Bound::Prompt),
    param("image_url", Bound::Url),
    param("detail", Bound::Ignored),
];

impl Item {
    fn new(kind: &str) -> Self {
        Self {
            kind: kind.to_owned(),
            id: None,
            role: None,
            content: None,
            call_id: None,
            name: None,
            namespace: None,
            arguments: None,
            input: None,
            output: None,
            summary: None,
            encrypted_content: None,
        }
    }

    /// The approximate size of the item in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let texts = [
            &self.id,
            &self.role,
            &self.call_id,
            &self.name,
            &self.namespace,
            &self.encrypted_content,
        ];
        let texts: usize = texts.into_iter().flatten().map(String::len).sum();
        let listed = |given: &Option<Loose<TextOr<ItemPart>>>| match given {
            Some(Loose::Text(text) | Loose::Known(TextOr::Text(text))) => text.len(),
            Some(Loose::Known(TextOr::List(parts))) => parts.iter().map(ItemPart::bytes).sum(),
            Some(Loose::Other) | None => 0,
        };
        let lists = [&self.content, &self.arguments, &self.input, &self.output];
        let lists: usize = lists.into_iter().map(listed).sum();
        let summary = self.summary.as_ref().and_then(Loose::as_known).into_iter().flatten();
        size_of::<Self>() + texts + lists + summary.map(ItemPart::bytes).sum::<usize>()
    }

    /// Returns the id of the item.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// Returns the id of the stored item that this item refers to, or `None` if this item is not a
    /// reference.
    pub(super) fn reference(&self) -> Option<&str> {
        let is_bare = self.kind == "message" && self.role.is_none() && self.content.is_none();
        self.id.as_deref().filter(|_| self.kind == "item_reference" || is_bare)
    }

    /// Creates a message of the user.
    pub(super) fn said_by_user(text: String) -> Self {
        Self {
            role: Some("user".to_owned()),
            content: Some(Loose::Known(TextOr::Text(text))),
            ..Self::new("message")
        }
    }

    /// Returns the reasoning texts of the item: plain, sealed, or summarised.
    fn thoughts(&self) -> Vec<Cow<'_, str>> {
        fn texts(parts: &[ItemPart]) -> Vec<Cow<'_, str>> {
            parts.iter().map(|part| part.text.as_deref().unwrap_or_default().into()).collect()
        }
        match &self.content {
            Some(Loose::Known(TextOr::Text(text))) => return vec![text.into()],
            Some(Loose::Known(TextOr::List(parts))) if !parts.is_empty() => return texts(parts),
            _ => {}
        }
        if let Some(text) = self.encrypted_content.as_deref().and_then(unsealed) {
            return vec![text.into()];
        }
        match &self.summary {
            Some(Loose::Known(parts)) => texts(parts),
            Some(Loose::Text(text)) => vec![text.into()],
            Some(Loose::Other) | None => Vec::new(),
        }
    }

    /// Adds the item at `path` to the conversation.
    pub(super) fn add(
        &self,
        turns: &mut Turns,
        path: &str,
        ignored: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        match self.kind.as_str() {
            "message" => {
                let role = required(self.role.as_ref(), path, "role")?;
                // A message of the assistant may have no content.
                if role != "assistant" {
                    required(self.content.as_ref(), path, "content")?;
                }
                let path = format!("{path}.content");
                let content = parts(turns, self.content.as_ref(), &path, ignored)?;
                if role == "assistant" {
                    turns.said(&content.into_text());
                } else {
                    turns.message(role, content);
                }
            }
            "reasoning" => {
                let thoughts = self.thoughts();
                thoughts.iter().for_each(|text| turns.thought(text));
                if thoughts.is_empty() && self.encrypted_content.is_some() {
                    // Another server sealed the reasoning.
                    ignored.push(format!("{path}.encrypted_content"));
                }
            }
            "function_call" => {
                let name = required(self.name.as_ref(), path, "name")?;
                let name = format!("{}{name}", self.namespace.as_deref().unwrap_or_default());
                let arguments = text_of(self.arguments.as_ref(), path, "arguments")?;
                let arguments = arguments.unwrap_or("{}");
                // Templates expect the arguments as an object.
                let read = serde_json::from_str(arguments).ok().filter(Value::is_object);
                turns.called(self.call_id.clone(), &name, read.unwrap_or_else(|| json!(arguments)));
            }
            "custom_tool_call" => {
                let name = required(self.name.as_ref(), path, "name")?;
                let input = text_of(self.input.as_ref(), path, "input")?.unwrap_or_default();
                turns.called(self.call_id.clone(), name, json!({CUSTOM_INPUT: input}));
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = required(self.call_id.clone(), path, "call_id")?;
                let output = self.output.as_ref();
                let content = parts(turns, output, &format!("{path}.output"), ignored)?;
                turns.tool(Some(id), content);
            }
            kind => ignored.push(format!("{path}.type={kind}")),
        }
        Ok(())
    }
}

impl ItemPart {
    fn bytes(&self) -> usize {
        let texts = [&self.text, &self.refusal, &self.image_url];
        size_of::<Self>() + texts.into_iter().flatten().map(String::len).sum::<usize>()
    }
}

/// Returns the text in the field `name` of the item at `path`.
fn text_of<'a>(
    given: Option<&'a Loose<TextOr<ItemPart>>>,
    path: &str,
    name: &str,
) -> Result<Option<&'a str>, ApiError> {
    match given {
        None => Ok(None),
        Some(Loose::Known(TextOr::Text(text))) => Ok(Some(text)),
        Some(_) => Err(invalid(&format!("{path}.{name}"), "must be a string")),
    }
}

/// Returns the content at `path`, in the form for templates; `given` is `None` if the item has
/// none.
fn parts(
    turns: &mut Turns,
    given: Option<&Loose<TextOr<ItemPart>>>,
    path: &str,
    ignored: &mut Vec<String>,
) -> Result<Content, ApiError> {
    let mut content = Content::default();
    let list = match given {
        None => {
            content.text(String::new());
            return Ok(content);
        }
        Some(Loose::Known(TextOr::Text(text))) => {
            content.text(text.clone());
            return Ok(content);
        }
        Some(Loose::Known(TextOr::List(list))) => list,
        Some(_) => return Err(invalid(path, "must be a string or a list of parts")),
    };
    for (at, part) in list.iter().enumerate() {
        let path = format!("{path}[{at}]");
        match part.kind.as_str() {
            "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" => {
                content.text(required(part.text.clone(), &path, "text")?);
            }
            "refusal" => content.text(required(part.refusal.clone(), &path, "refusal")?),
            "input_image" => {
                let url = required(part.image_url.clone(), &path, "image_url")?;
                turns.image(&mut content, &path, ImageUrl { url })?;
            }
            // Dropping a file would change the meaning of the prompt.
            "input_file" | "input_audio" => {
                return Err(ApiError::unsupported(format!("{path}.type={}", part.kind)));
            }
            "" => return Err(invalid(&format!("{path}.type"), "required and missing")),
            kind => ignored.push(format!("{path}.type={kind}")),
        }
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::{LIMITS, request};
    use crate::{GenerationDefaults, ResponsesRequest};

    /// Returns the conversation of these items, and the ignored parameters.
    fn conversation(items: Value) -> Result<(Value, Vec<String>), ApiError> {
        let request = request::<ResponsesRequest>(&json!({"input": items}))?;
        let mut ignored = Vec::new();
        let valid = request.validate(&[], &GenerationDefaults::default(), LIMITS, &mut ignored)?;
        Ok((valid.chat.prompt.messages, ignored))
    }

    #[test]
    fn items_of_other_kinds_are_skipped_whatever_is_in_them() {
        for item in [
            json!({"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "u"}}),
            json!({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]}),
            json!({"type": "tool_search_call", "arguments": {"query": "a"}}),
            json!({"type": "web_search_call", "id": "w", "action": {"type": "search"}, "status": "completed"}),
            json!({"type": "other", "content": {"a": 1}, "summary": "x", "input": {"a": 1}, "output": 7}),
        ] {
            let kind = item["type"].as_str().unwrap().to_owned();
            let asked = json!({"role": "user", "content": "hi"});
            let (messages, ignored) = conversation(json!([asked, item])).unwrap();
            assert_eq!(messages, json!([asked]));
            assert_eq!(ignored, [format!("input[1].type={kind}")]);
        }
        for (item, param) in [
            (json!({"type": "function_call", "name": "f", "arguments": {"a": 1}}), "arguments"),
            (json!({"type": "function_call_output", "call_id": "c", "output": {"a": 1}}), "output"),
            (json!({"role": "user", "content": {"a": 1}}), "content"),
            (json!({"role": "user"}), "content"),
            (json!({"role": "user", "content": [{"text": "a"}]}), "content[0].type"),
            (
                json!({"role": "user", "content": [{"type": "input_file"}]}),
                "content[0].type=input_file",
            ),
        ] {
            let error = conversation(json!([item])).unwrap_err().body().error;
            assert_eq!(error.param, Some(format!("input[0].{param}")), "{item}");
        }
    }

    #[test]
    fn what_is_null_or_absent_is_empty() {
        for empty in
            [json!({}), json!({"content": null, "arguments": null, "output": null, "type": null})]
        {
            let with = |more: Value| crate::trial::with(empty.clone(), &more);
            let (messages, ignored) = conversation(json!([
                {"role": "user", "content": "hi"},
                with(json!({"role": "assistant"})),
                with(json!({"type": "function_call", "name": "f", "call_id": "c"})),
                with(json!({"type": "function_call_output", "call_id": "c"})),
            ]))
            .unwrap();
            let call =
                json!({"type": "function", "id": "c", "function": {"name": "f", "arguments": {}}});
            let expected = json!([
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "", "tool_call_id": "c"},
            ]);
            assert_eq!((messages, ignored), (expected, Vec::new()));
        }
    }

    #[test]
    fn reasoning_is_kept_in_each_of_its_forms() {
        let part = json!([{"type": "reasoning_text", "text": "hm"}]);
        for item in [
            json!({"content": part}),
            json!({"content": "hm", "summary": part}),
            json!({"summary": part, "content": []}),
            json!({"summary": "hm"}),
            json!({"encrypted_content": sealed("hm"), "summary": []}),
        ] {
            let item = crate::trial::with(json!({"type": "reasoning"}), &item);
            let (messages, ignored) = conversation(json!([item])).unwrap();
            assert_eq!(messages[0]["reasoning_content"], "hm", "{item}");
            assert_eq!(ignored, [""; 0]);
        }
        let sealed = json!({"type": "reasoning", "encrypted_content": "elsewhere"});
        let (_, ignored) = conversation(json!([sealed])).unwrap();
        assert_eq!(ignored, ["input[0].encrypted_content"]);
    }
}
