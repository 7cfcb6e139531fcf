//! `POST /v1/embeddings`.

use std::sync::Arc;

use axum::response::Response;
use forebay_api::limits::{Limited, Params, Walk};
use forebay_api::{
    ApiError, Embedding, EmbeddingRequest, EmbeddingResponse, ErrorBody, PoolingData,
    PoolingResponse, PoolingUsage, ValidEmbedding,
};
use forebay_http::Charge;

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use crate::answer::AnswerWriter;
use crate::names::random_hex;
use crate::pooling::{Form, Place, PooledCall, PoolingTask, answers, encode_inputs, form};
use crate::reply::Failure;
use crate::state::{Shared, now};
use crate::text::RequestText;

/// Responses with at least this many elements are written on another thread, so that they do not
/// block the HTTP threads.
const LARGE: usize = 1 << 15;

impl Admissible for EmbeddingRequest {
    type Valid = ValidEmbedding;

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn suits(&self, state: &Shared) -> Result<(), ApiError> {
        state.embedder().map(|_| ())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidEmbedding, ApiError> {
        let model = door.state.pooled_model()?;
        self.validate(door.limits, model.size, model.normalize)
    }
}

/// An embedding request, for routes that also accept a scoring model.
pub(crate) struct Poolable(EmbeddingRequest);

impl Limited for Poolable {
    const PARAMS: Params = EmbeddingRequest::PARAMS;

    fn read(walk: &mut Walk<'_>) -> Result<Self, ApiError> {
        EmbeddingRequest::read(walk).map(Self)
    }
}

impl Admissible for Poolable {
    type Valid = ValidEmbedding;

    fn model(&self) -> Option<&str> {
        self.0.model()
    }

    fn suits(&self, state: &Shared) -> Result<(), ApiError> {
        let fits: &[&str] = match state.pooled_model()?.task {
            PoolingTask::Embed => &["embed", "encode"],
            PoolingTask::Score => &["score", "classify"],
            PoolingTask::Classify => &["classify"],
        };
        match self.0.task.as_deref().filter(|task| !fits.contains(task)) {
            None => Ok(()),
            Some(task) => {
                let reason = format!("`task`: the model does {}, and not {task}", fits[0]);
                Err(ApiError::invalid("task", reason))
            }
        }
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidEmbedding, ApiError> {
        self.0.validate_at(door)
    }
}

/// Embeds texts as vectors.
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
    AdmittedRequest { admission, valid }: AdmittedRequest<EmbeddingRequest>,
) -> Result<Response, Failure> {
    let name = admission.model.clone();
    let id = format!("embd-{}", random_hex());
    let embedded = embed(admission, valid, &id).await?;
    let writer = embedded.writer();
    let Embedded { vectors, wanted, usage, large, .. } = embedded;
    let write = move || writer.value(&response(vectors, wanted, id, name, usage));
    if large {
        let written = tokio::task::spawn_blocking(write).await;
        return written
            .map_err(|error| ApiError::Internal { reason: error.to_string(), code: None })?;
    }
    write()
}

/// The vectors of a request's texts.
pub(super) struct Embedded {
    pub(super) vectors: Vec<Box<[f32]>>,
    /// The requested format of vectors.
    pub(super) wanted: Form,
    pub(super) usage: PoolingUsage,
    /// True if writing the vectors takes long enough for another thread.
    large: bool,
    charge: Arc<Charge>,
}

impl Embedded {
    /// Creates a writer for the response. The writer has no size limit: the charge for the inputs
    /// already covers the response, whose size follows from the inputs.
    pub(super) fn writer(&self) -> AnswerWriter {
        AnswerWriter::new(usize::MAX, &self.charge)
    }
}

/// Computes the texts of a request, whose id in traces is `id`.
///
/// # Errors
/// One of the texts is not accepted.
pub(super) async fn embed(
    Admission { state, peer, arrived, limits, routing, charge, .. }: Admission,
    valid: ValidEmbedding,
    id: &str,
) -> Result<Embedded, ApiError> {
    let model = state.pooled_model()?;
    let special = valid.add_special_tokens;
    let most = limits.context_length as usize;
    let text = RequestText::new(&state, &peer, valid.cache_salt.as_deref(), &charge);
    let inputs = encode_inputs(text, valid.prompts, special, valid.truncate, most, "input").await?;
    drop(charge);
    let (priority, cache_salt) = (valid.priority, valid.cache_salt);
    let place = Place { param: "input", priority, cache_salt, preference: routing.0 };
    let call = PooledCall::start(&state, model, inputs, limits, place, arrived, &peer).await?;
    let mut call = call.named(id);
    let vectors = call.collect().await?;
    let wanted =
        Form { dimensions: valid.dimensions, normalize: valid.normalize, format: valid.format };
    let large = vectors.len() * model.size >= LARGE;
    let (usage, charge) = (call.usage(), call.charge());
    Ok(Embedded { vectors, wanted, usage, large, charge })
}

/// Returns the model's output (vectors or scores) for texts, as vLLM's route of this name does.
#[utoipa::path(
    post,
    path = "/pooling",
    request_body = EmbeddingRequest,
    responses(
        (status = 200, description = "A vector, or a list of scores, for each input", body = PoolingResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn pooling(
    AdmittedRequest { admission, valid }: AdmittedRequest<Poolable>,
) -> Result<Response, Failure> {
    let (state, name) = (Arc::clone(&admission.state), admission.model.clone());
    let model = state.pooled_model()?;
    let id = format!("pool-{}", random_hex());
    let raw = valid.raw;
    let embedded = embed(admission, valid, &id).await?;
    let writer = embedded.writer();
    let Embedded { vectors, mut wanted, usage, .. } = embedded;
    let vectors: Vec<Box<[f32]>> = match model.task {
        PoolingTask::Embed => vectors,
        PoolingTask::Score | PoolingTask::Classify => {
            wanted.normalize = false;
            let function = model.function_for(raw);
            vectors.into_iter().map(|scores| answers(scores, function)).collect()
        }
    };
    let data = vectors.into_iter().enumerate();
    let data = data
        .map(|(index, vector)| PoolingData { index, object: "pooling", data: form(vector, wanted) })
        .collect();
    writer.value(&PoolingResponse { id, object: "list", created: now(), model: name, data, usage })
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
