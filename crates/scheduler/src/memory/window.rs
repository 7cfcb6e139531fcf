//! The window part of pages: sliding-window layers read only the last positions of a request.
//!
//! A request has pages of the window part only for its last positions, and frees the others. It
//! gets pages as its rows need them, in prefill too. If there are too few, its rows are shorter.
//!
//! A page is *passed* when its last position is a whole window before the next position to compute.
//! The lowest possible next position counts: drafts in flight may be rejected, and the last
//! position of a masked row may be computed again.

use std::collections::VecDeque;

use forebay_protocol::StepPlan;

use super::Memory;
use super::pages::Pages;
use super::window_part::WindowRun;
use crate::entry::{Entry, Residence};

impl Memory {
    /// Makes a resident give up the pages of the window part that its next rows do not read. These
    /// pages become free after the steps in flight.
    pub(crate) fn pass_window(&mut self, entry: &mut Entry, plan: &mut StepPlan) {
        let next = entry.computed.saturating_sub(u32::from(entry.request.masked));
        let (Some(windows), Some(residence)) = (&mut self.windows, &mut entry.residence) else {
            return;
        };
        let Residence { slot, pages: Pages { window: Some(run), .. }, last_step, .. } = residence
        else {
            return;
        };
        // Pages before `first` were dropped earlier, and the run has no pages from `end` on.
        let count = windows.passed(next).min(run.end()).saturating_sub(run.first);
        if count == 0 {
            return;
        }
        let leases: VecDeque<_> = run.leases.drain(..count as usize).collect();
        let passed = WindowRun { first: run.first, leases, passed: true };
        run.first += count;
        (passed.first..run.first).for_each(|index| plan.drop_window(*slot, index));
        windows.counters.passed += u64::from(count);
        let pages = Pages { window: Some(passed), ..Pages::default() };
        self.retire(*last_step, pages);
    }

    /// Gives a resident pages of the window part for its next row of `length` positions. Leaves at
    /// least `others` pages, which other requests may need. Returns the number of positions of the
    /// row that have pages.
    pub(crate) fn window_room(
        &mut self,
        entry: &mut Entry,
        length: u32,
        others: u32,
        plan: &mut StepPlan,
    ) -> u32 {
        let (start, page_size) = (entry.computed, self.page_size);
        let (Some(windows), Some(residence)) = (&mut self.windows, &mut entry.residence) else {
            return length;
        };
        let Residence { slot, pages: Pages { window: Some(run), .. }, .. } = residence else {
            return length;
        };
        let wanted = (start + length).div_ceil(page_size);
        while run.end() < wanted
            && windows.pool.available() > others
            && windows.add(*slot, run, plan)
        {}
        length.min((run.end() * page_size).saturating_sub(start))
    }
}
