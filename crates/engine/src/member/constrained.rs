//! Requests with constraints. A request's tokens are fed to its constraint, which computes the
//! masks for its rows.
//!
//! A plan is sent before the tokens of the previous step are known. Its masks follow once those
//! tokens have been applied, while the hand computes: masks are needed only for sampling.
//!
//! A step waits for its masks for at most a share of the mean step time. After that, a row whose
//! mask is not ready sits the step out. The request is then *late*: it gets no row before its mask
//! is ready, so that no further row is computed in vain. The request stops being late when one of
//! its masks is cheap.
//!
//! With drafts, a request with cheap masks is checked as soon as its tokens are known: which drafts
//! are allowed, and which tokens the grammar forces. Its row then has one mask per position.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::bounded;
use forebay_protocol::{RowMask, StepMasks, StepPlan, Want};

use crate::constraint::{Allowed, Constraint, ConstraintError};
use crate::executor::{Executor, Wake};
use crate::masks::{Inbox, Job, Made, MaskThreads, RowMasks, deferred, guarded, is_cheap};
use crate::member::Member;
use crate::types::{FinishReason, RequestError};

/// The shortest and the longest time that a step may wait for masks, in microseconds.
const LEAST_US: u64 = 2_000;
const MOST_US: u64 = 20_000;
/// The newest step has weight `1 / NEWEST` in the mean of step times. The expected time of a mask
/// decays by the same share with each mask, unless the newest mask took longer.
const NEWEST: u64 = 8;
/// The time, in microseconds, that the masks of a row with drafts may be expected to take. It
/// limits the number of drafts.
const WALK_US: u64 = 1_000;

/// The number of a request's first masks whose times are ignored, because these times say little
/// about later masks. The second mask may include copying the matcher of the grammar, the first one
/// does not.
const UNKNOWN: u8 = 2;

/// A live request's constraint.
#[derive(Debug)]
struct Held {
    client: u64,
    /// `None`: a mask job owns the constraint now.
    constraint: Option<Box<dyn Constraint>>,
    /// Generated tokens that the constraint has not accepted yet.
    said: Vec<i32>,
    /// The masks for the next tokens. They are dropped when a token is sampled.
    masks: Option<RowMasks>,
    /// The expected time of the next mask, in microseconds. It falls slowly after an expensive
    /// mask.
    expected_us: Option<u64>,
    /// The number of masks computed for the request. The count is exact only up to `UNKNOWN`.
    made: u8,
    /// Microseconds that the newest mask took. `None`: only the first `UNKNOWN` masks, whose times
    /// are ignored, were computed.
    newest_us: Option<u64>,
    /// True if a row of the request has sat a step out, and no cheap mask of the request was
    /// computed since.
    late: bool,
    /// True if the scheduler plans no sampling row for the request until its mask is ready.
    waits: bool,
    /// True while a step waits for the request's mask.
    due: bool,
}

impl Held {
    /// The expected time of a mask; `None` while it is not known.
    fn known_us(&self) -> Option<u64> {
        self.expected_us.filter(|_| self.made >= UNKNOWN)
    }

    fn needs_masks(&self, drafts: &[i32]) -> bool {
        !self.masks.as_ref().is_some_and(|masks| masks.cover(drafts))
    }
}

/// A masked row of a plan.
#[derive(Debug)]
struct Due {
    id: u64,
    drafts: Vec<i32>,
}

