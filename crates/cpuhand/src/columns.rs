//! The rows of a plan, checked against the tables.

use std::sync::Arc;

use forebay_kernels::{AdapterMatrices, Given, Rows, Shared};
use forebay_protocol::{StepPlan, Want};

use crate::drafts::Run;
use crate::tables::{PlanError, Tables, wrong};

/// The columns of `r` rows, of which `s` are sampled or pooled.
pub(crate) struct Columns {
    /// `[r]`: the slot of each row.
    pub(crate) slot: Vec<i64>,
    /// `[r]`: the first position of each row.
    pub(crate) start: Vec<i64>,
    /// `[r]`: the number of positions of each row, including drafts.
    pub(crate) length: Vec<i64>,
    /// `[r]`: the number of drafts, which are the last positions of a row.
    pub(crate) drafts: Vec<usize>,
    /// `[r]`: each row's last position, as an index over the positions of all rows.
    pub(crate) last: Vec<i64>,
    /// `[s]`: the rows that are sampled or pooled.
    pub(crate) sampling: Vec<usize>,
    /// The sampled rows that have a mask.
    pub(crate) masked: Vec<usize>,
    /// `[r, 2]`: the rows of the state tables with the state before and after each row; empty
    /// without recurrent layers.
    pub(crate) states: Vec<[i64; 2]>,
    /// `[r]`: the adapter of each row; empty if no row has an adapter.
    pub(crate) adapters: Vec<Option<Arc<AdapterMatrices>>>,
}

impl Columns {
    /// Creates the columns of one sampled row of slot 0. `states`: whether the model has recurrent
    /// layers.
    pub(crate) fn one(start: i64, length: i64, states: bool) -> Self {
        Self {
            slot: vec![0],
            start: vec![start],
            length: vec![length],
            drafts: vec![0],
            last: vec![length - 1],
            sampling: vec![0],
            masked: Vec::new(),
            states: if states { vec![[0, 0]] } else { Vec::new() },
            adapters: Vec::new(),
        }
    }

    /// Checks a plan's rows and converts them to columns. `pools`: true if the model returns
    /// vectors, false if it returns tokens.
    pub(crate) fn of(plan: &StepPlan, tables: &Tables, pools: bool) -> Result<Self, PlanError> {
        let count = plan.rows().len();
        let mut columns = Self {
            slot: Vec::with_capacity(count),
            start: Vec::with_capacity(count),
            length: Vec::with_capacity(count),
            drafts: Vec::with_capacity(count),
            last: Vec::with_capacity(count),
            sampling: Vec::with_capacity(count),
            masked: Vec::new(),
            states: Vec::new(),
            adapters: Vec::new(),
        };
        let (slots, context) = (tables.slots.len(), tables.context_length as u64);
        let mut last = -1;
        for (index, (row, drafts)) in plan.rows().zip(plan.drafts()).enumerate() {
            let drafts = drafts.len();
            let end = u64::from(row.start) + u64::from(row.length) + drafts as u64;
            // A negative value in a plan arrives as an unsigned number that is larger than any
            // table.
            if row.slot as usize >= slots || row.length == 0 || end > context {
                return wrong(format!(
                    "a row outside of {slots} slots of {context} positions: slot {}, start {}, length {}",
                    row.slot, row.start, row.length
                ));
            }
            let pooled = row.want == Want::Vector;
            if pooled && !pools {
                return wrong("a row that pools, for a model that generates");
            }
            if pools && !pooled && row.want != Want::Nothing {
                return wrong("a row that samples, for a model that pools");
            }
            let length = i64::from(row.length) + drafts as i64;
            last += length;
            columns.slot.push(row.slot.into());
            columns.start.push(row.start.into());
            columns.length.push(length);
            columns.drafts.push(drafts);
            columns.last.push(last);
            if matches!(row.want, Want::Masked(_)) {
                columns.masked.push(columns.sampling.len());
            }
            if pooled || row.want.samples() {
                columns.sampling.push(index);
            }
        }
        Ok(columns)
    }

    /// The positions for which sampled rows may return a token.
    pub(crate) fn wanted(&self) -> Vec<Run> {
        let mut first = 0;
        let run = |&row: &usize| {
            let end = (self.start[row] + self.length[row]) as usize;
            let drafts = self.drafts[row];
            let run = Run { slot: self.slot[row] as usize, position: end - drafts, drafts, first };
            first += 1 + drafts;
            run
        };
        self.sampling.iter().map(run).collect()
    }

    /// The tokens whose logits sampled rows need: the last token of each row, and those before its
    /// drafts.
    pub(crate) fn last_tokens(&self) -> Vec<i64> {
        let of = |&row: &usize| self.last[row] - self.drafts[row] as i64..=self.last[row];
        self.sampling.iter().flat_map(of).collect()
    }

    /// Converts the columns to the rows that the kernels take.
    pub(crate) fn rows<'a>(
        &'a self,
        tables: &'a Tables,
        given: &'a [Option<Given<'a>>],
        sample: &'a [i64],
    ) -> Rows<'a> {
        Rows {
            slot: &self.slot,
            start: &self.start,
            length: &self.length,
            given,
            adapters: &self.adapters,
            tokens: &tables.tokens,
            token_stride: tables.token_stride,
            pages: &tables.pages,
            page_stride: tables.page_stride,
            window_pages: &tables.window,
            sample,
            states: &self.states,
        }
    }

    /// Returns, for each row, the prompt embeddings in the arena if the row starts within them,
    /// otherwise `None`. Empty if no row does. An embedding has `row_bytes` bytes, in elements of
    /// `width` bytes.
    pub(crate) fn given<'a>(
        &self,
        tables: &Tables,
        arena: &'a Shared,
        (row_bytes, width): (usize, usize),
    ) -> Result<Vec<Option<Given<'a>>>, PlanError> {
        let mut given = Vec::new();
        for (row, &slot) in self.slot.iter().enumerate() {
            let slot = &tables.slots[slot as usize];
            let until = slot.prompt_len;
            let Some(offset) = slot.spec.embeds.filter(|_| (self.start[row] as usize) < until)
            else {
                continue;
            };
            let offset = offset as usize;
            let bytes = until * row_bytes;
            let Some(inputs) = arena.read(offset, bytes).filter(|_| offset.is_multiple_of(width))
            else {
                let (end, all) = (offset + bytes, arena.bytes());
                return wrong(format!("embeddings at bytes {offset}..{end} of an arena of {all}"));
            };
            given.resize(self.slot.len(), None);
            given[row] = Some(Given { inputs, until });
        }
        Ok(given)
    }
}
