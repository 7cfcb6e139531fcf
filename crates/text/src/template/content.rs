//! The two forms of a message's content, and the detection of the form that a template reads.

use serde_json::{Value, json};

use super::{ChatRender, ChatTemplate};

/// The form in which a template reads the content of a message: a string, or a list of parts such
/// as `{"type": "text", "text": "..."}`.
///
/// Clients may send either. A short chat in each form is rendered once, to find the template's
/// form. The text must come out, and without the part's other fields: a template that prints the
/// whole list does not read parts. The template's effect counts and not its text, so macros,
/// variables and loops make no difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentFormat {
    /// Reads strings only: a list of text parts is joined with line feeds.
    String,
    /// Reads lists of parts only: a string becomes one text part.
    Parts,
    /// Reads both, or refused both short chats. Content stays as it is.
    Either,
}

const PROBE: &str = "forebay-probe-text";
const OTHER_FIELD: &str = "forebay-probe-field";

impl ContentFormat {
    /// Detects the form that `template` reads, while its own format is still
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

    /// Brings `content` into this form. Parts other than plain text (an image, a null) stay as they
    /// are.
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

/// True if the text of a user's message with this content comes out, and nothing else of the
/// content.
fn reads(template: &ChatTemplate, content: &Value) -> bool {
    let user = json!({"role": "user", "content": content});
    // Some templates require a system message or more turns, some refuse one: any chat that renders
    // will do.
    let system = json!({"role": "system", "content": "s"});
    let chats = [json!([user]), json!([system, user])];
    chats.iter().any(|messages| {
        let rendered = template.render(&ChatRender::new(messages)).unwrap_or_default();
        rendered.contains(PROBE) && !rendered.contains(OTHER_FIELD)
    })
}
