//! Draft tokens that the brain proposes for a row, and that the hand verifies.

use super::{FLAG_SAMPLE, StepPlan, take};

impl StepPlan {
    /// Adds drafts, at least one, to row `row`, which may return only one token so far. With
    /// drafts, the row may return one token more than it has drafts. Calls must be in ascending
    /// order of rows.
    ///
    /// # Panics
    /// The row does not sample.
    pub fn push_drafts(&mut self, row: usize, drafts: &[i32]) {
        assert!(self.rows[row].flags & FLAG_SAMPLE != 0, "row {row} gives no tokens");
        let rows = self.rows[..row].iter();
        let place = rows.filter(|row| row.flags & FLAG_SAMPLE != 0).count();
        if self.row_tokens.is_empty() {
            self.row_tokens.resize(self.sampling_rows(), 1);
        }
        self.row_tokens[place] += drafts.len() as i32;
        self.draft_tokens.extend_from_slice(drafts);
    }

    /// Iterates over the drafts of each row, in row order.
    pub fn drafts(&self) -> impl Iterator<Item = &[i32]> {
        let (mut rest, mut most) = (&self.draft_tokens[..], self.row_tokens.iter());
        let expects = !rest.is_empty();
        self.rows.iter().map(move |row| {
            let samples = row.flags & FLAG_SAMPLE != 0;
            let most = most.by_ref().take(usize::from(samples)).next().copied().unwrap_or(1);
            take(&mut rest, if expects { most.cast_unsigned() as usize - 1 } else { 0 })
        })
    }

    /// True if either all rows that may return several tokens have drafts, or none has.
    pub(super) fn drafts_agree(&self) -> bool {
        let expected: usize = self.row_tokens.iter().map(|&most| most.max(1) as usize - 1).sum();
        self.draft_tokens.is_empty()
            || expected == self.draft_tokens.len()
                && self.draft_tokens.iter().all(|&token| token >= 0)
    }
}
