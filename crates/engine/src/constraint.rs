//! Constraints on a request's next tokens.

use std::fmt;

use thiserror::Error;

/// The tokens that a request may sample next.
///
/// A constraint belongs to one request, and ends with it. It depends only on the tokens so far, so
/// it outlives preemption, the hand's death and a change of replica. One thread at a time uses it:
/// the engine thread while its masks are cheap, otherwise a mask thread.
pub trait Constraint: fmt::Debug + Send {
    /// Records that the request has generated `token`.
    ///
    /// # Errors
    /// The token was not allowed. The constraint is unusable afterwards.
    fn accept(&mut self, token: i32) -> Result<(), ConstraintError>;

    /// Writes the tokens that may come next to the first of `masks`. Mask `n` gets the tokens that
    /// may follow the first `n` of `drafts`, as if these had been generated. In a mask, bit
    /// `i % 32` of word `i / 32` is set if token `i` is allowed. Every word is written, and at
    /// least one bit is set.
    ///
    /// Returns the content of each computed mask: the first one, and one after each draft up to the
    /// first draft that is not allowed. Afterwards the constraint is in the same state as before.
    ///
    /// A thread computes the masks of several requests one after the other, so this must not block.
    /// If it takes long, the request's row sits the step out, and other requests continue.
    ///
    /// # Errors
    /// No token can come next, or the search for one would take too long.
    fn walk(
        &mut self,
        drafts: &[i32],
        masks: &mut [&mut [u32]],
    ) -> Result<Vec<Allowed>, ConstraintError>;

    /// Writes the tokens that may come next, as [`Self::walk`] does.
    ///
    /// # Errors
    /// The errors of [`Self::walk`].
    fn mask(&mut self, words: &mut [u32]) -> Result<Allowed, ConstraintError> {
        let made = self.walk(&[], &mut [words])?;
        made.first().copied().ok_or_else(|| ConstraintError("no mask was made".into()))
    }

    /// Removes drafts that can't come next, as far as that is cheap to determine. If the grammar
    /// forces the next tokens, puts these first, at most `most`. Returns the number of forced
    /// tokens.
    ///
    /// # Errors
    /// The constraint is unusable.
    fn restrict(&mut self, most: usize, drafts: &mut Vec<i32>) -> Result<usize, ConstraintError> {
        drafts.truncate(most);
        Ok(0)
    }
}

/// The content of a mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowed {
    /// Every token may come next, and the mask's content is undefined.
    Everything,
    /// Only the tokens in the mask may come next.
    Some,
}

/// The reason why a request cannot continue under its constraint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);
