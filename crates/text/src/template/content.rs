//! The two forms of a message's content, and detection of the one that a template reads.

use serde_json::{Value, json};

use super::{ChatRender, ChatTemplate};

/// The form in which a template reads the content of a message: a string, or a list of parts such
/// as `{"type": "text", "text": "..."}`.
///
/// Clients may send either. To find the template's form, a short chat in each form is rendered
/// once. The output must contain the text but not the part's other fields: a template that prints
/// the whole list does not read parts. Since the output is tested and not the template's source,
/// macros, variables and loops make no difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// Reads strings only: a list of text parts is joined with line feeds.
    String,
    /// Reads lists of parts only: a string becomes one text part.
    Parts,
    /// Accepts both forms, or has rejected both short chats. Content is passed unchanged.
    Either,
}

const PROBE: &str = "forebay-probe-text";
const OTHER_FIELD: &str = "forebay-probe-field";

impl ContentFormat {
    /// Detects the form that `template` reads. Its own format must still be
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

    /// Converts `content` to this form. Parts other than plain text (an image, a null) stay
    /// unchanged.
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
    // Some templates require a system message or more turns, others refuse a system message. Any
    // chat that renders will do.
    let system = json!({"role": "system", "content": "s"});
    let chats = [json!([user]), json!([system, user])];
    chats.iter().any(|messages| {
        let rendered = template.render(&ChatRender::new(messages)).unwrap_or_default();
        rendered.contains(PROBE) && !rendered.contains(OTHER_FIELD)
    })
}
