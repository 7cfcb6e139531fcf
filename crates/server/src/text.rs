//! Prompts to token ids, on the text pool's threads.

use std::sync::Arc;

use forebay_api::{ApiError, ChatPrompt, Prompt};
use forebay_text::{TextError, TextInput, TextPool};

use crate::budget::Charge;

/// Renders and tokenises a conversation, which may have `most` tokens and whose bytes were charged to `charge`.
///
/// # Errors
/// The template or the tokenizer refuses it, it is too long, or the text threads have no time.
pub(crate) async fn encode_chat(
    text: &TextPool,
    chat: ChatPrompt,
    most: usize,
    charge: &Arc<Charge>,
) -> Result<Vec<i32>, ApiError> {
    let input = TextInput::Chat {
        messages: chat.messages,
        tools: None,
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        kwargs: chat.kwargs,
    };
    let encoded = text.within(most).keeping(charge.clone()).encode(input).await;
    Ok(encoded.map_err(|error| text_error(error, "messages"))?.ids)
}

/// Tokenises what is text, in one piece of work for the pool; each may have `most` tokens, or any number with `None`. Their bytes were
/// charged to `charge`.
///
/// # Errors
/// The tokenizer refuses a text, one is too long, or the text threads have no time.
pub(crate) async fn encode_prompts(
    text: &TextPool,
    prompts: Vec<Prompt>,
    add_special_tokens: bool,
    most: Option<usize>,
    param: &'static str,
    charge: &Arc<Charge>,
) -> Result<Vec<Vec<i32>>, ApiError> {
    let mut texts = Vec::new();
    // Where each text stands among the prompts.
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
        let pool = text.within(most).keeping(charge.clone());
        let encode = pool.encode_all(texts, add_special_tokens);
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

/// What a client is told; `param` carried the text.
pub(crate) fn text_error(error: TextError, param: &str) -> ApiError {
    let reason = error.to_string();
    match error {
        TextError::Busy => ApiError::Overloaded { reason },
        TextError::TooLong { at_least, limit, .. } => {
            ApiError::TextTooLong { param: param.to_owned(), limit, at_least }
        }
        // The template is the operator's, and so is what can be done about it.
        TextError::Costly(_) => {
            ApiError::Internal { reason, code: Some("chat_template_too_expensive") }
        }
        TextError::NoTemplate
        | TextError::Guarded
        | TextError::Encode(_)
        | TextError::Decode(_)
        | TextError::Template(_) => ApiError::invalid(param, format!("`{param}`: {reason}")),
        TextError::Closed => ApiError::Draining,
        TextError::Load(_) => ApiError::Internal { reason, code: None },
    }
}
