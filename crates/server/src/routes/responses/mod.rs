//! `/v1/responses`, OpenAI's newer API, built on the modules of the chat route and a store of
//! conversations.

mod answer;
mod input;
mod keep;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Path, State};
use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use bytes::Bytes;
use forebay_api::limits::{SHOWN_BYTES, cut};
use forebay_api::peer::RESPONSE_HEADER;
use forebay_api::{ApiError, ErrorBody, Item, ResponsesRequest, ValidResponses};
use forebay_http::{Charge, ClientId, KeyId, contained};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use utoipa::ToSchema;

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use super::chat::{CallIds, prepare, render};
use crate::answer::{AnswerWriter, charged};
use crate::call::Call;
use crate::ignored::ignore;
use crate::peers::Peer;
use crate::reply::{self, Failure};
use crate::sse;
use crate::state::Shared;
use crate::store::{Kept, Owner, Turn};
use crate::submission::Submission;
use crate::text::RequestText;
use crate::wire::Wire;
use answer::{Answer, Head};
use keep::Keeper;

/// The header with the number of the client's stored responses that were evicted since the last
/// report.
const EVICTED: HeaderName = HeaderName::from_static("x-forebay-responses-evicted");

/// Bytes of the copies of an item in a prompt, per byte of the item: message, rendered text and
/// token ids.
const RENDERED: usize = 3;
/// The number of copies of repeated request parameters, in the response itself and in its output.
const REPEATED: usize = 3;

/// The next turn of a conversation.
pub(crate) struct NextTurn {
    valid: ValidResponses,
    owner: Owner,
    /// The earlier turns of the conversation.
    before: Vec<Arc<Turn>>,
    /// The memory charge for earlier turns, which is held until the prompt is tokenised.
    front: Charge,
}

impl Admissible for ResponsesRequest {
    type Valid = NextTurn;

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn validate_at(mut self, door: &Door<'_>) -> Result<NextTurn, ApiError> {
        let (state, owner) = (door.state, owner(door.key));
        let before = match &self.previous_response_id {
            Some(id) => previous(state, owner, id)?,
            None => Vec::new(),
        };
        let named = referred(state, owner, &self, &before)?;
        // The earlier conversation is rendered with the new turn, but its bytes arrived in other
        // requests.
        let front = state.budget.open(door.client);
        let bytes = before.iter().map(|turn| turn.bytes()).sum::<usize>();
        let bytes = bytes + named.values().map(Item::bytes).sum::<usize>();
        front.set(bytes.saturating_mul(RENDERED))?;
        self.resolve(&named);
        let turns = before.iter().flat_map(|turn| turn.input.iter().chain(&turn.output));
        let said: Vec<&Item> = turns.collect();
        let mut ignored = Vec::new();
        let defaults = &state.model.defaults;
        let mut valid = self.validate(&said, defaults, door.limits, &mut ignored)?;
        for name in &ignored {
            ignore(state, name)?;
        }
        door.routing.fill(&mut valid.chat.generation);
        Ok(NextTurn { valid, owner, before, front })
    }
}

