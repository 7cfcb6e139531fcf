//! A simulated rank group or step group, as an [`Executor`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{Clock, Executor, Signal, Wake};
use forebay_protocol::{
    Dtype, Ready, SparseRows, StepMasks, StepPlan, StepResult, StepTiming, Want,
};

use crate::clock::{self, SimClock};
use crate::copies::Bus;
use crate::device::Device;
use crate::faults::SimControl;
use crate::profile::Jitter;
use crate::states::States;
use crate::text::SimText;
use crate::timeline::{Span, Timeline, Timing};

/// The settings of a simulated device.
#[derive(Clone)]
pub struct SimConfig {
    /// The clock.
    pub clock: SimClock,
    /// The durations of steps and copies.
    pub timing: Timing,
    /// The bus of the machine, which its devices share.
    pub bus: Bus,
    /// The seed of the jitter.
    pub seed: u64,
    /// Microseconds from the start to `ready`.
    pub load_us: u64,
    /// The number of pages in the KV pool; 0 for a model without a KV cache.
    pub page_count: u32,
    /// The number of rows of the output head. Every token id of `text` is below this number.
    pub vocab_size: u32,
    /// The number of elements of an embedding, in bfloat16. Embeddings are not read.
    pub hidden_size: u32,
    /// How simulated answers are generated.
    pub text: SimText,
    /// The largest number of tokens that a row returns, as if drafts were accepted; 1 for one token
    /// per row.
    pub tokens_a_row: u32,
    /// The name of the device.
    pub device: String,
    /// The number of pages in the host tier; 0 if there is none.
    pub host_pages: u32,
    /// The number of state pages in the host tier.
    pub host_state_pages: u32,
    /// The number of positions that a sparse slot caches on the device; 0 if slots never become
    /// sparse.
    pub hot_row_tokens: u32,
    /// The vision tower; `None` if there is none.
    pub tower: Option<SimTower>,
    /// The number of state pages. The size of a state is in `timing`; if that size is 0, the model
    /// has no states.
    pub state_pages: u32,
}

impl Default for SimConfig {
    /// A small model in virtual time, on a device whose steps take no time.
    fn default() -> Self {
        const VOCAB: u32 = 100;
        Self {
            clock: SimClock::virtual_time(),
            timing: Timing::default(),
            bus: Bus::default(),
            seed: 0,
            load_us: 1000,
            page_count: 64,
            vocab_size: VOCAB,
            hidden_size: 4,
            text: SimText::endless((0..VOCAB.cast_signed()).collect()),
            tokens_a_row: 1,
            device: "sim".into(),
            host_pages: 0,
            host_state_pages: 0,
            hot_row_tokens: 0,
            tower: None,
            state_pages: 0,
        }
    }
}

/// A simulated vision tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimTower {
    /// The number of layers of the tower.
    pub layers: u32,
    /// The number of image pages.
    pub pages: u32,
}

impl SimTower {
    /// The number of positions of an image page, as in hands.
    pub const PAGE_TOKENS: u32 = 64;
}

impl SimConfig {
    fn timeline(&self, member: u64, now_us: u64) -> Timeline {
        let seed = self.seed.wrapping_add(member);
        let jitter = Jitter::new(self.timing.model.jitter_sigma, seed);
        Timeline::new(self.timing, jitter, now_us).on(self.bus.clone())
    }
}

struct Pending {
    at_us: u64,
    what: SimEvent,
    /// The start of the wait if this is a plan without rows, which waits for copies; otherwise
    /// `None`. Another plan ends the wait.
    waits_since: Option<u64>,
}

/// A future event of the simulation.
enum SimEvent {
    /// The group becomes ready.
    Ready,
    /// The group dies from this signal.
    Death(Signal),
    /// A step ends, with one answer per member.
    Step(Vec<Answer>),
}

/// The answer of one member to a step.
#[allow(clippy::large_enum_variant, reason = "nearly all are results")]
enum Answer {
    Result(StepResult),
    /// The step has started, but its tokens cannot be sampled until the masks arrive.
    Unmasked(Box<UnmaskedStep>),
}

struct UnmaskedStep {
    plan: StepPlan,
    span: Span,
    rows: SparseRows,
}

/// The state of one member's device.
struct Rank {
    device: Device,
    timeline: Timeline,
    /// Slots whose rows kill the device.
    poisoned: Vec<u32>,
    /// The last step that was submitted; `None` before the first.
    step: Option<u64>,
    states: States,
}

impl Rank {
    fn new(timeline: Timeline) -> Self {
        Self {
            device: Device::default(),
            timeline,
            poisoned: Vec::new(),
            step: None,
            states: States::default(),
        }
    }

