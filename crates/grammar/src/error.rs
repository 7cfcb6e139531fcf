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
    /// Too many sources wait, of all clients or of this one.
    #[error("too many grammars wait to be compiled")]
    Busy,
    /// Compiles of this client were given up, and still run.
    #[error(
        "{compiles} grammars of this client were given up because they took too long, and are still being compiled"
    )]
    Overdue {
        /// The number of these compiles.
        compiles: usize,
    },
    /// The grammar's turn has not come, and will not soon.
    #[error("the grammar was not compiled within {seconds} s, as others were")]
    Late {
        /// The time that it has waited, in seconds.
        seconds: u64,
        /// Seconds after which fewer may wait.
        retry_after: u32,
    },
    /// No new source is compiled until a compile ends that was given up.
    #[error("the compiler of grammars is stuck: {compiles} compiles were given up and still run")]
    Stuck {
        /// The number of these compiles.
        compiles: usize,
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
