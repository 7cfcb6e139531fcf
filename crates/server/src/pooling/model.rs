//! A model that pools.

use forebay_egress::Pooled;

/// The output of a model that pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingTask {
    /// Vectors of texts.
    Embed,
    /// The model gives a pair of texts one score.
    Score,
    /// The model gives a number for each of several labels.
    Classify,
}

/// The activation that turns raw scores into answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreFunction {
    /// No activation.
    Identity,
    /// Maps each score to a number between 0 and 1.
    Sigmoid,
    /// Turns all scores together into probabilities.
    Softmax,
}

/// A model that pools.
#[derive(Debug, Clone)]
pub struct PooledModel {
    /// The output of the model.
    pub task: PoolingTask,
    /// The number of elements of a vector.
    pub size: usize,
    /// True if the model's authors normalise vectors to length 1.
    pub normalize: bool,
    /// The activation that turns scores into answers.
    pub function: ScoreFunction,
    /// The names of labels, one for each score; empty: the model makes vectors.
    pub labels: Vec<String>,
    /// The receiving end of the engine's sink for vectors.
    pub outputs: Pooled,
}

impl PooledModel {
    /// The activation for a client, which may want `raw` scores.
    pub(crate) fn function_for(&self, raw: bool) -> ScoreFunction {
        if raw { ScoreFunction::Identity } else { self.function }
    }
}
