//! The items of a conversation.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{CUSTOM_INPUT, required};
use crate::content::TextOr;
use crate::error::ApiError;
use crate::images::ImageUrl;
use crate::limits::bounds::{WORD, param};
use crate::limits::{Bound, Param};
use crate::turns::{Content, Turns};

/// An item of a conversation: a type, and the fields of that type. A message may leave its type
/// out.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct Item {
    /// The kind of the item.
    #[serde(rename = "type", default = "message")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<TextOr<ItemPart>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    call_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output: Option<TextOr<ItemPart>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    summary: Option<Vec<ItemPart>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    encrypted_content: Option<String>,
}

/// The beginning of sealed reasoning. It is no secret: clients keep it, and do not read it.
const SEAL: &str = "forebay.1.";

/// Reasoning in a form that clients send back without reading it.
#[must_use]
pub fn sealed(reasoning: &str) -> String {
    format!("{SEAL}{}", STANDARD.encode(reasoning))
}

/// The sealed text; `None`: it was sealed elsewhere.
fn unsealed(sealed: &str) -> Option<String> {
    let bytes = STANDARD.decode(sealed.strip_prefix(SEAL)?).ok()?;
    String::from_utf8(bytes).ok()
}

fn message() -> String {
    "message".to_owned()
}

/// A part of an item.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct ItemPart {
    #[serde(rename = "type")]
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    image_url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<String>,
}

pub(crate) const ITEM: &[Param] = &[
    param("type", WORD),
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
    param("detail", WORD),
];

impl Item {
    fn new(kind: &str) -> Self {
        Self {
            kind: kind.to_owned(),
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

    /// The approximate number of bytes of the part.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let texts = [
            &self.role,
            &self.call_id,
            &self.name,
            &self.namespace,
            &self.arguments,
            &self.input,
            &self.encrypted_content,
        ];
        let texts: usize = texts.into_iter().flatten().map(String::len).sum();
        let listed = |given: &Option<TextOr<ItemPart>>| match given {
            Some(TextOr::Text(text)) => text.len(),
            Some(TextOr::List(parts)) => parts.iter().map(ItemPart::bytes).sum(),
            None => 0,
        };
        let summary: usize = self.summary.iter().flatten().map(ItemPart::bytes).sum();
        size_of::<Self>() + texts + listed(&self.content) + listed(&self.output) + summary
    }

    /// A message of the user.
    pub(super) fn said_by_user(text: String) -> Self {
        Self {
            role: Some("user".to_owned()),
            content: Some(TextOr::Text(text)),
            ..Self::new("message")
        }
    }

    /// Adds the item at `path` to the conversation for the template.
    pub(super) fn add(
        &self,
        turns: &mut Turns,
        path: &str,
        ignored: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        match self.kind.as_str() {
            "message" => {
                let role = required(self.role.as_ref(), path, "role")?;
                let given = required(self.content.as_ref(), path, "content")?;
                let content = parts(turns, given, &format!("{path}.content"), ignored)?;
                if role == "assistant" {
                    turns.said(&content.into_text());
                } else {
                    turns.message(role, content);
                }
            }
            "reasoning" => {
                let own = match &self.content {
                    Some(TextOr::List(parts)) => parts.as_slice(),
                    _ => &[],
                };
                let sealed = self.encrypted_content.as_deref().filter(|_| own.is_empty());
                if let Some(text) = sealed.and_then(unsealed) {
                    turns.thought(&text);
                    return Ok(());
                }
                let texts =
                    if own.is_empty() { self.summary.as_deref().unwrap_or(&[]) } else { own };
                for part in texts {
                    turns.thought(part.text.as_deref().unwrap_or_default());
                }
            }
            "function_call" => {
                let name = required(self.name.as_ref(), path, "name")?;
                let name = format!("{}{name}", self.namespace.as_deref().unwrap_or_default());
                let arguments = required(self.arguments.as_ref(), path, "arguments")?;
                // Templates read arguments as the object that they are.
                let read = serde_json::from_str(arguments).ok().filter(Value::is_object);
                turns.called(self.call_id.clone(), &name, read.unwrap_or_else(|| json!(arguments)));
            }
            "custom_tool_call" => {
                let name = required(self.name.as_ref(), path, "name")?;
                let input = required(self.input.as_ref(), path, "input")?;
                turns.called(self.call_id.clone(), name, json!({CUSTOM_INPUT: input}));
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = required(self.call_id.clone(), path, "call_id")?;
                let output = required(self.output.as_ref(), path, "output")?;
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

/// The content of an item, which is at `path`.
fn parts(
    turns: &mut Turns,
    given: &TextOr<ItemPart>,
    path: &str,
    ignored: &mut Vec<String>,
) -> Result<Content, ApiError> {
    let mut content = Content::default();
    let list = match given {
        TextOr::Text(text) => {
            content.text(text.clone());
            return Ok(content);
        }
        TextOr::List(list) => list,
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
                let image = ImageUrl { url, detail: part.detail.clone() };
                turns.image(&mut content, &path, image)?;
            }
            // A file is content: to leave it out would answer another question.
            "input_file" | "input_audio" => {
                return Err(ApiError::unsupported(format!("{path}.type={}", part.kind)));
            }
            kind => ignored.push(format!("{path}.type={kind}")),
        }
    }
    Ok(content)
}
