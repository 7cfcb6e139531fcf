//! Reasons for which a source has no constraint.

use thiserror::Error;

/// Why a source was not compiled.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// The source is at fault.
    #[error("{reason}")]
    Invalid {
        /// The place in the source, such as `.properties.a.not`; empty: no specific place.
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
    /// Too many sources are waiting, in all or from this client.
    #[error("too many grammars wait to be compiled")]
    Busy,
    /// Compilations for this client were abandoned and are still running.
    #[error(
        "{compiles} grammars of this client were given up because they took too long, and are still being compiled"
    )]
    Overdue {
        /// The number of compiles that still run.
        compiles: usize,
    },
    /// The grammar's turn did not come in time.
    #[error("the grammar was not compiled within {seconds} s, as others were")]
    Late {
        /// The time that it has waited, in seconds.
        seconds: u64,
        /// Seconds after which fewer may wait.
        retry_after: u32,
    },
    /// No new source is compiled until an abandoned compilation ends.
    #[error("the compiler of grammars is stuck: {compiles} compiles were given up and still run")]
    Stuck {
        /// The number of compiles that still run.
        compiles: usize,
    },
    /// The compiling threads have ended, or one panicked.
    #[error("{0}")]
    Internal(String),
}

impl GrammarError {
    /// An error of the source as a whole.
    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::at(String::new(), reason)
    }

    /// An error at a place in the source.
    pub(crate) fn at(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { path: path.into(), reason: reason.into() }
    }
}
