//! The simulated rank group as an [`Executor`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{Clock, Executor, Signal, Wake};
use forebay_protocol::{Dtype, Ready, SparseRows, StepMasks, StepPlan, StepResult, Want};
use parking_lot::{Condvar, Mutex};

use crate::clock::{self, SimClock};
use crate::copies::CopyFault;
use crate::device::Device;
use crate::profile::Jitter;
use crate::text::SimText;
use crate::timeline::{Span, Timeline, Timing};

/// The settings of a simulated device.
#[derive(Clone)]
pub struct SimConfig {
    /// Time.
    pub clock: SimClock,
    /// The times of steps and copies.
    pub timing: Timing,
    /// Seed of the jitter.
    pub seed: u64,
    /// Microseconds from spawn to ready.
    pub load_us: u64,
    /// Pages of the KV pool; 0 for a model that keeps no keys and values.
    pub page_count: u32,
    /// Rows of the output head; every token of `text` is below it.
    pub vocab_size: u32,
    /// Elements of an embedding, as if it were bfloat16; nothing reads any.
    pub hidden_size: u32,
    /// The rules by which simulated answers are made.
    pub text: SimText,
    /// The largest number of tokens that a row gives, as if drafts were accepted; 1: one each.
    pub tokens_a_row: u32,
    /// The device's name.
    pub device: String,
    /// Pages of the host's tier; 0: there is none.
    pub host_pages: u32,
    /// Positions that a sparse slot keeps; 0: no slot is ever sparse.
    pub hot_row_tokens: u32,
    /// The vision tower, if there is one.
    pub tower: Option<SimTower>,
}

/// A simulated vision tower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimTower {
    /// The number of layers of the tower.
    pub layers: u32,
    /// Image pages.
    pub pages: u32,
}

impl SimTower {
    /// Positions of an image page, as hands have them.
    pub const PAGE_TOKENS: u32 = 64;
}

impl SimConfig {
    fn timeline(&self, now_us: u64) -> Timeline {
        Timeline::new(self.timing, Jitter::new(self.timing.model.jitter_sigma, self.seed), now_us)
    }
}

/// Injects faults into a running simulation, from any thread.
#[derive(Clone, Default)]
pub struct SimControl {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    faults: Mutex<Faults>,
    changed: Condvar,
}

#[derive(Default)]
struct Faults {
    woken: bool,
    kill: bool,
    fail_starts: u32,
    hang_starts: u32,
    poison: Option<i32>,
    hang: bool,
    held: bool,
    fail_copies: u32,
    hang_copies: bool,
}

impl SimControl {
    /// Kills the group as `kill -9` would.
    pub fn kill(&self) {
        self.change(|faults| faults.kill = true);
    }

    /// Lets the next `count` starts fail.
    pub fn fail_starts(&self, count: u32) {
        self.change(|faults| faults.fail_starts = count);
    }

    /// Lets the next `count` starts hang: they neither fail nor come to an end.
    pub fn hang_starts(&self, count: u32) {
        self.change(|faults| faults.hang_starts = count);
    }

    /// Has every later step that computes a slot written with this token kill the group.
    pub fn poison(&self, token: i32) {
        self.change(|faults| faults.poison = Some(token));
    }

    /// Steps submitted from now on never end, until the group is started again.
    pub fn hang(&self) {
        self.change(|faults| faults.hang = true);
    }

    /// Lets the next `count` copies fail.
    pub fn fail_copies(&self, count: u32) {
        self.change(|faults| faults.fail_copies = count);
    }

    /// Copies that are started from now on never end, until the group is started again.
    pub fn hang_copies(&self) {
        self.change(|faults| faults.hang_copies = true);
    }

    /// Stops time: nothing happens but wakes, until [`release`](Self::release).
    pub fn hold(&self) {
        self.change(|faults| faults.held = true);
    }

    /// Lets time go on.
    pub fn release(&self) {
        self.change(|faults| faults.held = false);
    }

    /// The outcome of the next copy.
    fn copy_fault(&self) -> CopyFault {
        let mut faults = self.shared.faults.lock();
        if faults.hang_copies {
            CopyFault::Hangs
        } else if faults.fail_copies > 0 {
            faults.fail_copies -= 1;
            CopyFault::Fails
        } else {
            CopyFault::None
        }
    }

    fn change(&self, with: impl FnOnce(&mut Faults)) {
        with(&mut self.shared.faults.lock());
        self.shared.changed.notify_all();
    }
}

impl Wake for SimControl {
    fn wake(&self) {
        self.change(|faults| faults.woken = true);
    }
}

struct Pending {
    at_us: u64,
    /// `None`: the group becomes ready; a step may also end in death.
    outcome: Option<Result<StepResult, &'static str>>,
    /// The time since which a plan without rows waits for copies; another plan ends the wait.
    waits_since: Option<u64>,
}

/// A step that has begun, and whose tokens can't be sampled before the masks have come.
struct Unmasked {
    plan: StepPlan,
    span: Span,
    rows: SparseRows,
}

/// A simulated rank group.
pub struct SimExecutor {
    config: SimConfig,
    control: SimControl,
    device: Device,
    pending: VecDeque<Pending>,
    poisoned: Vec<u32>,
    timeline: Timeline,
    unmasked: Option<Unmasked>,
    up: bool,
}

impl SimExecutor {
    /// A group that runs in `config.clock`, and the handle that breaks it.
    #[must_use]
    pub fn new(config: SimConfig) -> (Self, SimControl) {
        let control = SimControl::default();
        let executor = Self {
            timeline: config.timeline(0),
            config,
            control: control.clone(),
            device: Device::default(),
            pending: VecDeque::new(),
            poisoned: Vec::new(),
            unmasked: None,
            up: false,
        };
        (executor, control)
    }

