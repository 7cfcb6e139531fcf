//! The recurrent states of the simulated device. Only the number of positions that each state
//! covers is simulated.

use std::collections::HashMap;

use forebay_protocol::{StepPlan, Want};
use serde::{Deserialize, Serialize};

/// The size and number of a model's recurrent states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StateModel {
    /// The size of the states of one request over all layers in bytes; 0 if the model has none.
    pub bytes: u64,
    /// The number of state pages.
    pub pages: u32,
    /// The speed in GB (10^9 bytes) per second at which states are copied to pages and back,
    /// between the rows of steps; absent if copies take no time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_gbps: Option<f64>,
}

impl StateModel {
    /// Returns the time of a plan's state copies in microseconds.
    pub(crate) fn copy_us(&self, plan: &StepPlan) -> f64 {
        let copies = plan.state_loads().len() + plan.state_saves().len();
        let bytes = copies as f64 * self.bytes as f64;
        // One GB per second is a thousand bytes per microsecond.
        self.copy_gbps.map_or(0.0, |gbps| bytes / (1000.0 * gbps))
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        if self.bytes == 0 && self.pages > 0 {
            return Err("states.pages: states without bytes need no pages".to_owned());
        }
        match self.copy_gbps.is_none_or(|speed| speed.is_finite() && speed > 0.0) {
            true => Ok(()),
            false => Err("states.copy_gbps: expected a number above 0".to_owned()),
        }
    }
}

/// The number of positions that each state of a slot or page covers.
#[derive(Debug, Default)]
pub(crate) struct States {
    /// Per slot, the number of positions, and whether the last position may be computed again
    /// because its mask was late.
    slots: HashMap<u32, (u32, bool)>,
    /// Per state page, the number of positions; `None` for a state from another replica, whose
    /// number of positions is not known here.
    pages: HashMap<u32, Option<u32>>,
    /// As `pages`, for the state pages of the host tier, which survives a restart of the device.
    host: HashMap<u32, Option<u32>>,
}

impl States {
    /// Returns the states with which the next device starts: only those in the host tier.
    pub(crate) fn of_next_device(&mut self) -> Self {
        Self { host: std::mem::take(&mut self.host), ..Self::default() }
    }

    /// Applies a plan to the states.
    ///
    /// # Errors
    /// A row does not begin where its slot's state ends, or a page that is loaded, saved or copied
    /// has no state or does not exist.
    pub(crate) fn advance(&mut self, plan: &StepPlan, pages: u32) -> Result<(), String> {
        for new in plan.new_slots() {
            self.slots.remove(&new.slot);
        }
        for load in plan.state_loads() {
            let seen = *self.pages.get(&load.page).ok_or("a state page is loaded that has none")?;
            let mut rows = plan.rows().filter(|row| row.slot == load.slot);
            let seen = seen.or(rows.next().map(|row| row.start));
            self.slots.insert(load.slot, (seen.unwrap_or_default(), false));
        }
        for row in plan.rows() {
            let state = self.slots.get(&row.slot).copied();
            let (seen, again) = state.filter(|_| row.start > 0).unwrap_or_default();
            if seen != row.start && !(again && seen == row.start + 1) {
                return Err(format!(
                    "slot {} begins at position {}, and its states have seen {seen}",
                    row.slot, row.start
                ));
            }
            let again = row.want == Want::MASKED;
            self.slots.insert(row.slot, (row.start + row.length, again));
        }
        for save in plan.state_saves() {
            let seen = self.slots.get(&save.slot).filter(|_| save.page < pages);
            let (seen, _) = seen.ok_or("a state is saved that there is not")?;
            self.pages.insert(save.page, Some(*seen));
        }
        self.copy(plan)
    }

