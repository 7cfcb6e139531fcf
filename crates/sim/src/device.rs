//! What the simulated device computes, and how long that takes.

use std::collections::HashMap;

use forebay_protocol::{ROW_OK, SlotWrite, StepPlan, StepResult};
use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};

/// Microseconds that a step takes: linear in what a device mainly spends time on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeviceModel {
    /// Any step.
    pub step_us: f64,
    /// Each row.
    pub row_us: f64,
    /// Each token computed.
    pub token_us: f64,
    /// Each position of context that a row attends to.
    pub context_us: f64,
}

impl DeviceModel {
    /// A device that takes no time.
    pub const INSTANT: Self = Self { step_us: 0.0, row_us: 0.0, token_us: 0.0, context_us: 0.0 };

    pub(crate) fn duration_us(&self, plan: &StepPlan) -> u64 {
        let mut time = self.step_us;
        for row in plan.rows() {
            time += self.row_us
                + self.token_us * f64::from(row.length)
                + self.context_us * f64::from(row.start + row.length);
        }
        time.round() as u64
    }
}

/// The token that follows `tokens`, below `vocab_size`.
#[must_use]
pub fn next_token(tokens: &[i32], vocab_size: u32) -> i32 {
    let mut sequence = Sequence::default();
    sequence.extend(tokens);
    sequence.next(vocab_size)
}

/// All tokens of a slot, as a running hash.
#[derive(Clone, Default)]
struct Sequence {
    hash: Xxh3,
    length: u32,
}

impl Sequence {
    fn extend(&mut self, tokens: &[i32]) {
        for token in tokens {
            self.hash.update(&token.to_le_bytes());
        }
        self.length += tokens.len() as u32;
    }

    fn next(&self, vocab_size: u32) -> i32 {
        let mixed = xxh3_64_with_seed(&self.length.to_le_bytes(), self.hash.digest());
        (mixed % u64::from(vocab_size)) as i32
    }
}

/// A row of the simulated device tables.
struct Slot {
    sequence: Sequence,
    min_total: u32,
    stop_ids: Vec<i32>,
    logprobs: Option<u8>,
}

impl Slot {
    fn sample(&mut self, vocab_size: u32) -> i32 {
        let mut token = self.sequence.next(vocab_size);
        while self.sequence.length < self.min_total && self.stop_ids.contains(&token) {
            token = (token + 1) % vocab_size.cast_signed();
        }
        self.sequence.extend(&[token]);
        token
    }
}

/// The device tables of the simulation.
#[derive(Default)]
pub(crate) struct Device {
    slots: HashMap<u32, Slot>,
}

impl Device {
    /// Executes a plan; the result's times are left at 0.
    pub(crate) fn execute(&mut self, plan: &StepPlan, vocab_size: u32) -> StepResult {
        for new in plan.new_slots() {
            let mut sequence = Sequence::default();
            sequence.extend(new.tokens);
            let SlotWrite { slot, min_total, logprobs, .. } = new;
            let stop_ids = new.stop_ids.to_vec();
            self.slots.insert(slot, Slot { sequence, min_total, stop_ids, logprobs });
        }
        let mut result = StepResult { step: plan.step(), ..StepResult::default() };
        let mut counts = Vec::new();
        for row in plan.rows() {
            result.row_errors.push(ROW_OK);
            let Some(slot) = self.slots.get_mut(&row.slot).filter(|_| row.sample) else {
                continue;
            };
            debug_assert_eq!(
                slot.sequence.length,
                row.start + row.length,
                "the row must end the slot"
            );
            let token = slot.sample(vocab_size);
            result.tokens.push(token);
            counts.push(slot.logprobs.map_or(0, |n| i32::from(n) + 1));
            if let Some(top) = slot.logprobs {
                let top = 0..i32::from(top);
                result.logprob_ids.push(token);
                result
                    .logprob_ids
                    .extend(top.clone().map(|i| (token + i) % vocab_size.cast_signed()));
                result.logprob_values.push(-0.5);
                result.logprob_values.extend(top.map(|i| -0.5 - i as f32));
            }
        }
        if counts.iter().any(|&n| n > 0) {
            result.logprob_counts = counts;
        }
        result
    }
}
