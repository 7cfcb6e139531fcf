//! Chat templates in Jinja, rendered like transformers does.

mod content;
mod generation;
mod generic;
mod guard;
mod history;
mod isolated;
mod json;
mod program;
mod python;
mod shape;

use std::collections::BTreeMap;
use std::fmt;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use jiff::Zoned;

pub use content::ContentFormat;
pub(crate) use guard::{Guard, GuardedChat};
use isolated::RenderPool;
pub use isolated::render_templates;
pub(crate) use program::text_bytes;
use program::{Program, Variables};

use crate::error::TextError;
use shape::Shape;

/// The tag that transformers appends to the message to be continued. The rendered text is cut at
/// the tag.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The fields in which messages carry reasoning, in order of precedence. Templates read only the
/// first two.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A compiled chat template.
///
/// It renders like `transformers.apply_chat_template`, with the same filters, functions and
/// whitespace rules. Undefined names are empty, and Python's string and dictionary methods work.
/// `{% generation %}` tags are accepted without effect. The text is not tokenised here.
pub struct ChatTemplate {
    renderer: Renderer,
    source: String,
    content_format: ContentFormat,
    shape: Shape,
    /// The template for chats with tools, if it is a separate one.
    tool_use: Option<Box<Self>>,
    /// True if the tools are listed in a system message, because the template does not support
    /// tools.
    generic_tools: bool,
    /// The error of the first probe that was too expensive. Later probes fail with the same error.
    /// `None` once probing is done.
    probes: Option<OnceLock<TextError>>,
}

/// Where a template is rendered.
enum Renderer {
    /// On the caller's thread, where the sizes of variables are not limited.
    Caller(Box<Program>),
    /// In processes with limits on memory and time.
    Processes(RenderPool),
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("content_format", &self.content_format)
            .finish_non_exhaustive()
    }
}

/// A chat to render.
#[derive(Debug, Clone, Copy)]
pub struct ChatRender<'a> {
    /// The list of messages, each an object.
    pub messages: &'a serde_json::Value,
    /// The list of tool descriptions; `None` if there are none.
    pub tools: Option<&'a serde_json::Value>,
    /// The list of documents for retrieval-augmented generation; `None` if there are none.
    pub documents: Option<&'a serde_json::Value>,
    /// True if the text ends with the header of the assistant's message.
    pub add_generation_prompt: bool,
    /// True if the text ends within the last message, which the model continues. Must not be
    /// combined with `add_generation_prompt`.
    pub continue_final_message: bool,
    /// Additional variables for the template (`enable_thinking`, ...).
    pub kwargs: Option<&'a serde_json::Map<String, serde_json::Value>>,
}

