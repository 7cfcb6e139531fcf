//! `POST /v1/embeddings`.

use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use forebay_api::{
    ApiError, Embedding, EmbeddingRequest, EmbeddingResponse, ErrorBody, PoolingUsage,
};

use super::random_hex;
use crate::limits::{self, Upload};
use crate::peers::Peer;
use crate::pooling::{Form, Place, PooledCall, encode_inputs, form};
use crate::reply::{self, Failure};
use crate::routing::Routing;
use crate::state::{Shared, now};

/// Numbers in a response from which on it is written beside the HTTP threads: others wait for those.
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
    let model = state.embedder()?;
    let model_limits = state.admit()?;
    let valid = request.validate(model_limits, model.size, model.normalize)?;
    let special = valid.add_special_tokens;
    let most = model_limits.context_length as usize;
    let inputs =
        encode_inputs(&state.text, valid.prompts, special, valid.truncate, most, "input", &charge)
            .await?;
    drop(charge);
    let id = format!("embd-{}", random_hex());
    let (priority, cache_salt) = (valid.priority, valid.cache_salt);
    let place = Place { param: "input", priority, cache_salt, preference: routing.0 };
    let call =
        PooledCall::start(&state, model, inputs, model_limits, place, arrived, &peer).await?;
    let mut call = call.named(&id);
    let vectors = call.collect().await?;
    let wanted =
        Form { dimensions: valid.dimensions, normalize: valid.normalize, format: valid.format };
    let usage = call.usage();
    let large = vectors.len() * model.size >= LARGE;
    let write = move || reply::ok(&response(vectors, wanted, id, name, usage));
    if large {
        let written = tokio::task::spawn_blocking(write).await;
        return Ok(written
            .map_err(|error| ApiError::Internal { reason: error.to_string(), code: None })?);
    }
    Ok(write())
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
