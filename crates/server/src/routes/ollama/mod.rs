//! Ollama's routes, so that its clients find this server: shapes over the parts that chats use.

mod about;
mod answer;

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    ApiError, ErrorBody, OllamaAsk, OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest,
    Prompt, Vector,
};
use serde_json::json;

use super::chat::{CallIds, prepare};
use super::embeddings::{Embedded, embed as embed_texts};
use super::random_hex;
use crate::budget::Charge;
use crate::call::{Call, Submission, Terms};
use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::pooling::form;
use crate::reply::{self, Failure};
use crate::routing::Routing;
use crate::state::Shared;
use crate::stream::sse;
use crate::stream::wire::Wire;
use crate::text::encode_prompts;
pub(crate) use about::{__path_ps, __path_show, __path_tags, __path_version};
pub(crate) use about::{ps, show, tags, version};
use answer::{Kind, Lines, Writer};

/// Behind a model's name it says nothing.
const LATEST: &str = ":latest";

/// The served name that a request means.
fn served(state: &Shared, wanted: Option<&str>) -> Result<String, ApiError> {
    state.model_name(wanted.map(|name| name.strip_suffix(LATEST).unwrap_or(name)))
}

/// Answers a conversation in Ollama's words, a line of JSON for each piece.
#[utoipa::path(
    post,
    path = "/api/chat",
    operation_id = "ollama_chat",
    request_body = OllamaChatRequest,
    responses(
        (status = 200, description = "The answer, or lines of it", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn chat(
    State(state): State<Shared>,
    wire: Wire,
    peer: Peer,
    routing: Routing,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let (request, charge) = limits::read::<OllamaChatRequest>(body, &state).await?;
    let model = served(&state, request.model.as_deref())?;
    let ask = request.validate(&state.model.defaults, state.admit()?)?;
    let from = From { state: &state, wire, peer: &peer, routing, arrived };
    from.answer(ask, Kind::Chat, model, charge).await
}

/// Answers a prompt in Ollama's words, a line of JSON for each piece.
#[utoipa::path(
    post,
    path = "/api/generate",
    operation_id = "ollama_generate",
    request_body = OllamaGenerateRequest,
    responses(
        (status = 200, description = "The answer, or lines of it", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn generate(
    State(state): State<Shared>,
    wire: Wire,
    peer: Peer,
    routing: Routing,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let (request, charge) = limits::read::<OllamaGenerateRequest>(body, &state).await?;
    let model = served(&state, request.model.as_deref())?;
    let has_template = state.text.template().is_some();
    let ask = request.validate(has_template, &state.model.defaults, state.admit()?)?;
    let from = From { state: &state, wire, peer: &peer, routing, arrived };
    from.answer(ask, Kind::Generate, model, charge).await
}

/// The origin of a request.
struct From<'a> {
    state: &'a Shared,
    wire: Wire,
    peer: &'a Peer,
    routing: Routing,
    arrived: Instant,
}

impl From<'_> {
    async fn answer(
        self,
        ask: OllamaAsk,
        kind: Kind,
        model: String,
        charge: Arc<Charge>,
    ) -> Result<Response, Failure> {
        let Self { state, wire, peer, routing, arrived } = self;
        let name = peer.name("ollama-");
        let ids = CallIds { response: name.id.clone(), form: state.model.dialect.ids() };
        let writer = Writer::new(kind, model, ids, arrived);
        let limits = state.limits()?;
        let (submission, streamed) = match ask {
            OllamaAsk::Load { unload } => return Ok(reply::ok(&writer.loaded(unload))),
            OllamaAsk::Chat(mut chat) => {
                routing.fill(&mut chat.generation);
                let streamed = chat.streaming.is_some();
                let param = if kind == Kind::Chat { "messages" } else { "prompt" };
                (prepare(state, *chat, limits, &charge, param).await?, streamed)
            }
            OllamaAsk::Raw { prompt, mut generation, streamed } => {
                routing.fill(&mut generation);
                let terms = Arc::new(Terms::new(*generation, &state.model.eos, limits));
                let most = Some(limits.context_length as usize);
                let prompts = vec![Prompt::Text(prompt)];
                let ids =
                    encode_prompts(&state.text, prompts, true, most, "prompt", &charge).await?;
                let ids = ids.into_iter().next().unwrap_or_default();
                (Submission::new(state, ids, terms, limits, "prompt")?, streamed)
            }
        };
        drop(charge);
        let call = Call::start(state, vec![submission], streamed, arrived, peer).await?;
        let mut call = call.named(&name.id);
        if streamed {
            return sse::stream(state, call, Lines::new(writer), wire, (peer, &name));
        }
        let deltas = call.collect().await?;
        let delta = deltas.first().ok_or(ApiError::Aborted)?;
        Ok(reply::ok(&writer.whole(delta, &call.tally())))
    }
}

/// Turns texts into vectors, in Ollama's words.
#[utoipa::path(
    post,
    path = "/api/embed",
    operation_id = "ollama_embed",
    request_body = OllamaEmbedRequest,
    responses(
        (status = 200, description = "A vector for each text", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn embed(
    State(state): State<Shared>,
    peer: Peer,
    routing: Routing,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let (request, charge) = limits::read::<OllamaEmbedRequest>(body, &state).await?;
    let model = served(&state, request.model.as_deref())?;
    let id = format!("ollama-{}", random_hex());
    let Embedded { vectors, wanted, usage, .. } =
        embed_texts(&state, request.in_openai(), charge, &peer, routing, (&id, arrived)).await?;
    let vectors: Vec<Vector> = vectors.into_iter().map(|vector| form(vector, wanted)).collect();
    let total = u64::try_from(arrived.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(reply::ok(&json!({
        "model": model,
        "embeddings": vectors,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
    })))
}
