//! Images of requests. They stay files until the scheduler needs their patches.

use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

use thiserror::Error;

use crate::payload::Payload;

/// An image of a request, kept until the request ends. Its patches, and its pages on the device,
/// may be dropped in favour of other images, and are lost when the hand dies.
pub trait Picture: Debug + Send + Sync {
    /// Starts copying the image's patches into the memory that the hand reads, on another thread.
    /// The engine thread calls this, so it must not block.
    fn place(&self, placement: Placement);
}

/// The reason why an image has no patches.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PictureError {
    /// The image file is invalid.
    #[error("{0}")]
    Unreadable(String),
    /// The patches could not be prepared although the file may be valid.
    #[error("{0}")]
    Failed(String),
}

/// The outcome of a placement: a payload that starts with the patches, or an error.
pub type Placed = Result<Arc<dyn Payload>, PictureError>;

/// A callback that reports where an image's patches are, or that they could not be prepared.
/// Dropping it reports a failure.
pub struct Placement(Option<Box<dyn FnOnce(Placed) + Send>>);

impl Debug for Placement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placement").finish_non_exhaustive()
    }
}

impl Placement {
    /// Creates a placement that calls `done` with its outcome.
    #[must_use]
    pub fn new(done: impl FnOnce(Placed) + Send + 'static) -> Self {
        Self(Some(Box::new(done)))
    }

    /// Reports the outcome of the placement.
    pub fn done(mut self, placed: Placed) {
        if let Some(done) = self.0.take() {
            done(placed);
        }
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        if let Some(done) = self.0.take() {
            done(Err(PictureError::Failed("the image was not prepared".into())));
        }
    }
}
