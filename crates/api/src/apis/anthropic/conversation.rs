//! The messages of a request to Anthropic's API. Their blocks are converted to messages of the chat
//! template.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::content::{KnownShapes, Loose, TextOr};
use crate::error::ApiError;
use crate::images::ImageUrl;
use crate::inert::Inert;
use crate::limits::bounds::{WORD, param};
use crate::limits::{Bound, Param};
use crate::turns::{Content, Turns};

/// Some clients begin the system prompt with a line that starts like this and contains a number
/// that changes with each request. The line is removed, because it would defeat the prefix cache.
const BILLING: &str = "x-anthropic-billing-header:";

/// The roles of messages. Anthropic's API has no system messages, but some clients send them.
const ROLES: [&str; 3] = ["user", "assistant", "system"];

/// A message.
#[derive(Debug, Deserialize)]
pub(crate) struct InMessage {
    role: String,
    /// The assistant's messages may have no content.
    content: Option<TextOr<Block>>,
}

impl InMessage {
    /// True if this is a message of the assistant that ends in text, so the model is to continue
    /// it.
    pub(super) fn is_begun_answer(&self) -> bool {
        let ends_in_text = match &self.content {
            Some(TextOr::Text(_)) => true,
            Some(TextOr::List(blocks)) => blocks.last().is_some_and(|block| block.kind == "text"),
            None => false,
        };
        self.role == "assistant" && ends_in_text
    }
}

/// A block of a message: a type, and the fields of that type.
#[derive(Debug, Deserialize)]
pub(crate) struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    source: Option<Loose<Source>>,
    title: Option<String>,
    context: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Value>,
    tool_use_id: Option<String>,
    is_error: Option<bool>,
    content: Option<Loose<TextOr<Inner>>>,
    /// The signature of a thinking block, which this server generated. It is ignored.
    #[serde(default, rename = "signature")]
    _signature: Inert,
}

/// A block within a tool result or a search result.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Inner {
    /// Empty if the element has no type, as in skipped kinds of tool results.
    #[serde(default, rename = "type")]
    kind: String,
    text: Option<String>,
    source: Option<Loose<Source>>,
    title: Option<String>,
    context: Option<String>,
    content: Option<Loose<TextOr<Leaf>>>,
}

/// A block within a document, or within a search result in a tool result.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Leaf {
    #[serde(default, rename = "type")]
    kind: String,
    text: Option<String>,
}

/// The source of an image or a document: its data, its URL, or blocks.
#[derive(Debug, Deserialize)]
pub(crate) struct Source {
    #[serde(rename = "type")]
    kind: String,
    media_type: Option<String>,
    data: Option<String>,
    url: Option<String>,
    content: Option<Loose<TextOr<Leaf>>>,
}

impl KnownShapes for Source {
    const IS_OBJECT: bool = true;
    fn from_text(text: String) -> Result<Self, String> {
        Err(text)
    }
}

pub(crate) const MESSAGE: &[Param] =
    &[param("role", WORD), param("content", Bound::Content(&[BLOCK]))];

pub(crate) const BLOCK: &[Param] = &[
    param("type", WORD),
    param("text", Bound::Prompt),
    param("thinking", Bound::Prompt),
    param("source", Bound::Object(&[SOURCE_OF_BLOCK])),
    param("title", Bound::Prompt),
    param("context", Bound::Prompt),
    param("id", WORD),
    param("name", WORD),
    param("input", Bound::Tree),
    param("tool_use_id", WORD),
    param("is_error", Bound::Flag),
    param("content", Bound::Content(&[INNER])),
    param("signature", Bound::Ignored),
];

pub(crate) const INNER: &[Param] = &[
    param("type", WORD),
    param("text", Bound::Prompt),
    param("source", Bound::Object(&[SOURCE_OF_BLOCK])),
    param("title", Bound::Prompt),
    param("context", Bound::Prompt),
    param("content", Bound::Content(&[LEAF])),
];

pub(crate) const LEAF: &[Param] = &[param("type", WORD), param("text", Bound::Prompt)];

pub(crate) const SOURCE_OF_BLOCK: &[Param] = &[
    param("type", WORD),
    param("media_type", WORD),
    param("data", Bound::Url),
    param("url", Bound::Url),
    param("content", Bound::Content(&[LEAF])),
];

pub(super) fn invalid(param: &str, reason: &str) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {reason}"))
}

