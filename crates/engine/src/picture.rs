//! Images that requests bring: files, until somebody needs their patches.

use std::fmt::{self, Debug, Formatter};
use std::sync::Arc;

use thiserror::Error;

use crate::payload::Payload;

/// An image as its request brought it. It is kept as long as the request lives. The device's part
/// of it may be dropped for other images, and dies with the hand.
pub trait Picture: Debug + Send + Sync {
    /// Has its patches put where the hand reads them, by another thread. Called on the engine
    /// thread: it must not block.
    fn place(&self, placement: Placement);
}

/// Why an image has no patches.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PictureError {
    /// The file is to blame.
    #[error("{0}")]
    Unreadable(String),
    /// The file is not to blame.
    #[error("{0}")]
    Failed(String),
}

/// The end of a placement: the payload that holds the patches, from its first byte on.
pub type Placed = Result<Arc<dyn Payload>, PictureError>;

/// The duty to say where the patches of an image are, or that there are none. Dropping it says that
/// something went wrong.
pub struct Placement(Option<Box<dyn FnOnce(Placed) + Send>>);

impl Debug for Placement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placement").finish_non_exhaustive()
    }
}

impl Placement {
    /// A duty towards the caller of `done`.
    #[must_use]
    pub fn new(done: impl FnOnce(Placed) + Send + 'static) -> Self {
        Self(Some(Box::new(done)))
    }

    /// Does it.
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
