//! A job: accept tokens, fill a mask.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::clock::Clock;
use crate::constraint::{Allowed, Broken, Constraint};

/// Microseconds up to which a mask is cheap. Masks of usual grammars take tens of microseconds.
const CHEAP_US: u64 = 500;

/// True if a mask that takes so long is cheap.
pub(crate) fn is_cheap(us: u64) -> bool {
    us <= CHEAP_US
}

/// A mask that is ready.
#[derive(Debug)]
pub(crate) struct Mask {
    pub(crate) allowed: Allowed,
    /// Of no meaning if everything is allowed.
    pub(crate) words: Vec<u32>,
}

/// The work of one request's constraint up to its next mask.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: u64,
    pub(crate) client: u64,
    pub(crate) constraint: Box<dyn Constraint>,
    /// Tokens that the constraint has not accepted yet.
    pub(crate) said: Vec<i32>,
    /// The memory for the mask.
    pub(crate) words: Vec<u32>,
    /// Microseconds that it is expected to take; `None`: nothing is known of it.
    pub(crate) expected_us: Option<u64>,
}

/// The result of a job.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) request: u64,
    pub(crate) constraint: Box<dyn Constraint>,
    pub(crate) mask: Result<Mask, Broken>,
    pub(crate) us: u64,
}

impl Job {
    pub(crate) fn run(self, clock: &dyn Clock) -> Made {
        let Self { request, mut constraint, said, mut words, .. } = self;
        let began = clock.now_us();
        let work = || {
            said.into_iter().try_for_each(|token| constraint.accept(token))?;
            constraint.mask(&mut words)
        };
        let allowed = catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|_| Err(Broken("the form of the answer could not be followed".into())));
        let us = clock.now_us().saturating_sub(began);
        Made { request, constraint, mask: allowed.map(|allowed| Mask { allowed, words }), us }
    }
}