    /// Generates the result of a step's rows.
    fn sample(
        &mut self,
        plan: &StepPlan,
        span: Span,
        rows: SparseRows,
        text: &SimText,
        masks: Option<&StepMasks>,
    ) -> StepResult {
        let mut result = self.device.execute(plan, text, masks);
        let us = |time: u64| u32::try_from(time).unwrap_or(u32::MAX);
        let (device_us, gap_us) = (us(span.end_us - span.start_us), us(span.gap_us));
        result.timing = StepTiming { device_us, gap_us };
        result.sparse_rows = (rows != SparseRows::default()).then_some(rows);
        result
    }

    /// Writes the slots of a plan. True if one of its rows kills the group.
    fn take_slots(&mut self, plan: &StepPlan, poison: Option<i32>) -> bool {
        for new in plan.new_slots() {
            self.poisoned.retain(|&slot| slot != new.slot);
            if poison.is_some_and(|token| new.tokens.contains(&token)) {
                self.poisoned.push(new.slot);
            }
        }
        !self.poisoned.is_empty() && plan.rows().any(|row| self.poisoned.contains(&row.slot))
    }
}

/// A simulated rank group or step group.
pub struct SimExecutor {
    config: SimConfig,
    control: SimControl,
    ranks: Vec<Rank>,
    pending: VecDeque<Pending>,
    up: bool,
}

impl SimExecutor {
    /// Creates a group that runs in `config.clock`, and the handle to inject faults. The group
    /// takes one plan per step, however many ranks compute the step.
    #[must_use]
    pub fn new(config: SimConfig) -> (Self, SimControl) {
        Self::group(config, 1)
    }

    /// Creates a step group of `members` ranks with separate plans and pages. A step takes as long
    /// as its slowest rank, and each rank has its own jitter.
    #[must_use]
    pub fn group(config: SimConfig, members: u32) -> (Self, SimControl) {
        let control = SimControl::default();
        let ranks = (0..members.into()).map(|rank| Rank::new(config.timeline(rank, 0)));
        let executor = Self {
            ranks: ranks.collect(),
            config,
            control: control.clone(),
            pending: VecDeque::new(),
            up: false,
        };
        (executor, control)
    }

    /// Detects errors in plans that would make ranks wait forever or compute wrong results: steps
    /// out of order, or wrong token counts of the other ranks.
    fn fault_of(&self, plans: &[StepPlan]) -> Option<String> {
        if plans.len() != self.ranks.len() {
            return Some(format!("{} plans for {} ranks", plans.len(), self.ranks.len()));
        }
        let tokens = |plan: &StepPlan| plan.rows().map(|row| row.length.cast_signed()).sum::<i32>();
        let several = plans.iter().filter(|_| plans.len() > 1);
        let group: Vec<i32> = several.map(tokens).collect();
        let step = plans[0].step();
        for (rank, (state, plan)) in self.ranks.iter().zip(plans).enumerate() {
            let last = state.step.unwrap_or(step.wrapping_sub(1));
            if plan.step() != last.wrapping_add(1) || plan.step() != step {
                return Some(format!("rank {rank}: step {} after {last}", plan.step()));
            }
            if plan.group() != group {
                return Some(format!("rank {rank}: {:?} for {group:?} tokens", plan.group()));
            }
        }
        None
    }

    /// Handles plans without rows: their results are sent when a copy ends, or after the longest
    /// wait of the plan.
    fn wait_for_copies(&mut self, plans: &[StepPlan], now: u64) {
        let (mut at_us, mut since, mut answers) = (0, u64::MAX, Vec::new());
        for (rank, plan) in self.ranks.iter_mut().zip(plans) {
            let span = rank.timeline.wait(plan, now, || self.control.copy_fault());
            (at_us, since) = (span.end_us.max(at_us), span.start_us.min(since));
            let result = StepResult { step: plan.step(), ..StepResult::default() };
            answers.push(Answer::Result(result));
        }
        self.pending.push_back(Pending {
            at_us,
            what: SimEvent::Step(answers),
            waits_since: Some(since),
        });
    }

    /// Computes plans, at least one of which has rows.
    fn compute(&mut self, plans: &[StepPlan], now: u64) {
        let begin = |(rank, plan): (&mut Rank, &StepPlan)| {
            rank.timeline.compute(plan, now, || self.control.copy_fault())
        };
        let begun: Vec<(Span, SparseRows)> = self.ranks.iter_mut().zip(plans).map(begin).collect();
        let end_us = begun.iter().map(|(span, _)| span.end_us).max().unwrap_or(now);
        let answer = |((rank, plan), (span, rows)): ((&mut Rank, &StepPlan), _)| {
            let span = rank.timeline.meet(span, end_us);
            if plan.rows().any(|row| matches!(row.want, Want::Masked(_))) {
                let plan = plan.clone();
                return Answer::Unmasked(Box::new(UnmaskedStep { plan, span, rows }));
            }
            Answer::Result(rank.sample(plan, span, rows, &self.config.text, None))
        };
        let answers = self.ranks.iter_mut().zip(plans).zip(begun).map(answer).collect();
        let what = SimEvent::Step(answers);
        self.pending.push_back(Pending { at_us: end_us, what, waits_since: None });
    }

