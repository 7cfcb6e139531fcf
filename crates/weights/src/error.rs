//! Errors of a model, as text with advice for the user.

use std::io;
use std::path::Path;

use thiserror::Error;

/// Why a model can't be read or computed. The message is one line for the user.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ModelError {
    /// Files are missing, damaged, or belong to another model.
    #[error("{0}")]
    Broken(String),
    /// The Rust hand lacks a feature that the model needs, such as `latent attention`.
    #[error("{0}")]
    Elsewhere(String),
    /// No hand has a feature that the model needs.
    #[error("no hand serves {0}")]
    Unserved(String),
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