/// The constraints of live requests.
pub(crate) struct Constrained {
    live: HashMap<u64, Held>,
    /// The step number and the masked rows, in order, of the newest plan. `None`: the plan's masks
    /// were sent, or it needs none.
    due: Option<(u64, Vec<Due>)>,
    /// The number of requests for whose masks a step waits.
    missing: usize,
    masks: StepMasks,
    /// Memory of old masks, kept for reuse.
    spare: Vec<Vec<u32>>,
    /// The number of tokens in the hand's vocabulary.
    pub(crate) vocabulary: u32,
    threads: Arc<MaskThreads>,
    inbox: Arc<Inbox>,
    /// The mean time of a step, in microseconds.
    step_us: u64,
    /// The longest wait of a step for masks, in percent of the mean step time.
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
                masks: None,
                expected_us: None,
                made: 0,
                newest_us: None,
                late: false,
                waits: false,
                due: false,
            };
            self.live.insert(id, held);
        }
    }

    /// Forgets an ended request.
    pub(crate) fn forget(&mut self, id: u64) {
        let Some(held) = self.live.remove(&id) else { return };
        self.missing -= usize::from(held.due);
        if held.constraint.is_none() {
            self.threads.cancel(id, &self.inbox);
            self.inbox.forget(id);
        }
    }

    /// Removes the constraint of a request that moves to another engine. The returned constraint
    /// accepts all tokens of the request before it is used.
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
            // This can't block: nothing else is sent to the channel, which has room for one
            // constraint.
            let _ = to.send(constraint);
        }
        before.extend(said);
        Some(deferred(from, before))
    }

    /// Creates the job for the masks of a request's next row with these drafts. `None`: the masks
    /// exist, or a job is already running.
    fn job(&mut self, id: u64, drafts: &[i32]) -> Option<Job> {
        let held = self.live.get_mut(&id).filter(|held| held.needs_masks(drafts))?;
        let constraint = held.constraint.take()?;
        self.spare.extend(held.masks.take().into_iter().flat_map(|masks| masks.words));
        let width = self.vocabulary.div_ceil(u32::BITS) as usize;
        let masks = 1 + drafts.len();
        let words = (0..masks).map(|_| {
            let mut words = self.spare.pop().unwrap_or_default();
            words.resize(width, 0);
            words
        });
        Some(Job {
            request: id,
            client: held.client,
            constraint,
            said: std::mem::take(&mut held.said),
            drafts: drafts.to_vec(),
            words: words.collect(),
            expected_us: held.known_us().map(|us| us * masks as u64),
        })
    }

    /// The longest time that the next step may wait for masks, in microseconds.
    fn budget(&self, members: u64) -> u64 {
        let share = self.step_us.saturating_mul(self.share.into()) / 100;
        share.clamp(LEAST_US, MOST_US) / members.max(1)
    }

    /// Adds a step to the mean time of steps.
    pub(crate) fn stepped(&mut self, us: u32) {
        let us = u64::from(us);
        let first = if self.step_us == 0 { us } else { self.step_us };
        self.step_us = first - first / NEWEST + us / NEWEST;
    }

    /// Feeds a sampled token to the request's constraint. Returns whether the request's next mask
    /// is to be computed at once. `None`: the request has no constraint.
    pub(super) fn say(&mut self, id: u64, token: i32) -> Option<bool> {
        let held = self.live.get_mut(&id)?;
        held.said.push(token);
        self.spare.extend(held.masks.take().into_iter().flat_map(|masks| masks.words));
        Some(held.late)
    }
}

