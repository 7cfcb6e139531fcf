//! The column of a step group, whose ranks have separate plans and exchange rows.

use super::StepPlan;

/// The largest number of ranks of a step group.
pub const MAX_GROUP: usize = 256;

/// Writes the token counts of all ranks into each plan of a step group, in the order of ranks. The
/// sizes of the exchanges follow from these counts. A single plan gets no such column.
pub fn tell_group(plans: &mut [StepPlan]) {
    let [_, _, ..] = plans else { return };
    let tokens = plans.iter().map(|plan| i32::try_from(plan.own_tokens()).unwrap_or(i32::MAX));
    let tokens: Vec<i32> = tokens.collect();
    for plan in plans {
        plan.group.clone_from(&tokens);
    }
}

impl StepPlan {
    /// Returns the number of tokens of each rank of the step group; empty if there is no group.
    #[must_use]
    pub fn group(&self) -> &[i32] {
        &self.group
    }

    /// Returns the number of positions that the plan's rows compute.
    fn own_tokens(&self) -> i64 {
        self.rows.iter().map(|row| i64::from(row.length.cast_signed())).sum()
    }

    /// True if the column is valid for this plan.
    pub(super) fn group_agrees(&self) -> bool {
        let tokens = &self.group;
        tokens.is_empty()
            || (2..=MAX_GROUP).contains(&tokens.len())
                && tokens.iter().all(|&count| count >= 0)
                && tokens.iter().any(|&count| i64::from(count) == self.own_tokens())
    }
}
