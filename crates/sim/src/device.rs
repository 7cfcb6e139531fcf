//! Computes the results of a simulated device.

use std::sync::Arc;

use forebay_protocol::{ROW_OK, RowMask, SlotSpec, StepMasks, StepPlan, StepResult, Want};

use crate::text::{Sequence, SimText, has};

/// A slot of the simulated device tables.
#[derive(Debug, Default)]
struct Slot {
    sequence: Sequence,
    /// The tokens of the prompt.
    prompt: Vec<i32>,
    /// The scripted answer, if there is one, with the length of the prompt.
    script: Option<(Arc<[i32]>, u32)>,
    min_total: u32,
    spec: SlotSpec,
}

impl Slot {
    fn sample(&mut self, text: &SimText, mask: Option<&[u32]>) -> i32 {
        if let Some(mask) = mask {
            return match self.scripted().filter(|&token| has(mask, token)) {
                Some(token) => self.sequence.repeat(token),
                None => self.sequence.say_masked(text, mask),
            };
        }
        let early = self.sequence.length < self.min_total;
        let suppressed = if early { &self.spec.stop_ids[..] } else { &[] };
        let allowed = self.spec.sampling.allowed.as_deref().unwrap_or_default();
        if let Some(token) = self.scripted()
            && !suppressed.contains(&token)
            && (allowed.is_empty() || allowed.contains(&token))
        {
            return self.sequence.repeat(token);
        }
        self.sequence.say(text, suppressed, allowed)
    }

    /// Returns the next token of the script, if there is one.
    fn scripted(&self) -> Option<i32> {
        let (answer, prompt_len) = self.script.as_ref()?;
        answer.get(self.sequence.length.checked_sub(*prompt_len)? as usize).copied()
    }
}

/// The device tables of the simulation.
#[derive(Debug, Default)]
pub(crate) struct Device {
    slots: Vec<Slot>,
}

impl Device {
    /// Writes the new slots of a plan, which may have no rows.
    pub(crate) fn write_slots(&mut self, plan: &StepPlan, text: &SimText) {
        for new in plan.new_slots() {
            let at = new.slot as usize;
            if self.slots.len() <= at {
                self.slots.resize_with(at + 1, Slot::default);
            }
            let slot = &mut self.slots[at];
            let prompt_len = new.prompt_len as usize;
            let min_total = new.prompt_len + new.spec.sampling.min_tokens;
            slot.sequence = Sequence::new(text, new.tokens, prompt_len, min_total);
            let prompt = &new.tokens[..prompt_len.min(new.tokens.len())];
            slot.prompt.clear();
            slot.prompt.extend_from_slice(prompt);
            slot.script = text.script(prompt).map(|answer| (answer, new.prompt_len));
            slot.min_total = min_total;
            slot.spec = new.spec;
        }
    }

    /// Executes a plan whose slots are already written. `masks` are those of its masked rows. The
    /// times in the result are 0.
    pub(crate) fn execute(
        &mut self,
        plan: &StepPlan,
        text: &SimText,
        masks: Option<&StepMasks>,
    ) -> StepResult {
        let mut masks = masks.into_iter().flat_map(|masks| &masks.masks);
        let rows = plan.rows();
        let expected = plan.drafts();
        let mut result = StepResult {
            step: plan.step(),
            row_errors: vec![ROW_OK; rows.len()],
            tokens: Vec::with_capacity(rows.len()),
            ..StepResult::default()
        };
        for want in plan.prompt_logprobs() {
            let prompt = self.slots.get(want.slot as usize).map_or(&[][..], |slot| &slot.prompt);
            let tokens = prompt.iter().skip(want.first as usize).take(want.count as usize);
            tokens.for_each(|&token| push_of_prompt(&mut result, text, token, want.most));
        }
        let several = plan.rows().any(|row| row.want.most() > 1);
        for (row, drafts) in rows.zip(expected) {
            let want = row.want;
            if want == Want::Nothing {
                continue;
            }
            let Some(slot) = self.slots.get_mut(row.slot as usize) else {
                debug_assert!(false, "slot {} was never written", row.slot);
                continue;
            };
            let end = row.start + row.length;
            debug_assert_eq!(
                slot.sequence.length,
                end,
                "the row must end the slot: {row:?}, a prompt of {}, step {}",
                slot.prompt.len(),
                plan.step(),
            );
            let masks: Vec<&RowMask> = match want {
                Want::Masked(most) => masks.by_ref().take(most as usize).collect(),
                _ => Vec::new(),
            };
            let count = match want {
                Want::Tokens(most) if drafts.is_empty() => slot.sequence.count(most) as usize,
                Want::Tokens(_) => 1 + drafts.len(),
                // The row ends at the first position without a mask. A row whose first position has
                // no mask sits out.
                Want::Masked(most) => {
                    let none = masks.iter().position(|mask| **mask == RowMask::NoToken);
                    none.unwrap_or(most as usize)
                }
                Want::Vector | Want::Nothing => {
                    slot.sequence.pool(text, &mut result.pooled);
                    continue;
                }
            };
            if count == 0 {
                continue;
            }
            let before = result.tokens.len();
            for nth in 0..count {
                let mask = masks.get(nth).and_then(|mask| match mask {
                    RowMask::Tokens(words) => Some(&words[..]),
                    RowMask::Everything | RowMask::NoToken => None,
                });
                let token = slot.sample(text, mask);
                if let Some(top) = slot.spec.sampling.logprobs {
                    // Tokens of earlier rows without log-probabilities have the count 0.
                    result.logprob_counts.resize(result.tokens.len(), 0);
                    result.logprob_counts.push(i32::from(top) + 1);
                    push_logprobs(&mut result, text, token, usize::from(top));
                }
                result.tokens.push(token);
                if drafts.get(nth).is_some_and(|&draft| draft != token) {
                    break;
                }
            }
            if several {
                result.token_counts.push((result.tokens.len() - before) as i32);
            }
        }
        if !result.logprob_counts.is_empty() {
            result.logprob_counts.resize(result.tokens.len(), 0);
        }
        result
    }
}

