//! Copies of recurrent states between slots and state pages.

use std::collections::HashSet;

use super::StepPlan;
use crate::columns::record;

/// The number of words of a state copy in a plan.
pub const STATE_COPY_WORDS: usize = StateCopy::WORDS;

record! {
    /// A copy of a slot's recurrent states, over all layers, from or to a state page.
    #[derive(Eq)]
    pub struct StateCopy {
        /// The index of the slot in the device tables.
        pub slot: u32,
        /// The state page.
        pub page: u32,
    }
}

impl StepPlan {
    /// Loads a slot's states from a state page, before the plan's rows are computed.
    pub fn load_state(&mut self, slot: u32, page: u32) {
        self.state_loads.push(StateCopy { slot, page });
    }

    /// Copies a slot's states to a state page, after the plan's rows are computed.
    pub fn save_state(&mut self, slot: u32, page: u32) {
        self.state_saves.push(StateCopy { slot, page });
    }

    /// Iterates over the loads of states, in order.
    pub fn state_loads(&self) -> impl ExactSizeIterator<Item = StateCopy> + '_ {
        self.state_loads.iter().copied()
    }

    /// Iterates over the saves of states, in order.
    pub fn state_saves(&self) -> impl ExactSizeIterator<Item = StateCopy> + '_ {
        self.state_saves.iter().copied()
    }

    /// True if no slot is loaded twice, and no page is saved to twice.
    pub(super) fn states_agree(&self) -> bool {
        let whole = |copy: &StateCopy| (copy.slot | copy.page).cast_signed() >= 0;
        let (loads, saves) = (&self.state_loads, &self.state_saves);
        loads.iter().chain(saves).all(whole)
            && all_differ(loads.iter().map(|copy| copy.slot))
            && all_differ(saves.iter().map(|copy| copy.page))
    }
}

fn all_differ(mut numbers: impl Iterator<Item = u32>) -> bool {
    let mut seen = HashSet::new();
    numbers.all(|number| seen.insert(number))
}
