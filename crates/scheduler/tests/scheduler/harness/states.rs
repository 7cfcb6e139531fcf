//! Rules for state pages, and faults that the tests must detect.

use forebay_protocol::{Direction, Row, StateCopy, StepPlan};

use super::Harness;
use crate::copier::CopyFault;

/// A fault in the copies of recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spoilt {
    /// A load is missing.
    NoLoad,
    /// Saves come one plan late.
    LateSaves,
    /// The states of two slots are saved to each other's pages.
    MixedSaves,
    /// Two slots load each other's states.
    MixedLoads,
    /// A fault in copies to and from the host.
    Copies(CopyFault),
}

/// Injects a fault into the plans that a device executes.
#[derive(Debug)]
pub(crate) struct StateFault {
    kind: Spoilt,
    /// The saves that the next plan has instead of its own saves.
    late: Vec<StateCopy>,
}

impl StateFault {
    /// Injects the fault into the copies of the next plan.
    pub(super) fn spoil(&mut self, copies: &mut StateCopies) {
        match self.kind {
            Spoilt::NoLoad => copies.loads.clear(),
            Spoilt::LateSaves => std::mem::swap(&mut copies.saves, &mut self.late),
            Spoilt::MixedSaves => swap_pages(&mut copies.saves),
            Spoilt::MixedLoads => swap_pages(&mut copies.loads),
            Spoilt::Copies(_) => {}
        }
    }
}

/// The copies of states that a device executes with a plan.
#[derive(Debug)]
pub(crate) struct StateCopies {
    pub(crate) loads: Vec<StateCopy>,
    pub(crate) saves: Vec<StateCopy>,
}

impl StateCopies {
    pub(super) fn of(plan: &StepPlan) -> Self {
        Self { loads: plan.state_loads().collect(), saves: plan.state_saves().collect() }
    }
}

fn swap_pages(copies: &mut [StateCopy]) {
    if let [first, .., last] = copies {
        std::mem::swap(&mut first.page, &mut last.page);
    }
}

impl Harness {
    /// Injects this fault into the plans that the device executes.
    pub(crate) fn spoil(mut self, kind: Spoilt) -> Self {
        match kind {
            Spoilt::Copies(fault) => self.copier.fault = Some(fault),
            kind => self.fault = Some(StateFault { kind, late: vec![] }),
        }
        self
    }

    /// Checks a plan's copies of states. Returns their pages.
    pub(super) fn check_states(&self, plan: &StepPlan) -> Vec<u32> {
        let (page_size, rows) = (self.config.page_size, || plan.rows());
        let new: Vec<u32> = plan.new_slots().map(|new| new.slot).collect();
        let flights = || self.flights.iter().flat_map(|flight| &flight.states);
        let loads: Vec<StateCopy> = plan.state_loads().collect();
        for load in &loads {
            assert!(new.contains(&load.slot), "{load:?} is not of a new slot");
        }
        for Row { slot, start, .. } in rows().filter(|row| new.contains(&row.slot)) {
            let loaded = loads.iter().any(|load| load.slot == slot);
            let wanted = self.config.states.is_some() && start > 0;
            assert_eq!(loaded, wanted, "slot {slot} begins at {start}");
        }
        for save in plan.state_saves() {
            let row = rows().find(|row| row.slot == save.slot).expect("a row before the save");
            let end = row.start + row.length;
            assert!(end.is_multiple_of(page_size), "{row:?} does not end with a page");
            assert!(!flights().any(|&page| page == save.page), "{save:?} is to a page in flight");
            assert!(
                !loads.iter().any(|load| load.page == save.page),
                "{save:?} is to a loaded page"
            );
            assert!(!self.copier.has_state_page(save.page), "{save:?} is to a page that is copied");
        }
        for copy in plan.copies().filter(|copy| copy.direction == Direction::RestoreState) {
            let named = loads.iter().any(|load| Some(load.page) == copy.hot)
                || flights().any(|&page| Some(page) == copy.hot);
            assert!(!named, "{copy:?} is to a page that a plan in flight names");
        }
        let stats = self.scheduler.stats().states;
        assert!(stats.pages_held + stats.pages_cached <= stats.pages, "{stats:?}");
        assert!(stats.host_pages_used <= stats.host_pages, "{stats:?}");
        loads.iter().copied().chain(plan.state_saves()).map(|copy| copy.page).collect()
    }
}
