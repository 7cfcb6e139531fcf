//! Chat templates in Jinja, rendered like transformers renders them.

mod content;
mod generation;
mod guard;
mod json;
mod python;
mod shape;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::Arc;

use jiff::Zoned;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};

pub use content::ContentFormat;
pub(crate) use guard::{Guard, Rendered};

use crate::error::TextError;
use python::Printed;
use shape::Shape;

const NAME: &str = "chat_template";
/// Instructions that a template may run for one chat: hundreds of thousands of messages with most
/// templates, and about a second.
const FUEL: u64 = 20_000_000;
/// Macros and blocks inside each other; a tool's schema nests a few levels, of a few calls each.
const RECURSION: usize = 250;
/// Bytes that a template may print for one chat: this, and so much for each byte of the chat.
const OUTPUT: usize = 4 << 20;
const OUTPUT_A_BYTE: usize = 16;

/// The tag that transformers puts after the message to be continued. It marks the place at which
/// the rendered text has to be cut.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The names under which messages carry reasoning; templates read the first.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

type Clock = Arc<dyn Fn() -> Zoned + Send + Sync>;

/// A compiled chat template.
///
/// It renders like `transformers.apply_chat_template`, with the same filters, functions and
/// whitespace rules. Undefined names are empty, and Python's string and dictionary methods work.
/// `{% generation %}` marks are accepted and mean nothing. The text is not tokenised here.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: BTreeMap<String, String>,
    content_format: ContentFormat,
    shape: Shape,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("content_format", &self.content_format)
            .field("special_tokens", &self.special_tokens)
            .finish_non_exhaustive()
    }
}

/// The input of one rendering.
#[derive(Debug, Clone, Copy)]
pub struct ChatRender<'a> {
    /// A list of messages, each an object.
    pub messages: &'a serde_json::Value,
    /// A list of tool descriptions.
    pub tools: Option<&'a serde_json::Value>,
    /// A list of documents to answer from.
    pub documents: Option<&'a serde_json::Value>,
    /// True if the text ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// True if the text ends inside the last message, which the model continues. Not together with
    /// `add_generation_prompt`.
    pub continue_final_message: bool,
    /// More variables for the template (`enable_thinking`, ...).
    pub kwargs: Option<&'a serde_json::Map<String, serde_json::Value>>,
}