    fn died(&mut self, death: Signal) -> Signal {
        self.up = false;
        self.pending.clear();
        death
    }

    fn happen(&mut self, pending: Pending) -> Signal {
        match pending.what {
            SimEvent::Ready => {
                self.up = true;
                Signal::Ready(Box::new(Ready {
                    page_count: self.config.page_count,
                    vocab_size: self.config.vocab_size,
                    hidden_size: self.config.hidden_size,
                    dtype: Dtype::Bfloat16,
                    device: self.config.device.clone(),
                    load_seconds: self.config.load_us as f64 / 1e6,
                    tokens_a_row: self.config.tokens_a_row,
                    verifies_drafts: self.config.tokens_a_row == 1
                        && self.ranks.len() == 1
                        && self.config.timing.states.bytes == 0,
                    state_page_count: self.config.state_pages,
                    state_bytes: self.config.timing.states.bytes,
                    host_page_count: self.config.host_pages,
                    host_state_page_count: self.config.host_state_pages,
                    page_bytes: self.config.timing.bytes.all(),
                    hot_row_tokens: self.config.hot_row_tokens,
                    tower_layers: self.config.tower.map_or(0, |tower| tower.layers),
                    image_page_count: self.config.tower.map_or(0, |tower| tower.pages),
                    image_page_tokens: self.config.tower.map_or(0, |_| SimTower::PAGE_TOKENS),
                    ..Ready::default()
                }))
            }
            SimEvent::Step(answers) => {
                let results = answers.into_iter().filter_map(|answer| match answer {
                    Answer::Result(result) => Some(result),
                    Answer::Unmasked(_) => None,
                });
                let mut results: Vec<StepResult> = results.collect();
                let liar = self.control.shared.faults.lock().lie.take();
                if let Some(result) = liar.and_then(|rank| results.get_mut(rank)) {
                    result.tokens.push(0);
                }
                for (rank, result) in self.ranks.iter_mut().zip(&mut results) {
                    rank.timeline.report(pending.at_us, result);
                }
                Signal::Result(results)
            }
            SimEvent::Death(death) => self.died(death),
        }
    }
}

impl Pending {
    /// True unless the event is a step that still waits for masks.
    fn is_whole(&self) -> bool {
        match &self.what {
            SimEvent::Step(answers) => {
                answers.iter().all(|answer| matches!(answer, Answer::Result(_)))
            }
            SimEvent::Ready | SimEvent::Death(_) => true,
        }
    }
}

impl Executor for SimExecutor {
    fn start(&mut self) {
        let now = self.config.clock.now_us();
        if matches!(self.config.clock, SimClock::Real(_)) {
            clock::sleep_exactly();
        }
        self.pending.clear();
        for (member, rank) in (0..).zip(&mut self.ranks) {
            let states = rank.states.of_next_device();
            *rank = Rank { states, ..Rank::new(self.config.timeline(member, now)) };
        }
        let mut faults = self.control.shared.faults.lock();
        faults.hang = false;
        faults.hang_copies = false;
        faults.kill = None;
        faults.lie = None;
        if faults.hang_starts > 0 {
            faults.hang_starts -= 1;
            return;
        }
        let what = if faults.fail_starts > 0 {
            faults.fail_starts -= 1;
            SimEvent::Death(Signal::Died("start refused".into()))
        } else {
            SimEvent::Ready
        };
        let at_us = now + self.config.load_us;
        self.pending.push_back(Pending { at_us, what, waits_since: None });
    }

    fn limit_pages(&mut self, pages: u32, host_pages: u32) {
        (self.config.page_count, self.config.host_pages) = (pages, host_pages);
    }

