//! Ollama's routes, built on the modules of the chat route.

mod about;
mod answer;

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use forebay_api::{
    ApiError, ErrorBody, OllamaAsk, OllamaChatRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest,
    OllamaGenerateRequest, Prompt, ValidEmbedding, Vector,
};
use forebay_dialect::Ids;
use forebay_egress::Terms;
use serde_json::json;

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use super::chat::{CallIds, prepare};
use super::embeddings::{Embedded, embed as embed_texts};
use crate::call::Call;
use crate::names::random_hex;
use crate::pooling::form;
use crate::reply::{self, Failure};
use crate::sse;
use crate::state::Shared;
use crate::submission::Submission;
use crate::text::{RequestText, encode_prompts};
use crate::wire::Wire;
use about::served;
pub(crate) use about::{__path_ps, __path_show, __path_tags, __path_version};
pub(super) use about::{ModelSheet, NEVER, described, listed};
pub(crate) use about::{ps, show, tags, version};
use answer::{Kind, Lines, Writer};

/// Adds the routing preferences from the headers to the parameters in the body.
fn filled(mut ask: OllamaAsk, door: &Door<'_>) -> OllamaAsk {
    match &mut ask {
        OllamaAsk::Load { .. } => {}
        OllamaAsk::Chat(chat) => door.routing.fill(&mut chat.generation),
        OllamaAsk::Raw { generation, .. } => door.routing.fill(generation),
    }
    ask
}

impl Admissible for OllamaChatRequest {
    type Valid = OllamaAsk;

    fn model(&self) -> Option<&str> {
        served(self.model.as_deref())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<OllamaAsk, ApiError> {
        Ok(filled(self.validate(&door.state.model.defaults, door.limits)?, door))
    }
}

impl Admissible for OllamaGenerateRequest {
    type Valid = OllamaAsk;

    fn model(&self) -> Option<&str> {
        served(self.model.as_deref())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<OllamaAsk, ApiError> {
        let has_template = door.state.text.template().is_some();
        Ok(filled(self.validate(has_template, &door.state.model.defaults, door.limits)?, door))
    }
}

impl Admissible for OllamaEmbedRequest {
    /// `None`: the request has no text.
    type Valid = Option<ValidEmbedding>;

    fn model(&self) -> Option<&str> {
        served(self.model.as_deref())
    }

    fn suits(&self, state: &Shared) -> Result<(), ApiError> {
        state.embedder().map(|_| ())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<Self::Valid, ApiError> {
        self.in_openai().map(|request| request.validate_at(door)).transpose()
    }
}

impl Admissible for OllamaEmbeddingsRequest {
    /// `None`: the request has no text.
    type Valid = Option<ValidEmbedding>;

    fn model(&self) -> Option<&str> {
        served(self.model.as_deref())
    }

