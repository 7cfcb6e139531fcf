//! The errors of constraints.

use thiserror::Error;

/// Why no constraint could be created.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarError {
    /// The source is not valid or not supported.
    #[error("{reason}")]
    Invalid {
        /// The path within the source, such as `.properties.a.not`; empty if the error concerns the
        /// whole source.
        path: String,
        /// The reason, for the user.
        reason: String,
    },
    /// The server was started without grammars.
    #[error("this server was started with --no-grammar")]
    Off,
    /// The bytes of the tokenizer's tokens are unknown.
    #[error("{0}")]
    Tokenizer(String),
    /// Too many sources are waiting, in total or from this client.
    #[error("too many grammars wait to be compiled")]
    Busy,
    /// Too many compilations for this client were abandoned and are still running.
    #[error(
        "{compiles} grammars of this client were given up because they took too long, and are still being compiled"
    )]
    Overdue {
        /// The number of compilations that are still running.
        compiles: usize,
    },
    /// The source was not compiled in time, because others were compiled first.
    #[error("the grammar waited {seconds} s while others were compiled")]
    Late {
        /// The time that the request has waited, in seconds.
        seconds: u64,
        /// Seconds after which the queue may be shorter.
        retry_after: u32,
    },
    /// Too many abandoned compilations are still running. No new source is compiled until one of
    /// them ends.
    #[error("the compiler of grammars is stuck: {compiles} compiles were given up and still run")]
    Stuck {
        /// The number of compilations that are still running.
        compiles: usize,
    },
    /// The compiling threads have ended, or the compiler panicked.
    #[error("{0}")]
    Internal(String),
}

impl GrammarError {
    /// Creates an error of the source as a whole.
    pub(crate) fn invalid(reason: impl Into<String>) -> Self {
        Self::at(String::new(), reason)
    }

    /// Creates an error at a path within the source.
    pub(crate) fn at(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { path: path.into(), reason: reason.into() }
    }
}
