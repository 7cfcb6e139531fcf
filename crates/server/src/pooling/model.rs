//! A model that pools.

use super::lane::Pooled;

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
    /// True if the model's authors divide vectors by their length.
    pub normalize: bool,
    /// True if scores go through a sigmoid, which puts them between 0 and 1.
    pub sigmoid: bool,
    /// The other end of the sink that the engine was started with.
    pub outputs: Pooled,
}
