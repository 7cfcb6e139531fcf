//! Detects the form of message content that a template reads, and converts content to it.

use serde_json::{Value, json};

use super::{ChatRender, ChatTemplate};

/// The form of a message's content that a template reads: a string, or a list of parts such as
/// `{"type": "text", "text": "..."}`.
///
/// Clients may send either form. To detect the template's form, a short chat in each form is
/// rendered once. The output must contain the text but not the part's other fields: a template that
/// prints the whole list does not read parts. The output is tested rather than the template's
/// source, so macros, variables and loops make no difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// The template reads only strings: a list of text parts is joined with line feeds.
    String,
    /// The template reads only lists of parts: a string becomes one text part.
    Parts,
    /// The template accepts both forms, or rejected both short chats. Content is passed unchanged.
    Either,
}

const PROBE: &str = "forebay-probe-text";
const OTHER_FIELD: &str = "forebay-probe-field";

impl ContentFormat {
    /// Detects the form that `template` reads. The template's `content_format` must still be
    /// [`ContentFormat::Either`].
    pub(super) fn of(template: &ChatTemplate) -> Self {
        let string = reads(template, &json!(PROBE));
        let parts = reads(template, &json!([{"type": "text", "text": PROBE, OTHER_FIELD: 1}]));
        match (string, parts) {
            (true, false) => Self::String,
            (false, true) => Self::Parts,
            _ => Self::Either,
        }
    }

    /// Converts `content` to this form. Content with anything but plain text (an image, a null)
    /// stays unchanged.
    pub(super) fn convert(self, content: &mut Value) {
        match (self, &*content) {
            (Self::String, Value::Array(parts)) => {
                let texts: Option<Vec<&str>> = parts.iter().map(part_text).collect();
                if let Some(texts) = texts {
                    *content = Value::String(texts.join("\n"));
                }
            }
            (Self::Parts, Value::String(text)) => {
                *content = json!([{"type": "text", "text": text}]);
            }
            _ => {}
        }
    }
}

fn part_text(part: &Value) -> Option<&str> {
    (part["type"] == "text").then(|| part["text"].as_str())?
}

/// True if a user message with this content is rendered as its text and nothing else.
fn reads(template: &ChatTemplate, content: &Value) -> bool {
    let user = json!({"role": "user", "content": content});
    // Some templates require a system message or more turns; others reject a system message. One
    // chat that renders is enough.
    let system = json!({"role": "system", "content": "s"});
    let chats = [json!([user]), json!([system, user])];
    chats.iter().any(|messages| {
        let rendered = template.render(&ChatRender::new(messages)).unwrap_or_default();
        rendered.contains(PROBE) && !rendered.contains(OTHER_FIELD)
    })
}
