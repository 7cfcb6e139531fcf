//! Determines when the steps of a simulated device start and end.

use std::collections::HashSet;

use forebay_protocol::{SparseRows, StepPlan, StepResult};
use serde::{Deserialize, Serialize};

use crate::copies::{Bus, CopyEngines, CopyFault, PageBytes};
use crate::load::StepLoad;
use crate::profile::{CopyModel, DeviceModel, Jitter};
use crate::states::StateModel;

/// The additional cost of the rows of sparse slots, for a model with sparse attention. The number
/// of misses is not simulated but configured, as `miss_rows`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SparseModel {
    /// The number of positions that a row selects in each layer; 0 if the model has no sparse
    /// attention.
    pub top_k: u32,
    /// The number of selected positions, per row and layer, that are neither in a hot row nor on a
    /// hot page.
    pub miss_rows: f64,
    /// The number of layers that copy missing positions.
    pub layers: u32,
    /// The size of a position in one layer, in bytes.
    pub row_bytes: f64,
    /// The speed at which single positions are read from host memory, in GB (10^9 bytes) per
    /// second; absent if this takes no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gather_gbps: Option<f64>,
}

impl SparseModel {
    /// Returns the time in microseconds to read the missing positions of `rows` rows of sparse
    /// slots.
    #[must_use]
    pub fn gather_us(&self, rows: u32) -> f64 {
        let bytes = f64::from(rows) * self.miss_rows * f64::from(self.layers) * self.row_bytes;
        // One GB per second is a thousand bytes per microsecond.
        self.gather_gbps.map_or(0.0, |gbps| bytes / (1000.0 * gbps))
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let numbers = [("miss_rows", self.miss_rows), ("row_bytes", self.row_bytes)];
        for (name, number) in numbers {
            if !(number.is_finite() && number >= 0.0) {
                return Err(format!("sparse.{name}: expected a number from 0 on"));
            }
        }
        if self.miss_rows > f64::from(self.top_k) {
            return Err("sparse.miss_rows: no more can be missed than top_k".to_owned());
        }
        match self.gather_gbps.is_none_or(|speed| speed.is_finite() && speed > 0.0) {
            true => Ok(()),
            false => Err("sparse.gather_gbps: expected a number above 0".to_owned()),
        }
    }
}

/// The work that waits for the saves of a plan.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveOrder {
    /// Nothing waits for saves.
    #[default]
    Behind,
    /// The rows of the next plan wait on the device.
    Fence,
    /// The next plan waits: the host prepares it after the saves (as SGLang did before #21932).
    Inline,
}

/// The times and sizes of a device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timing {
    /// The times of steps.
    pub model: DeviceModel,
    /// The speed of page copies.
    pub copy: CopyModel,
    /// The bytes of a page.
    pub bytes: PageBytes,
    /// The cost of rows of sparse slots.
    pub sparse: SparseModel,
    /// The recurrent states.
    pub states: StateModel,
    /// The work that waits for saves.
    pub save_order: SaveOrder,
    /// The number of ranks that compute each step together. The times of `model` are those of a
    /// typical rank. 0 and 1 both mean one rank.
    pub ranks: u32,
}

/// The time in which a step was computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Span {
    /// The start of the span.
    pub start_us: u64,
    /// The end of the span, exclusive.
    pub end_us: u64,
    /// The time since the end of the previous step.
    pub gap_us: u64,
}

/// The timeline of one device. The caller passes the current time.
#[derive(Debug)]
pub struct Timeline {
    timing: Timing,
    jitter: Jitter,
    /// The copies that are in progress.
    pub copies: CopyEngines,
    sparse_slots: HashSet<u32>,
    busy_until: u64,
    last_end: u64,
    /// Microseconds that rows have waited for saves since the last report.
    waited_us: u64,
}

impl Timeline {
    /// Creates the timeline of a device that is idle from `now_us` on.
    #[must_use]
    pub fn new(timing: Timing, jitter: Jitter, now_us: u64) -> Self {
        Self {
            timing,
            jitter: jitter.of_ranks(timing.ranks),
            copies: CopyEngines::new(timing.copy, timing.bytes),
            sparse_slots: HashSet::new(),
            busy_until: now_us,
            last_end: now_us,
            waited_us: 0,
        }
    }