    /// Executes a plan's copies of states at once. This is correct, because no plan uses a copy
    /// before its end is reported.
    fn copy(&mut self, plan: &StepPlan) -> Result<(), String> {
        for copy in plan.copies().filter(|copy| copy.direction.is_of_state()) {
            let page = copy.hot.unwrap_or_default();
            if copy.direction.is_save() {
                let seen = self.pages.get(&page).ok_or("a state page is copied that has none")?;
                self.host.insert(copy.host, *seen);
            } else if copy.lender.is_some() {
                self.pages.insert(page, None);
            } else {
                let seen = self.host.get(&copy.host).ok_or("the host has no such state")?;
                self.pages.insert(page, *seen);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{Direction, NewSlot, PageCopy, Row, SlotSpec};

    use super::*;

    fn plan(new: bool, start: u32, load: Option<u32>, save: Option<u32>) -> StepPlan {
        let (mut plan, spec) = (StepPlan::default(), SlotSpec::default());
        plan.begin(1);
        if new {
            plan.write_slot(&NewSlot {
                slot: 1,
                tokens: &[5; 9],
                prompt_len: 9,
                spec: &spec,
                place: None,
            });
        }
        plan.push_row(Row { slot: 1, start, length: 4, want: Want::Nothing });
        load.into_iter().for_each(|page| plan.load_state(1, page));
        save.into_iter().for_each(|page| plan.save_state(1, page));
        plan
    }

    #[test]
    fn a_row_goes_on_where_its_state_ends() {
        let mut states = States::default();
        let mut take = |plan: StepPlan| states.advance(&plan, 2).is_ok();
        assert!(take(plan(true, 0, None, Some(1))));
        assert!(take(plan(false, 4, None, None)));
        assert!(!take(plan(true, 4, None, None)), "the row lacks a load");
        assert!(take(plan(true, 4, Some(1), None)));
        assert!(!take(plan(true, 8, Some(1), None)), "the state covers other positions");
        assert!(!take(plan(true, 4, Some(0), None)), "the page is empty");
        assert!(!take(plan(true, 0, None, Some(2))), "the page does not exist");
    }

    #[test]
    fn the_host_s_states_outlive_the_device() {
        let mut states = States::default();
        let copy = |plan: &mut StepPlan, direction, page, host, lender| {
            let (hot, span) = (Some(page), None);
            plan.push_copy(PageCopy { ticket: 1, direction, hot, host, span, lender });
        };
        let mut first = plan(true, 0, None, Some(1));
        copy(&mut first, Direction::SaveState, 1, 7, None);
        assert!(states.advance(&first, 2).is_ok());
        let mut states = states.of_next_device();
        assert!(states.advance(&plan(true, 4, Some(1), None), 2).is_err(), "the device has none");
        let mut back = StepPlan::default();
        back.begin(2);
        copy(&mut back, Direction::RestoreState, 0, 7, None);
        assert!(states.advance(&back, 2).is_ok());
        assert!(states.advance(&plan(true, 4, Some(0), None), 2).is_ok());
        assert!(
            states.advance(&plan(true, 8, Some(0), None), 2).is_err(),
            "the state covers other positions"
        );
        copy(&mut back, Direction::RestoreState, 1, 8, None);
        assert!(states.advance(&back, 2).is_err(), "the host has no such state");
        let mut lent = StepPlan::default();
        lent.begin(3);
        copy(&mut lent, Direction::RestoreState, 1, 8, Some(0));
        assert!(states.advance(&lent, 2).is_ok());
        assert!(states.advance(&plan(true, 12, Some(1), None), 2).is_ok());
    }

    #[test]
    fn copies_take_their_bytes() {
        let model = StateModel { bytes: 2_000_000, pages: 4, copy_gbps: Some(1000.0) };
        assert_eq!(model.copy_us(&plan(true, 4, Some(1), Some(0))), 4.0);
        assert_eq!(model.copy_us(&plan(false, 4, None, None)), 0.0);
        assert!(model.check().is_ok());
        assert!(StateModel { bytes: 0, ..model }.check().is_err());
        assert!(StateModel { copy_gbps: Some(0.0), ..model }.check().is_err());
    }
}
