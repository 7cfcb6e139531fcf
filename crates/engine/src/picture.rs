//! Images of requests. They stay files until their patches are needed.

use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

use thiserror::Error;

use crate::payload::Payload;

/// An image of a request. It is kept as long as the request lives. Its patches and its pages on the
/// device may be dropped for other images, and are lost when the hand dies.
pub trait Picture: Debug + Send + Sync {
    /// Starts copying the image's patches into the memory that the hand reads, on another thread.
    /// The engine thread calls this, so it must not block.
    fn place(&self, placement: Placement);
}

/// Why an image has no patches.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PictureError {
    /// The file is at fault.
    #[error("{0}")]
    Unreadable(String),
    /// The file is not at fault.
    #[error("{0}")]
    Failed(String),
}

/// The outcome of a placement: the payload that begins with the patches.
pub type Placed = Result<Arc<dyn Payload>, PictureError>;

/// A promise to report where an image's patches are, or that there are none. Dropping it reports a
/// failure.
pub struct Placement(Option<Box<dyn FnOnce(Placed) + Send>>);

impl Debug for Placement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placement").finish_non_exhaustive()
    }
}

impl Placement {
    /// Makes a promise that is kept by calling `done`.
    #[must_use]
    pub fn new(done: impl FnOnce(Placed) + Send + 'static) -> Self {
        Self(Some(Box::new(done)))
    }

    /// Reports the end of the placement.
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