    /// Makes the copies share `bus` with those of other devices.
    #[must_use]
    pub fn on(mut self, bus: Bus) -> Self {
        self.copies = self.copies.on(bus);
        self
    }

    /// Returns the earliest time at which another step could start.
    #[must_use]
    pub fn busy_until(&self) -> u64 {
        self.busy_until
    }

    /// Computes a plan with rows that arrives at `now_us`, and starts its copies. `fault` returns
    /// how each copy ends.
    pub fn compute(
        &mut self,
        plan: &StepPlan,
        now_us: u64,
        fault: impl FnMut() -> CopyFault,
    ) -> (Span, SparseRows) {
        let Timing { model, sparse, save_order, .. } = self.timing;
        let host_us = model.host_us.round() as u64;
        let saved = self.copies.saves_end();
        let free = self.busy_until.max(now_us + host_us);
        let start_us = match save_order {
            SaveOrder::Behind => free,
            SaveOrder::Fence => free.max(saved),
            SaveOrder::Inline => self.busy_until.max(now_us).max(saved) + host_us,
        };
        self.waited_us += start_us - free;
        for new in plan.new_slots() {
            self.sparse_slots.remove(&new.slot);
        }
        self.sparse_slots.extend(plan.hot_rows().map(|(slot, ..)| slot));
        let rows = plan.rows().filter(|row| self.sparse_slots.contains(&row.slot)).count() as u32;
        let gathers = sparse.gather_us(rows);
        self.copies.delay_restores(gathers.round() as u64);
        let median = model.median_us(&StepLoad::of(plan)) + gathers;
        let median = median + model.tower_us * tower_work(plan) as f64;
        let median = median + self.timing.states.copy_us(plan);
        let device_us = (median * self.jitter.factor(plan.step())).round() as u64;
        let end_us = start_us + device_us;
        let gap_us = start_us - self.last_end.min(start_us);
        (self.busy_until, self.last_end) = (end_us, end_us);
        self.start_copies(plan, start_us, end_us, fault);
        (Span { start_us, end_us, gap_us }, self.rows(rows))
    }

    /// Postpones the last step, which took `span`: it ends no earlier than `now_us`, the time at
    /// which its masks arrived. The delay counts as idle time before the step. Its saves are not
    /// postponed.
    pub fn hold(&mut self, span: Span, now_us: u64) -> Span {
        let late_us = now_us.saturating_sub(span.end_us);
        let start_us = span.start_us + late_us;
        let end_us = span.end_us + late_us;
        (self.busy_until, self.last_end) = (end_us, end_us);
        Span { start_us, end_us, gap_us: span.gap_us + late_us }
    }

    /// Sets the end of the last step, which took `span`, to `end_us`: the time at which the slowest
    /// rank of the group is done. Ranks wait for each other in every layer.
    pub fn meet(&mut self, span: Span, end_us: u64) -> Span {
        (self.busy_until, self.last_end) = (end_us, end_us);
        Span { end_us, ..span }
    }

    /// Runs a plan without rows. It ends when a copy ends, or after the longest wait of the plan.
    pub fn wait(&mut self, plan: &StepPlan, now_us: u64, fault: impl FnMut() -> CopyFault) -> Span {
        let start_us = self.busy_until.max(now_us);
        self.start_copies(plan, start_us, start_us, fault);
        let over = start_us + u64::from(plan.wait_us());
        let end_us = self.copies.next_end().map_or(over, |end| end.clamp(start_us, over));
        (self.busy_until, self.last_end) = (end_us, end_us);
        for (slot, ..) in plan.hot_rows() {
            self.sparse_slots.insert(slot);
        }
        Span { start_us, end_us, gap_us: 0 }
    }

    /// Ends the wait of a plan without rows at `at_us`.
    pub fn cut(&mut self, at_us: u64) {
        (self.busy_until, self.last_end) = (at_us, at_us);
    }

    /// Adds the copies that have ended by `now_us`, and the time that rows waited for copies, to a
    /// result.
    pub fn report(&mut self, now_us: u64, result: &mut StepResult) {
        self.copies.report(now_us, result);
        let waited_us = std::mem::take(&mut self.waited_us);
        result.copy_wait_us = (waited_us > 0).then(|| u32::try_from(waited_us).unwrap_or(u32::MAX));
    }

