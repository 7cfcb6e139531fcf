//! A model that pools.

use super::lane::Pooled;

/// What a model that pools gives.
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
    /// What it gives.
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
