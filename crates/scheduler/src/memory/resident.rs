//! The recurrent states of a request with a slot.

use std::collections::VecDeque;

use forebay_kvcache::{BlockHash, Lease};

/// The states of a request with a slot.
#[derive(Debug, Default)]
pub(crate) struct ResidentState {
    /// The kept state that the request starts from, until a plan loads it.
    pub(super) load: Option<Lease>,
    /// Positions at which the request's state is kept, besides the multiples of the interval. The
    /// request may be past these positions.
    pub(super) kept: [u32; 2],
    /// The end of the last full page before the request's last token.
    pub(super) tail: u32,
    /// Positions and states that plans save. A state is offered to the cache once all tokens before
    /// its position are known.
    pub(super) saved: VecDeque<(u32, Lease)>,
    /// The kept state that the request's next kept state replaces.
    pub(super) replaced: Option<BlockHash>,
}

impl ResidentState {
    /// The next position after `start` at which a row must end.
    pub(super) fn next_stop(&self, start: u32, interval: u32) -> Option<u32> {
        let step = (start / interval + 1).checked_mul(interval);
        let stops = self.kept.into_iter().chain([self.tail]).chain(step);
        stops.filter(|&stop| stop > start).min()
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = &Lease> {
        self.load.iter().chain(self.saved.iter().map(|(_, lease)| lease))
    }
}
