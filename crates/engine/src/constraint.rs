//! Constraints on a request's next tokens.

use std::fmt;

use thiserror::Error;

/// The tokens that a request may sample next.
///
/// A constraint belongs to one request, and goes with it. It outlives preemption, the hand's death
/// and the change to another replica, because it depends on the tokens so far alone. The engine's
/// thread drives it, one token at a time; helpers fill masks beside it.
pub trait Constraint: fmt::Debug + Send {
    /// The request has said `token`.
    ///
    /// # Errors
    /// It was not allowed. The constraint is of no use any more.
    fn accept(&mut self, token: i32) -> Result<(), Broken>;

    /// Writes which tokens may come next: bit `i % 32` of word `i / 32` says it of token `i`. Every
    /// word is written, and at least one bit is set. The masks of requests are filled one after the
    /// other by each thread: this must not wait.
    ///
    /// # Errors
    /// No token can come next, or to find out would take too long.
    fn mask(&mut self, words: &mut [u32]) -> Result<Allowed, Broken>;
}

/// The content of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// Every token may come next: what is in the mask means nothing.
    Everything,
    /// Those of the mask.
    Some,
}

/// Why a request cannot go on under its constraint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Broken(pub String);
