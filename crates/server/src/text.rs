//! Tokenises prompts, on the threads of the text pool.

use std::sync::Arc;

use forebay_api::{ApiError, ChatPrompt, Effort, Prompt};
use forebay_http::Charge;
use forebay_text::{TextError, TextInput, TextPool, Within};
use serde_json::Value;

use crate::ignored::note_generic_tools;
use crate::peers::Peer;
use crate::state::Shared;

/// Access to the text pool for one request. `charge` already covers the request's bytes.
#[derive(Clone, Copy)]
pub(crate) struct RequestText<'a> {
    pool: &'a TextPool,
    /// Like cached blocks, cached encodings are shared only by requests with the same salt.
    salt: u64,
    pub(crate) charge: &'a Arc<Charge>,
}

impl<'a> RequestText<'a> {
    /// Creates the access for a request of `peer` with `cache_salt`.
    pub(crate) fn new(
        state: &'a Shared,
        peer: &Peer,
        cache_salt: Option<&str>,
        charge: &'a Arc<Charge>,
    ) -> Self {
        Self { pool: &state.text, salt: peer.salt(state, cache_salt), charge }
    }

    /// Returns access for texts of at most `most` tokens each; `None`: no limit.
    pub(crate) fn within(&self, most: impl Into<Option<usize>>) -> Within<'a> {
        self.pool.within(most).salted(self.salt).keeping(self.charge.clone())
    }
}

/// A conversation as a prompt.
pub(crate) struct RenderedChat {
    pub(crate) ids: Vec<i32>,
    /// The text that the chat template rendered.
    pub(crate) text: String,
    /// Parameters that the template does not use.
    pub(crate) ignored: Vec<&'static str>,
}

/// Renders and tokenises a conversation of at most `most` tokens. `param` is the parameter that
/// contained the conversation.
///
/// # Errors
/// The template or the tokenizer rejects the conversation, it is too long, or the text threads are
/// overloaded.
pub(crate) async fn encode_chat(
    text: RequestText<'_>,
    mut chat: ChatPrompt,
    most: usize,
    param: &str,
) -> Result<RenderedChat, ApiError> {
    let mut ignored = Vec::new();
    if let Some(template) = text.pool.template() {
        if chat.tools.is_some() && !template.takes_tools() {
            let reason = "`tools`: the chat template ignores tools. Start the server with another \
                          --chat-template, or send `tool_choice: none`";
            return Err(ApiError::invalid("tools", reason));
        }
        if chat.tools.is_some() && template.has_generic_tools() {
            note_generic_tools();
        }
        ignored = ask_to_think(template.source(), &mut chat);
    }
    let input = TextInput::Chat {
        messages: chat.messages,
        tools: chat.tools,
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        kwargs: chat.kwargs,
    };
    let encoded = text.within(most).encode(input).await;
    let encoded = encoded.map_err(|error| text_error(error, param))?;
    Ok(RenderedChat { ids: encoded.ids, text: encoded.text.unwrap_or_default(), ignored })
}

/// Sets the template's variables for reasoning effort. Returns the parameters for which the
/// template has no variable. Variables that the client has set take precedence.
fn ask_to_think(template: &str, chat: &mut ChatPrompt) -> Vec<&'static str> {
    const LEVEL: &str = "reasoning_effort";
    let Effort { level, thinks, params } = std::mem::take(&mut chat.effort);
    let mut set = |name: &str, value: Value| {
        let known = template.contains(name);
        if known && !chat.kwargs.contains_key(name) {
            chat.kwargs.insert(name.to_owned(), value);
        }
        known
    };
    let off = level.as_deref() == Some("none");
    let wanted = thinks.or(level.as_ref().map(|_| !off));
    let mut switch = false;
    if let Some(wanted) = wanted {
        // A template may read both variables.
        for name in ["enable_thinking", "thinking"] {
            switch |= set(name, Value::Bool(wanted));
        }
    }
    let mut ignored = Vec::new();
    if let Some(level) = level {
        let known = !off && set(LEVEL, Value::String(level));
        if !known && !switch {
            ignored.push(params.level);
        }
    }
    if thinks.is_some() && !off && !switch && !ignored.contains(&params.switch) {
        ignored.push(params.switch);
    }
    ignored
}

/// Tokenises texts as one job of the pool. Each text may have at most `most` tokens; `None`: no
/// limit.
///
/// # Errors
/// The tokenizer rejects a text, a text is too long, or the text threads are overloaded.
pub(crate) async fn encode_prompts(
    text: RequestText<'_>,
    prompts: Vec<Prompt>,
    add_special_tokens: bool,
    most: Option<usize>,
    param: &'static str,
) -> Result<Vec<Vec<i32>>, ApiError> {
    let mut texts = Vec::new();
    // The index of each text among the prompts.
    let mut places = Vec::new();
    let mut encoded: Vec<Option<Vec<i32>>> = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        match prompt {
            Prompt::Text(text) => {
                texts.push(text);
                places.push(encoded.len());
                encoded.push(None);
            }
            Prompt::Tokens(ids) => encoded.push(Some(ids)),
        }
    }
    let mut fresh = if texts.is_empty() {
        Vec::new()
    } else {
        let encode = text.within(most).encode_all(texts, add_special_tokens);
        encode.await.map_err(|error| match error {
            TextError::TooLong { text, .. } if encoded.len() > 1 => {
                let place = places.get(text).copied().unwrap_or_default();
                text_error(error, &format!("{param}[{place}]"))
            }
            error => text_error(error, param),
        })?
    }
    .into_iter();
    Ok(encoded.into_iter().filter_map(|ids| ids.or_else(|| fresh.next())).collect())
}

/// Converts a text error to the error for the client. `param` is the parameter that contained the
/// text.
pub(crate) fn text_error(error: TextError, param: &str) -> ApiError {
    let reason = error.to_string();
    match error {
        TextError::Busy => ApiError::Overloaded { reason },
        TextError::TooLong { at_least, limit, .. } => {
            ApiError::TextTooLong { param: param.to_owned(), limit, at_least }
        }
        // Only the operator can change the template, so it is not the client's error.
        TextError::Costly(_) => {
            ApiError::Internal { reason, code: Some("chat_template_too_expensive") }
        }
        TextError::NoTemplate
        | TextError::Guarded
        | TextError::Undivided { .. }
        | TextError::Encode(_)
        | TextError::Decode(_)
        | TextError::Template(_) => ApiError::invalid(param, format!("`{param}`: {reason}")),
        TextError::Closed => ApiError::Draining,
        TextError::Load(_) | TextError::Renderer(_) => ApiError::Internal { reason, code: None },
    }
}
