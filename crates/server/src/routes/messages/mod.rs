//! `POST /v1/messages`, Anthropic's API, built on the modules of the chat route.

mod answer;
#[cfg(test)]
mod tests;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{ApiError, ErrorBody, Limits, MessagesRequest, ValidChat};
use serde::Serialize;
use utoipa::ToSchema;

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use super::chat::{CallIds, prepare, render};
use crate::call::Call;
use crate::ignored::ignore;
use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::reply::{self, Failure};
use crate::sse;
use crate::state::Shared;
use crate::text::RequestText;
use crate::wire::Wire;
use answer::{Blocks, Writer};

impl Admissible for MessagesRequest {
    type Valid = ValidChat;

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidChat, ApiError> {
        let mut chat = validate(door.state, self, door.limits)?;
        door.routing.fill(&mut chat.generation);
        Ok(chat)
    }
}

/// Answers a conversation in Anthropic's API. With `stream`, sends typed events.
#[utoipa::path(
    post,
    path = "/v1/messages",
    request_body = MessagesRequest,
    responses(
        (status = 200, description = "The message, or a stream of its events", body = Object),
        (status = "default", description = "An error, in Anthropic's shape", body = ErrorBody),
    ),
)]
pub(crate) async fn messages(
    wire: Wire,
    AdmittedRequest { admission, valid: chat }: AdmittedRequest<MessagesRequest>,
) -> Result<Response, Failure> {
    let Admission { state, peer, arrived, model, limits, charge, .. } = admission;
    let streamed = chat.streaming.is_some();
    let submission = prepare(&state, chat, limits, (&peer, &charge), "messages").await?;
    drop(charge);
    let name = peer.name("msg_");
    let call = Call::start(&state, vec![submission], streamed, arrived, &peer).await?;
    let mut call = call.named(&name.id);
    let ids = CallIds { response: name.id.clone(), form: state.model.dialect.ids() };
    let writer = Writer { id: name.id.clone(), model, ids };
    if streamed {
        return sse::stream(&state, call, Blocks::new(writer), wire, (&peer, &name));
    }
    let deltas = call.collect().await?;
    let delta = deltas.first().ok_or(ApiError::Aborted)?;
    call.writer().value(&writer.message(delta, &call.tally()))
}

/// The number of tokens of a prompt.
#[derive(Serialize, ToSchema)]
pub(crate) struct TokenCount {
    /// Tokens of the prompt, including image positions.
    input_tokens: u32,
}

/// Counts the tokens of a conversation.
#[utoipa::path(
    post,
    path = "/v1/messages/count_tokens",
    request_body = MessagesRequest,
    responses(
        (status = 200, description = "The number", body = TokenCount),
        (status = "default", description = "An error, in Anthropic's shape", body = ErrorBody),
    ),
)]
pub(crate) async fn count_tokens(
    State(state): State<Shared>,
    peer: Peer,
    body: Upload,
) -> Result<Response, Failure> {
    let (request, charge) = limits::read::<MessagesRequest>(body, &state).await?;
    state.model_name(request.model.as_deref())?;
    let most = super::tokenize::most_tokens(&state)?;
    let chat = validate(&state, request, state.limits()?)?;
    let text = RequestText::new(&state, &peer, chat.generation.cache_salt.as_deref(), &charge);
    let rendered = render(&state, chat.prompt, most, text, "messages").await?;
    let input_tokens = u32::try_from(rendered.seen.ids.len()).unwrap_or(u32::MAX);
    Ok(reply::ok(&TokenCount { input_tokens }))
}

/// Checks a request, and reports its parameters without effect.
fn validate(
    state: &Shared,
    request: MessagesRequest,
    limits: Limits,
) -> Result<ValidChat, ApiError> {
    let mut ignored = Vec::new();
    let mut chat = request.validate(&state.model.defaults, limits, &mut ignored)?;
    // Clients request thinking from every model, so it is no error if a model can't think.
    let bounds_thought = state.model.markers.is_some() && state.model.grammars.is_some();
    if !bounds_thought && chat.generation.thinking_budget.take().is_some() {
        ignored.push("thinking.budget_tokens".to_owned());
    }
    for name in &ignored {
        ignore(state, name)?;
    }
    Ok(chat)
}
