//! `POST /v1/embeddings`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    ApiError, Embedding, EmbeddingRequest, EmbeddingResponse, ErrorBody, PoolingData,
    PoolingResponse, PoolingUsage,
};

use super::random_hex;
use crate::budget::Charge;
use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::pooling::{Form, Place, PooledCall, PoolingTask, encode_inputs, form, scores};
use crate::reply::{self, Failure};
use crate::routing::Routing;
use crate::state::{Shared, now};

/// Numbers in a response from which on it is written beside the HTTP threads: others wait for
/// those.
const LARGE: usize = 1 << 15;

/// Turns texts into vectors.
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    request_body = EmbeddingRequest,
    responses(
        (status = 200, description = "A vector for each input", body = EmbeddingResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn embeddings(
    State(state): State<Shared>,
    peer: Peer,
    routing: Routing,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let (request, charge) = limits::read::<EmbeddingRequest>(body, &state).await?;
    let name = state.model_name(request.model.as_deref())?;
    let id = format!("embd-{}", random_hex());
    let Embedded { vectors, wanted, usage, large } =
        embed(&state, request, charge, &peer, routing, (&id, arrived)).await?;
    let write = move || reply::ok(&response(vectors, wanted, id, name, usage));
    if large {
        let written = tokio::task::spawn_blocking(write).await;
        return Ok(written
            .map_err(|error| ApiError::Internal { reason: error.to_string(), code: None })?);
    }
    Ok(write())
}

/// Vectors of texts.
pub(super) struct Embedded {
    pub(super) vectors: Vec<Box<[f32]>>,
    /// The form in which they are wanted.
    pub(super) wanted: Form,
    pub(super) usage: PoolingUsage,
    /// To write them takes long.
    large: bool,
}

/// Has the texts of a request computed; the request is called `id` in traces.
///
/// # Errors
/// The model makes no vectors, or one of the texts is not taken.
pub(super) async fn embed(
    state: &Shared,
    request: EmbeddingRequest,
    charge: Arc<Charge>,
    peer: &Peer,
    routing: Routing,
    (id, arrived): (&str, Instant),
) -> Result<Embedded, ApiError> {
    let model = state.embedder()?;
    let model_limits = state.admit()?;
    let valid = request.validate(model_limits, model.size, model.normalize)?;
    let special = valid.add_special_tokens;
    let most = model_limits.context_length as usize;
    let inputs =
        encode_inputs(&state.text, valid.prompts, special, valid.truncate, most, "input", &charge)
            .await?;
    drop(charge);
    let (priority, cache_salt) = (valid.priority, valid.cache_salt);
    let place = Place { param: "input", priority, cache_salt, preference: routing.0 };
    let call = PooledCall::start(state, model, inputs, model_limits, place, arrived, peer).await?;
    let mut call = call.named(id);
    let vectors = call.collect().await?;
    let wanted =
        Form { dimensions: valid.dimensions, normalize: valid.normalize, format: valid.format };
    let large = vectors.len() * model.size >= LARGE;
    Ok(Embedded { vectors, wanted, usage: call.usage(), large })
}

/// Gives what the model makes of texts, vectors or scores, as vLLM's route of this name does.
#[utoipa::path(
    post,
    path = "/pooling",
    request_body = EmbeddingRequest,
    responses(
        (status = 200, description = "A vector, or a list of one score, for each input", body = PoolingResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn pooling(
    State(state): State<Shared>,
    peer: Peer,
    routing: Routing,
    body: Upload,
) -> Result<Response, Failure> {
    let arrived = Instant::now();
    let (request, charge) = limits::read::<EmbeddingRequest>(body, &state).await?;
    let name = state.model_name(request.model.as_deref())?;
    let model = state.pooled_model()?;
    let fits: &[&str] = match model.task {
        PoolingTask::Embed => &["embed", "encode"],
        PoolingTask::Score => &["score", "classify"],
    };
    if let Some(task) = request.task.as_deref().filter(|task| !fits.contains(task)) {
        let reason = format!("`task`: the model does {}, and not {task}", fits[0]);
        return Err(ApiError::invalid("task", reason).into());
    }
    let model_limits = state.admit()?;
    let valid = request.validate(model_limits, model.size, model.normalize)?;
    let most = model_limits.context_length as usize;
    let (special, cut) = (valid.add_special_tokens, valid.truncate);
    let inputs =
        encode_inputs(&state.text, valid.prompts, special, cut, most, "input", &charge).await?;
    drop(charge);
    let id = format!("pool-{}", random_hex());
    let (priority, cache_salt) = (valid.priority, valid.cache_salt);
    let place = Place { param: "input", priority, cache_salt, preference: routing.0 };
    let call =
        PooledCall::start(&state, model, inputs, model_limits, place, arrived, &peer).await?;
    let mut call = call.named(&id);
    let vectors = call.collect().await?;
    let vectors: Vec<Box<[f32]>> = match model.task {
        PoolingTask::Embed => vectors,
        PoolingTask::Score => {
            scores(&vectors, model.sigmoid).into_iter().map(|score| [score].into()).collect()
        }
    };
    let normalize = valid.normalize && model.task == PoolingTask::Embed;
    let wanted = Form { dimensions: valid.dimensions, normalize, format: valid.format };
    let data = vectors.into_iter().enumerate();
    let data = data
        .map(|(index, vector)| PoolingData { index, object: "pooling", data: form(vector, wanted) })
        .collect();
    let usage = call.usage();
    Ok(reply::ok(&PoolingResponse { id, object: "list", created: now(), model: name, data, usage }))
}

fn response(
    vectors: Vec<Box<[f32]>>,
    wanted: Form,
    id: String,
    model: String,
    usage: PoolingUsage,
) -> EmbeddingResponse {
    let embed =
        |(index, vector)| Embedding { object: "embedding", index, embedding: form(vector, wanted) };
    EmbeddingResponse {
        id,
        object: "list",
        created: now(),
        model,
        data: vectors.into_iter().enumerate().map(embed).collect(),
        usage,
    }
}