fn required<T>(value: Option<T>, path: &str, field: &str) -> Result<T, ApiError> {
    value.ok_or_else(|| invalid(&format!("{path}.{field}"), "required and missing"))
}

/// Reads the system prompt, without the billing lines that some clients add. Blocks that are not
/// text are skipped, and added to `ignored`.
pub(super) fn system_text(
    system: TextOr<Block>,
    ignored: &mut Vec<String>,
) -> Result<Content, ApiError> {
    let mut content = Content::default();
    let blocks = match system {
        TextOr::Text(text) => {
            content.text(unbilled(text));
            return Ok(content);
        }
        TextOr::List(blocks) => blocks,
    };
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("system[{at}]");
        if block.kind != "text" {
            ignored.push(format!("{path}.type={}", block.kind));
            continue;
        }
        let text = required(block.text, &path, "text")?;
        if !text.starts_with(BILLING) {
            content.text(text);
        }
    }
    Ok(content)
}

/// Removes the billing line from the start of a system prompt.
fn unbilled(text: String) -> String {
    if !text.starts_with(BILLING) {
        return text;
    }
    text.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned())
}

/// Adds the message at `path` to the conversation.
pub(super) fn add(
    turns: &mut Turns,
    path: &str,
    message: InMessage,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let is_known = ROLES.contains(&message.role.as_str());
    let blocks = match message.content {
        Some(TextOr::List(blocks)) => blocks,
        text if is_known => {
            let mut content = Content::default();
            match text {
                Some(TextOr::Text(text)) => content.text(text),
                // An assistant's message may be empty.
                _ if message.role == "assistant" => content.text(String::new()),
                _ => return Err(invalid(&format!("{path}.content"), "required and missing")),
            }
            turns.message(&message.role, content);
            return Ok(());
        }
        _ => Vec::new(),
    };
    match message.role.as_str() {
        "assistant" => blocks.into_iter().enumerate().try_for_each(|(at, block)| {
            said(turns, &format!("{path}.content[{at}]"), block, ignored)
        }),
        "user" | "system" => {
            let (mut content, mut results) = (Content::default(), Vec::new());
            for (at, block) in blocks.into_iter().enumerate() {
                let path = format!("{path}.content[{at}]");
                if block.kind == "tool_result" {
                    results.push((path, block));
                } else {
                    asked(turns, &mut content, &path, block, ignored)?;
                }
            }
            // Tool results directly follow their calls, and the user's text follows the results.
            for (path, block) in results {
                result(turns, &path, block, ignored)?;
            }
            if !content.is_empty() {
                turns.message(&message.role, content);
            }
            Ok(())
        }
        _ => Err(invalid(&format!("{path}.role"), "must be user or assistant")),
    }
}

/// Adds a block of the assistant's message.
fn said(
    turns: &mut Turns,
    path: &str,
    block: Block,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    match block.kind.as_str() {
        "text" => turns.said(&required(block.text, path, "text")?),
        "thinking" => turns.thought(&required(block.thinking, path, "thinking")?),
        "tool_use" => {
            let name = required(block.name, path, "name")?;
            let input = block.input.unwrap_or_else(|| json!({}));
            if !input.is_object() {
                return Err(invalid(&format!("{path}.input"), "must be an object"));
            }
            turns.called(block.id, &name, input);
        }
        // Skipped: only Anthropic's servers can decrypt this block.
        "redacted_thinking" => {}
        kind => ignored.push(format!("{path}.type={kind}")),
    }
    Ok(())
}

/// Adds a block of the user's message.
fn asked(
    turns: &mut Turns,
    content: &mut Content,
    path: &str,
    block: Block,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let Block { kind, text, source, title, context, content: inner, .. } = block;
    match kind.as_str() {
        "search_result" => {
            let blocks = required(inner, path, "content")?;
            let blocks = blocks.known().map(|blocks| match blocks {
                TextOr::Text(text) => TextOr::Text(text),
                TextOr::List(blocks) => {
                    let leaf = |Inner { kind, text, .. }: Inner| Leaf { kind, text };
                    TextOr::List(blocks.into_iter().map(leaf).collect())
                }
            });
            found(content, path, (source, title, blocks))
        }
        kind => {
            let shown = Shown { kind, text, source, title, context };
            show(turns, content, path, shown, ignored)
        }
    }
}

/// A block with content for the model, at any nesting level.
struct Shown<'a> {
    kind: &'a str,
    text: Option<String>,
    source: Option<Loose<Source>>,
    title: Option<String>,
    context: Option<String>,
}

