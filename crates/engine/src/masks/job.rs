//! A job: feeds tokens to a constraint and computes masks.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::clock::Clock;
use crate::constraint::{Allowed, Constraint, ConstraintError};

/// The largest CPU time of a cheap mask, in microseconds. Masks of common grammars take tens of
/// microseconds.
const CHEAP_US: u64 = 500;

/// True if a mask that takes `us` microseconds is cheap.
pub(crate) fn is_cheap(us: u64) -> bool {
    us <= CHEAP_US
}

/// The masks for a row: one for its next token, and one for the token after each draft.
#[derive(Debug)]
pub(crate) struct RowMasks {
    pub(crate) drafts: Vec<i32>,
    /// For each computed mask, whether it restricts the token. There is at least one.
    pub(crate) allowed: Vec<Allowed>,
    /// The bits of each mask, also of masks that were not computed. They are undefined if
    /// everything is allowed or the mask was not computed.
    pub(crate) words: Vec<Vec<u32>>,
}

impl RowMasks {
    /// True if these masks were requested for a row whose drafts begin with `drafts`.
    pub(crate) fn cover(&self, drafts: &[i32]) -> bool {
        self.drafts.starts_with(drafts)
    }

    /// The number of leading masks that are valid for a row with the drafts `drafts`.
    pub(crate) fn usable(&self, drafts: &[i32]) -> usize {
        let equal = self.drafts.iter().zip(drafts).take_while(|(one, other)| one == other).count();
        self.allowed.len().min(1 + equal)
    }
}

/// The work on one request's constraint: accept tokens and compute the next masks.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: u64,
    pub(crate) client: u64,
    pub(crate) constraint: Box<dyn Constraint>,
    /// Tokens that the constraint has not accepted yet.
    pub(crate) said: Vec<i32>,
    /// Draft tokens that may follow `said`.
    pub(crate) drafts: Vec<i32>,
    /// The memory for the masks, one more than there are drafts.
    pub(crate) words: Vec<Vec<u32>>,
    /// The expected time in microseconds; `None`: not known.
    pub(crate) expected_us: Option<u64>,
}

/// The result of a job.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) request: u64,
    pub(crate) constraint: Box<dyn Constraint>,
    pub(crate) masks: Result<RowMasks, ConstraintError>,
    /// The CPU time of the job, in microseconds.
    pub(crate) us: u64,
}

impl Job {
    pub(crate) fn run(self, clock: &dyn Clock) -> Made {
        let Self { request, mut constraint, said, drafts, mut words, .. } = self;
        let began = clock.thread_us();
        let allowed = guarded(|| {
            said.into_iter().try_for_each(|token| constraint.accept(token))?;
            let mut masks: Vec<&mut [u32]> = words.iter_mut().map(|words| &mut words[..]).collect();
            constraint.walk(&drafts, &mut masks)
        });
        let us = clock.thread_us().saturating_sub(began);
        let masks = allowed.map(|allowed| RowMasks { drafts, allowed, words });
        Made { request, constraint, masks, us }
    }
}

/// Runs work on a constraint, and turns a panic into an error.
pub(crate) fn guarded<T>(
    work: impl FnOnce() -> Result<T, ConstraintError>,
) -> Result<T, ConstraintError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(ConstraintError("the form of the answer could not be followed".into()))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A clock of a thread that is preempted for ten milliseconds at each reading.
    struct Preempted(AtomicU64);

    impl Clock for Preempted {
        fn now_us(&self) -> u64 {
            self.0.fetch_add(10_000, Ordering::Relaxed)
        }

        fn thread_us(&self) -> u64 {
            self.0.load(Ordering::Relaxed) / 10_000
        }
    }

    #[derive(Debug)]
    struct Anything;

    impl Constraint for Anything {
        fn accept(&mut self, _token: i32) -> Result<(), ConstraintError> {
            Ok(())
        }

        fn walk(
            &mut self,
            _drafts: &[i32],
            _masks: &mut [&mut [u32]],
        ) -> Result<Vec<Allowed>, ConstraintError> {
            Ok(vec![Allowed::Everything])
        }
    }

    #[test]
    fn a_mask_whose_thread_is_preempted_is_cheap() {
        let job = Job {
            request: 1,
            client: 1,
            constraint: Box::new(Anything),
            said: vec![5],
            drafts: Vec::new(),
            words: vec![vec![0]],
            expected_us: None,
        };
        assert!(is_cheap(job.run(&Preempted(AtomicU64::new(0))).us));
    }
}
