//! Constraints on a request's next tokens.

use std::fmt;

use thiserror::Error;

/// The tokens that a request may sample next.
///
/// A constraint belongs to one request, and ends with it. It depends on the tokens so far alone, so
/// it outlives preemption, the hand's death and a change of replica. One thread at a time drives
/// it: the engine's, while its masks are cheap, or a mask thread.
pub trait Constraint: fmt::Debug + Send {
    /// Notes that the request has generated `token`.
    ///
    /// # Errors
    /// The token was not allowed. The constraint can't be used any more.
    fn accept(&mut self, token: i32) -> Result<(), Broken>;

    /// Writes the tokens that may come next: bit `i % 32` of word `i / 32` is set for an allowed
    /// token `i`. Every word is written, and at least one bit is set. A thread fills the masks of
    /// several requests one after the other, so this must not wait. If it takes long, the request's
    /// row sits the step out, and others go on.
    ///
    /// # Errors
    /// No token can come next, or the search for one would take too long.
    fn mask(&mut self, words: &mut [u32]) -> Result<Allowed, Broken>;
}

/// The content of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// Every token may come next, and the mask has no meaning.
    Everything,
    /// The tokens of the mask are allowed.
    Some,
}

/// The reason for which a request cannot go on under its constraint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Broken(pub String);
