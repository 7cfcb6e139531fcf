//! Prompts to token ids, on the text pool's threads.

use std::sync::Arc;

use forebay_api::{ApiError, ChatPrompt, Prompt};
use forebay_text::{TextError, TextInput, TextPool};

use crate::budget::Charge;

/// Renders and tokenises a conversation, whose bytes were charged to `charge`.
pub(crate) async fn encode_chat(
    text: &TextPool,
    chat: ChatPrompt,
    charge: &Arc<Charge>,
) -> Result<Vec<i32>, ApiError> {
    let input = TextInput::Chat {
        messages: chat.messages,
        tools: None,
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        kwargs: chat.kwargs,
    };
    let keep = Arc::clone(charge);
    let encoded =
        text.keeping(keep).encode(input).await.map_err(|error| text_error(error, "messages"))?;
    Ok(encoded.ids)
}

/// Tokenises what is text, in one piece of work for the pool. Its bytes were charged to `charge`.
pub(crate) async fn encode_prompts(
    text: &TextPool,
    prompts: Vec<Prompt>,
    add_special_tokens: bool,
    param: &'static str,
    charge: &Arc<Charge>,
) -> Result<Vec<Vec<i32>>, ApiError> {
    let mut texts = Vec::new();
    let mut encoded: Vec<Option<Vec<i32>>> = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        match prompt {
            Prompt::Text(text) => {
                texts.push(text);
                encoded.push(None);
            }
            Prompt::Tokens(ids) => encoded.push(Some(ids)),
        }
    }
    let mut fresh = if texts.is_empty() {
        Vec::new()
    } else {
        let keep = Arc::clone(charge);
        let encoded = text.keeping(keep).encode_all(texts, add_special_tokens).await;
        encoded.map_err(|error| text_error(error, param))?
    }
    .into_iter();
    Ok(encoded.into_iter().filter_map(|ids| ids.or_else(|| fresh.next())).collect())
}

/// What a client is told; `param` carried the text.
pub(crate) fn text_error(error: TextError, param: &str) -> ApiError {
    let reason = error.to_string();
    match error {
        TextError::Busy => ApiError::Overloaded { reason },
        TextError::NoTemplate
        | TextError::Encode(_)
        | TextError::Decode(_)
        | TextError::Template(_) => ApiError::invalid(param, format!("`{param}`: {reason}")),
        TextError::Closed => ApiError::Draining,
        TextError::Load(_) => ApiError::Internal { reason, code: None },
    }
}
