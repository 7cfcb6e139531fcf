//! Log-probabilities of a prompt's tokens, computed in slices so that the logits of all positions
//! are never in memory at once.

use std::sync::OnceLock;

use forebay_kernels::Threads;
use forebay_protocol::{PromptLogprobsWant, StepResult};

use crate::sampler::{finite, likely};

/// The size of a slice's logits: 32 MiB hold enough rows for an efficient matrix product.
const SLICE_BYTES: usize = 1 << 25;
/// The number of slice-sized matrices that the Python hand holds at a time. This hand holds one,
/// but both hands should have the same number of pages.
const SLICES: usize = 4;

/// The number of positions whose logits are computed at a time.
pub(crate) fn slice_rows(vocabulary: usize) -> usize {
    (SLICE_BYTES / (4 * vocabulary)).max(1)
}

/// Bytes reserved for slices, if a step has `positions` positions.
pub(crate) fn slice_bytes(vocabulary: usize, positions: usize) -> u64 {
    (SLICES * 4 * vocabulary * slice_rows(vocabulary).min(positions)) as u64
}

/// A token's rank and its entries (id and log-probability); `None` if the logits were not finite.
type Told = Option<(i32, Vec<(i32, f32)>)>;

/// The prompt tokens whose log-probabilities a step has to return.
pub(crate) struct Wanted {
    /// The row of each token: the row that computes the position before the token.
    pub(crate) rows: Vec<usize>,
    /// The position before each token, as an index over the positions of all rows.
    pub(crate) before: Vec<i64>,
    /// The tokens.
    pub(crate) tokens: Vec<i32>,
    /// For each token, the number of most likely tokens to list.
    most: Vec<usize>,
}

impl Wanted {
    /// Collects the tokens; `None` if there are none. `first`: each row's first position, as an
    /// index over the positions of all rows. `row_of` returns a slot's row and the row's start;
    /// `token` returns a slot's token at a position.
    pub(crate) fn of(
        wants: impl Iterator<Item = PromptLogprobsWant>,
        first: &[i64],
        row_of: impl Fn(u32) -> Option<(usize, i64)>,
        token: impl Fn(usize, usize) -> i32,
    ) -> Option<Self> {
        let mut wanted =
            Self { rows: Vec::new(), before: Vec::new(), tokens: Vec::new(), most: Vec::new() };
        for want in wants {
            // The plan was checked, so every entry has its row.
            let (row, start) = row_of(want.slot)?;
            for position in want.first..want.first + want.count {
                wanted.rows.push(row);
                wanted.before.push(first[row] + i64::from(position) - 1 - start);
                wanted.tokens.push(token(want.slot as usize, position as usize));
                wanted.most.push(want.most as usize);
            }
        }
        (!wanted.rows.is_empty()).then_some(wanted)
    }

    /// The largest number of most likely tokens to list for any token.
    pub(crate) fn widest(&self) -> usize {
        self.most.iter().copied().max().unwrap_or(0)
    }

    /// Appends the log-probabilities of tokens `first ..` to `to`. `logits` `[n, vocabulary]` are
    /// those of the positions before the tokens. Rows with logits that are not finite are added to
    /// `broken`.
    pub(crate) fn fill(
        &self,
        first: usize,
        (logits, vocabulary): (&[f32], usize),
        threads: &Threads,
        to: &mut StepResult,
        broken: &mut Vec<usize>,
    ) {
        let rows: Vec<&[f32]> = logits.chunks_exact(vocabulary).collect();
        let found: Vec<OnceLock<Told>> = rows.iter().map(|_| OnceLock::new()).collect();
        threads.each(rows.len(), |index| {
            let (logits, at) = (rows[index], first + index);
            let token = usize::try_from(self.tokens[at]).ok().filter(|&token| token < vocabulary);
            let of_token = token.filter(|_| finite(logits)).map(|token| {
                let larger = logits.iter().filter(|&&logit| logit > logits[token]).count();
                (1 + larger as i32, likely(logits, token, self.most[at]))
            });
            // The cell is empty, because only this call sets it.
            let _ = found[index].set(of_token);
        });
        for (index, of_token) in found.into_iter().enumerate() {
            let at = first + index;
            let (rank, entries) = of_token.into_inner().flatten().unwrap_or_else(|| {
                broken.push(self.rows[at]);
                (1, vec![(0, f32::NAN); 1 + self.most[at]])
            });
            to.prompt_ranks.push(rank);
            to.prompt_ids.extend(entries.iter().map(|(id, _)| id));
            to.prompt_values.extend(entries.iter().map(|(_, value)| value));
        }
    }
}
