//! `POST /classify`, under each path that clients use for it.

use std::sync::Arc;

use axum::response::Response;
use forebay_api::{
    ApiError, ClassifyData, ClassifyRequest, ClassifyResponse, ErrorBody, ValidEmbedding,
};

use super::admitted::{Admissible, AdmittedRequest, Door};
use super::embeddings::{Embedded, embed};
use crate::names::random_hex;
use crate::pooling::answers;
use crate::reply::Failure;
use crate::state::{Shared, now};

impl Admissible for ClassifyRequest {
    type Valid = ValidEmbedding;

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn suits(&self, state: &Shared) -> Result<(), ApiError> {
        state.classifier().map(|_| ())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidEmbedding, ApiError> {
        let model = door.state.classifier()?;
        self.validate(door.limits, model.size)
    }
}

/// Returns the probabilities of a classifier's labels for texts.
#[utoipa::path(
    post,
    path = "/classify",
    request_body = ClassifyRequest,
    responses(
        (status = 200, description = "A probability for each label of each input", body = ClassifyResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn classify(
    AdmittedRequest { admission, valid }: AdmittedRequest<ClassifyRequest>,
) -> Result<Response, Failure> {
    let (state, name) = (Arc::clone(&admission.state), admission.model.clone());
    let model = state.classifier()?;
    let id = format!("classify-{}", random_hex());
    let function = model.function_for(valid.raw);
    let embedded = embed(admission, valid, &id).await?;
    let writer = embedded.writer();
    let Embedded { vectors, usage, .. } = embedded;
    let of_input = |(index, scores): (usize, Box<[f32]>)| {
        let probs = answers(scores, function).into_vec();
        // Of equal scores, the first wins.
        let best =
            (1..probs.len()).fold(0, |best, at| if probs[at] > probs[best] { at } else { best });
        let label = model.labels.get(best).cloned().unwrap_or_default();
        ClassifyData { index, label, num_classes: probs.len(), probs }
    };
    let data = vectors.into_iter().enumerate().map(of_input).collect();
    writer.value(&ClassifyResponse { id, object: "list", created: now(), model: name, data, usage })
}
