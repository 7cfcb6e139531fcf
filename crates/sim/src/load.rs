//! The quantities that determine the time of a step on a device.

use forebay_protocol::StepPlan;
use serde::{Deserialize, Serialize};

/// The work of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepLoad {
    /// The number of rows.
    pub rows: u32,
    /// The number of rows that compute one position and sample: decoding requests, prefills with
    /// one position left, and drafts, which cost the same.
    pub decode_rows: u32,
    /// The number of positions computed in the other rows.
    pub prefill_tokens: u32,
    /// The number of positions whose keys and values are read: the sum of all rows' ends.
    pub context: u64,
    /// The number of pairs of a computed position and a position that it attends to.
    pub attention: u64,
}

impl StepLoad {
    /// Returns the work of a plan.
    #[must_use]
    pub fn of(plan: &StepPlan) -> Self {
        let mut load = Self::default();
        for (row, drafts) in plan.rows().zip(plan.drafts()) {
            load.add(row.start, row.length, row.want.samples());
            // For the device, drafts are additional rows, but their keys and values are already
            // counted as read.
            load.decode_rows += drafts.len() as u32;
            let (before, more) = (u64::from(row.start + row.length), drafts.len() as u64);
            load.attention += more * before + more * (more + 1) / 2;
        }
        load
    }

    fn add(&mut self, start: u32, length: u32, sample: bool) {
        self.rows += 1;
        if length == 1 && sample {
            self.decode_rows += 1;
        } else {
            self.prefill_tokens += length;
        }
        let (start, length) = (u64::from(start), u64::from(length));
        self.context += start + length;
        self.attention += length * start + length * (length + 1) / 2;
    }

    /// Returns the number of computed positions.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.decode_rows + self.prefill_tokens
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{Row, Want};

    use super::*;

    #[test]
    fn rows_are_counted_by_what_they_cost() {
        let mut plan = StepPlan::default();
        plan.begin(1);
        let rows = [(0, 9, 1, Want::TOKEN), (1, 0, 4, Want::TOKEN), (2, 4, 1, Want::Nothing)];
        for (slot, start, length, want) in rows {
            plan.push_row(Row { slot, start, length, want });
        }
        let load = StepLoad::of(&plan);
        let expected = StepLoad {
            rows: 3,
            decode_rows: 1,
            prefill_tokens: 5,
            context: 10 + 4 + 5,
            attention: 10 + (1 + 2 + 3 + 4) + 5,
        };
        assert_eq!(load, expected);
        assert_eq!(load.tokens(), 6);
    }
}