/// Answers a conversation, or the next turn of a stored one. With `stream`, sends typed events.
/// With `background`, returns the response at once and computes it afterwards.
#[utoipa::path(
    post,
    path = "/v1/responses",
    request_body = ResponsesRequest,
    responses(
        (status = 200, description = "The response, or a stream of its events", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn responses(
    wire: Wire,
    AdmittedRequest { admission, valid: turn }: AdmittedRequest<ResponsesRequest>,
) -> Result<Response, Failure> {
    let Admission { state, peer, arrived, model, limits, charge, .. } = admission;
    let NextTurn { valid, owner, before, front } = turn;
    let ValidResponses { chat, kinds, input, store, background, sealed, echo } = valid;
    // These parts of the request are kept longer than its body.
    let held = charge.beside();
    let items: usize = input.iter().map(Item::bytes).sum();
    held.set(items + REPEATED * Value::from(echo.clone()).to_string().len())?;
    let kept = store && state.store.keeps();
    if background && !kept {
        let reason = "`background`: this server keeps no responses (--response-store-bytes)";
        return Err(ApiError::invalid("background", reason).into());
    }
    let streamed = chat.streaming.is_some();
    let submission = prepare(&state, chat, limits, (&peer, &charge), "input").await?;
    drop((charge, front));
    let name = peer.name("resp_");
    let ids = CallIds { response: name.id.clone(), form: state.model.dialect.ids() };
    let kinds = kinds.into_iter().collect();
    let head = Head {
        id: name.id.clone(),
        created: name.created,
        model,
        echo,
        ids,
        kinds,
        sealed,
        _held: held,
    };
    let keeper =
        kept.then(|| Keeper { state: Arc::clone(&state), owner, input, before, background });
    let answer = Answer::new(head, keeper);
    let mut response = if background {
        start(&state, owner, &name.id, (submission, arrived), answer, &peer).await?
    } else {
        let call = Call::start(&state, vec![submission], streamed, arrived, &peer).await?;
        let mut call = call.named(&name.id);
        if streamed {
            sse::stream(&state, call, answer, wire, (&peer, &name))?
        } else {
            let deltas = call.collect().await?;
            let delta = deltas.first().ok_or(ApiError::Aborted)?;
            let whole = answer.whole(delta, &call.tally()).map_err(reply::unwritable)?;
            call.writer().value(&whole)?
        }
    };
    let headers = response.headers_mut();
    if let Some(id) = HeaderValue::from_str(&name.id).ok().filter(|_| kept) {
        headers.insert(RESPONSE_HEADER, id);
    }
    let evicted = state.store.take_untold(owner);
    if evicted > 0 {
        headers.insert(EVICTED, evicted.into());
    }
    Ok(response)
}

/// Starts a background response. Returns as soon as the engine has accepted the request.
async fn start(
    state: &Shared,
    owner: Owner,
    id: &str,
    (submission, arrived): (Submission, Instant),
    answer: Answer,
    peer: &Peer,
) -> Result<Response, ApiError> {
    let call = Call::start(state, vec![submission], false, arrived, peer).await?;
    let mut call = call.named(id);
    let body = bytes(&answer.state("in_progress"));
    let queued = sent(state, peer.client(), bytes(&answer.state("queued")))?;
    let (kept, begin) = oneshot::channel();
    let (shared, name) = (Arc::clone(state), id.to_owned());
    let broken = answer.failed(&ApiError::Aborted);
    let work = async move {
        let collected = call.collect().await;
        let delta = collected.and_then(|deltas| deltas.into_iter().next().ok_or(ApiError::Aborted));
        match delta {
            Ok(delta) => answer.whole(&delta, &call.tally()).map_err(|_| ApiError::Aborted),
            Err(error) => Ok(answer.failed(&error)),
        }
    };
    let task = tokio::spawn(async move {
        // The response must be stored before it can finish.
        let Ok(()) = begin.await else { return };
        let ended = contained(work).await;
        let response = ended.ok().and_then(Result::ok).unwrap_or(broken);
        // A successful response was stored by the answer itself, and `fail` leaves it unchanged.
        shared.store.fail(owner, &name, bytes(&response));
    });
    state.store.begin(owner, id, body, Some(task.abort_handle()));
    // Sending fails only if the task was stopped already.
    let _ = kept.send(());
    Ok(queued)
}

/// Returns a stored response in its current state.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}",
    params(("id" = String, Path, description = "Name of the response")),
    responses(
        (status = 200, description = "The response", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn retrieve(
    State(state): State<Shared>,
    key: KeyId,
    client: ClientId,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    Ok(sent(&state, client, find(&state, owner(key), &id, None)?.body)?)
}

/// The confirmation that a response was deleted.
#[derive(Serialize, ToSchema)]
pub(crate) struct Deleted {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// Deletes a response, and stops it if it is still being computed.
#[utoipa::path(
    delete,
    path = "/v1/responses/{id}",
    params(("id" = String, Path, description = "Name of the response")),
    responses(
        (status = 200, description = "It is gone", body = Deleted),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn delete(
    State(state): State<Shared>,
    key: KeyId,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    if !state.store.delete(owner(key), &id) {
        return Err(unknown(&id, None).into());
    }
    Ok(reply::ok(&Deleted { id, object: "response", deleted: true }))
}

/// Stops a background response. A finished response stays unchanged.
#[utoipa::path(
    post,
    path = "/v1/responses/{id}/cancel",
    params(("id" = String, Path, description = "Name of the response")),
    responses(
        (status = 200, description = "The response", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn cancel(
    State(state): State<Shared>,
    key: KeyId,
    client: ClientId,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let owner = owner(key);
    let kept = find(&state, owner, &id, None)?;
    if !kept.background {
        let reason = "`id`: only a response in the background can be cancelled";
        return Err(ApiError::invalid("id", reason).into());
    }
    if kept.running {
        let mut body: Value = serde_json::from_slice(&kept.body).map_err(reply::unwritable)?;
        body["status"] = json!("cancelled");
        // The response may have finished in the meantime.
        if state.store.fail(owner, &id, bytes(&body)) {
            state.store.stop(owner, &id);
        }
    }
    Ok(sent(&state, client, find(&state, owner, &id, None)?.body)?)
}

/// The new input items of a response.
#[derive(Serialize, ToSchema)]
pub(crate) struct ItemList {
    object: &'static str,
    #[schema(value_type = Vec<Object>)]
    data: Vec<Item>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
}

/// Returns the input items that were new in a response.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}/input_items",
    params(("id" = String, Path, description = "Name of the response")),
    responses(
        (status = 200, description = "The items", body = ItemList),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn input_items(
    State(state): State<Shared>,
    key: KeyId,
    client: ClientId,
    Path(id): Path<String>,
) -> Result<Response, Failure> {
    let kept = find(&state, owner(key), &id, None)?;
    let list = ItemList {
        object: "list",
        data: Vec::new(),
        first_id: None,
        last_id: None,
        has_more: false,
    };
    let items = kept.turns.last().into_iter().flat_map(|turn| &turn.input);
    let charge = Arc::new(state.budget.open(client));
    AnswerWriter::new(state.config.max_unread_bytes, &charge).filled(&list, "data", items)
}

/// Returns the owner of responses that were made with this API key.
fn owner(KeyId(key): KeyId) -> Owner {
    key.map_or(0, |at| at + 1)
}

fn unknown(id: &str, param: Option<&'static str>) -> ApiError {
    ApiError::UnknownResponse { response: cut(id, SHOWN_BYTES).into_owned(), param }
}

fn find(
    state: &Shared,
    owner: Owner,
    id: &str,
    param: Option<&'static str>,
) -> Result<Kept, ApiError> {
    state.store.get(owner, id).ok_or_else(|| unknown(id, param))
}

/// Returns the conversation up to the response that a request continues.
fn previous(state: &Shared, owner: Owner, id: &str) -> Result<Vec<Arc<Turn>>, ApiError> {
    const PARAM: &str = "previous_response_id";
    let kept = find(state, owner, id, Some(PARAM))?;
    if kept.turns.is_empty() {
        let state = if kept.running { "has not ended yet" } else { "was not answered" };
        return Err(ApiError::invalid(PARAM, format!("`{PARAM}`: that response {state}")));
    }
    Ok(kept.turns)
}

/// Returns the stored items to which a request refers by id.
fn referred(
    state: &Shared,
    owner: Owner,
    request: &ResponsesRequest,
    before: &[Arc<Turn>],
) -> Result<HashMap<String, Item>, ApiError> {
    let references = request.references();
    if references.is_empty() {
        return Ok(HashMap::new());
    }
    let wanted: HashSet<&str> = references.iter().map(|(id, _)| *id).collect();
    let mut found = state.store.items(owner, &wanted);
    let turns = before.iter().flat_map(|turn| turn.input.iter().chain(&turn.output));
    for item in turns {
        if let Some(id) = item.id().filter(|id| wanted.contains(id)) {
            found.entry(id.to_owned()).or_insert_with(|| item.clone());
        }
    }
    match references.into_iter().find(|(id, _)| !found.contains_key(*id)) {
        None => Ok(found),
        Some((id, param)) => {
            let item = cut(id, SHOWN_BYTES).into_owned();
            Err(ApiError::UnknownItem { item, param })
        }
    }
}

/// The number of tokens of a response's input.
#[derive(Serialize, ToSchema)]
pub(crate) struct InputTokens {
    /// Always `response.input_tokens`.
    object: &'static str,
    /// Tokens of the prompt, including image positions.
    input_tokens: u32,
}

/// Counts the input tokens of a response without computing it.
#[utoipa::path(
    post,
    path = "/v1/responses/input_tokens",
    request_body = ResponsesRequest,
    responses(
        (status = 200, description = "The number", body = InputTokens),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn input_tokens(
    AdmittedRequest { admission, valid: turn }: AdmittedRequest<ResponsesRequest>,
) -> Result<Response, Failure> {
    let Admission { state, peer, charge, .. } = admission;
    let chat = turn.valid.chat;
    let most = super::tokenize::most_tokens(&state)?;
    let text = RequestText::new(&state, &peer, chat.generation.cache_salt.as_deref(), &charge);
    let rendered = render(&state, chat.prompt, most, text, "input").await?;
    let input_tokens = u32::try_from(rendered.seen.ids.len()).unwrap_or(u32::MAX);
    Ok(reply::ok(&InputTokens { object: "response.input_tokens", input_tokens }))
}

fn bytes(response: &Value) -> Bytes {
    Bytes::from(response.to_string())
}

/// Sends a stored response to `client`. The store may evict it before it has been sent, so its
/// bytes are charged.
fn sent(state: &Shared, client: ClientId, body: Bytes) -> Result<Response, ApiError> {
    let charge = Arc::new(state.budget.open(client));
    charge.set(body.len())?;
    Ok(charged(body, charge))
}
