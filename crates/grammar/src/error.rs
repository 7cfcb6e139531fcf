//! Reasons for which a source has no constraint.

use thiserror::Error;

/// The reason for which a source was not compiled.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// The source is at fault.
    #[error("{reason}")]
    Invalid {
        /// The place in the source, such as `.properties.a.not`. Empty: no special place.
        path: String,
        /// The reason, for the user.
        reason: String,
    },
    /// The server was started without grammars.
    #[error("this server was started with --no-grammar")]
    Off,
    /// The tokenizer's tokens have no bytes of their own.
    #[error("{0}")]
    Tokenizer(String),
    /// Too many sources wait.
    #[error("too many grammars wait to be compiled")]
    Busy,
    /// The grammar is not compiled, and will not be soon.
    #[error("the grammar was not compiled within {seconds} s")]
    Late {
        /// The limit in seconds.
        seconds: u64,
    },
    /// The compiling threads have ended, or one panicked.
    #[error("{0}")]
    Internal(String),
}

impl GrammarError {
    /// The source as a whole is at fault.
    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::at(String::new(), reason)
    }

    /// A place in the source is at fault.
    pub(crate) fn at(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { path: path.into(), reason: reason.into() }
    }
}
