//! Requests with constraints: their tokens go into these, and masks come out for the rows of each
//! plan.
//!
//! A plan leaves before the tokens of the step before it are known, as every plan does. Its masks
//! follow when these have been applied, while the hand computes: a mask is needed only when a token
//! is sampled.
//!
//! A step waits for its masks for a part of its own time at most. A row whose mask is not ready
//! then sits the step out. Its mask is made meanwhile, and the request has its next row when it is
//! there. From then on the request is *late*: none of its rows is planned before its mask is ready,
//! so that no further row is computed for nothing. A cheap mask ends that.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use forebay_protocol::{RowMask, StepMasks, StepPlan};

use crate::constraint::{Allowed, Broken, Constraint};
use crate::executor::{Executor, Wake};
use crate::masks::{Inbox, Job, Made, Mask, MaskThreads, deferred, is_cheap};
use crate::member::Member;
use crate::types::{FinishReason, RequestError};

/// The bounds of the time that a step waits for masks, in microseconds.
const LEAST_US: u64 = 2_000;
const MOST_US: u64 = 20_000;
/// Weight of the newest step in the mean of their times, and of a mask in the memory of dear ones:
/// one in so many.
const NEWEST: u64 = 8;

/// The first masks of a request, of which nothing is known: the second one may copy the matcher of
/// its form, and the first one does not.
const UNKNOWN: u8 = 2;

/// A live request's constraint.
#[derive(Debug)]
struct Held {
    client: u64,
    /// `None`: a job has it.
    constraint: Option<Box<dyn Constraint>>,
    /// Tokens that it has not accepted yet.
    said: Vec<i32>,
    /// The mask for the next token, until this was said.
    mask: Option<Mask>,
    /// Microseconds that its next mask may take. Dear ones are forgotten slowly.
    expected_us: Option<u64>,
    /// Its masks so far, as far as they are counted.
    made: u8,
    /// A row has sat out, and no mask was cheap since.
    late: bool,
    /// The scheduler plans no row of it that samples.
    waits: bool,
    /// A row of the newest plan needs its mask.
    due: bool,
}

/// The constraints of live requests.
pub(crate) struct Constrained {
    live: HashMap<u64, Held>,
    /// The plan whose masks are due: its step and the requests of its masked rows, in row order.
    due: Option<(u64, Vec<u64>)>,
    /// Requests whose masks are due and not ready.
    missing: usize,
    masks: StepMasks,
    /// Memory for masks.
    spare: Vec<Vec<u32>>,
    /// Tokens of the hand's vocabulary.
    pub(crate) vocabulary: u32,
    threads: Arc<MaskThreads>,
    inbox: Arc<Inbox>,
    /// Microseconds that a step takes.
    step_us: u64,
    /// The part of it for which it waits for masks, in percent.
    share: u32,
}

impl Constrained {
    pub(crate) fn new(threads: Arc<MaskThreads>, share: u32, waker: Arc<dyn Wake>) -> Self {
        Self {
            live: HashMap::new(),
            due: None,
            missing: 0,
            masks: StepMasks::default(),
            spare: Vec::new(),
            vocabulary: 0,
            threads,
            inbox: Arc::new(Inbox::new(waker)),
            step_us: 0,
            share,
        }
    }

    pub(crate) fn hold(&mut self, id: u64, client: u64, constraint: Option<Box<dyn Constraint>>) {
        if let Some(constraint) = constraint {
            let held = Held {
                client,
                constraint: Some(constraint),
                said: Vec::new(),
                mask: None,
                expected_us: None,
                made: 0,
                late: false,
                waits: false,
                due: false,
            };
            self.live.insert(id, held);
        }
    }

    /// The request has ended.
    pub(crate) fn forget(&mut self, id: u64) {
        let Some(held) = self.live.remove(&id) else { return };
        self.missing -= usize::from(held.due);
        if held.constraint.is_none() {
            self.threads.cancel(id, &self.inbox);
            self.inbox.forget(id);
        }
    }

    /// The request goes to another engine, with a constraint that will have accepted its tokens.
    pub(crate) fn give(&mut self, id: u64) -> Option<Box<dyn Constraint>> {
        let Held { constraint, said, due, .. } = self.live.remove(&id)?;
        self.missing -= usize::from(due);
        if said.is_empty() && constraint.is_some() {
            return constraint;
        }
        let (to, from) = bounded(1);
        let unbegun = |job: Job| (job.constraint, job.said);
        let own = constraint.map(|constraint| (constraint, Vec::new()));
        let found =
            own.or_else(|| self.threads.cancel(id, &self.inbox).map(unbegun)).or_else(|| {
                let made = self.inbox.forward(id, to.clone())?;
                Some((made.constraint, Vec::new()))
            });
        self.inbox.forget(id);
        let mut before = Vec::new();
        if let Some((constraint, tokens)) = found {
            before = tokens;
            // The channel has room for it.
            let _ = to.send(constraint);
        }
        before.extend(said);
        Some(deferred(from, before))
    }