/// Adds a text, image or document to the content.
fn show(
    turns: &mut Turns,
    content: &mut Content,
    path: &str,
    Shown { kind, text, source, title, context }: Shown<'_>,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    match kind {
        "text" => content.text(required(text, path, "text")?),
        "image" => {
            let image = source_of(source, path)?.image(path)?;
            turns.image(content, path, image)?;
        }
        "document" => {
            let source = source_of(source, path)?;
            title.into_iter().chain(context).for_each(|text| content.text(text));
            match source.kind.as_str() {
                "text" => content.text(required(source.data, path, "source.data")?),
                "content" => {
                    let path = format!("{path}.source");
                    let blocks = required(source.content, &path, "content")?.known();
                    texts(content, &path, blocks)?;
                }
                kind => {
                    return Err(ApiError::unsupported(format!("{path}.source.type={kind}")));
                }
            }
        }
        "" => return Err(invalid(&format!("{path}.type"), "required and missing")),
        kind => ignored.push(format!("{path}.type={kind}")),
    }
    Ok(())
}

/// Returns the source of the block at `path`.
fn source_of(source: Option<Loose<Source>>, path: &str) -> Result<Source, ApiError> {
    let source = required(source, path, "source")?.known();
    source.ok_or_else(|| invalid(&format!("{path}.source"), "must be an object"))
}

/// Adds a search result: its title, its source and its texts.
fn found(
    content: &mut Content,
    path: &str,
    (source, title, blocks): (Option<Loose<Source>>, Option<String>, Option<TextOr<Leaf>>),
) -> Result<(), ApiError> {
    title.into_iter().for_each(|title| content.text(title));
    if let Some(Loose::Text(source)) = source {
        content.text(source);
    }
    texts(content, path, blocks)
}

/// Adds the texts of `blocks`, which are the `content` of the block at `path`. `None`: that
/// `content` has another type.
fn texts(content: &mut Content, path: &str, blocks: Option<TextOr<Leaf>>) -> Result<(), ApiError> {
    let path = format!("{path}.content");
    match blocks {
        Some(TextOr::Text(text)) => content.text(text),
        Some(TextOr::List(blocks)) => {
            for (at, block) in blocks.into_iter().enumerate() {
                let path = format!("{path}[{at}]");
                match block.kind.as_str() {
                    "text" => content.text(required(block.text, &path, "text")?),
                    // To drop a block with content would change the meaning of the prompt.
                    kind => return Err(ApiError::unsupported(format!("{path}.type={kind}"))),
                }
            }
        }
        None => return Err(invalid(&path, "must be a string or a list of blocks")),
    }
    Ok(())
}

/// Adds the result of a tool call.
fn result(
    turns: &mut Turns,
    path: &str,
    block: Block,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let id = required(block.tool_use_id, path, "tool_use_id")?;
    let mut content = Content::default();
    if block.is_error == Some(true) {
        content.text("Error:".to_owned());
    }
    match block.content.map(Loose::known) {
        None => {}
        Some(Some(TextOr::Text(text))) => content.text(text),
        Some(Some(TextOr::List(blocks))) => {
            for (at, inner) in blocks.into_iter().enumerate() {
                let path = format!("{path}.content[{at}]");
                let Inner { kind, text, source, title, context, content: inner } = inner;
                if kind == "search_result" {
                    let blocks = required(inner, &path, "content")?.known();
                    found(&mut content, &path, (source, title, blocks))?;
                } else {
                    let shown = Shown { kind: &kind, text, source, title, context };
                    show(turns, &mut content, &path, shown, ignored)?;
                }
            }
        }
        Some(None) => {
            return Err(invalid(
                &format!("{path}.content"),
                "must be a string or a list of blocks",
            ));
        }
    }
    turns.tool(Some(id), content);
    Ok(())
}

impl Source {
    /// Converts the source to the URL of an image.
    fn image(self, path: &str) -> Result<ImageUrl, ApiError> {
        let url = match self.kind.as_str() {
            "base64" => {
                let data = required(self.data, path, "source.data")?;
                format!("data:{};base64,{data}", self.media_type.unwrap_or_default())
            }
            "url" => required(self.url, path, "source.url")?,
            kind => return Err(ApiError::unsupported(format!("{path}.source.type={kind}"))),
        };
        Ok(ImageUrl { url })
    }
}
