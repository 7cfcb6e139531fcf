//! Log-probabilities of a prompt's tokens, computed in slices, without the logits of all positions
//! at once.

use std::sync::OnceLock;

use forebay_kernels::Threads;
use forebay_protocol::{PromptLogprobsWant, StepResult};

use crate::sampler::{finite, likely};

/// The bytes of a slice's logits: 32 MiB are enough rows for a product to be a product of matrices.
const SLICE_BYTES: usize = 1 << 25;
/// Matrices of a slice's size that the hand in Python has at a time. Here it is one; both have the
/// same number of pages.
const SLICES: usize = 4;

/// Positions whose logits are computed at a time.
pub(crate) fn slice_rows(vocabulary: usize) -> usize {
    (SLICE_BYTES / (4 * vocabulary)).max(1)
}

/// Memory that is set apart for slices of steps of so many positions.
pub(crate) fn slice_bytes(vocabulary: usize, positions: usize) -> u64 {
    (SLICES * 4 * vocabulary * slice_rows(vocabulary).min(positions)) as u64
}

/// A token's rank and its entries; `None`: the logits were not finite.
type Told = Option<(i32, Vec<(i32, f32)>)>;

/// Tokens of prompts whose log-probabilities a step asks for.
pub(crate) struct Wanted {
    /// The row of each token. It computes the position before the token.
    pub(crate) rows: Vec<usize>,
    /// The position before each token, numbered over all rows.
    pub(crate) before: Vec<i64>,
    /// The tokens.
    pub(crate) tokens: Vec<i32>,
    /// The number of most likely tokens that come beside each token.
    most: Vec<usize>,
}

impl Wanted {
    /// `first` is each row's first position, numbered over all rows; `row_of` gives the row of a
    /// slot and its start, `token` a slot's token.
    pub(crate) fn of(
        wants: impl Iterator<Item = PromptLogprobsWant>,
        first: &[i64],
        row_of: impl Fn(u32) -> Option<(usize, i64)>,
        token: impl Fn(usize, usize) -> i32,
    ) -> Option<Self> {
        let mut wanted =
            Self { rows: Vec::new(), before: Vec::new(), tokens: Vec::new(), most: Vec::new() };
        for want in wants {
            // The plan was read: every want has its row.
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

    /// The most likely tokens that any token asks for.
    pub(crate) fn widest(&self) -> usize {
        self.most.iter().copied().max().unwrap_or(0)
    }

    /// Appends the log-probabilities of tokens `first ..` to `to`. `logits` are those before the
    /// tokens, `[n, vocabulary]`. Rows with logits that are not finite go to `broken`.
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
            // It is the only one for this row.
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