    /// The job for a request's next mask, if nobody is at it.
    fn job(&mut self, id: u64) -> Option<Job> {
        let held = self.live.get_mut(&id).filter(|held| held.mask.is_none())?;
        let constraint = held.constraint.take()?;
        let mut words = self.spare.pop().unwrap_or_default();
        words.resize(self.vocabulary.div_ceil(u32::BITS) as usize, 0);
        Some(Job {
            request: id,
            client: held.client,
            constraint,
            said: std::mem::take(&mut held.said),
            words,
            expected_us: held.expected_us.filter(|_| held.made >= UNKNOWN),
        })
    }

    /// The longest time that the next step waits for masks, in microseconds.
    fn budget(&self, members: u64) -> u64 {
        let share = self.step_us.saturating_mul(self.share.into()) / 100;
        share.clamp(LEAST_US, MOST_US) / members.max(1)
    }

    /// Notes the time of a step.
    pub(crate) fn stepped(&mut self, us: u32) {
        let us = u64::from(us);
        let first = if self.step_us == 0 { us } else { self.step_us };
        self.step_us = first - first / NEWEST + us / NEWEST;
    }

    /// The request has said a token. True: its next mask is to be made at once.
    pub(super) fn say(&mut self, id: u64, token: i32) -> bool {
        let Some(held) = self.live.get_mut(&id) else { return false };
        held.said.push(token);
        self.spare.extend(held.mask.take().map(|mask| mask.words));
        held.late
    }
}

impl Member {
    /// Notes which rows of the plan that was just submitted need masks.
    pub(super) fn note_masked(&mut self, plan: &StepPlan) {
        let Some(scheduler) = &mut self.scheduler else { return };
        let ids: Vec<u64> = scheduler.masked().collect();
        if ids.is_empty() {
            return;
        }
        debug_assert!(self.constrained.due.is_none(), "masks go before the next plan");
        for id in &ids {
            if let Some(held) = self.constrained.live.get_mut(id).filter(|held| held.late) {
                scheduler.wait_for_mask(*id);
                held.waits = true;
            }
        }
        self.constrained.due = Some((plan.step(), ids));
    }

    /// Has the next masks of requests made that no plan has a row for yet.
    pub(super) fn begin_masks(&mut self, ids: &[u64]) {
        let own = &mut self.constrained;
        let jobs: Vec<Job> = ids.iter().filter_map(|&id| own.job(id)).collect();
        if jobs.is_empty() {
            return;
        }
        let waits = |id: &u64| own.live.get(id).is_some_and(|held| held.waits);
        let waiting: Vec<u64> = ids.iter().copied().filter(waits).collect();
        let made = own.inbox.take_and_await(waiting.into_iter());
        own.threads.push(jobs, &own.inbox, false);
        self.take_made(made);
    }

    /// True if masks are made by other threads too.
    pub(super) fn has_mask_threads(&self) -> bool {
        !self.constrained.threads.is_empty()
    }

    /// Sends the masks that are due, if the tokens that they depend on are known; `at` is the
    /// member's place in its group, which has so many `members`.
    pub(crate) fn send_masks(&mut self, at: usize, members: u64, executor: &mut dyn Executor) {
        let alone = self.in_flight() == 1;
        let Some((step, ids)) = self.constrained.due.take_if(|_| alone) else { return };
        let began = self.shared.clock.now_us();
        self.stats.mask_budget_us = self.constrained.budget(members);
        self.make_masks(&ids, began + self.stats.mask_budget_us);
        let own = &mut self.constrained;
        let mut idle = Vec::new();
        own.masks.step = step;
        for &id in &ids {
            // Whoever has ended meanwhile may sample what it likes.
            let mut row = RowMask::Everything;
            if let Some(held) = own.live.get_mut(&id) {
                match &mut held.mask {
                    Some(Mask { allowed: Allowed::Everything, .. }) => {}
                    Some(Mask { allowed: Allowed::Some, words }) => {
                        row = RowMask::Tokens(std::mem::take(words));
                    }
                    None => {
                        if self.scheduler.as_mut().is_some_and(|it| it.sit_out(id)) {
                            (held.late, held.waits) = (true, true);
                            row = RowMask::NoToken;
                            self.stats.sat_out += 1;
                            idle.extend(held.constraint.is_some().then_some(id));
                        }
                    }
                }
            }
            own.masks.rows.push(row);
        }
        executor.masks(at, &own.masks);
        for (row, id) in own.masks.rows.drain(..).zip(&ids) {
            let mask = own.live.get_mut(id).and_then(|held| held.mask.as_mut());
            if let (RowMask::Tokens(words), Some(mask)) = (row, mask) {
                mask.words = words;
            }
        }
        self.begin_masks(&idle);
        self.stats.mask_wait_us += self.shared.clock.now_us().saturating_sub(began);
    }

