//! The recurrent states of slots: the number of positions in each state, and the rows of the state
//! tables.
//!
//! A slot has two rows. If a mask arrives too late, the last position is computed again. So the
//! states after that position are written to the slot's other row, until the slot's next row in a
//! plan shows from which of the two it continues. The rows of state pages follow those of slots.

use std::collections::HashSet;

use forebay_kernels::Decoder;
use forebay_protocol::{HandConfig, StateCopy, StepPlan, Want};

use crate::descriptors::PageMemory;
use crate::runner::HandError;
use crate::tables::{PlanError, wrong};

/// By default, state pages get `1 / SHARE` of the memory for pages.
const SHARE: u64 = 4;
/// By default, the largest number of state pages per slot. The smallest is one.
const MOST_EACH: u64 = 8;

/// The number of state pages, if a slot's state takes `of_slot` bytes and `free` bytes remain for
/// pages of all kinds.
pub(crate) fn state_pages(config: &HandConfig, of_slot: u64, free: u64) -> u64 {
    let slots = u64::from(config.slots);
    match config.state_pages {
        _ if of_slot == 0 => 0,
        Some(pages) => pages.into(),
        None => (free / SHARE / of_slot).clamp(slots, MOST_EACH * slots),
    }
}

/// The state pages of the device, which are the last rows of the state tables.
pub(crate) struct StateMemory {
    pub(crate) rows: PageMemory,
    /// The index of the first page's row.
    pub(crate) first: u32,
}

impl StateMemory {
    pub(crate) fn row(&self, page: u32) -> u32 {
        self.first.saturating_add(page)
    }
}

/// The states of a plan's rows, and the copies of states before and after the rows are computed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct StateSteps {
    /// For each row of the plan, two rows of the state tables: the one with the state before the
    /// row, and the one for the state after the row.
    pub(crate) rows: Vec<[i64; 2]>,
    /// Table rows to be cleared, because the plan's rows that use them begin at position 0.
    fresh: Vec<usize>,
    /// Copies before the rows are computed, as `[from, to]`.
    loads: Vec<[usize; 2]>,
    /// Copies after the rows are computed, as `[from, to]`.
    saves: Vec<[usize; 2]>,
    /// The number of positions in each state that is copied to the host, in the plan's order.
    pub(crate) to_host: Vec<u32>,
}

/// The number of positions in the states of slots and state pages.
pub(crate) struct States {
    slots: usize,
    /// The number of positions in each slot's state; `None` if it has no state.
    seen: Vec<Option<u32>>,
    /// The number of positions in the slot's other row; `None` if no plan can continue from it.
    other: Vec<Option<u32>>,
    half: Vec<bool>,
    of_page: Vec<Option<u32>>,
}

impl States {
    pub(crate) fn new(slots: usize, pages: usize) -> Self {
        Self {
            slots,
            seen: vec![None; slots],
            other: vec![None; slots],
            half: vec![false; slots],
            of_page: vec![None; pages],
        }
    }

    /// Determines the states of a plan's rows. The plan's new slots must be within bounds.
    ///
    /// # Errors
    /// If a row does not begin where its slot's state ends, or a page has no state.
    pub(crate) fn read(&mut self, plan: &StepPlan) -> Result<StateSteps, PlanError> {
        for write in plan.new_slots() {
            let slot = write.slot as usize;
            (self.seen[slot], self.other[slot]) = (None, None);
        }
        let mut steps = StateSteps::default();
        for copy in plan.state_loads() {
            let (slot, page) = self.places(copy)?;
            let Some(seen) = self.of_page[page] else {
                return wrong(format!("state page {page} has no state for slot {slot}"));
            };
            (self.seen[slot], self.other[slot]) = (Some(seen), None);
            steps.loads.push([2 * self.slots + page, self.row(slot)]);
        }
        let mut busy = HashSet::new();
        for (row, drafts) in plan.rows().zip(plan.drafts()) {
            let slot = row.slot as usize;
            if slot >= self.slots || row.length == 0 {
                return wrong(format!("a row of slot {slot}, of {} slots", self.slots));
            }
            if !busy.insert(slot) || !drafts.is_empty() {
                return wrong(format!(
                    "a second row of slot {slot}, or drafts, beside its recurrent states"
                ));
            }
            let source = self.source(slot, row.start)?;
            if row.start == 0 {
                steps.fresh.push(source);
            }
            let end = row.start.saturating_add(row.length);
            (self.seen[slot], self.other[slot]) = (Some(end), None);
            if matches!(row.want, Want::Masked(_)) {
                self.other[slot] = Some(end - 1);
                self.half[slot] = !self.half[slot];
            }
            steps.rows.push([source as i64, self.row(slot) as i64]);
        }
        for copy in plan.state_saves() {
            let (slot, page) = self.places(copy)?;
            let Some(seen) = self.seen[slot] else {
                return wrong(format!("slot {slot} has no state for state page {page}"));
            };
            self.of_page[page] = Some(seen);
            steps.saves.push([self.row(slot), 2 * self.slots + page]);
        }
        for copy in plan.copies().filter(|copy| copy.direction.is_of_state()) {
            let page = copy.hot.map_or(usize::MAX, |page| page as usize);
            let count = self.of_page.len();
            let Some(seen) = self.of_page.get_mut(page) else {
                return wrong(format!("copy of state page {page} of {count}"));
            };
            if !copy.direction.is_save() {
                // No slot may load the state before the copy has finished.
                *seen = None;
                continue;
            }
            let Some(seen) = *seen else {
                return wrong(format!("state page {page} has no state for the host"));
            };
            steps.to_host.push(seen);
        }
        Ok(steps)
    }

