//! The event loop that owns a rank group and the schedulers of its members: one scheduler, or one
//! per rank in a step group.
//!
//! All plans of a step, one per member, have the same step number. A member without work takes part
//! with an empty plan; if no member has work, there is no step. So all members have the same steps
//! in flight, and statements about the steps of one scheduler hold for the whole group.

mod hand;
mod reload;

use std::sync::Arc;

use forebay_protocol::{StepPlan, StepResult, tell_group};

use crate::clock::Clock;
use crate::config::EngineConfig;
use crate::executor::{Executor, Signal};
use crate::member::Member;
use crate::owner::reload::PendingReload;
use crate::recovery::Recovery;

pub(crate) struct Owner {
    config: EngineConfig,
    executor: Box<dyn Executor>,
    clock: Arc<dyn Clock>,
    members: Vec<Member>,
    /// The plans of the last step, one per member.
    plans: Vec<StepPlan>,
    /// Whether each member has work in the step that is being planned. Kept to reuse its memory.
    planned: Vec<bool>,
    /// True if the hand takes plans.
    up: bool,
    recovery: Recovery,
    /// The number of times that the hand was given fewer pages because memory had run out.
    shrunk: u32,
    restart_at: Option<u64>,
    /// The reload that is pending or for which the hand is starting; `None`: no reload.
    reloading: Option<PendingReload>,
    /// The id of the last reload that succeeded.
    reloaded: Option<u64>,
    /// The time at which the starting hand last reported progress; `None`: it is not starting.
    loading_us: Option<u64>,
    /// True if no hand, of this replica or another, will be started again.
    over: bool,
    /// True if the hand was killed because its copies hang.
    copies_hang: bool,
    /// The time of the last progress while a step was in flight.
    progress_us: u64,
    /// True if the device had no work before the next step, so the host did not cause the gap.
    rested: bool,
    rested_step: Option<u64>,
    /// True if something has changed since the last integrity check.
    unchecked: bool,
}

impl Owner {
    pub(crate) fn new(
        config: EngineConfig,
        executor: Box<dyn Executor>,
        clock: Arc<dyn Clock>,
        members: Vec<Member>,
    ) -> Self {
        let recovery = Recovery::new(config.hand_restarts);
        Self {
            config,
            executor,
            clock,
            plans: members.iter().map(|_| StepPlan::default()).collect(),
            planned: Vec::new(),
            members,
            up: false,
            recovery,
            shrunk: 0,
            restart_at: None,
            reloading: None,
            reloaded: None,
            loading_us: None,
            over: false,
            copies_hang: false,
            progress_us: 0,
            rested: true,
            rested_step: None,
            unchecked: false,
        }
    }

    pub(crate) fn run(mut self) {
        self.start();
        while self.take_orders() {
            self.restart_if_due();
            self.reload_if_due();
            self.members.iter_mut().for_each(Member::expire);
            self.feed();
            self.deliver();
            // A pause begins only after all earlier outputs have been delivered.
            self.members.iter_mut().for_each(Member::settle_pause);
            if self.over {
                break;
            }
            // The mask threads may all be busy, while the engine thread has nothing else to do.
            if self.in_flight() == 0 && self.members.iter().any(Member::help_with_masks) {
                continue;
            }
            match self.executor.wait(self.timeout()) {
                Signal::Woken => {}
                Signal::TimedOut => self.timed_out(),
                Signal::Result(results) => self.apply(&results),
                Signal::Progress(stage) => self.loading(stage),
                Signal::Ready(facts) => self.ready(*facts),
                Signal::Died(reason) => self.died(&reason),
                Signal::OutOfMemory(reason) => self.out_of_memory(&reason),
            }
        }
        self.executor.stop();
        self.members.iter_mut().for_each(Member::end_all);
        self.deliver();
    }