    fn suits(&self, state: &Shared) -> Result<(), ApiError> {
        state.embedder().map(|_| ())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<Self::Valid, ApiError> {
        self.in_openai().map(|request| request.validate_at(door)).transpose()
    }
}

/// Answers a conversation in Ollama's API, with one line of JSON per chunk.
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
    wire: Wire,
    admitted: AdmittedRequest<OllamaChatRequest>,
) -> Result<Response, Failure> {
    answer(wire, admitted, Kind::Chat).await
}

/// Answers a prompt in Ollama's API, with one line of JSON per chunk.
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
    wire: Wire,
    admitted: AdmittedRequest<OllamaGenerateRequest>,
) -> Result<Response, Failure> {
    answer(wire, admitted, Kind::Generate).await
}

/// Returns the response to a request without a prompt that asked to unload a model.
pub(super) fn unloaded(path: &str, model: &str) -> Response {
    let kind = if path == "/api/chat" { Kind::Chat } else { Kind::Generate };
    let ids = CallIds { response: String::new(), form: Ids::default() };
    reply::ok(&Writer::new(kind, model.to_owned(), ids, Instant::now()).loaded(true))
}

async fn answer<T: Admissible<Valid = OllamaAsk>>(
    wire: Wire,
    AdmittedRequest { admission, valid: ask }: AdmittedRequest<T>,
    kind: Kind,
) -> Result<Response, Failure> {
    let Admission { state, peer, arrived, model, limits, charge, .. } = admission;
    let name = peer.name("ollama-");
    let ids = CallIds { response: name.id.clone(), form: state.model.dialect.ids() };
    let writer = Writer::new(kind, model, ids, arrived);
    let (submission, streamed) = match ask {
        OllamaAsk::Load { unload } => return Ok(reply::ok(&writer.loaded(unload))),
        OllamaAsk::Chat(chat) => {
            let streamed = chat.streaming.is_some();
            let param = if kind == Kind::Chat { "messages" } else { "prompt" };
            (prepare(&state, *chat, limits, (&peer, &charge), param).await?, streamed)
        }
        OllamaAsk::Raw { prompt, generation, streamed } => {
            let terms = Arc::new(Terms::new(*generation, &state.model.eos, limits));
            let most = Some(limits.context_length as usize);
            let prompts = vec![Prompt::Text(prompt)];
            let salt = terms.generation.cache_salt.as_deref();
            let text = RequestText::new(&state, &peer, salt, &charge);
            let ids = encode_prompts(text, prompts, true, most, "prompt").await?;
            let ids = ids.into_iter().next().unwrap_or_default();
            (Submission::new(&state, ids, terms, limits, "prompt")?, streamed)
        }
    };
    drop(charge);
    let call = Call::start(&state, vec![submission], streamed, arrived, &peer).await?;
    let mut call = call.named(&name.id);
    if streamed {
        return sse::stream(&state, call, Lines::new(writer), wire, (&peer, &name));
    }
    let deltas = call.collect().await?;
    let delta = deltas.first().ok_or(ApiError::Aborted)?;
    call.writer().value(&writer.whole(delta, &call.tally()))
}

/// Embeds texts as vectors, in Ollama's API.
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
    AdmittedRequest { admission, valid }: AdmittedRequest<OllamaEmbedRequest>,
) -> Result<Response, Failure> {
    let (model, arrived) = (admission.model.clone(), admission.arrived);
    let id = format!("ollama-{}", random_hex());
    let Some(valid) = valid else {
        return Ok(reply::ok(&json!({"model": model, "embeddings": []})));
    };
    let embedded = embed_texts(admission, valid, &id).await?;
    let writer = embedded.writer();
    let Embedded { vectors, wanted, usage, .. } = embedded;
    let vectors: Vec<Vector> = vectors.into_iter().map(|vector| form(vector, wanted)).collect();
    let total = u64::try_from(arrived.elapsed().as_nanos()).unwrap_or(u64::MAX);
    writer.value(&json!({
        "model": model,
        "embeddings": vectors,
        "total_duration": total,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
    }))
}

/// Embeds a text as a vector, with the request format of older Ollama clients.
#[utoipa::path(
    post,
    path = "/api/embeddings",
    operation_id = "ollama_embeddings",
    request_body = OllamaEmbeddingsRequest,
    responses(
        (status = 200, description = "The vector", body = Object),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn embeddings(
    AdmittedRequest { admission, valid }: AdmittedRequest<OllamaEmbeddingsRequest>,
) -> Result<Response, Failure> {
    let id = format!("ollama-{}", random_hex());
    let Some(valid) = valid else { return Ok(reply::ok(&json!({"embedding": []}))) };
    let embedded = embed_texts(admission, valid, &id).await?;
    let writer = embedded.writer();
    let Embedded { vectors, wanted, .. } = embedded;
    let vector: Option<Vector> = vectors.into_iter().next().map(|vector| form(vector, wanted));
    writer.value(&json!({"embedding": vector}))
}