    fn submit(&mut self, plans: &[StepPlan]) {
        let faults = self.control.shared.faults.lock();
        if faults.hang {
            return;
        }
        let poison = faults.poison;
        let starves = faults.starves_from.is_some_and(|pages| self.config.page_count > pages);
        drop(faults);
        let now = self.config.clock.now_us();
        if let Some(why) = self.fault_of(plans) {
            let what = SimEvent::Death(Signal::Died(why));
            return self.pending.push_back(Pending { at_us: now, what, waits_since: None });
        }
        let mut deadly = false;
        let recurs = self.config.timing.states.bytes > 0;
        for (rank, plan) in self.ranks.iter_mut().zip(plans) {
            rank.step = Some(plan.step());
            if recurs && let Err(why) = rank.states.advance(plan, self.config.state_pages) {
                let what = SimEvent::Death(Signal::Died(format!("plan error: {why}")));
                return self.pending.push_back(Pending { at_us: now, what, waits_since: None });
            }
            rank.device.write_slots(plan, &self.config.text);
            deadly |= rank.take_slots(plan, poison);
        }
        if let Some(Pending { at_us, waits_since: Some(since), .. }) = self.pending.back_mut() {
            *at_us = (*at_us).min(now.max(*since));
            self.ranks.iter_mut().for_each(|rank| rank.timeline.cut(*at_us));
        }
        if plans.iter().all(|plan| plan.rows().len() == 0 && plan.images().next().is_none()) {
            return self.wait_for_copies(plans, now);
        }
        self.compute(plans, now);
        if deadly && let Some(pending) = self.pending.back_mut() {
            pending.what = SimEvent::Death(Signal::Died("poisoned".into()));
        }
        if starves && let Some(pending) = self.pending.back_mut() {
            pending.what = SimEvent::Death(Signal::OutOfMemory("memory ran out".into()));
        }
    }

    fn masks(&mut self, member: usize, masks: &StepMasks) {
        let Some(Pending { at_us, what: SimEvent::Step(answers), .. }) = self.pending.back_mut()
        else {
            return;
        };
        let (Some(answer), Some(rank)) = (answers.get_mut(member), self.ranks.get_mut(member))
        else {
            return;
        };
        if let Answer::Unmasked(unmasked) = answer {
            let UnmaskedStep { plan, span, rows } = &**unmasked;
            debug_assert_eq!(plan.step(), masks.step, "masks are those of the last plan");
            let span = rank.timeline.hold(*span, self.config.clock.now_us());
            let result = rank.sample(plan, span, *rows, &self.config.text, Some(masks));
            *answer = Answer::Result(result);
            *at_us = span.end_us.max(*at_us);
            // The next step starts when all ranks are done.
            self.ranks.iter_mut().for_each(|rank| rank.timeline.cut(*at_us));
        }
    }

    fn wait(&mut self, timeout_us: Option<u64>) -> Signal {
        let deadline = timeout_us.map(|us| self.config.clock.now_us().saturating_add(us));
        let shared = self.control.shared.clone();
        let mut faults = shared.faults.lock();
        loop {
            if std::mem::take(&mut faults.woken) {
                return Signal::Woken;
            }
            if faults.held {
                shared.changed.wait(&mut faults);
                continue;
            }
            if self.up
                && let Some(death) = faults.kill.take()
            {
                return self.died(death);
            }
            let front = self.pending.front().filter(|pending| pending.is_whole());
            let next = front.map(|pending| pending.at_us);
            let until = match (next, deadline) {
                (Some(next), Some(deadline)) => Some(next.min(deadline)),
                (one, other) => one.or(other),
            };
            let now = self.config.clock.now_us();
            match (until, &self.config.clock) {
                (None, _) => shared.changed.wait(&mut faults),
                (Some(until), SimClock::Real(_)) if until > now => {
                    let left = Duration::from_micros(until - now);
                    shared.changed.wait_for(&mut faults, left);
                }
                (Some(until), clock) => {
                    clock.advance_to(until);
                    if next.is_some_and(|next| next <= until)
                        && let Some(pending) = self.pending.pop_front()
                    {
                        drop(faults);
                        return self.happen(pending);
                    }
                    return Signal::TimedOut;
                }
            }
        }
    }

    fn stop(&mut self) {
        self.up = false;
        self.pending.clear();
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(self.control.clone())
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{NewSlot, Row, SlotSpec};

    use super::*;

    #[test]
    fn a_plan_without_rows_writes_its_slots() {
        let (mut executor, _) = SimExecutor::new(SimConfig::default());
        executor.start();
        assert!(matches!(executor.wait(None), Signal::Ready(_)));
        let (mut plan, spec) = (StepPlan::default(), SlotSpec::default());
        plan.begin(1);
        plan.write_slot(&NewSlot {
            slot: 0,
            tokens: &[1, 2],
            prompt_len: 2,
            spec: &spec,
            place: None,
        });
        plan.wait(1);
        executor.submit(std::slice::from_ref(&plan));
        assert!(matches!(executor.wait(None), Signal::Result(_)));
        plan.begin(2);
        plan.push_row(Row { slot: 0, start: 0, length: 2, want: Want::TOKEN });
        executor.submit(std::slice::from_ref(&plan));
        let Signal::Result(results) = executor.wait(None) else { panic!("the step ends") };
        assert_eq!(results[0].tokens.len(), 1);
    }
}
