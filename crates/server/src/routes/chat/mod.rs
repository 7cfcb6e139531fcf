//! `POST /v1/chat/completions`.

mod answer;
mod calls;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    ApiError, Calls, ChatCompletion, ChatRequest, ErrorBody, OfferedTools, ReasoningOutput,
};
use forebay_dialect::{Reading, Start, Tools};

use crate::call::{Call, Submission, Terms};
use crate::ignored::ignore;
use crate::images::{self, SeenPrompt};
use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::reply::{self, Failure};
use crate::routing::Routing;
use crate::sse::{self, Chunks};
use crate::state::Shared;
use crate::text::encode_chat;
use crate::wire::Wire;
use answer::{CallIds, ChatEncoder, Tokens, choice};

/// Answers a conversation. With `stream`, chunks come as server-sent events.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    request_body = ChatRequest,
    responses(
        (status = 200, description = "The completion, or a stream of its chunks", body = ChatCompletion),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn chat_completions(
    State(state): State<Shared>,
    wire: Wire,
    peer: Peer,
    routing: Routing,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let (request, charge) = limits::read::<ChatRequest>(body, &state).await?;
    let model = state.model_name(request.model.as_deref())?;
    let model_limits = state.admit()?;
    let mut chat = request.validate(&state.model.defaults, model_limits)?;
    routing.fill(&mut chat.generation);
    let most = model_limits.context_length as usize;
    let continues = chat.prompt.continue_final_message;
    let parts = std::mem::take(&mut chat.prompt.images);
    let files = images::read(&state, parts, model_limits).await?;
    let prompt = encode_chat(&state.text, chat.prompt, most, &charge).await?;
    drop(charge);
    for name in chat.tools.skipped.iter().map(String::as_str).chain(prompt.ignored) {
        ignore(&state, name)?;
    }
    let structure = chat.generation.structure.take();
    let thinks = Start::of(state.model.dialect, &prompt.text, continues).place();
    chat.generation.structure = calls::form(&state, &chat.tools, structure, thinks)?;
    let bound = chat.generation.structure.is_some();
    let rendered = (&*prompt.text, continues);
    let reading = reading(&state, chat.tools, chat.reasoning, bound, rendered);
    let tokenizer = chat.generation.sampling.logprobs.map(|_| state.text.tokenizer().clone());
    let of_prompt = chat.generation.prompt_logprobs;
    if of_prompt.is_some() && !files.is_empty() {
        let reason = "`prompt_logprobs`: a prompt with images has none";
        return Err(ApiError::invalid("prompt_logprobs", reason).into());
    }
    let tokens = Tokens { tokenizer, output: chat.tokens };
    let seen = match state.model.images {
        Some(model) => images::spread(prompt.ids, model.token, &files, "messages")?,
        None => SeenPrompt { ids: prompt.ids, images: Arc::default() },
    };
    let prompt_token_ids = chat.tokens.ids.then(|| seen.ids.clone());
    let n = chat.generation.n;
    let mut terms = Terms::new(chat.generation, &state.model.eos, model_limits);
    terms.reading = reading;
    terms.thinks = Some(thinks);
    let mut submission =
        Submission::new(&state, seen.ids, Arc::new(terms), model_limits, "messages")?;
    (submission.images, submission.files) = (seen.images, files);

    let name = peer.name("chatcmpl-");
    let (id, streamed) = (&name.id, chat.streaming.is_some());
    let mut call = Call::start(&state, vec![submission], streamed, arrived, &peer).await?.named(id);
    let ids = CallIds { response: name.id.clone(), form: state.model.dialect.ids() };
    if let Some(streaming) = chat.streaming {
        let egress = state.config.egress;
        let chunks = Chunks::new(&name, "chat.completion.chunk", &model, streaming, egress)
            .map_err(reply::unwritable)?
            .with_prompt(prompt_token_ids);
        let encoder = ChatEncoder::new(chunks, tokens, ids, n);
        return sse::stream(&state, call, encoder, wire, (&peer, &name));
    }
    let deltas = call.collect().await?;
    let told = deltas.first().zip(of_prompt);
    let choices = (0..).zip(&deltas).map(|(index, delta)| choice(index, delta, &tokens, &ids));
    Ok(reply::ok(&ChatCompletion {
        id: name.id,
        object: "chat.completion",
        created: name.created,
        model,
        choices: choices.collect::<Result<_, _>>()?,
        usage: call.tally().usage(),
        prompt_token_ids,
        prompt_logprobs: told
            .map(|(first, tail)| first.prompt.listed(tail.most, state.text.tokenizer())),
    }))
}

/// How answers behind `prompt` are read; `None`: they are text.
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