    /// Records that a state with `seen` positions was restored to a page from the host.
    pub(crate) fn has_come(&mut self, page: u32, seen: u32) {
        if let Some(of_page) = self.of_page.get_mut(page as usize) {
            *of_page = Some(seen);
        }
    }

    fn row(&self, slot: usize) -> usize {
        slot + if self.half[slot] { self.slots } else { 0 }
    }

    /// Returns the table row with the state before position `start` of a slot. This table row
    /// becomes the slot's current one.
    fn source(&mut self, slot: usize, start: u32) -> Result<usize, PlanError> {
        if start > 0 && self.seen[slot] != Some(start) {
            if self.other[slot] != Some(start) {
                return wrong(format!(
                    "a row of slot {slot} begins at position {start}, and the slot's recurrent states have seen others"
                ));
            }
            self.half[slot] = !self.half[slot];
        }
        Ok(self.row(slot))
    }

    fn places(&self, copy: StateCopy) -> Result<(usize, usize), PlanError> {
        let (slot, page) = (copy.slot as usize, copy.page as usize);
        if slot >= self.slots || page >= self.of_page.len() {
            return wrong(format!(
                "copy of a state: slot {slot} and page {page}, of {} and {}",
                self.slots,
                self.of_page.len()
            ));
        }
        Ok((slot, page))
    }
}

impl StateSteps {
    /// Loads or clears the states from which the rows continue.
    pub(crate) fn load(&self, decoder: &mut Decoder) -> Result<(), HandError> {
        for &[from, to] in &self.loads {
            decoder.copy_state(from, to)?;
        }
        for &row in &self.fresh {
            decoder.clear_state(row)?;
        }
        Ok(())
    }

    /// Copies the states after the rows to their state pages.
    pub(crate) fn save(&self, decoder: &mut Decoder) -> Result<(), HandError> {
        for &[from, to] in &self.saves {
            decoder.copy_state(from, to)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{NewSlot, Row, SlotSpec};

    use super::*;

    fn row(plan: &mut StepPlan, start: u32, length: u32, want: Want) {
        plan.push_row(Row { slot: 1, start, length, want });
    }

    fn read(states: &mut States, build: impl Fn(&mut StepPlan)) -> Result<StateSteps, PlanError> {
        let mut plan = StepPlan::default();
        plan.begin(1);
        build(&mut plan);
        states.read(&plan)
    }

    fn new_slot(plan: &mut StepPlan) {
        let spec = SlotSpec::default();
        plan.write_slot(&NewSlot {
            slot: 1,
            tokens: &[4, 5],
            prompt_len: 2,
            spec: &spec,
            place: None,
        });
    }

    #[test]
    fn a_row_goes_on_where_its_state_is_and_nowhere_else() {
        let mut states = States::new(3, 2);
        let first = read(&mut states, |plan| {
            new_slot(plan);
            row(plan, 0, 5, Want::Nothing);
            plan.save_state(1, 1);
        });
        let first = first.expect("a new slot begins at 0");
        assert_eq!((&first.rows[..], &first.fresh[..]), (&[[1, 1]][..], &[1][..]));
        assert_eq!(first.saves, [[1, 7]]);
        for start in [4, 6] {
            let error = read(&mut states, |plan| row(plan, start, 1, Want::TOKEN));
            assert!(error.is_err_and(|error| error.0.contains("have seen others")), "{start}");
        }
        read(&mut states, |plan| row(plan, 5, 1, Want::TOKEN)).expect("the next position");
        // A new request has no state, even if the slot's previous request had one.
        let error = read(&mut states, |plan| {
            new_slot(plan);
            row(plan, 6, 1, Want::TOKEN);
        });
        assert!(error.is_err());
        let loaded = read(&mut states, |plan| {
            new_slot(plan);
            plan.load_state(1, 1);
            row(plan, 5, 1, Want::TOKEN);
        });
        assert_eq!(loaded.expect("what the page has seen").loads, [[7, 1]]);
        let error = read(&mut states, |plan| plan.load_state(1, 0));
        assert!(error.is_err_and(|error| error.0.contains("no state")));
    }

    #[test]
    fn the_last_position_of_a_masked_row_may_be_computed_again() {
        let mut states = States::new(3, 0);
        let first = read(&mut states, |plan| {
            new_slot(plan);
            row(plan, 0, 5, Want::MASKED);
        });
        assert_eq!(first.expect("a row").rows, [[1, 4]]);
        for _ in 0..2 {
            let again = read(&mut states, |plan| row(plan, 4, 1, Want::MASKED));
            assert_eq!(again.expect("the same position").rows, [[1, 4]]);
        }
        let next = read(&mut states, |plan| row(plan, 5, 1, Want::MASKED));
        assert_eq!(next.expect("the next one").rows, [[4, 1]]);
        assert!(read(&mut states, |plan| row(plan, 4, 1, Want::TOKEN)).is_err());
    }
}
