//! A model that pools.

use forebay_egress::Pooled;

/// The output of a model that pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingTask {
    /// Vectors of texts.
    Embed,
    /// One score of the two texts of a pair.
    Score,
    /// A number for each of several labels.
    Classify,
}

/// What makes answers of a model's scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreFunction {
    /// They are the answer.
    Identity,
    /// Brings each between 0 and 1.
    Sigmoid,
    /// Makes probabilities of all together.
    Softmax,
}

/// A model that pools.
#[derive(Debug, Clone)]
pub struct PooledModel {
    /// The output of the model.
    pub task: PoolingTask,
    /// The number of elements of a vector.
    pub size: usize,
    /// True if the model's authors divide vectors by their length.
    pub normalize: bool,
    /// What makes answers of scores.
    pub function: ScoreFunction,
    /// The names of labels, one for each score; none: the model makes vectors.
    pub labels: Vec<String>,
    /// The server's side of the engine's sink for vectors.
    pub outputs: Pooled,
}

impl PooledModel {
    /// What makes answers of scores for a client who may want them `raw`.
    pub(crate) fn function_for(&self, raw: bool) -> ScoreFunction {
        if raw { ScoreFunction::Identity } else { self.function }
    }
}