    /// A plan without rows: it is answered when a copy ends, or when its time is over.
    fn wait_for_copies(&mut self, plan: &StepPlan, now: u64) {
        let span = self.timeline.wait(plan, now, || self.control.copy_fault());
        let result = StepResult { step: plan.step(), ..StepResult::default() };
        let (outcome, waits_since) = (Some(Ok(result)), Some(span.start_us));
        self.pending.push_back(Pending { at_us: span.end_us, outcome, waits_since });
    }

    /// Makes up what the rows of a step give, and has the result come at its end.
    fn sample(&mut self, plan: &StepPlan, span: Span, rows: SparseRows, masks: Option<&StepMasks>) {
        let mut result = self.device.execute(plan, &self.config.text, masks);
        result.device_us = u32::try_from(span.end_us - span.start_us).unwrap_or(u32::MAX);
        result.gap_us = u32::try_from(span.gap_us).unwrap_or(u32::MAX);
        result.sparse_rows = rows;
        let deadly =
            !self.poisoned.is_empty() && plan.rows().any(|row| self.poisoned.contains(&row.slot));
        let outcome = Some(if deadly { Err("poisoned") } else { Ok(result) });
        self.pending.push_back(Pending { at_us: span.end_us, outcome, waits_since: None });
    }

    fn died(&mut self, why: &str) -> Signal {
        self.up = false;
        self.pending.clear();
        self.unmasked = None;
        Signal::Died(why.to_owned())
    }

    fn happen(&mut self, pending: Pending) -> Signal {
        match pending.outcome {
            None => {
                self.up = true;
                Signal::Ready(Ready {
                    page_count: self.config.page_count,
                    vocab_size: self.config.vocab_size,
                    hidden_size: self.config.hidden_size,
                    dtype: Dtype::Bfloat16,
                    weight_bytes: 0,
                    kv_bytes: 0,
                    device: self.config.device.clone(),
                    load_seconds: self.config.load_us as f64 / 1e6,
                    tokens_a_row: self.config.tokens_a_row,
                    host_page_count: self.config.host_pages,
                    page_bytes: self.config.timing.bytes.all(),
                    hot_row_tokens: self.config.hot_row_tokens,
                    tower_layers: self.config.tower.map_or(0, |tower| tower.layers),
                    image_page_count: self.config.tower.map_or(0, |tower| tower.pages),
                    image_page_tokens: self.config.tower.map_or(0, |_| SimTower::PAGE_TOKENS),
                    graphs: 0,
                })
            }
            Some(Ok(mut result)) => {
                self.timeline.report(pending.at_us, &mut result);
                Signal::Result(result)
            }
            Some(Err(why)) => self.died(why),
        }
    }
}

impl Executor for SimExecutor {
    fn start(&mut self) {
        let now = self.config.clock.now_us();
        if matches!(self.config.clock, SimClock::Real(_)) {
            clock::sleep_exactly();
        }
        self.device = Device::default();
        self.pending.clear();
        self.unmasked = None;
        self.poisoned.clear();
        self.timeline = self.config.timeline(now);
        let mut faults = self.control.shared.faults.lock();
        faults.hang = false;
        faults.hang_copies = false;
        faults.kill = false;
        if faults.hang_starts > 0 {
            faults.hang_starts -= 1;
            return;
        }
        let outcome = if faults.fail_starts > 0 {
            faults.fail_starts -= 1;
            Some(Err("start refused"))
        } else {
            None
        };
        let at_us = now + self.config.load_us;
        self.pending.push_back(Pending { at_us, outcome, waits_since: None });
    }

    fn submit(&mut self, plan: &StepPlan) {
        let faults = self.control.shared.faults.lock();
        if faults.hang {
            return;
        }
        let poison = faults.poison;
        drop(faults);
        for new in plan.new_slots() {
            self.poisoned.retain(|&slot| slot != new.slot);
            if poison.is_some_and(|token| new.tokens.contains(&token)) {
                self.poisoned.push(new.slot);
            }
        }
        let now = self.config.clock.now_us();
        if let Some(Pending { at_us, waits_since: Some(since), .. }) = self.pending.back_mut() {
            *at_us = (*at_us).min(now.max(*since));
            self.timeline.cut(*at_us);
        }
        if plan.rows().len() == 0 && plan.images().next().is_none() {
            return self.wait_for_copies(plan, now);
        }
        let (span, rows) = self.timeline.compute(plan, now, || self.control.copy_fault());
        if plan.rows().any(|row| row.want == Want::Masked) {
            debug_assert!(self.unmasked.is_none(), "masks go before the next plan");
            self.unmasked = Some(Unmasked { plan: plan.clone(), span, rows });
        } else {
            self.sample(plan, span, rows, None);
        }
    }

    fn masks(&mut self, masks: &StepMasks) {
        if let Some(Unmasked { plan, span, rows }) = self.unmasked.take() {
            debug_assert_eq!(plan.step(), masks.step(), "masks are those of the last plan");
            let span = self.timeline.hold(span, self.config.clock.now_us());
            self.sample(&plan, span, rows, Some(masks));
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
            if self.up && std::mem::take(&mut faults.kill) {
                return self.died("killed (signal 9)");
            }
            let next = self.pending.front().map(|pending| pending.at_us);
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
        self.unmasked = None;
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(self.control.clone())
    }
}
