//! A model that pools.

use forebay_egress::Pooled;

/// The output of a model that pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolingTask {
    /// Vectors of texts.
    Embed,
    /// One score of the two texts of a pair.
    Score,
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
    /// True if scores go through a sigmoid, which brings them between 0 and 1.
    pub sigmoid: bool,
    /// The server's side of the engine's sink for vectors.
    pub outputs: Pooled,
}
