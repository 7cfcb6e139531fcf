//! Requests for vectors: submitted input by input, answered when the last one has come.
//!
//! A model that pools makes no text, so its outputs go past the egress thread. `lane` is their way
//! from the engine, and routes wait for a `call`. `inputs` makes prompts of texts. `vectors` works
//! on the model's output.

mod call;
mod inputs;
mod lane;
mod vectors;

use forebay_api::ApiError;

pub use lane::{Pooled, PooledSink, pooled};

pub(crate) use call::{Place, PooledCall, check_lengths};
pub(crate) use inputs::{Input, encode_inputs, encode_pairs};
pub(crate) use vectors::{Form, cosine, form, scores};

use crate::state::Inner;

/// The output of a model that pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingTask {
    /// Vectors of texts.
    Embed,
    /// One number, of how well the two texts of a pair go together.
    Score,
}

/// A model that pools.
#[derive(Debug, Clone)]
pub struct PooledModel {
    /// The output of the model.
    pub task: PoolingTask,
    /// Numbers of a vector.
    pub size: usize,
    /// Its authors divide vectors by their length.
    pub normalize: bool,
    /// Its authors squeeze scores into 0 to 1.
    pub sigmoid: bool,
    /// The other end of the sink that the engine was started with.
    pub outputs: Pooled,
}

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