impl<'a> ChatRender<'a> {
    /// A rendering of these messages and nothing else.
    pub fn new(messages: &'a serde_json::Value) -> Self {
        Self {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: false,
            continue_final_message: false,
            kwargs: None,
        }
    }
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are more variables by name (`pad_token`, ...).
    ///
    /// # Errors
    /// [`TextError::Template`] if the source is not a template.
    pub fn new(
        source: &str,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self, TextError> {
        Self::with_clock(source, bos_token, eos_token, special_tokens, Zoned::now)
    }

    /// Compiles a template like [`ChatTemplate::new`], with `clock` as the time of `strftime_now`.
    ///
    /// # Errors
    /// [`TextError::Template`] if the source is not a template.
    pub fn with_clock(
        source: &str,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
        special_tokens: &BTreeMap<String, String>,
        clock: impl Fn() -> Zoned + Send + Sync + 'static,
    ) -> Result<Self, TextError> {
        let mut environment = python::environment().map_err(|error| template_error(&error))?;
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.add_function("raise_exception", raise_exception);
        let clock: Clock = Arc::new(clock);
        environment.add_function("strftime_now", move |format: &str| strftime(&clock(), format));
        let plain = generation::without_generation_marks(source);
        environment.add_template_owned(NAME, plain).map_err(|error| template_error(&error))?;

        let mut special_tokens = special_tokens.clone();
        let named = [("bos_token", bos_token), ("eos_token", eos_token)];
        special_tokens.extend(
            named
                .into_iter()
                .filter_map(|(name, token)| Some((name.to_owned(), token?.to_owned()))),
        );
        let mut template = Self {
            environment,
            source: source.to_owned(),
            special_tokens,
            content_format: ContentFormat::Either,
            shape: Shape::ANY,
        };
        template.content_format = ContentFormat::of(&template);
        template.shape = Shape::of(&template);
        Ok(template)
    }

    /// The form in which the template reads a message's content.
    pub fn content_format(&self) -> ContentFormat {
        self.content_format
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// True if the template shows descriptions of tools.
    pub fn takes_tools(&self) -> bool {
        self.shape.tools()
    }

    /// The changes to messages that the template needs, in words.
    pub fn adaptations(&self) -> Vec<&'static str> {
        self.shape.notes()
    }

    /// The text of a chat.
    ///
    /// Message contents are first brought into the form that the template reads, see
    /// [`ContentFormat`].
    ///
    /// # Errors
    /// [`TextError::Template`]: the template refuses the messages or fails on them, or the last
    /// message is to be continued and cannot be. [`TextError::Costly`]: the template runs for too
    /// long, prints too much or calls itself too often.
    pub fn render(&self, request: &ChatRender<'_>) -> Result<String, TextError> {
        if request.continue_final_message && request.add_generation_prompt {
            return Err(refused(
                "continue_final_message and add_generation_prompt are not compatible",
            ));
        }
        let mut messages = self.prepared_messages(request.messages)?;
        if !request.continue_final_message {
            return self.render_messages(&messages, request);
        }
        let final_text = self.tag_final_message(&mut messages)?;
        let rendered = self.render_messages(&messages, request)?;
        cut_at_tag(rendered, &final_text)
    }

    fn prepared_messages(
        &self,
        messages: &serde_json::Value,
    ) -> Result<Vec<serde_json::Value>, TextError> {
        let Some(messages) = messages.as_array() else {
            return Err(refused("messages must be a list"));
        };
        let mut prepared = Vec::with_capacity(messages.len());
        for message in messages {
            let Some(message) = message.as_object() else {
                return Err(refused("every message must be an object"));
            };
            let mut message = with_reasoning_names(message);
            if let Some(content) = message.get_mut("content") {
                self.content_format.convert(content);
            }
            prepared.push(serde_json::Value::Object(message));
        }
        self.shape.adapt(&mut prepared);
        Ok(prepared)
    }

    /// Appends the tag to the last message's text and returns that text.
    fn tag_final_message(&self, messages: &mut [serde_json::Value]) -> Result<String, TextError> {
        let content = messages.last_mut().and_then(|message| message.get_mut("content"));
        let text = match content {
            Some(serde_json::Value::String(text)) => Some(text),
            Some(serde_json::Value::Array(parts)) => {
                parts.iter_mut().rev().find_map(|part| match part.get_mut("text") {
                    Some(serde_json::Value::String(text)) => Some(text),
                    _ => None,
                })
            }
            _ => None,
        };
        let Some(text) = text.filter(|_| self.source.contains("content")) else {
            return Err(refused(
                "continue_final_message is set but the final message has no text to continue",
            ));
        };
        let before = text.clone();
        text.push_str(CONTINUE_TAG);
        Ok(before)
    }

    /// Renders messages as they are.
    fn render_messages(
        &self,
        messages: &[serde_json::Value],
        request: &ChatRender<'_>,
    ) -> Result<String, TextError> {
        let special =
            self.special_tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token)));
        let kwargs = request.kwargs.into_iter().flatten();
        let kwargs = kwargs.map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let fixed = [
            ("messages", Value::from(Serde(messages))),
            ("tools", Value::from(Serde(request.tools))),
            ("documents", Value::from(Serde(request.documents))),
            ("add_generation_prompt", Value::from(request.add_generation_prompt)),
        ];
        // A later name replaces an earlier one: a caller's variable replaces a special token, and
        // nothing replaces the chat itself.
        let context = Value::from_pairs(special.chain(kwargs).chain(fixed));
        let template =
            self.environment.get_template(NAME).map_err(|error| template_error(&error))?;
        let most = OUTPUT + OUTPUT_A_BYTE * chat_bytes(messages, request);
        let printed = Printed::limited(most);
        let mut out = Limited { bytes: Vec::new(), most };
        let rendered = template.render_captured_to(context, &mut out);
        drop(printed);
        rendered.map_err(|error| template_error(&error))?;
        String::from_utf8(out.bytes).map_err(|error| TextError::Template(error.to_string()))
    }
}

