//! What the simulated device computes.

use forebay_protocol::{ROW_OK, StepMasks, StepPlan, StepResult, Want};

use crate::text::{Sequence, SimText};

/// A row of the simulated device tables.
#[derive(Debug, Default)]
struct Slot {
    sequence: Sequence,
    min_total: u32,
    /// Mostly empty, and then without memory.
    stop_ids: Vec<i32>,
    /// Empty: all.
    allowed: Vec<i32>,
    logprobs: Option<u8>,
}

impl Slot {
    fn sample(&mut self, text: &SimText, mask: Option<&[u32]>) -> i32 {
        if let Some(mask) = mask {
            return self.sequence.say_masked(text, mask);
        }
        let early = self.sequence.length < self.min_total;
        let suppressed = if early { self.stop_ids.as_slice() } else { &[] };
        self.sequence.say(text, suppressed, &self.allowed)
    }
}

/// The device tables of the simulation.
#[derive(Debug, Default)]
pub(crate) struct Device {
    slots: Vec<Slot>,
}

impl Device {
    /// Executes a plan, whose masked rows have these masks; the result's times are left at 0.
    pub(crate) fn execute(
        &mut self,
        plan: &StepPlan,
        text: &SimText,
        masks: Option<&StepMasks>,
    ) -> StepResult {
        let mut masks = masks.into_iter().flat_map(StepMasks::rows);
        for new in plan.new_slots() {
            let at = new.slot as usize;
            if self.slots.len() <= at {
                self.slots.resize_with(at + 1, Slot::default);
            }
            let slot = &mut self.slots[at];
            let prompt_len = new.prompt_len as usize;
            slot.sequence = Sequence::new(text, new.tokens, prompt_len, new.min_total);
            slot.min_total = new.min_total;
            slot.stop_ids.clear();
            slot.stop_ids.extend_from_slice(new.stop_ids);
            slot.allowed.clear();
            slot.allowed.extend_from_slice(new.allowed.unwrap_or_default());
            slot.logprobs = new.logprobs;
        }
        let rows = plan.rows();
        let several = plan.rows().any(|row| matches!(row.want, Want::Tokens(most) if most > 1));
        let mut result = StepResult {
            step: plan.step(),
            row_errors: vec![ROW_OK; rows.len()],
            tokens: Vec::with_capacity(rows.len()),
            ..StepResult::default()
        };
        for row in rows {
            let want = row.want;
            if want == Want::Nothing {
                continue;
            }
            let Some(slot) = self.slots.get_mut(row.slot as usize) else {
                debug_assert!(false, "slot {} was never written", row.slot);
                continue;
            };
            let end = row.start + row.length;
            debug_assert_eq!(slot.sequence.length, end, "the row must end the slot");
            let (count, mask) = match want {
                Want::Tokens(most) => (slot.sequence.count(most), None),
                Want::Masked => (1, masks.next().flatten()),
                Want::Vector | Want::Nothing => {
                    slot.sequence.pool(text, &mut result.pooled);
                    continue;
                }
            };
            for _ in 0..count {
                let token = slot.sample(text, mask);
                if let Some(top) = slot.logprobs {
                    // Tokens before this one did not ask.
                    result.logprob_counts.resize(result.tokens.len(), 0);
                    result.logprob_counts.push(i32::from(top) + 1);
                    push_logprobs(&mut result, text, token, usize::from(top));
                }
                result.tokens.push(token);
            }
            if several {
                result.token_counts.push(count as i32);
            }
        }
        if !result.logprob_counts.is_empty() {
            result.logprob_counts.resize(result.tokens.len(), 0);
        }
        result
    }
}

/// Made-up log-probabilities: the sampled token is always the most likely one.
fn push_logprobs(result: &mut StepResult, text: &SimText, token: i32, top: usize) {
    result.logprob_ids.push(token);
    result.logprob_values.push(-0.5);
    for rank in 0..top {
        result.logprob_ids.push(text.alternative(token, rank));
        result.logprob_values.push(-0.5 - rank as f32);
    }
}