    /// Takes all pending orders. Returns false after a stop order. Even then, the orders of the
    /// remaining members are taken, so that their requests end too.
    fn take_orders(&mut self) -> bool {
        let mut stopped = false;
        for at in 0..self.members.len() {
            let taken = self.members[at].take_orders();
            stopped |= taken.stopped;
            self.unchecked |= taken.any;
            self.take_reloads(at);
            // During a reload the hand will soon be ready again, so requests wait for it.
            if taken.entered && !self.up && !stopped && self.reloading.is_none() {
                self.members[at].give_away(self.over);
            }
            let hand = self.up.then_some(&mut *self.executor);
            self.members[at].send_off(at, hand);
            let hand = self.up.then_some(&mut *self.executor);
            let Member { adapters, scheduler, .. } = &mut self.members[at];
            let forget = |id| scheduler.as_mut().is_none_or(|it| it.forget_adapter(id));
            adapters.send(at, hand, forget);
        }
        !stopped
    }

    /// The number of steps in flight.
    fn in_flight(&self) -> usize {
        self.members.first().map_or(0, Member::in_flight)
    }

    /// Plans steps until the lookahead is used up.
    fn feed(&mut self) {
        let most = self.config.lookahead as usize + 1;
        let plans = self.up && self.reloading.is_none();
        while plans && self.in_flight() < most && self.plan_step() {
            let [first, ..] = &self.plans[..] else { return };
            let step = first.step();
            if self.in_flight() == 1 {
                self.progress_us = self.clock.now_us();
            }
            if self.plans.iter().all(|plan| plan.rows().len() == 0) {
                // While the hand only waits for copies, the host does not cause its idle time.
                self.rested = true;
            } else if std::mem::take(&mut self.rested) {
                self.rested_step = Some(step);
            }
            self.executor.submit(&self.plans);
            for (member, plan) in self.members.iter_mut().zip(&self.plans) {
                member.note_planned(plan);
            }
            self.send_masks();
        }
        self.rested |= self.up && self.in_flight() == 0;
        self.members.iter_mut().for_each(Member::take_events);
    }

    /// Makes the plans of the next step. Returns false if no member has work.
    fn plan_step(&mut self) -> bool {
        // All members share the hand. So at most one suspect among all members is tried at a time,
        // with no other request in flight.
        let tried = self.members.iter().position(Member::is_suspected);
        let others = |tried| {
            let mut others = self.members.iter().enumerate().filter(|&(at, _)| at != tried);
            others.any(|(_, member)| member.computes())
        };
        if tried.is_some_and(others) {
            return false;
        }
        self.planned.clear();
        for (at, (member, plan)) in self.members.iter_mut().zip(&mut self.plans).enumerate() {
            let may = tried.is_none_or(|tried| tried == at);
            self.planned.push(may && member.plan(plan));
        }
        if !self.planned.contains(&true) {
            return false;
        }
        let members = self.members.iter_mut().zip(&mut self.plans);
        for ((member, plan), _) in members.zip(&self.planned).filter(|(_, planned)| !**planned) {
            member.idle(plan);
        }
        tell_group(&mut self.plans);
        if self.plans.iter().any(|plan| plan.rows().len() > 0) {
            // The tokens of a step are reported only when all ranks have responded, so no rank may
            // wait.
            self.plans.iter_mut().for_each(StepPlan::wait_for_nothing);
        }
        true
    }

    /// Sends the masks of each member's last plan, if the tokens that they depend on are known.
    fn send_masks(&mut self) {
        let members = self.members.len() as u64;
        for (at, member) in self.members.iter_mut().enumerate() {
            member.send_masks(at, members, &mut *self.executor);
        }
    }

    fn apply(&mut self, results: &[StepResult]) {
        debug_assert_eq!(results.len(), self.members.len(), "one result a member");
        let Some(step) = results.first().map(|result| result.step) else { return };
        let rested = self.rested_step == Some(step);
        for (member, result) in self.members.iter_mut().zip(results) {
            if let Err(error) = member.apply(result, rested) {
                self.executor.kill();
                return self.died(&format!("it broke the protocol: {error}"));
            }
        }
        self.recovery.works();
        self.progress_us = self.clock.now_us();
        self.send_masks();
        let members = self.members.iter_mut().zip(results);
        let silent = members.filter_map(|(member, result)| {
            member.watch_copies(!(result.copied.is_empty() && result.placed.is_empty()))
        });
        if let Some(silent) = silent.max() {
            self.executor.kill();
            self.copies_hang = true;
            self.died(&format!("no page copy has finished for {silent} s"));
        }
    }

    fn deliver(&mut self) {
        self.members.iter_mut().for_each(Member::deliver);
    }
}
