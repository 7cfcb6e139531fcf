//! Requests for vectors. They are submitted input by input, and answered with the last vector.
//!
//! A model that pools makes no text, so its outputs go past the egress thread. Their way from the
//! engine is in `forebay_egress`, and routes wait for a `call`. `inputs` makes prompts of texts.
//! `vectors` works on the model's output.

mod call;
mod inputs;
pub(crate) mod model;
mod vectors;

use forebay_api::ApiError;

pub use model::{PooledModel, PoolingTask};

pub(crate) use call::{Place, PooledCall, check_lengths};
pub(crate) use inputs::{Input, encode_inputs, encode_pairs};
pub(crate) use vectors::{Form, cosine, form, scores};

use crate::state::Inner;

impl Inner {
    /// The model, if it pools.
    ///
    /// # Errors
    /// It generates.
    pub(crate) fn pooled_model(&self) -> Result<&PooledModel, ApiError> {
        self.model.pooling.as_ref().ok_or_else(|| {
            self.wrong_model(
                "generates text and makes no vectors; `--is-embedding` serves it as an embedder",
            )
        })
    }

    /// The model, if it makes vectors of texts.
    ///
    /// # Errors
    /// It generates, or scores pairs.
    pub(crate) fn embedder(&self) -> Result<&PooledModel, ApiError> {
        let model = self.pooled_model()?;
        match model.task {
            PoolingTask::Embed => Ok(model),
            PoolingTask::Score => {
                Err(self.wrong_model("scores pairs of texts: use /rerank or /score"))
            }
        }
    }

    /// Refuses what only a model that generates can do.
    ///
    /// # Errors
    /// The model pools.
    pub(crate) fn generator(&self) -> Result<(), ApiError> {
        match &self.model.pooling {
            None => Ok(()),
            Some(PooledModel { task: PoolingTask::Embed, .. }) => Err(self.wrong_model(
                "makes vectors and generates no text: use /v1/embeddings, /rerank or /score",
            )),
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
