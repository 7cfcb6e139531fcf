//! The faults that a model can have, in words that tell a user what to do.

use std::io;
use std::path::Path;

use thiserror::Error;

/// Why a model can't be read or computed here. The message is one line for the user.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ModelError {
    /// Files that are missing, damaged, or of another model.
    #[error("{0}")]
    Broken(String),
    /// Something that only the hand in Python has, such as `a mixture of experts`.
    #[error("{0}")]
    Elsewhere(String),
}

impl ModelError {
    pub(crate) fn broken(what: impl Into<String>) -> Self {
        Self::Broken(what.into())
    }

    pub(crate) fn elsewhere(what: impl Into<String>) -> Self {
        Self::Elsewhere(what.into())
    }

    pub(crate) fn unreadable(path: &Path, error: &io::Error) -> Self {
        Self::Broken(format!("{} can't be read: {error}", path.display()))
    }
}
