//! A pooling model.

use forebay_egress::Pooled;

/// The task of a pooling model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingTask {
    /// The model embeds a text as a vector.
    Embed,
    /// The model gives one score to a pair of texts.
    Score,
    /// The model gives a score to each of several labels.
    Classify,
}

/// The activation that converts raw scores to the scores in responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreFunction {
    /// No activation.
    Identity,
    /// Maps each score to a number between 0 and 1.
    Sigmoid,
    /// Converts all scores of an input to probabilities.
    Softmax,
}

/// A pooling model.
#[derive(Debug, Clone)]
pub struct PooledModel {
    /// The task of the model.
    pub task: PoolingTask,
    /// The number of elements of a vector.
    pub size: usize,
    /// True if the model's configuration requires vectors of length 1.
    pub normalize: bool,
    /// The activation that converts raw scores to the scores in responses.
    pub function: ScoreFunction,
    /// The names of labels, one per score; empty: the model embeds texts as vectors.
    pub labels: Vec<String>,
    /// The receiving end of the engine's sink for vectors.
    pub outputs: Pooled,
}

impl PooledModel {
    /// Returns the activation for a request. `raw` is true if the client requests raw scores.
    pub(crate) fn function_for(&self, raw: bool) -> ScoreFunction {
        if raw { ScoreFunction::Identity } else { self.function }
    }
}