impl Member {
    /// Records which rows of the plan that was just submitted need masks.
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
        let rows = plan.rows().zip(plan.drafts());
        let drafts = rows.filter(|(row, _)| matches!(row.want, Want::Masked(_)));
        let due = |(id, (_, drafts)): (u64, (_, &[i32]))| Due { id, drafts: drafts.to_vec() };
        self.constrained.due = Some((plan.step(), ids.into_iter().zip(drafts).map(due).collect()));
    }

    /// For requests that have just got tokens: checks their drafts against the grammar, and adds
    /// the tokens that the grammar forces.
    pub(super) fn expect_masked(&mut self, ids: &[u64]) {
        for &id in ids {
            let Self { constrained, scheduler, shared, .. } = self;
            let Constrained { live, threads, .. } = constrained;
            let (Some(scheduler), Some(held)) = (scheduler, live.get_mut(&id)) else { continue };
            let (client, newest_us) = (held.client, held.newest_us.filter(|&us| is_cheap(us)));
            let (Some(us), Some(constraint)) = (newest_us, &mut held.constraint) else { continue };
            if held.late || scheduler.most_drafts() == 0 || threads.is_barred(client) {
                continue;
            }
            let room = WALK_US / us.max(1);
            let (said, mut broken) = (&mut held.said, None);
            let began = shared.clock.thread_us();
            scheduler.expect_masked(id, |most, drafts| {
                let forced = guarded(|| {
                    said.drain(..).try_for_each(|token| constraint.accept(token))?;
                    constraint.restrict(u64::from(most).min(room) as usize, drafts)
                });
                forced.unwrap_or_else(|why| {
                    drafts.clear();
                    broken = Some(why);
                    0
                }) as u32
            });
            let us = shared.clock.thread_us().saturating_sub(began);
            threads.took(client, us);
            self.stats.mask_us += us;
            if let Some(why) = broken {
                self.break_off(id, why);
            }
        }
    }

    /// Starts computing the next masks of these requests. No plan has rows for these masks yet.
    pub(super) fn begin_masks(&mut self, ids: &[u64]) {
        let own = &mut self.constrained;
        let jobs: Vec<Job> = ids.iter().filter_map(|&id| own.job(id, &[])).collect();
        if jobs.is_empty() {
            return;
        }
        let waits = |id: &u64| own.live.get(id).is_some_and(|held| held.waits);
        let waiting: Vec<u64> = ids.iter().copied().filter(waits).collect();
        let made = own.inbox.take_and_await(waiting.into_iter());
        own.threads.push(jobs, &own.inbox, false);
        self.take_made(made);
    }

    /// Computes one cheap mask that is queued for the mask threads. Returns false if no such mask
    /// is queued.
    pub(crate) fn help_with_masks(&self) -> bool {
        self.constrained.threads.help()
    }

    /// True if other threads compute masks too.
    pub(super) fn has_mask_threads(&self) -> bool {
        !self.constrained.threads.is_empty()
    }

    /// Sends the masks that are due, if the tokens that they depend on are known. `at` is the
    /// member's index in a group of `members`.
    pub(crate) fn send_masks(&mut self, at: usize, members: u64, executor: &mut dyn Executor) {
        let alone = self.in_flight() == 1;
        let Some((step, rows)) = self.constrained.due.take_if(|_| alone) else { return };
        let began = self.shared.clock.now_us();
        self.stats.mask_budget_us = self.constrained.budget(members);
        self.make_masks(&rows, began + self.stats.mask_budget_us);
        let own = &mut self.constrained;
        let mut idle = Vec::new();
        own.masks.step = step;
        for Due { id, drafts } in &rows {
            let places = 1 + drafts.len();
            let sent = own.masks.masks.len();
            if let Some(held) = own.live.get_mut(id) {
                if let Some(masks) = &mut held.masks {
                    let made = masks.allowed[..masks.usable(drafts)].iter().zip(&mut masks.words);
                    own.masks.masks.extend(made.map(|(allowed, words)| match allowed {
                        Allowed::Everything => RowMask::Everything,
                        Allowed::Some => RowMask::Tokens(std::mem::take(words)),
                    }));
                    // The row ends at the first position without a mask.
                    own.masks.masks.resize(sent + places, RowMask::NoToken);
                } else if self.scheduler.as_mut().is_some_and(|it| it.sit_out(*id)) {
                    (held.late, held.waits) = (true, true);
                    own.masks.masks.resize(sent + places, RowMask::NoToken);
                    self.stats.sat_out += 1;
                    idle.extend(held.constraint.is_some().then_some(*id));
                }
            }
            // For a request that has ended since the plan was made, any token is allowed.
            own.masks.masks.resize(sent + places, RowMask::Everything);
        }
        executor.masks(at, &own.masks);
        let mut sent = own.masks.masks.drain(..);
        for Due { id, drafts } in &rows {
            let masks = own.live.get_mut(id).and_then(|held| held.masks.as_mut());
            let mut words = masks.map(|masks| masks.words.iter_mut());
            for mask in sent.by_ref().take(1 + drafts.len()) {
                let words = words.as_mut().and_then(Iterator::next);
                if let (RowMask::Tokens(mask), Some(words)) = (mask, words) {
                    *words = mask;
                }
            }
        }
        drop(sent);
        self.begin_masks(&idle);
        self.stats.mask_wait_us += self.shared.clock.now_us().saturating_sub(began);
    }

    /// Computes the masks of these rows, or waits for them, until `deadline`.
    fn make_masks(&mut self, rows: &[Due], deadline: u64) {
        self.collect_masks();
        let own = &mut self.constrained;
        let mut jobs = Vec::new();
        for Due { id, drafts } in rows {
            jobs.extend(own.job(*id, drafts));
            if let Some(held) = own.live.get_mut(id).filter(|held| held.needs_masks(drafts)) {
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
            self.leave_masks(rows);
        }
    }

    /// Stops waiting: leaves the masks that are not ready to the mask threads.
    fn leave_masks(&mut self, rows: &[Due]) {
        let own = &mut self.constrained;
        own.threads.leave();
        let due = |id: &u64| own.live.get(id).is_some_and(|held| held.due);
        let late: Vec<u64> = rows.iter().map(|row| row.id).filter(due).collect();
        let made = own.inbox.take_and_await(late.into_iter());
        self.take_made(made);
        for row in rows {
            if let Some(held) = self.constrained.live.get_mut(&row.id) {
                held.due = false;
            }
        }
        self.constrained.missing = 0;
    }

    /// Takes the masks that have been computed.
    pub(crate) fn collect_masks(&mut self) {
        let made = self.constrained.inbox.take();
        self.take_made(made);
    }

    fn take_made(&mut self, all: Vec<Made>) {
        let mut again = Vec::new();
        for Made { request: id, constraint, masks, us } in all {
            let made = masks.as_ref().map_or(1, |masks| masks.allowed.len().max(1) as u64);
            self.stats.masks += made;
            self.stats.mask_us += us;
            let own = &mut self.constrained;
            let Some(held) = own.live.get_mut(&id) else {
                own.spare.extend(masks.into_iter().flat_map(|masks| masks.words));
                continue;
            };
            // The mean time of one mask.
            let us = us / made;
            held.constraint = Some(constraint);
            let before = held.expected_us.unwrap_or(0);
            held.expected_us = Some(us.max(before - before / NEWEST));
            held.newest_us = Some(us).filter(|_| held.made >= UNKNOWN);
            held.made = held.made.saturating_add(1);
            held.late &= !is_cheap(us);
            own.missing -= usize::from(std::mem::take(&mut held.due));
            let scheduler = self.scheduler.as_mut().filter(|_| !is_cheap(us));
            scheduler.into_iter().for_each(|scheduler| scheduler.charge(id, us));
            match masks {
                Err(why) => self.break_off(id, why),
                Ok(masks) if held.said.is_empty() => {
                    held.masks = Some(masks);
                    if std::mem::take(&mut held.waits)
                        && let Some(scheduler) = &mut self.scheduler
                    {
                        scheduler.mask_ready(id);
                    }
                }
                // A token was sampled meanwhile, so these masks are outdated.
                Ok(masks) => {
                    own.spare.extend(masks.words);
                    again.extend(held.waits.then_some(id));
                }
            }
        }
        if !again.is_empty() {
            self.begin_masks(&again);
        }
    }

    /// Forgets the masks that the dead hand waited for. The rows of its last plan gave no token, so
    /// masks that are already computed are still valid.
    pub(super) fn forget_masks(&mut self) {
        let own = &mut self.constrained;
        own.due = None;
        for (&id, held) in &mut own.live {
            if held.masks.is_some()
                && std::mem::take(&mut held.waits)
                && let Some(scheduler) = &mut self.scheduler
            {
                scheduler.mask_ready(id);
            }
        }
    }

    /// Ends a request that cannot continue under its constraint, unless it has already ended.
    fn break_off(&mut self, id: u64, why: ConstraintError) {
        if self.scheduler.as_mut().is_some_and(|scheduler| scheduler.abort(id)) {
            self.end(id, FinishReason::Error(RequestError::Constraint(why.0)));
        }
    }
}