/// The output of a template, up to a limit.
struct Limited {
    bytes: Vec<u8>,
    most: usize,
}

impl io::Write for Limited {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + text.len() > self.most {
            return Err(io::Error::other(TooMuch));
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A template printed more than it may.
#[derive(Debug, thiserror::Error)]
#[error("it prints more than {OUTPUT} bytes and {OUTPUT_A_BYTE} for each byte of the chat")]
struct TooMuch;

/// Bytes of a chat's strings.
fn chat_bytes(messages: &[serde_json::Value], request: &ChatRender<'_>) -> usize {
    let given = [request.tools, request.documents].into_iter().flatten();
    let kwargs = request.kwargs.into_iter().flat_map(serde_json::Map::values);
    messages.iter().chain(given).chain(kwargs).map(text_bytes).sum()
}

/// Bytes of all strings in `value`, names not counted.
pub(crate) fn text_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value::{Array, Bool, Null, Number, Object, String};
    match value {
        String(text) => text.len(),
        Array(values) => values.iter().map(text_bytes).sum(),
        Object(fields) => fields.values().map(text_bytes).sum(),
        Null | Bool(_) | Number(_) => 0,
    }
}

/// The message with its reasoning under the names that templates read, as transformers does:
/// `reasoning_content`, and `thinking` if there is none.
fn with_reasoning_names(
    message: &serde_json::Map<String, serde_json::Value>,
) -> serde_json::Map<String, serde_json::Value> {
    let reasoning = REASONING_FIELDS
        .iter()
        .find_map(|field| message.get(*field).filter(|value| !value.is_null()));
    let Some(reasoning) = reasoning else { return message.clone() };
    let mut named = serde_json::Map::with_capacity(message.len() + 2);
    named.insert("thinking".to_owned(), reasoning.clone());
    named.extend(message.iter().map(|(name, value)| (name.clone(), value.clone())));
    named.insert("reasoning_content".to_owned(), reasoning.clone());
    named
}

/// Cuts the rendered text right after the message to be continued.
fn cut_at_tag(mut rendered: String, final_text: &str) -> Result<String, TextError> {
    let at = rendered.rfind(CONTINUE_TAG.trim_end());
    let Some(at) = at.filter(|_| rendered.contains(final_text.trim())) else {
        return Err(refused(
            "continue_final_message is set but the chat template does not show the final message as it is",
        ));
    };
    let keeps_spaces = rendered[at..].starts_with(CONTINUE_TAG);
    rendered.truncate(at);
    if !keeps_spaces {
        // The template trimmed the message, so what it would have trimmed before the tag goes too.
        rendered.truncate(rendered.trim_end().len());
    }
    Ok(rendered)
}

/// A template's own refusal: the message alone is for the client.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// An error of the writer hides its cause from `source`.
fn is_too_much(cause: &(dyn std::error::Error + 'static)) -> bool {
    let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    inner.is_some_and(|inner| inner.is::<TooMuch>())
}

fn strftime(now: &Zoned, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

fn refused(why: &str) -> TextError {
    TextError::Template(why.to_owned())
}

fn template_error(error: &Error) -> TextError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(raised) = cause.downcast_ref::<Raised>() {
            return TextError::Template(raised.0.clone());
        }
        if cause.downcast_ref::<TooMuch>().is_some() || is_too_much(cause) {
            return TextError::Costly(TooMuch.to_string());
        }
        match cause.downcast_ref::<Error>() {
            Some(error) if error.kind() == ErrorKind::OutOfFuel => {
                return TextError::Costly(format!("it runs for more than {FUEL} instructions"));
            }
            Some(error) if error.detail() == Some("recursion limit exceeded") => {
                return TextError::Costly(format!("it nests deeper than {RECURSION} calls"));
            }
            _ => source = cause.source(),
        }
    }
    let mut text = error.to_string();
    if let Some(cause) = std::error::Error::source(error) {
        text = format!("{text}: {cause}");
    }
    TextError::Template(text)
}

/// Text for a filter: a string, or Python's `str` of another value.
pub(crate) fn soft_string(value: &Value) -> Cow<'_, str> {
    match value.as_str() {
        Some(text) => Cow::Borrowed(text),
        None => Cow::Owned(python::str(value)),
    }
}