impl<'a> ChatRender<'a> {
    /// Creates a chat of these messages, with no other options.
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
    /// Compiles a template. `special_tokens` are additional variables by name (`pad_token`, ...).
    ///
    /// # Errors
    /// [`TextError::Template`] if the source is not a valid template. [`TextError::Costly`] if
    /// rendering a chat of a few words is too expensive.
    pub fn new(
        source: &str,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<Self, TextError> {
        Self::with_clock(source, bos_token, eos_token, special_tokens, Zoned::now)
    }

    /// Compiles a template like [`ChatTemplate::new`]. `strftime_now` uses the time of `clock`.
    ///
    /// # Errors
    /// The same errors as [`ChatTemplate::new`].
    pub fn with_clock(
        source: &str,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
        special_tokens: &BTreeMap<String, String>,
        clock: impl Fn() -> Zoned + Send + Sync + 'static,
    ) -> Result<Self, TextError> {
        let tokens = all_tokens(bos_token, eos_token, special_tokens);
        let program = Program::compile(source, tokens, Arc::new(clock))?;
        Self::probed(Renderer::Caller(Box::new(program)), source)
    }

    /// Compiles a template like [`ChatTemplate::new`], to be rendered in other processes. `start`
    /// returns the command of a process that calls [`render_templates`].
    ///
    /// Such a process has limits on memory and on the time per chat. If it exceeds a limit, it
    /// ends, and the chat fails with [`TextError::Costly`]. The next chat gets a new process.
    ///
    /// # Errors
    /// The errors of [`ChatTemplate::new`], and [`TextError::Renderer`] if no process can be
    /// started.
    pub fn isolated(
        source: &str,
        bos_token: Option<&str>,
        eos_token: Option<&str>,
        special_tokens: &BTreeMap<String, String>,
        start: impl Fn() -> Command + Send + Sync + 'static,
    ) -> Result<Self, TextError> {
        let tokens = all_tokens(bos_token, eos_token, special_tokens);
        let pool = RenderPool::new(Box::new(start), source, &tokens)?;
        Self::probed(Renderer::Processes(pool), source)
    }

    /// Renders short chats to detect which message formats the template reads.
    fn probed(renderer: Renderer, source: &str) -> Result<Self, TextError> {
        let mut template = Self {
            renderer,
            source: source.to_owned(),
            content_format: ContentFormat::Either,
            shape: Shape::ANY,
            tool_use: None,
            generic_tools: false,
            probes: Some(OnceLock::new()),
        };
        template.content_format = ContentFormat::of(&template);
        template.shape = Shape::of(&template);
        match template.probes.take().and_then(OnceLock::into_inner) {
            Some(error) => Err(error),
            None => Ok(template),
        }
    }

    /// Returns the form of a message's content that the template reads.
    pub fn content_format(&self) -> ContentFormat {
        self.content_format
    }

    /// Uses the template `tool_use` for chats with tools, as transformers does if a model has
    /// several templates.
    #[must_use]
    pub fn with_tool_use(self, tool_use: Self) -> Self {
        Self { tool_use: Some(Box::new(tool_use)), ..self }
    }

    /// If the template does not render tools, lists the tools in a system message, and writes calls
    /// and results as text. The model then writes calls in the dialect `generic`.
    pub fn show_tools_generically(&mut self) {
        self.generic_tools = !self.shows_tools();
    }

    /// True if a system message lists the tools, because the template does not.
    pub fn has_generic_tools(&self) -> bool {
        self.generic_tools
    }

    /// Returns the template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the sources of all templates.
    pub fn sources(&self) -> impl Iterator<Item = &str> {
        [Some(self.source()), self.tool_use.as_deref().map(Self::source)].into_iter().flatten()
    }

    /// True if the template itself renders tool descriptions.
    pub fn shows_tools(&self) -> bool {
        self.tool_use.as_ref().map_or(self.shape.tools(), |template| template.shape.tools())
    }

    /// True if chats may have tools.
    pub fn takes_tools(&self) -> bool {
        self.generic_tools || self.shows_tools()
    }

    /// Describes the changes to messages that the template needs, as phrases for display.
    pub fn adaptations(&self) -> Vec<&'static str> {
        self.shape.notes()
    }

    /// Renders a chat to text.
    ///
    /// Message contents are first converted to the form that the template reads; see
    /// [`ContentFormat`].
    ///
    /// # Errors
    /// [`TextError::Template`] if the template rejects the messages or fails, or if the last
    /// message cannot be continued as requested. [`TextError::Costly`] if the template runs too
    /// long, prints too much or recurses too deeply.
    pub fn render(&self, request: &ChatRender<'_>) -> Result<String, TextError> {
        let chat = self.prepare(request)?;
        let rendered = chat.template.render_prepared(&[&chat]).pop();
        chat.finish(rendered.unwrap_or(Err(TextError::Closed))?)
    }

