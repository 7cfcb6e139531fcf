//! Pooling requests. Each input is submitted separately, and the response is sent when the last
//! vector has arrived.
//!
//! A pooling model generates no text, so its outputs bypass the egress thread. `forebay_egress`
//! delivers them from the engine. A `call` submits a request's inputs and waits for their outputs.
//! `inputs` converts texts to prompts, and `vectors` processes the model's output.

mod call;
mod inputs;
pub(crate) mod model;
mod vectors;

use forebay_api::ApiError;

pub use model::{PooledModel, PoolingTask, ScoreFunction};

pub(crate) use call::{Place, PooledCall, check_lengths};
pub(crate) use inputs::{Input, encode_inputs, encode_pairs};
pub(crate) use vectors::{Form, answers, cosine, form, scores};

use crate::state::Inner;

impl Inner {
    /// Returns the model if it is a pooling model.
    ///
    /// # Errors
    /// The model generates text.
    pub(crate) fn pooled_model(&self) -> Result<&PooledModel, ApiError> {
        self.model.pooling.as_ref().ok_or_else(|| {
            self.wrong_model(
                "generates text and makes no vectors; `--is-embedding` serves it as an embedder",
            )
        })
    }

    /// Returns the model if it embeds texts as vectors.
    ///
    /// # Errors
    /// The model generates text, or scores pairs, or classifies.
    pub(crate) fn embedder(&self) -> Result<&PooledModel, ApiError> {
        let model = self.pooled_model()?;
        match model.task {
            PoolingTask::Embed => Ok(model),
            PoolingTask::Score => {
                Err(self.wrong_model("scores pairs of texts: use /rerank or /score"))
            }
            PoolingTask::Classify => {
                Err(self.wrong_model("classifies texts and makes no vectors: use /classify"))
            }
        }
    }

    /// Returns the model if it can score a pair of texts: directly, or by comparing vectors.
    ///
    /// # Errors
    /// The model generates text, or has several labels.
    pub(crate) fn scorer(&self) -> Result<&PooledModel, ApiError> {
        let model = self.pooled_model()?;
        match model.task {
            PoolingTask::Embed | PoolingTask::Score => Ok(model),
            PoolingTask::Classify => {
                Err(self.wrong_model("has several labels and no score of pairs: use /classify"))
            }
        }
    }

    /// Returns the model if it is a classifier.
    ///
    /// # Errors
    /// The model generates text, or embeds texts as vectors.
    pub(crate) fn classifier(&self) -> Result<&PooledModel, ApiError> {
        let model = self.model.pooling.as_ref();
        model.filter(|model| model.task != PoolingTask::Embed).ok_or_else(|| {
            self.wrong_model("has no labels: /classify is for classifiers and cross-encoders")
        })
    }

    /// Rejects requests that need a generating model.
    ///
    /// # Errors
    /// The model is a pooling model.
    pub(crate) fn generator(&self) -> Result<(), ApiError> {
        match &self.model.pooling {
            None => Ok(()),
            Some(PooledModel { task: PoolingTask::Embed, .. }) => Err(self.wrong_model(
                "makes vectors and generates no text: use /v1/embeddings, /rerank or /score",
            )),
            Some(PooledModel { task: PoolingTask::Classify, .. }) => {
                Err(self.wrong_model("classifies texts and generates none: use /classify"))
            }
            Some(PooledModel { task: PoolingTask::Score, .. }) => {
                Err(self
                    .wrong_model("scores pairs of texts and generates none: use /rerank or /score"))
            }
        }
    }

    fn wrong_model(&self, does: &str) -> ApiError {
        let name = self.model.served_names.first().map_or("", String::as_str);
        ApiError::invalid("model", format!("`model`: {name} {does}"))
    }
}
