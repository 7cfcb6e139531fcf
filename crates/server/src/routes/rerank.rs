//! `POST /rerank` and `POST /score`, under all paths that clients use for them.

use axum::response::Response;
use forebay_api::{
    ApiError, ErrorBody, Pairs, PoolingUsage, Prompt, RerankDocument, RerankRequest,
    RerankResponse, RerankResult, ScoreData, ScoreRequest, ScoreResponse, ValidRerank,
};

use super::admitted::{Admissible, Admission, AdmittedRequest, Door};
use crate::answer::AnswerWriter;
use crate::names::random_hex;
use crate::pooling::{
    Place, PooledCall, PoolingTask, check_lengths, cosine, encode_inputs, encode_pairs, scores,
};
use crate::reply::{self, Failure};
use crate::state::{Shared, now};
use crate::text::RequestText;

impl Admissible for RerankRequest {
    type Valid = ValidRerank;

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn suits(&self, state: &Shared) -> Result<(), ApiError> {
        state.scorer().map(|_| ())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<ValidRerank, ApiError> {
        self.validate(door.limits)
    }
}

impl Admissible for ScoreRequest {
    type Valid = Pairs;

    fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    fn suits(&self, state: &Shared) -> Result<(), ApiError> {
        state.scorer().map(|_| ())
    }

    fn validate_at(self, door: &Door<'_>) -> Result<Pairs, ApiError> {
        self.validate(door.limits)
    }
}

/// Sorts documents by their relevance to a query.
#[utoipa::path(
    post,
    path = "/rerank",
    request_body = RerankRequest,
    responses(
        (status = 200, description = "The best documents first", body = RerankResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn rerank(
    AdmittedRequest { admission, valid }: AdmittedRequest<RerankRequest>,
) -> Result<Response, Failure> {
    let id = format!("rerank-{}", random_hex());
    let (found, usage) = score_pairs(&admission, &valid.pairs, &id).await?;
    let mut order: Vec<usize> = (0..found.len()).collect();
    // Of equal scores the first document stays first.
    order.sort_by(|&a, &b| found[b].total_cmp(&found[a]));
    order.truncate(valid.top_n);
    let mut documents = valid.pairs.second;
    let results = order.into_iter().map(|index| RerankResult {
        index,
        document: valid
            .return_documents
            .then(|| RerankDocument { text: std::mem::take(&mut documents[index]) }),
        relevance_score: found[index],
    });
    let model = admission.model;
    // The documents come from the body, so its charge covers them.
    let response = RerankResponse { id, model, usage, results: results.collect() };
    AnswerWriter::new(usize::MAX, &admission.charge).value(&response)
}

/// Scores how well the two texts of each pair match.
#[utoipa::path(
    post,
    path = "/score",
    request_body = ScoreRequest,
    responses(
        (status = 200, description = "A score for each pair", body = ScoreResponse),
        (status = "default", description = "An error", body = ErrorBody),
    ),
)]
pub(crate) async fn score(
    AdmittedRequest { admission, valid: pairs }: AdmittedRequest<ScoreRequest>,
) -> Result<Response, Failure> {
    let id = format!("score-{}", random_hex());
    let (found, usage) = score_pairs(&admission, &pairs, &id).await?;
    let data = found.into_iter().enumerate();
    let data = data.map(|(index, score)| ScoreData { index, object: "score", score }).collect();
    let model = admission.model;
    Ok(reply::ok(&ScoreResponse { id, object: "list", created: now(), model, data, usage }))
}

/// Returns the score of each pair: the output of a cross-encoder, or the cosine of an embedder's
/// vectors.
async fn score_pairs(
    admission: &Admission,
    pairs: &Pairs,
    id: &str,
) -> Result<(Vec<f32>, PoolingUsage), ApiError> {
    let Admission { state, peer, limits, charge, .. } = admission;
    let (model, limits) = (state.scorer()?, *limits);
    let text = RequestText::new(state, peer, pairs.cache_salt.as_deref(), charge);
    let inputs = match model.task {
        PoolingTask::Score | PoolingTask::Classify => {
            encode_pairs(text, pairs, limits.context_length as usize).await?
        }
        PoolingTask::Embed => {
            let mut inputs = Vec::with_capacity(pairs.first.len() + pairs.second.len());
            for (texts, param) in [&pairs.first, &pairs.second].into_iter().zip(pairs.params) {
                let texts = texts.iter().cloned().map(Prompt::Text).collect();
                let most = limits.context_length as usize;
                let encoded = encode_inputs(text, texts, true, pairs.truncate, most, param).await?;
                check_lengths(&encoded, limits.context_length, param)?;
                inputs.extend(encoded);
            }
            inputs
        }
    };
    let (param, priority) = (pairs.params[1], pairs.priority);
    let cache_salt = pairs.cache_salt.clone();
    let place = Place { param, priority, cache_salt, preference: admission.routing.0.clone() };
    let call =
        PooledCall::start(state, model, inputs, limits, place, admission.arrived, peer).await?;
    let mut call = call.named(id);
    let vectors = call.collect().await?;
    let found = match model.task {
        PoolingTask::Score | PoolingTask::Classify => {
            scores(vectors, model.function_for(pairs.raw))
        }
        PoolingTask::Embed => {
            let (first, second) = vectors.split_at(pairs.first.len());
            let partner = |index| first.get(index).unwrap_or(&first[0]);
            second.iter().enumerate().map(|(index, b)| cosine(partner(index), b)).collect()
        }
    };
    Ok((found, call.usage()))
}
