//! Verifies drafts (speculative tokens). A row's positions are sampled in order, as if each were a
//! separate row. Sampling stops at the first token that differs from its draft.

use forebay_protocol::StepResult;

use crate::sampler::Sampled;
use crate::tables::{Slot, Tables};

/// The positions for which a row may return a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) slot: usize,
    /// The position of the row's first token.
    pub(crate) position: usize,
    /// The number of drafts after the first position.
    pub(crate) drafts: usize,
    /// The index of the row's first logits among the logits of all rows.
    pub(crate) first: usize,
}

impl Run {
    /// The number of positions with logits.
    pub(crate) fn places(&self) -> usize {
        1 + self.drafts
    }

    /// Samples the row's tokens, and accepts or rejects its drafts. `sample` gets the index of the
    /// logits, the position, and the slot with the tokens before that position. It returns the
    /// token, or `None` to end the row before that token.
    pub(crate) fn verify(
        &self,
        tables: &Tables,
        mut sample: impl FnMut(usize, usize, &Slot) -> Option<Sampled>,
    ) -> Vec<Sampled> {
        let slot = &tables.slots[self.slot];
        // Penalties count accepted drafts. The slot itself counts all tokens later, in `keep`.
        let mut counted =
            (self.drafts > 0 && slot.spec.sampling.has_penalty()).then(|| slot.clone());
        let mut given = Vec::with_capacity(1);
        for nth in 0..self.places() {
            let position = self.position + nth;
            let before = counted.as_ref().unwrap_or(slot);
            let Some(sampled) = sample(self.first + nth, position, before) else { break };
            let (token, finite) = (sampled.token, sampled.finite);
            if nth > 0 && !finite {
                // The earlier tokens are valid. The next row begins at this position, and reports
                // the error.
                break;
            }
            given.push(sampled);
            let expected = nth < self.drafts && token == tables.token(self.slot, position);
            if !expected || !finite {
                break;
            }
            if let Some(counted) = &mut counted {
                counted.count(token);
            }
        }
        given
    }
}

/// Adds the number of a row's tokens to a result, if any sampled row has drafts.
pub(crate) fn count(result: &mut StepResult, runs: &[Run], count: usize) {
    if runs.iter().any(|run| run.drafts > 0) {
        result.token_counts.push(count as i32);
    }
}

#[cfg(test)]
mod tests {
    use forebay_kernels::Shared;
    use forebay_protocol::{NewSlot, Row, SamplingParams, SlotSpec, StepPlan, Want};

    use super::*;

    fn tables(sampling: SamplingParams, drafts: &[i32]) -> (Tables, Run) {
        let spec = SlotSpec { sampling, ..SlotSpec::default() };
        let mut tables = Tables::new(2, 16, 4, 100);
        let mut plan = StepPlan::default();
        plan.begin(1);
        plan.write_slot(&NewSlot {
            slot: 1,
            tokens: &[3, 4, 5],
            prompt_len: 3,
            spec: &spec,
            place: None,
        });
        plan.push_row(Row { slot: 1, start: 2, length: 1, want: Want::TOKEN });
        plan.push_drafts(0, drafts);
        tables.write(&plan, &Shared::none()).expect("a good plan");
        tables.write_drafts(&plan).expect("good drafts");
        (tables, Run { slot: 1, position: 3, drafts: drafts.len(), first: 0 })
    }

    fn fine(token: i32) -> Sampled {
        Sampled { token, finite: true, logprobs: Vec::new() }
    }

    #[test]
    fn tokens_come_up_to_the_first_that_was_not_expected() {
        let (tables, run) = tables(SamplingParams::default(), &[7, 8, 9]);
        for (drawn, expected) in [
            ([7, 8, 9, 1], &[7, 8, 9, 1][..]),
            ([7, 8, 2, 1], &[7, 8, 2]),
            ([2, 8, 9, 1], &[2]),
            ([8, 7, 9, 1], &[8]),
        ] {
            let mut positions = Vec::new();
            let given = run.verify(&tables, |place, position, _| {
                positions.push((place, position));
                Some(fine(drawn[place]))
            });
            assert_eq!(given.iter().map(|it| it.token).collect::<Vec<_>>(), expected);
            let all = (0..expected.len()).map(|nth| (nth, 3 + nth)).collect::<Vec<_>>();
            assert_eq!(positions, all);
        }
        let broken = Sampled { finite: false, ..fine(0) };
        let given = run.verify(&tables, |_, _, _| Some(broken.clone()));
        assert_eq!(given, std::slice::from_ref(&broken), "no token follows an error");
        let given =
            run.verify(&tables, |at, _, _| Some(if at == 0 { fine(7) } else { broken.clone() }));
        assert_eq!(given, [fine(7)], "the error is the next row's");
        let given = run.verify(&tables, |at, _, _| (at < 2).then(|| fine([7, 8][at])));
        assert_eq!(given, [fine(7), fine(8)], "the next mask is not ready");
    }

    #[test]
    fn penalties_count_accepted_drafts_and_no_others() {
        let sampling = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
        let (mut tables, run) = tables(sampling, &[7, 7, 9]);
        let mut seen = Vec::new();
        let given = run.verify(&tables, |place, _, slot| {
            seen.push(slot.counts.get(&7).map_or(0, |count| count.generated));
            Some(fine([7, 7, 2, 1][place]))
        });
        assert_eq!((given.len(), seen), (3, vec![0, 1, 2]));
        assert!(!tables.slots[1].counts.contains_key(&7), "the slot has no drafted tokens yet");
        for (nth, sampled) in given.iter().enumerate() {
            tables.keep(1, 3 + nth, sampled.token);
        }
        assert_eq!(tables.slots[1].counts[&7].generated, 2);
        assert!(!tables.slots[1].counts.contains_key(&9), "token 9 was not accepted");
    }

    #[test]
    fn drafts_that_cannot_be_are_refused() {
        let (mut tables, _) = tables(SamplingParams::default(), &[7]);
        for (slot, start, draft) in [(2, 2, 7), (1, 15, 7), (1, 2, 100)] {
            let mut plan = StepPlan::default();
            plan.begin(2);
            plan.push_row(Row { slot, start, length: 1, want: Want::TOKEN });
            plan.push_drafts(0, &[draft]);
            assert!(tables.write_drafts(&plan).is_err(), "{slot} {start} {draft}");
        }
    }
}
