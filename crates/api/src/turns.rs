//! Converts conversations of other APIs to the messages of a chat template.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::images::{ImagePart, ImageUrl, Images};

/// Builds the messages one by one.
pub(crate) struct Turns {
    messages: Vec<Value>,
    images: Images,
}

/// The content of a message: its texts and images, in order.
#[derive(Default)]
pub(crate) struct Content {
    views: Vec<Value>,
    has_images: bool,
}

impl Content {
    pub(crate) fn text(&mut self, text: String) {
        self.views.push(json!({"type": "text", "text": text}));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.views.is_empty()
    }

    /// Joins the texts, one paragraph each.
    pub(crate) fn into_text(self) -> String {
        let texts = self.views.into_iter().filter_map(|mut view| match view["text"].take() {
            Value::String(text) => Some(text),
            _ => None,
        });
        texts.collect::<Vec<_>>().join("\n")
    }

    /// Returns a string if there are only texts, because not all templates accept lists.
    fn view(self) -> Value {
        if self.has_images {
            return Value::Array(self.views);
        }
        Value::String(self.into_text())
    }
}

impl Turns {
    /// Creates an empty conversation with at most `most` images; 0 means that the model takes none.
    pub(crate) fn new(most: u32) -> Self {
        Self { messages: Vec::new(), images: Images::new(most) }
    }

    /// Appends an image at `path` to `content`.
    ///
    /// # Errors
    /// The model takes no images, or the conversation has too many.
    pub(crate) fn image(
        &mut self,
        content: &mut Content,
        path: &str,
        image: ImageUrl,
    ) -> Result<(), ApiError> {
        if self.images.are_unseen() {
            return Err(ApiError::unsupported(format!("{path}.type=image")));
        }
        self.images.take(path.to_owned(), image)?;
        content.has_images = true;
        content.views.push(json!({"type": "image"}));
        Ok(())
    }

    /// Appends a message.
    pub(crate) fn message(&mut self, role: &str, content: Content) {
        self.messages.push(json!({"role": role, "content": content.view()}));
    }

    /// Appends the result of the tool call with id `id`.
    pub(crate) fn tool(&mut self, id: Option<String>, content: Content) {
        let mut message = json!({"role": "tool", "content": content.view()});
        if let Some(id) = id {
            message["tool_call_id"] = Value::String(id);
        }
        self.messages.push(message);
    }

    /// Returns the last message if it is the assistant's, else a new one. The assistant's message
    /// may arrive in several items.
    fn assistant(&mut self) -> &mut Map<String, Value> {
        let is_open = self.messages.last().is_some_and(|last| last["role"] == "assistant");
        if !is_open {
            self.messages.push(json!({"role": "assistant", "content": null}));
        }
        match self.messages.last_mut() {
            Some(Value::Object(fields)) => fields,
            _ => unreachable!("a message is an object"),
        }
    }

    /// Appends text to the assistant's message.
    pub(crate) fn said(&mut self, text: &str) {
        append(self.assistant(), "content", text);
    }

    /// Appends reasoning to the assistant's message.
    pub(crate) fn thought(&mut self, text: &str) {
        append(self.assistant(), "reasoning_content", text);
    }

    /// Appends a tool call to the assistant's message. `arguments` is a JSON object, or a string
    /// with JSON.
    pub(crate) fn called(&mut self, id: Option<String>, name: &str, arguments: Value) {
        let mut call =
            json!({"type": "function", "function": {"name": name, "arguments": arguments}});
        if let Some(id) = id {
            call["id"] = Value::String(id);
        }
        let calls = self.assistant().entry("tool_calls").or_insert_with(|| json!([]));
        if let Value::Array(calls) = calls {
            calls.push(call);
        }
    }

    /// Returns the messages, and their images.
    pub(crate) fn finish(self) -> (Value, Vec<ImagePart>) {
        (Value::Array(self.messages), self.images.found)
    }
}

/// Appends a paragraph to a text field of a message.
fn append(message: &mut Map<String, Value>, field: &str, text: &str) {
    match message.get_mut(field) {
        Some(Value::String(before)) => {
            before.push('\n');
            before.push_str(text);
        }
        _ => {
            message.insert(field.to_owned(), Value::String(text.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assistant_s_turn_is_told_in_pieces() {
        let mut turns = Turns::new(1);
        let mut content = Content::default();
        content.text("a".into());
        content.text("b".into());
        turns.message("user", content);
        turns.thought("hm");
        turns.said("well");
        turns.called(Some("c1".into()), "f", json!("{}"));
        turns.called(None, "g", json!({"x": 1}));
        let mut content = Content::default();
        content.text("4".into());
        turns.image(&mut content, "here", ImageUrl { url: "data:x".into() }).unwrap();
        turns.tool(Some("c1".into()), content);
        turns.said("so");
        let (messages, images) = turns.finish();
        let call = |function: Value| json!({"type": "function", "function": function});
        let mut first = call(json!({"name": "f", "arguments": "{}"}));
        first["id"] = json!("c1");
        let second = call(json!({"name": "g", "arguments": {"x": 1}}));
        let expected = json!([
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [first, second]},
            {"role": "tool", "content": [{"type": "text", "text": "4"}, {"type": "image"}], "tool_call_id": "c1"},
            {"role": "assistant", "content": "so"},
        ]);
        assert_eq!(messages, expected);
        assert_eq!(images, [ImagePart { param: "here".into(), url: "data:x".into() }]);
    }
}
