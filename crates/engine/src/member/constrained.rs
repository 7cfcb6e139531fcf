//! Requests with constraints: their tokens go into these, and masks come out for the rows of each
//! plan.
//!
//! A plan leaves before the tokens of the step before it are known, as every plan does. Its masks
//! follow when these have been applied, while the hand computes: a mask is needed only when a token
//! is sampled.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_protocol::{StepMasks, StepPlan};
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::constraint::{Allowed, Broken, Constraint};
use crate::executor::Executor;
use crate::member::Member;
use crate::types::{FinishReason, RequestError};

/// Masks that the engine's thread fills alone: to wake others takes as long as some masks.
const ALONE: usize = 8;

/// The constraints of live requests.
#[derive(Default)]
pub(crate) struct Constrained {
    live: HashMap<u64, Box<dyn Constraint>>,
    /// The plan whose masks are due: its step and the requests of its masked rows, in row order.
    due: Option<(u64, Vec<u64>)>,
    masks: StepMasks,
    /// Tokens of the hand's vocabulary.
    pub(crate) vocabulary: u32,
    /// The threads that help to fill many masks; `None`: there are none.
    helpers: Option<Arc<ThreadPool>>,
}

/// Threads that fill masks beside the engine's own, for all members together.
///
/// # Errors
/// The system has no room for a thread.
pub(crate) fn helpers(count: usize) -> std::io::Result<Option<Arc<ThreadPool>>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(count).thread_name(|_| "masks".into());
    let pool = (count > 0).then(|| pool.build()).transpose();
    Ok(pool.map_err(std::io::Error::other)?.map(Arc::new))
}

/// One mask to fill.
struct Job<'a> {
    constraint: Option<Box<dyn Constraint>>,
    words: &'a mut [u32],
    masked: &'a mut bool,
    broken: Option<Broken>,
}

impl Job<'_> {
    fn fill(&mut self) {
        // Whoever has ended meanwhile may sample what it likes.
        let Some(constraint) = &mut self.constraint else { return };
        match constraint.mask(self.words) {
            Ok(allowed) => *self.masked = allowed == Allowed::Some,
            Err(broken) => self.broken = Some(broken),
        }
    }
}

impl Constrained {
    pub(crate) fn new(helpers: Option<Arc<ThreadPool>>) -> Self {
        Self { helpers, ..Self::default() }
    }

    pub(crate) fn hold(&mut self, id: u64, constraint: Option<Box<dyn Constraint>>) {
        if let Some(constraint) = constraint {
            self.live.insert(id, constraint);
        }
    }

    /// The request has ended, or goes to another engine.
    pub(crate) fn give(&mut self, id: u64) -> Option<Box<dyn Constraint>> {
        self.live.remove(&id)
    }

    /// The request has said a token.
    pub(crate) fn accept(&mut self, id: u64, token: i32) -> Result<(), Broken> {
        self.live.get_mut(&id).map_or(Ok(()), |constraint| constraint.accept(token))
    }

    /// Fills the masks that are due; gives the requests that cannot go on.
    fn fill(&mut self, step: u64, ids: &[u64]) -> Vec<(u64, Broken)> {
        self.masks.begin(step, ids.len(), self.vocabulary);
        let rows = self.masks.rows_mut().zip(ids);
        let mut jobs: Vec<Job<'_>> = rows
            .map(|((words, masked), id)| Job {
                constraint: self.live.remove(id),
                words,
                masked,
                broken: None,
            })
            .collect();
        match &self.helpers {
            Some(helpers) if jobs.len() > ALONE => {
                helpers.install(|| jobs.par_iter_mut().for_each(Job::fill));
            }
            _ => jobs.iter_mut().for_each(Job::fill),
        }
        let mut broken = Vec::new();
        for (job, &id) in jobs.into_iter().zip(ids) {
            broken.extend(job.broken.map(|why| (id, why)));
            self.live.extend(job.constraint.map(|constraint| (id, constraint)));
        }
        broken
    }
}

impl Member {
    /// Notes which rows of the plan that was just submitted need masks.
    pub(super) fn note_masked(&mut self, plan: &StepPlan) {
        let Some(scheduler) = &self.scheduler else { return };
        let ids: Vec<u64> = scheduler.masked().collect();
        if !ids.is_empty() {
            debug_assert!(self.constrained.due.is_none(), "masks go before the next plan");
            self.constrained.due = Some((plan.step(), ids));
        }
    }

    /// Sends the masks that are due, if the tokens that they depend on are known; `at` is the
    /// member's place in its group.
    pub(crate) fn send_masks(&mut self, at: usize, executor: &mut dyn Executor) {
        let alone = self.in_flight() == 1;
        let Some((step, ids)) = self.constrained.due.take_if(|_| alone) else { return };
        let began = self.shared.clock.now_us();
        let broken = self.constrained.fill(step, &ids);
        executor.masks(at, &self.constrained.masks);
        self.stats.masks += ids.len() as u64;
        self.stats.mask_us += self.shared.clock.now_us().saturating_sub(began);
        for (id, why) in broken {
            self.break_off(id, why);
        }
    }

    /// The hand is gone, and waits for no masks.
    pub(super) fn forget_masks(&mut self) {
        self.constrained.due = None;
    }

    /// Ends a request that cannot go on under its constraint, if it has not ended.
    pub(super) fn break_off(&mut self, id: u64, why: Broken) {
        if self.scheduler.as_mut().is_some_and(|scheduler| scheduler.abort(id)) {
            self.end(id, FinishReason::Error(RequestError::Constraint(why.0)));
        }
    }
}
