//! Writes of adapters into places.

use super::StepPlan;
use crate::columns::record;

record! {
    /// A write of an adapter into a place.
    #[derive(Eq)]
    pub struct PlaceWrite {
        /// The ticket of the write, which the report of its end repeats.
        pub ticket: u32,
        /// The place to write to.
        pub place: u32,
        /// The id of the adapter.
        pub id: u32,
    }
}

impl StepPlan {
    /// Writes an adapter into a place. No slot may use the place until the end of the write was
    /// reported.
    pub fn write_place(&mut self, write: PlaceWrite) {
        self.place_writes.push(write);
    }

    /// Returns the writes into places, in order.
    pub fn place_writes(&self) -> &[PlaceWrite] {
        &self.place_writes
    }

    /// True if no number of these writes is negative.
    pub(crate) fn places_agree(&self) -> bool {
        let whole = |write: &PlaceWrite| {
            [write.ticket, write.place, write.id].iter().all(|number| number.cast_signed() >= 0)
        };
        self.place_writes.iter().all(whole)
    }
}