    /// Makes the masks of these requests, until `deadline`.
    fn make_masks(&mut self, ids: &[u64], deadline: u64) {
        self.collect_masks();
        let own = &mut self.constrained;
        let mut jobs = Vec::new();
        for &id in ids {
            jobs.extend(own.job(id));
            if let Some(held) = own.live.get_mut(&id).filter(|held| held.mask.is_none()) {
                held.due = true;
                own.missing += 1;
            }
        }
        if own.missing == 0 {
            return;
        }
        own.threads.push(jobs, &own.inbox, true);
        let threads = Arc::clone(&own.threads);
        let clock = Arc::clone(&self.shared.clock);
        while self.constrained.missing > 0
            && (threads.is_empty() || clock.now_us() < deadline)
            && threads.help()
        {
            self.collect_masks();
        }
        let left = Duration::from_micros(deadline.saturating_sub(clock.now_us()));
        let until = Instant::now() + left;
        while self.constrained.missing > 0 && self.constrained.inbox.wait(until) {
            self.collect_masks();
        }
        if self.constrained.missing > 0 {
            self.leave_masks(ids);
        }
    }

    /// The time is over: masks that are not ready are left to the mask threads.
    fn leave_masks(&mut self, ids: &[u64]) {
        let own = &mut self.constrained;
        own.threads.leave();
        let due = |id: &u64| own.live.get(id).is_some_and(|held| held.due);
        let late: Vec<u64> = ids.iter().copied().filter(due).collect();
        let made = own.inbox.take_and_await(late.into_iter());
        self.take_made(made);
        for id in ids {
            if let Some(held) = self.constrained.live.get_mut(id) {
                held.due = false;
            }
        }
        self.constrained.missing = 0;
    }

    /// Takes the masks that were made.
    pub(crate) fn collect_masks(&mut self) {
        let made = self.constrained.inbox.take();
        self.take_made(made);
    }

    fn take_made(&mut self, all: Vec<Made>) {
        let mut again = Vec::new();
        for Made { request: id, constraint, mask, us } in all {
            self.stats.masks += 1;
            self.stats.mask_us += us;
            let own = &mut self.constrained;
            let Some(held) = own.live.get_mut(&id) else {
                own.spare.extend(mask.ok().map(|mask| mask.words));
                continue;
            };
            held.constraint = Some(constraint);
            let before = held.expected_us.unwrap_or(0);
            held.expected_us = Some(us.max(before - before / NEWEST));
            held.made = held.made.saturating_add(1);
            held.late &= !is_cheap(us);
            own.missing -= usize::from(std::mem::take(&mut held.due));
            let scheduler = self.scheduler.as_mut().filter(|_| !is_cheap(us));
            scheduler.into_iter().for_each(|scheduler| scheduler.charge(id, us));
            match mask {
                Err(why) => self.break_off(id, why),
                Ok(mask) if held.said.is_empty() => {
                    held.mask = Some(mask);
                    if std::mem::take(&mut held.waits)
                        && let Some(scheduler) = &mut self.scheduler
                    {
                        scheduler.mask_ready(id);
                    }
                }
                // A token has come meanwhile.
                Ok(mask) => {
                    own.spare.push(mask.words);
                    again.extend(held.waits.then_some(id));
                }
            }
        }
        if !again.is_empty() {
            self.begin_masks(&again);
        }
    }

    /// The hand is gone, and waits for no masks. Its rows gave no token, so masks that are ready
    /// are still good.
    pub(super) fn forget_masks(&mut self) {
        let own = &mut self.constrained;
        own.due = None;
        for (&id, held) in &mut own.live {
            if held.mask.is_some()
                && std::mem::take(&mut held.waits)
                && let Some(scheduler) = &mut self.scheduler
            {
                scheduler.mask_ready(id);
            }
        }
    }

    /// Ends a request that cannot go on under its constraint, if it has not ended.
    fn break_off(&mut self, id: u64, why: Broken) {
        if self.scheduler.as_mut().is_some_and(|scheduler| scheduler.abort(id)) {
            self.end(id, FinishReason::Error(RequestError::Constraint(why.0)));
        }
    }
}
