//! Constraints on a request's next tokens.

use std::fmt;

use thiserror::Error;

/// The tokens that a request may sample next.
///
/// A constraint belongs to one request, and ends with it. It depends only on the tokens so far, so
/// it outlives preemption, the hand's death and a change of replica. One thread at a time drives
/// it: the engine's while its masks are cheap, otherwise a mask thread.
pub trait Constraint: fmt::Debug + Send {
    /// Notes that the request has generated `token`.
    ///
    /// # Errors
    /// The token was not allowed. The constraint is unusable afterwards.
    fn accept(&mut self, token: i32) -> Result<(), ConstraintError>;

    /// Writes the tokens that may come next to the first of `masks`. Each other mask gets the
    /// tokens that may follow one of `drafts`, as if the drafts up to it had been generated. In a
    /// mask bit `i % 32` of word `i / 32` is set for an allowed token `i`. Every word is written,
    /// and at least one bit is set.
    ///
    /// Returns the content of each mask that was made: the first, and those of the following drafts
    /// up to one that is not allowed. Afterwards the constraint is in the same state as before.
    ///
    /// A thread makes the masks of several requests one after the other, so this must not wait. If
    /// it takes long, the request's row sits the step out, and other requests continue.
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
    /// Those of [`Self::walk`].
    fn mask(&mut self, words: &mut [u32]) -> Result<Allowed, ConstraintError> {
        let made = self.walk(&[], &mut [words])?;
        made.first().copied().ok_or_else(|| ConstraintError("no mask was made".into()))
    }

    /// Removes drafts that can't come next, as far as this is cheap to find out. If the next tokens
    /// are certain, these come first, up to `most`. Returns the number of certain tokens.
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
    /// The tokens of the mask are allowed.
    Some,
}

/// Why a request cannot continue under its constraint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ConstraintError(pub String);
