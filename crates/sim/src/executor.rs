//! The simulated rank group as an [`Executor`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::{Clock, Executor, Signal, Wake};
use forebay_protocol::{Direction, Dtype, Ready, StepMasks, StepPlan, StepResult, Want};
use parking_lot::{Condvar, Mutex};

use crate::clock::{self, SimClock};
use crate::copies::{CopyEngines, CopyFault};
use crate::device::Device;
use crate::load::StepLoad;
use crate::profile::{CopyModel, DeviceModel, Jitter};
use crate::text::SimText;

/// What is simulated.
#[derive(Clone)]
pub struct SimConfig {
    /// Time.
    pub clock: SimClock,
    /// How long steps take.
    pub model: DeviceModel,
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
    /// What requests say.
    pub text: SimText,
    /// Most tokens that a row gives, as if drafts were accepted; 1: one each.
    pub tokens_a_row: u32,
    /// The device's name.
    pub device: String,
    /// Pages of the host's tier; 0: there is none.
    pub host_pages: u32,
    /// Bytes of a page; 0: copies take their latency.
    pub page_bytes: u64,
    /// How pages are copied.
    pub copy: CopyModel,
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

    /// From now on a step that computes a slot written with this token kills the group.
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
    /// It has no rows and waits for copies; another plan ends that.
    waits_since: Option<u64>,
}

/// A step that has begun, and whose tokens can't be sampled before the masks have come.
struct Unmasked {
    plan: StepPlan,
    start: u64,
    device_us: u64,
}

/// A simulated rank group.
pub struct SimExecutor {
    config: SimConfig,
    jitter: Jitter,
    control: SimControl,
    device: Device,
    pending: VecDeque<Pending>,
    busy_until: u64,
    last_end: u64,
    poisoned: Vec<u32>,
    copies: CopyEngines,
    unmasked: Option<Unmasked>,
    up: bool,
}

impl SimExecutor {
    /// A group that runs in `config.clock`, and the handle that breaks it.
    #[must_use]
    pub fn new(config: SimConfig) -> (Self, SimControl) {
        let control = SimControl::default();
        let executor = Self {
            jitter: Jitter::new(config.model.jitter_sigma, config.seed),
            config,
            control: control.clone(),
            device: Device::default(),
            pending: VecDeque::new(),
            busy_until: 0,
            last_end: 0,
            poisoned: Vec::new(),
            copies: CopyEngines::default(),
            unmasked: None,
            up: false,
        };
        (executor, control)
    }

    /// Starts a plan's copies: restores at once, saves behind the rows.
    fn start_copies(&mut self, plan: &StepPlan, now: u64, behind: u64) {
        for copy in plan.copies() {
            let mut faults = self.control.shared.faults.lock();
            let fault = if faults.hang_copies {
                CopyFault::Hangs
            } else if faults.fail_copies > 0 {
                faults.fail_copies -= 1;
                CopyFault::Fails
            } else {
                CopyFault::None
            };
            drop(faults);
            let from = if copy.direction == Direction::Save { behind } else { now };
            self.copies.start(copy, from, fault);
        }
    }

    /// A plan without rows: it is answered when a copy ends, or when its time is over.
    fn wait_for_copies(&mut self, plan: &StepPlan, start: u64) {
        self.start_copies(plan, start, start);
        let over = start + u64::from(plan.wait_us());
        let at_us = self.copies.next_end().map_or(over, |end| end.clamp(start, over));
        self.busy_until = at_us;
        self.last_end = at_us;
        let result = StepResult { step: plan.step(), ..StepResult::default() };
        let outcome = Some(Ok(result));
        self.pending.push_back(Pending { at_us, outcome, waits_since: Some(start) });
    }

    /// Computes a step that begins at `start` and takes `device_us`; masks that come later than that keep its end waiting.
    fn compute(&mut self, plan: &StepPlan, start: u64, device_us: u64, masks: Option<&StepMasks>) {
        let mut result = self.device.execute(plan, &self.config.text, masks);
        let computed = start + device_us;
        let late = masks.map_or(0, |_| self.config.clock.now_us().saturating_sub(computed));
        result.device_us = u32::try_from(device_us).unwrap_or(u32::MAX);
        result.gap_us = u32::try_from(start - self.last_end + late).unwrap_or(u32::MAX);
        self.busy_until = computed + late;
        self.last_end = self.busy_until;
        let deadly =
            !self.poisoned.is_empty() && plan.rows().any(|row| self.poisoned.contains(&row.slot));
        let outcome = Some(if deadly { Err("poisoned") } else { Ok(result) });
        self.start_copies(plan, start, self.busy_until);
        self.pending.push_back(Pending { at_us: self.busy_until, outcome, waits_since: None });
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
                    page_bytes: self.config.page_bytes,
                })
            }
            Some(Ok(mut result)) => {
                self.copies.report(pending.at_us, &mut result);
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
        self.copies = CopyEngines::new(self.config.copy, self.config.page_bytes);
        self.busy_until = now;
        self.last_end = now;
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
            self.busy_until = *at_us;
            self.last_end = *at_us;
        }
        let start = self.busy_until.max(now);
        if plan.rows().len() == 0 {
            return self.wait_for_copies(plan, start);
        }
        let median = self.config.model.median_us(&StepLoad::of(plan));
        let device_us = (median * self.jitter.factor(plan.step())).round() as u64;
        if plan.rows().any(|row| row.want == Want::Masked) {
            debug_assert!(self.unmasked.is_none(), "masks go before the next plan");
            self.unmasked = Some(Unmasked { plan: plan.clone(), start, device_us });
        } else {
            self.compute(plan, start, device_us, None);
        }
    }

    fn masks(&mut self, masks: &StepMasks) {
        if let Some(Unmasked { plan, start, device_us }) = self.unmasked.take() {
            debug_assert_eq!(plan.step(), masks.step(), "masks are those of the last plan");
            self.compute(&plan, start, device_us, Some(masks));
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