    fn rows(&self, rows: u32) -> SparseRows {
        let SparseModel { top_k, miss_rows, layers, .. } = self.timing.sparse;
        let chosen = rows.saturating_mul(layers);
        let selected = chosen.saturating_mul(top_k);
        let missed = ((f64::from(chosen) * miss_rows) as u32).min(selected);
        SparseRows { selected, on_pages: 0, in_rows: selected - missed, missed }
    }

    fn start_copies(
        &mut self,
        plan: &StepPlan,
        now_us: u64,
        behind_us: u64,
        mut fault: impl FnMut() -> CopyFault,
    ) {
        for copy in plan.copies() {
            let from_us = if copy.direction.is_save() { behind_us } else { now_us };
            self.copies.start(copy, from_us, fault());
        }
    }
}

/// Returns the number of image positions times layers of the vision tower that a plan computes.
fn tower_work(plan: &StepPlan) -> u64 {
    let work = plan.images().map(|(work, _)| work);
    work.map(|work| u64::from(work.grid.positions()) * u64::from(work.end - work.first)).sum()
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{Direction, PageCopy, Row, Want};

    use super::*;

    fn plan(step: u64, copies: u32) -> StepPlan {
        let mut plan = StepPlan::default();
        plan.begin(step);
        plan.push_row(Row { slot: 3, start: 5, length: 1, want: Want::TOKEN });
        for at in 0..copies {
            let ticket = step as u32 * 100 + at;
            plan.push_copy(PageCopy {
                ticket,
                direction: Direction::Save,
                hot: Some(at),
                host: at,
                span: None,
                lender: None,
            });
        }
        plan
    }

    fn timeline(save_order: SaveOrder) -> Timeline {
        let model = DeviceModel { step_us: 100.0, host_us: 30.0, ..DeviceModel::INSTANT };
        let copy = CopyModel { latency_us: 20.0, ..CopyModel::default() };
        let sparse = SparseModel {
            top_k: 10,
            miss_rows: 4.0,
            layers: 2,
            row_bytes: 1000.0,
            gather_gbps: Some(1.0),
        };
        let timing = Timing { model, copy, sparse, save_order, ..Timing::default() };
        Timeline::new(timing, Jitter::new(0.0, 0), 0)
    }

    /// Submits two plans at once, the first with two saves. Returns their start times, and how long
    /// rows waited.
    fn starts(save_order: SaveOrder) -> (u64, u64, u32) {
        let mut timeline = timeline(save_order);
        let first = timeline.compute(&plan(1, 2), 0, || CopyFault::None).0;
        let second = timeline.compute(&plan(2, 0), 0, || CopyFault::None).0;
        let mut result = StepResult::default();
        timeline.report(second.end_us, &mut result);
        assert_eq!(result.copied.len(), 2);
        (first.start_us, second.start_us, result.copy_wait_us.unwrap_or(0))
    }

    #[test]
    fn what_waits_for_saves_is_a_choice() {
        assert_eq!(starts(SaveOrder::Behind), (30, 130, 0));
        assert_eq!(starts(SaveOrder::Fence), (30, 170, 40));
        assert_eq!(starts(SaveOrder::Inline), (30, 200, 70));
    }

    #[test]
    fn a_sparse_slot_s_rows_cost_what_they_miss_until_it_is_written_anew() {
        let mut timeline = timeline(SaveOrder::Behind);
        let mut sparse = plan(1, 0);
        sparse.write_hot_rows(3, 0, 7);
        let (span, rows) = timeline.compute(&sparse, 0, || CopyFault::None);
        assert_eq!(span.end_us - span.start_us, 100 + 4 * 2);
        assert_eq!(rows, SparseRows { selected: 20, on_pages: 0, in_rows: 12, missed: 8 });
        let (_, rows) = timeline.compute(&plan(2, 0), 0, || CopyFault::None);
        assert_eq!(rows.missed, 8);
        let mut anew = plan(3, 0);
        let spec = forebay_protocol::SlotSpec::default();
        anew.write_slot(&forebay_protocol::NewSlot {
            slot: 3,
            tokens: &[1],
            prompt_len: 1,
            spec: &spec,
            place: None,
        });
        assert_eq!(timeline.compute(&anew, 0, || CopyFault::None).1, SparseRows::default());
    }
}
