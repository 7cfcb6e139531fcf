//! A compiled chat template, and the limits on rendering a chat.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use jiff::Zoned;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::Map;

use super::generation;
use super::python::{self, PrintLimit};
use crate::error::TextError;

const NAME: &str = "chat_template";
/// The number of instructions that a template may execute for one chat. This is about a second,
/// enough for hundreds of thousands of messages with most templates.
const FUEL: u64 = 20_000_000;
/// The largest depth of nested macros and blocks. A tool's schema nests a few levels, with a few
/// calls per level.
const RECURSION: usize = 250;
/// The number of bytes that a template may print for one chat, in addition to [`OUTPUT_A_BYTE`] per
/// byte of the chat.
const OUTPUT: usize = 4 << 20;
const OUTPUT_A_BYTE: usize = 16;

/// A function that returns the time for `strftime_now`.
pub(super) type Clock = Arc<dyn Fn() -> Zoned + Send + Sync>;

/// A compiled template and its special tokens.
#[derive(Debug)]
pub(super) struct Program {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
}

/// The variables for rendering a chat.
#[derive(Debug, Clone, Copy)]
pub(super) struct Variables<'a> {
    pub(super) messages: &'a [serde_json::Value],
    pub(super) tools: Option<&'a serde_json::Value>,
    pub(super) documents: Option<&'a serde_json::Value>,
    pub(super) add_generation_prompt: bool,
    pub(super) kwargs: Option<&'a Map<String, serde_json::Value>>,
}

impl Program {
    /// Compiles a template.
    pub(super) fn compile(
        source: &str,
        special_tokens: BTreeMap<String, String>,
        clock: Clock,
    ) -> Result<Self, TextError> {
        let mut environment = python::environment().map_err(|error| template_error(&error))?;
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", move |format: &str| strftime(&clock(), format));
        // Jinja2 normalises the line endings of templates like this.
        let source = source.strip_prefix('\u{feff}').unwrap_or(source);
        let lines = source.replace("\r\n", "\n").replace('\r', "\n");
        let plain = generation::without_generation_marks(&lines);
        environment.add_template_owned(NAME, plain).map_err(|error| template_error(&error))?;
        Ok(Self { environment, special_tokens })
    }

    /// Renders a chat to text.
    pub(super) fn render(&self, chat: &Variables<'_>) -> Result<String, TextError> {
        let special =
            self.special_tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token)));
        let kwargs = chat.kwargs.into_iter().flatten();
        let kwargs = kwargs.map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let fixed = [
            ("messages", Value::from(Serde(chat.messages))),
            ("tools", Value::from(Serde(chat.tools))),
            ("documents", Value::from(Serde(chat.documents))),
            ("add_generation_prompt", Value::from(chat.add_generation_prompt)),
        ];
        // Later names replace earlier ones: the caller's variables replace special tokens, and
        // nothing replaces the chat itself.
        let context = Value::from_pairs(special.chain(kwargs).chain(fixed));
        let template =
            self.environment.get_template(NAME).map_err(|error| template_error(&error))?;
        let most = chat.most_output();
        let printed = PrintLimit::limited(most);
        let mut out = LimitedOutput { bytes: Vec::new(), most };
        let rendered = template.render_captured_to(context, &mut out);
        drop(printed);
        rendered.map_err(|error| template_error(&error))?;
        String::from_utf8(out.bytes).map_err(|error| TextError::Template(error.to_string()))
    }
}

impl Variables<'_> {
    /// The number of bytes that a template may print for this chat.
    pub(super) fn most_output(&self) -> usize {
        let given = [self.tools, self.documents].into_iter().flatten();
        let kwargs = self.kwargs.into_iter().flat_map(Map::values);
        let bytes: usize = self.messages.iter().chain(given).chain(kwargs).map(text_bytes).sum();
        OUTPUT + OUTPUT_A_BYTE * bytes
    }
}

/// The output of a template, limited in size.
struct LimitedOutput {
    bytes: Vec<u8>,
    most: usize,
}

impl io::Write for LimitedOutput {
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

/// The error of a template that printed more than allowed.
#[derive(Debug, thiserror::Error)]
#[error("it prints more than {OUTPUT} bytes and {OUTPUT_A_BYTE} for each byte of the chat")]
pub(super) struct TooMuch;

/// The total size of all strings in `value` in bytes, except keys.
pub(crate) fn text_bytes(value: &serde_json::Value) -> usize {
    use serde_json::Value::{Array, Bool, Null, Number, Object, String};
    match value {
        String(text) => text.len(),
        Array(values) => values.iter().map(text_bytes).sum(),
        Object(fields) => fields.values().map(text_bytes).sum(),
        Null | Bool(_) | Number(_) => 0,
    }
}

/// The error that a template raises itself. Only its message is meant for the client.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TemplateRefusal(String);

fn raise_exception(message: &Value) -> Result<Value, Error> {
    let message = message.to_string();
    Err(Error::new(ErrorKind::InvalidOperation, message.clone())
        .with_source(TemplateRefusal(message)))
}

/// True if the cause is [`TooMuch`]. The writer's error does not expose its cause through `source`.
fn is_too_much(cause: &(dyn std::error::Error + 'static)) -> bool {
    let inner = cause.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    inner.is_some_and(|inner| inner.is::<TooMuch>())
}

fn strftime(now: &Zoned, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
}

fn template_error(error: &Error) -> TextError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(raised) = cause.downcast_ref::<TemplateRefusal>() {
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
