//! Prepares conversations of all APIs for the engine.

use std::sync::Arc;

use forebay_api::{
    ApiError, Calls, ChatPrompt, Limits, OfferedTools, Prompt, ReasoningOutput, ValidChat,
};
use forebay_dialect::{Reading, Start, Tools};
use forebay_egress::Terms;
use forebay_http::Charge;

use super::calls;
use crate::ignored::ignore;
use crate::images::{self, ImageFile, SeenPrompt};
use crate::peers::Peer;
use crate::state::Shared;
use crate::submission::Submission;
use crate::text::{RequestText, encode_chat, encode_prompts};

/// A conversation as tokens, with its images.
pub(crate) struct Rendered {
    pub(crate) seen: SeenPrompt,
    files: Vec<Arc<ImageFile>>,
    /// The text that the chat template rendered.
    text: String,
}

/// Reads the images of a conversation of at most `most` tokens, then renders and tokenises it.
/// `param` is the parameter that contained the conversation.
///
/// # Errors
/// An image is invalid, the template or the tokenizer rejects the conversation, or it is too long.
pub(crate) async fn render(
    state: &Shared,
    mut prompt: ChatPrompt,
    most: usize,
    text: RequestText<'_>,
    param: &'static str,
) -> Result<Rendered, ApiError> {
    let parts = std::mem::take(&mut prompt.images);
    let files = images::read(state, parts, state.limits()?, text.charge).await?;
    let prompt = encode_chat(text, prompt, most, param).await?;
    for name in prompt.ignored {
        ignore(state, name)?;
    }
    let seen = match state.model.images {
        Some(model) => images::spread(prompt.ids, model.token, &files, param)?,
        None => SeenPrompt { ids: prompt.ids, images: Arc::default() },
    };
    Ok(Rendered { seen, files, text: prompt.text })
}

/// Renders a conversation, which came in the parameter `param`. `charge` already covers its bytes.
/// Returns the submission, including the constraint and the parser for the answer.
///
/// # Errors
/// The errors of [`render`], and a form of the answer that can't be enforced.
pub(crate) async fn prepare(
    state: &Shared,
    mut chat: ValidChat,
    limits: Limits,
    (peer, charge): (&Peer, &Arc<Charge>),
    param: &'static str,
) -> Result<Submission, ApiError> {
    let continues = chat.prompt.continue_final_message;
    if chat.generation.prompt_logprobs.is_some() && !chat.prompt.images.is_empty() {
        let reason = "`prompt_logprobs`: not supported for prompts with images";
        return Err(ApiError::invalid("prompt_logprobs", reason));
    }
    let most = limits.context_length as usize;
    let salt = chat.generation.cache_salt.as_deref();
    let pool = RequestText::new(state, peer, salt, charge);
    let Rendered { seen, files, text } = render(state, chat.prompt, most, pool, param).await?;
    for name in &chat.tools.skipped {
        ignore(state, name)?;
    }
    let prediction = match chat.prediction.take() {
        Some(text) if state.verifies_drafts() => {
            let text = vec![Prompt::Text(text)];
            encode_prompts(pool, text, false, Some(most), "prediction").await?.pop()
        }
        Some(_) => {
            ignore(state, "prediction")?;
            None
        }
        None => None,
    };
    let structure = chat.generation.structure.take();
    let thinks = Start::of(state.model.dialect, &text, continues).place();
    chat.generation.structure = calls::form(state, &chat.tools, structure, thinks)?;
    let bound = chat.generation.structure.is_some();
    let reading = reading(state, chat.tools, chat.reasoning, bound, (&text, continues));
    let mut terms = Terms::new(chat.generation, &state.model.eos, limits);
    terms.reading = reading;
    terms.thinks = Some(thinks);
    let mut submission = Submission::new(state, seen.ids, Arc::new(terms), limits, param)?;
    (submission.images, submission.files) = (seen.images, files);
    submission.prediction = prediction;
    Ok(submission)
}

/// Returns the parser settings for answers after `prompt`; `None`: answers are plain text.
fn reading(
    state: &Shared,
    tools: OfferedTools,
    reasoning: ReasoningOutput,
    bound: bool,
    prompt: (&str, bool),
) -> Option<Reading> {
    let dialect = match reasoning {
        ReasoningOutput::Content => state.model.dialect.without_reasoning(),
        ReasoningOutput::Apart | ReasoningOutput::LeftOut => state.model.dialect,
    };
    let single = !tools.parallel;
    let named = tools.demand.is_some_and(|demand| demand.calls == Calls::Named);
    let tools = tools.functions.into_iter().map(|tool| (tool.name, tool.schema));
    let tools = Arc::new(Tools::new(tools));
    if !dialect.reads(&tools) {
        return None;
    }
    let (text, continues) = prompt;
    Some(Reading {
        start: Start::of(dialect, text, continues),
        dialect,
        single,
        silent: reasoning == ReasoningOutput::LeftOut,
        bound,
        named,
        tools,
    })
}
