//! The places of adapters in a plan.

use super::StepPlan;
use crate::columns::record;

record! {
    /// A place that gets an adapter.
    #[derive(Eq)]
    pub struct PlaceWrite {
        /// The number of the write, which the report of its end names.
        pub ticket: u32,
        /// The place.
        pub place: u32,
        /// The number of the adapter.
        pub id: u32,
    }
}

impl StepPlan {
    /// Brings an adapter to a place. No slot names the place before the end of the write was
    /// reported.
    pub fn write_place(&mut self, write: PlaceWrite) {
        self.place_writes.push(write);
    }

    /// The writes into places, in order.
    pub fn place_writes(&self) -> &[PlaceWrite] {
        &self.place_writes
    }

    /// True if no number of a place is negative.
    pub(crate) fn places_agree(&self) -> bool {
        let whole = |write: &PlaceWrite| {
            [write.ticket, write.place, write.id].iter().all(|number| number.cast_signed() >= 0)
        };
        self.place_writes.iter().all(whole)
    }
}