    /// Renders several chats, in order. Each may fail with the errors of [`Self::render`]. A
    /// rendering process gets all of them at once, because waking it takes as long as a short chat.
    pub fn render_all(&self, requests: &[ChatRender<'_>]) -> Vec<Result<String, TextError>> {
        let chats: Vec<_> = requests.iter().map(|request| self.prepare(request)).collect();
        let mut rendered: Vec<_> = chats.iter().map(|_| Err(TextError::Closed)).collect();
        for template in [Some(self), self.tool_use.as_deref()].into_iter().flatten() {
            let (places, group): (Vec<usize>, Vec<&PreparedChat<'_>>) = chats
                .iter()
                .enumerate()
                .filter_map(|(place, chat)| Some((place, chat.as_ref().ok()?)))
                .filter(|(_, chat)| std::ptr::eq(chat.template, template))
                .unzip();
            for (place, text) in places.into_iter().zip(template.render_prepared(&group)) {
                rendered[place] = text;
            }
        }
        let finished = chats.into_iter().zip(rendered);
        finished.map(|(chat, text)| chat?.finish(text?)).collect()
    }

    /// Converts a chat to the form that its template reads.
    fn prepare<'a>(&'a self, request: &ChatRender<'a>) -> Result<PreparedChat<'a>, TextError> {
        if request.continue_final_message && request.add_generation_prompt {
            return Err(refused(
                "continue_final_message and add_generation_prompt are not compatible",
            ));
        }
        let tools = request.tools.and_then(serde_json::Value::as_array);
        let tools = tools.filter(|tools| !tools.is_empty());
        if let (Some(template), Some(_)) = (&self.tool_use, tools) {
            return template.prepare(request);
        }
        let mut messages = if self.generic_tools && (tools.is_some() || !self.shape.calls()) {
            let messages = request.messages.as_array().map_or(&[][..], Vec::as_slice);
            let written = generic::write(messages, tools.map(Vec::as_slice));
            self.prepared_messages(&serde_json::Value::Array(written))?
        } else {
            self.prepared_messages(request.messages)?
        };
        let continues = request.continue_final_message;
        let final_text = continues.then(|| self.tag_final_message(&mut messages)).transpose()?;
        Ok(PreparedChat { template: self, request: *request, messages, final_text })
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
            history::normalise(&mut message);
            self.shape.adapt_nothing(&mut message);
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

    /// Renders prepared chats, in order.
    fn render_prepared(&self, chats: &[&PreparedChat<'_>]) -> Vec<Result<String, TextError>> {
        if let Some(error) = self.probes.as_ref().and_then(OnceLock::get) {
            return chats.iter().map(|_| Err(error.clone())).collect();
        }
        let variables: Vec<_> = chats.iter().map(|chat| chat.variables()).collect();
        let rendered = match &self.renderer {
            Renderer::Caller(program) => variables.iter().map(|one| program.render(one)).collect(),
            Renderer::Processes(pool) => pool.render_all(&variables),
        };
        for result in &rendered {
            if let (Some(probes), Err(error @ (TextError::Costly(_) | TextError::Renderer(_)))) =
                (&self.probes, result)
            {
                // `set` keeps the error of the first failed probe, and refuses later ones.
                let _ = probes.set(error.clone());
            }
        }
        rendered
    }
}

/// A chat in the form that its template reads.
struct PreparedChat<'a> {
    template: &'a ChatTemplate,
    request: ChatRender<'a>,
    messages: Vec<serde_json::Value>,
    /// The text of the message to be continued, with a tag at its end.
    final_text: Option<String>,
}

impl PreparedChat<'_> {
    fn variables(&self) -> Variables<'_> {
        Variables {
            messages: &self.messages,
            tools: self.request.tools.filter(|_| !self.template.generic_tools),
            documents: self.request.documents,
            add_generation_prompt: self.request.add_generation_prompt,
            kwargs: self.request.kwargs,
        }
    }

    fn finish(self, rendered: String) -> Result<String, TextError> {
        match self.final_text {
            Some(text) => cut_at_tag(rendered, &text),
            None => Ok(rendered),
        }
    }
}

/// Collects the special tokens, by the names of their variables.
fn all_tokens(
    bos_token: Option<&str>,
    eos_token: Option<&str>,
    special_tokens: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut tokens = special_tokens.clone();
    let named = [("bos_token", bos_token), ("eos_token", eos_token)];
    tokens.extend(
        named.into_iter().filter_map(|(name, token)| Some((name.to_owned(), token?.to_owned()))),
    );
    tokens
}

/// Returns the message with its reasoning in both fields that templates read. As in transformers,
/// `reasoning_content` takes precedence over `thinking`, and both over `reasoning`.
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
        // The template has trimmed the message, so white space before the tag is removed too.
        rendered.truncate(rendered.trim_end().len());
    }
    Ok(rendered)
}

fn refused(why: &str) -> TextError {
    TextError::Template(why.to_owned())
}
