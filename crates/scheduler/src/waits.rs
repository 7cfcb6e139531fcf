//! Requests whose mask is not ready.
//!
//! A plan is sent before the tokens that its masks depend on are known. So a mask may not be ready
//! when the hand needs it. Its row then *sits out*: it is computed, but samples no token. Its last
//! position is computed again when the mask is ready. Until then the request *waits*. It keeps its
//! slot and pages and computes its known tokens, but none of its rows samples. Blocks and images of
//! that last position are kept until a token has come ([`crate::entry::Entry::certain`]).

use forebay_protocol::Want;

use crate::Scheduler;
use crate::entry::Entry;
use crate::steps::FlightRow;

impl Scheduler {
    /// Makes the request wait: its masked row of the newest plan will not sample a token. The
    /// caller must also inform the hand, and must call this before it makes the next plan. Returns
    /// false if there is no such row, or its request has ended.
    pub fn sit_out(&mut self, id: u64) -> bool {
        let newest = self.steps.in_flight.back_mut();
        let (Some(handle), Some(flight)) = (self.roster.find(id), newest) else { return false };
        let mut rows = flight.rows.iter_mut();
        let is_masked = |row: &&mut FlightRow| matches!(row.want, Want::Masked(_));
        let Some(row) = rows.find(|row| row.handle == handle && is_masked(row)) else {
            return false;
        };
        (row.want, row.sits_out) = (Want::Nothing, true);
        flight.drafts -= row.drafts.take().map_or(0, |drafts| drafts.count);
        flight.sampled -= 1;
        let entry = &mut self.roster[handle];
        // Drop the drafts: masks for several positions would take several times as long.
        entry.expected.forget();
        debug_assert_eq!(entry.total, row.end + 1, "no later plan was made");
        entry.total -= 1;
        if entry.residence.is_some() {
            (entry.computed, entry.repeats) = (entry.computed - 1, true);
        }
        entry.waits = true;
        true
    }

    /// Prevents a request's rows from sampling until [`Self::mask_ready`].
    pub fn wait_for_mask(&mut self, id: u64) {
        self.set_waits(id, true);
    }

    /// Lets a request's rows sample again.
    pub fn mask_ready(&mut self, id: u64) {
        self.set_waits(id, false);
    }

    /// Charges a request's client for time that its masks took on the host. The charge is the
    /// number of tokens that the device computes in that time. It counts against the client's fair
    /// share.
    pub fn charge(&mut self, id: u64, us: u64) {
        let Some(handle) = self.roster.find(id) else { return };
        self.turns.charge(&self.roster[handle].ticket(handle), us);
    }

    fn set_waits(&mut self, id: u64, waits: bool) {
        if let Some(handle) = self.roster.find(id) {
            self.roster[handle].waits = waits;
        }
    }
}

impl Entry {
    /// The largest number of positions of the request's next row, so that the row does not sample
    /// while the mask is not ready.
    pub(crate) fn permitted(&self) -> u32 {
        if self.waits { (self.total - 1).saturating_sub(self.computed) } else { u32::MAX }
    }
}