/// Appends synthetic log-probabilities, in which the sampled token is always the most likely one.
fn push_logprobs(result: &mut StepResult, text: &SimText, token: i32, top: usize) {
    result.logprob_ids.push(token);
    result.logprob_values.push(-0.5);
    for rank in 0..top {
        result.logprob_ids.push(text.alternative(token, rank));
        result.logprob_values.push(-0.5 - rank as f32);
    }
}

/// Appends the log-probabilities of a prompt token. They depend on the token, so that tests notice
/// mix-ups.
fn push_of_prompt(result: &mut StepResult, text: &SimText, token: i32, most: u32) {
    const STEPS: i32 = 64;
    let logprob = -0.5 - token.rem_euclid(STEPS) as f32 / STEPS as f32;
    result.prompt_ranks.push(1);
    result.prompt_ids.push(token);
    result.prompt_values.push(logprob);
    for rank in 0..most {
        result.prompt_ids.push(text.alternative(token, rank as usize));
        result.prompt_values.push(logprob - rank as f32);
    }
}

#[cfg(test)]
mod tests {
    use forebay_protocol::{NewSlot, Row, SamplingParams, SlotSpec};

    use super::*;
    use crate::text::Script;

    #[derive(Debug)]
    struct Same(&'static [i32]);

    impl Script for Same {
        fn answer(&self, prompt: &[i32]) -> Option<Arc<[i32]>> {
            (prompt == [1, 2]).then(|| self.0.into())
        }
    }

    /// Writes the slots of a plan and executes it.
    fn written(
        device: &mut Device,
        plan: &StepPlan,
        text: &SimText,
        masks: Option<&StepMasks>,
    ) -> StepResult {
        device.write_slots(plan, text);
        device.execute(plan, text, masks)
    }

    /// Returns the `count` tokens that a slot generates after `tokens`, one per step.
    fn said(text: &SimText, tokens: &[i32], spec: &SlotSpec, count: u32) -> Vec<i32> {
        let mut device = Device::default();
        let mut said = Vec::new();
        let mut plan = StepPlan::default();
        for step in 0..count {
            plan.begin(u64::from(step) + 1);
            let (mut start, mut length) = (tokens.len() as u32 + step - 1, 1);
            if step == 0 {
                plan.write_slot(&NewSlot { slot: 0, tokens, prompt_len: 2, spec, place: None });
                (start, length) = (0, tokens.len() as u32);
            }
            plan.push_row(Row { slot: 0, start, length, want: Want::Tokens(1) });
            said.extend(written(&mut device, &plan, text, None).tokens);
        }
        said
    }

    #[test]
    fn drafts_are_verified_against_the_text() {
        let text = SimText::endless((100..110).collect()).scripted(Arc::new(Same(&[7, 8, 9, 6])));
        let spec = SlotSpec::default();
        let row = |plan: &mut StepPlan, start, length, drafts: &[i32]| {
            plan.push_row(Row { slot: 0, start, length, want: Want::TOKEN });
            plan.push_drafts(0, drafts);
        };
        for (drafts, given) in [
            (&[7, 8][..], &[7, 8, 9][..]),
            (&[7, 5, 9], &[7, 8]),
            (&[1], &[7]),
            (&[7, 8, 9], &[7, 8, 9, 6]),
        ] {
            let (mut device, mut plan) = (Device::default(), StepPlan::default());
            plan.begin(1);
            plan.write_slot(&NewSlot {
                slot: 0,
                tokens: &[1, 2],
                prompt_len: 2,
                spec: &spec,
                place: None,
            });
            row(&mut plan, 0, 2, drafts);
            let result = written(&mut device, &plan, &text, None);
            assert_eq!(
                (&result.tokens[..], &result.token_counts[..]),
                (given, &[given.len() as i32][..])
            );
            // The next step continues the text after the tokens that this step returned.
            plan.begin(2);
            row(&mut plan, 1 + given.len() as u32, 1, &[0]);
            let next = written(&mut device, &plan, &text, None).tokens;
            assert_eq!(next.len(), 1);
            assert!(given.len() == 4 || next[0] == [7, 8, 9, 6][given.len()]);
        }
    }

    #[test]
    fn a_script_is_said_whatever_was_computed_before() {
        let words: Vec<i32> = (100..110).collect();
        let text = SimText::endless(words.clone()).scripted(Arc::new(Same(&[7, 8, 9])));
        let free = SlotSpec::default();
        let whole = said(&text, &[1, 2], &free, 5);
        assert_eq!(whole[..3], [7, 8, 9]);
        assert!(whole[3..].iter().all(|token| words.contains(token)));
        // Another device continues the generated text in the same way.
        assert_eq!(said(&text, &[1, 2, 7], &free, 2), [8, 9]);
        assert!(said(&text, &[1, 3], &free, 3).iter().all(|token| words.contains(token)));
        let sampling = SamplingParams { allowed: Some([8, 105].into()), ..free.sampling.clone() };
        let bound = SlotSpec { sampling, ..free };
        let obeyed = said(&text, &[1, 2], &bound, 3);
        assert_eq!(obeyed[1], 8);
        assert!(obeyed.iter().all(|token| [8, 105].contains(token)));
    }

    #[test]
    fn a_mask_has_the_last_word_over_a_script() {
        let text = SimText::endless((100..110).collect()).scripted(Arc::new(Same(&[7, 8, 9])));
        let spec = SlotSpec::default();
        let mut device = Device::default();
        let mut plan = StepPlan::default();
        let mut said = Vec::new();
        for (step, allowed) in [(0, 7), (1, 9), (2, 9)] {
            plan.begin(u64::from(step) + 1);
            if step == 0 {
                plan.write_slot(&NewSlot {
                    slot: 0,
                    tokens: &[1, 2],
                    prompt_len: 2,
                    spec: &spec,
                    place: None,
                });
            }
            let (start, length) = if step == 0 { (0, 2) } else { (1 + step, 1) };
            plan.push_row(Row { slot: 0, start, length, want: Want::MASKED });
            let mut words = vec![0; 7];
            words[0] = 1 << allowed;
            let rows = vec![RowMask::Tokens(words)];
            let masks = StepMasks { step: plan.step(), masks: rows };
            said.extend(written(&mut device, &plan, &text, Some(&masks)).tokens);
        }
        assert_eq!(said, [7, 9, 9]);
    }

    #[test]
    fn a_row_without_a_token_says_the_same_when_it_comes_again() {
        let text = SimText::endless((100..110).collect());
        let sampling = SamplingParams { logprobs: Some(1), ..SamplingParams::default() };
        let spec = SlotSpec { sampling, ..SlotSpec::default() };
        let said = |rows: &[RowMask]| {
            let mut device = Device::default();
            let (mut plan, mut said, mut end) = (StepPlan::default(), Vec::new(), 2);
            for (step, mask) in (1..).zip(rows) {
                plan.begin(step);
                if step == 1 {
                    let new = NewSlot {
                        slot: 0,
                        tokens: &[1, 2],
                        prompt_len: 2,
                        spec: &spec,
                        place: None,
                    };
                    plan.write_slot(&new);
                }
                let start = if step == 1 { 0 } else { end - 1 };
                plan.push_row(Row { slot: 0, start, length: end - start, want: Want::MASKED });
                let masks = StepMasks { step, masks: vec![mask.clone()] };
                let result = written(&mut device, &plan, &text, Some(&masks));
                assert_eq!(result.logprob_counts.len(), result.tokens.len());
                end += result.tokens.len() as u32;
                said.extend(result.tokens);
            }
            said
        };
        let mask = RowMask::Tokens(vec![0b1110_0110; 4]);
        let plain = said(&[mask.clone(), RowMask::Everything, mask.clone()]);
        let late = [RowMask::NoToken, mask.clone(), RowMask::NoToken, RowMask::NoToken];
        let again = said(&[&late[..], &[RowMask::Everything, mask]].concat());
        assert_eq!((plain.len(), &again), (3, &plain));
    }
}
