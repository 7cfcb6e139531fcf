//! The parameters of a slot. The device gets no other information about the request.

use std::sync::Arc;

use bytemuck::cast_slice;

use super::{StepPlan, take};
use crate::columns::record;
use crate::frame::FrameError;

/// The sampling parameters of a slot. They are stored in the device's slot table, and are replaced
/// together when a slot is written. The defaults leave the model's distribution unchanged.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// The divisor of the logits; 0 is greedy, 1 (the default) is off.
    pub temperature: f32,
    /// The cumulative probability to keep (nucleus sampling), from 0 to 1; 1 (the default) is off.
    pub top_p: f32,
    /// The number of most likely tokens to keep; 0 (the default) is off.
    pub top_k: i32,
    /// The fraction of the largest probability below which tokens are dropped, from 0 to 1; 0 (the
    /// default) is off.
    pub min_p: f32,
    /// The divisor of positive logits of seen tokens, and the factor of negative ones (Keskar et
    /// al. 2019); 1 (the default) is off.
    pub repetition_penalty: f32,
    /// The value subtracted once from the logit of each generated token; 0 (the default) is off.
    pub presence_penalty: f32,
    /// The value subtracted from the logit of each generated token, once per occurrence; 0 (the
    /// default) is off.
    pub frequency_penalty: f32,
    /// The seed, 0 by default. The seed and the position are the only sources of randomness.
    pub seed: u64,
    /// The number of tokens to generate before stop ids may be sampled; 0 (the default) is off.
    pub min_tokens: u32,
    /// The number of most likely tokens to report besides the sampled token; `None` reports no
    /// log-probabilities.
    pub logprobs: Option<u8>,
    /// The values to add to the logits, by token id. The choices of a client's request share the
    /// list.
    pub logit_bias: Arc<[(i32, f32)]>,
    /// The only ids that can be sampled, ascending, at least one; `None` allows all. The choices of
    /// a client's request share the list.
    pub allowed: Option<Arc<[i32]>>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            min_tokens: 0,
            logprobs: None,
            logit_bias: Arc::default(),
            allowed: None,
        }
    }
}

impl SamplingParams {
    /// True if a parameter changes logits, so that the most likely token may differ from the
    /// model's.
    #[must_use]
    pub fn changes_logits(&self) -> bool {
        self.has_penalty() || !self.logit_bias.is_empty() || self.allowed.is_some()
    }

    /// True if a penalty is set, for which the slot's tokens are counted.
    #[must_use]
    pub fn has_penalty(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// Parameters of a pooling request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pooling {
    /// The position at which the second text of a pair starts; 0 if the prompt is one text.
    pub segment: u32,
}

/// The parameters of a request that are written with its slot. A new kind of parameter needs a
/// field here and a column of the plan.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SlotSpec {
    /// The sampling parameters. `seed` is always set, at random if the client gave none.
    pub sampling: SamplingParams,
    /// The token ids that end the request: end-of-sequence (unless ignored) and the client's
    /// `stop_token_ids`; ascending, without duplicates.
    pub stop_ids: Arc<[i32]>,
    /// The pooling parameters, for pooling models; `None` if tokens are generated.
    pub pooling: Option<Pooling>,
    /// The byte offset in the arena of embeddings that replace the prompt's tokens, one row of
    /// `hidden_size` elements per position. The blocks of such a prompt have no names and are not
    /// shared, because its tokens do not determine their content.
    pub embeds: Option<u32>,
}

impl SlotSpec {
    /// Returns the stop ids that the hand suppresses until `min_tokens` tokens are generated.
    #[must_use]
    pub fn suppressed(&self) -> &[i32] {
        if self.sampling.min_tokens == 0 { &[] } else { &self.stop_ids }
    }
}

/// A slot to write: its tokens and its parameters.
#[derive(Debug, Clone, Copy)]
pub struct NewSlot<'a> {
    /// The index in the device tables.
    pub slot: u32,
    /// The prompt, and generated tokens if the request was replayed or preempted.
    pub tokens: &'a [i32],
    /// The number of tokens of the prompt.
    pub prompt_len: u32,
    /// The parameters.
    pub spec: &'a SlotSpec,
    /// The place of the request's adapter; `None` for the base model.
    pub place: Option<u32>,
}

impl NewSlot<'_> {
    /// Returns the number of words that [`StepPlan::write_slot`] adds to a plan.
    #[must_use]
    pub fn words(&self) -> usize {
        let spec = self.spec;
        let allowed = spec.sampling.allowed.as_deref();
        let lists = spec.suppressed().len()
            + 2 * spec.sampling.logit_bias.len()
            + allowed.map_or(0, <[i32]>::len);
        let values = [
            spec.pooling.is_some(),
            spec.embeds.is_some(),
            allowed.is_some(),
            self.place.is_some(),
        ];
        let values = values.into_iter().filter(|&there| there).count();
        let records = SlotRecord::WORDS + SlotFloats::WORDS + SlotValue::WORDS * values;
        records + self.tokens.len() + lists
    }
}

/// A new slot, as read from a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotWrite<'a> {
    /// The index in the device tables.
    pub slot: u32,
    /// The tokens of the slot; empty if they are in the arena.
    pub tokens: &'a [i32],
    /// The number of tokens, whether in the plan or in the arena.
    pub token_count: u32,
    /// The byte offset of the tokens in the arena; `None` if they are in the plan.
    pub arena_offset: Option<u32>,
    /// The number of tokens of the prompt.
    pub prompt_len: u32,
    /// The parameters that a hand needs: `stop_ids` has those of [`SlotSpec::suppressed`], and
    /// `pooling` is only set for pairs.
    pub spec: SlotSpec,
    /// The place of the request's adapter; `None` for the base model.
    pub place: Option<u32>,
}

record! {
    /// A new slot.
    pub(crate) struct SlotRecord {
        slot: u32,
        token_count: i32,
        prompt_len: u32,
        top_k: i32,
        seed_lo: u32,
        seed_hi: u32,
        min_total: u32,
        logprobs: i32,
        stop_count: i32,
        bias_count: i32,
        arena_offset: i32,
    }
}

record! {
    /// The sampling parameters of a new slot that are floats.
    pub(crate) struct SlotFloats {
        temperature: f32,
        top_p: f32,
        min_p: f32,
        repetition_penalty: f32,
        presence_penalty: f32,
        frequency_penalty: f32,
    }
}

record! {
    /// A parameter that only some of the new slots have.
    pub(crate) struct SlotValue {
        slot: u32,
        value: i32,
    }
}

impl SlotRecord {
    /// Returns the number of tokens that are in the plan itself.
    fn inline(self) -> usize {
        if self.arena_offset < 0 { self.token_count as usize } else { 0 }
    }
}

impl SlotValue {
    fn new(slot: u32, value: u32) -> Self {
        Self { slot, value: value.cast_signed() }
    }

    /// Takes the value of `slot` from a column of values, which are in the order of the new slots.
    fn take(rest: &mut &[Self], slot: u32) -> Option<u32> {
        let (first, tail) = rest.split_first()?;
        (first.slot == slot).then(|| {
            *rest = tail;
            first.value.cast_unsigned()
        })
    }

    /// True if each value belongs to a different new slot, in the order of slots, and is at least
    /// `least`.
    fn agree(values: &[Self], slots: &[SlotRecord], least: i32) -> bool {
        let mut slots = slots.iter();
        values
            .iter()
            .all(|value| value.value >= least && slots.any(|record| record.slot == value.slot))
    }
}

impl StepPlan {
    /// Adds a slot to write.
    pub fn write_slot(&mut self, new: &NewSlot<'_>) {
        let NewSlot { slot, tokens, prompt_len, spec, place } = *new;
        let params = &spec.sampling;
        self.slots.push(SlotRecord {
            slot,
            token_count: tokens.len() as i32,
            prompt_len,
            top_k: params.top_k,
            seed_lo: params.seed as u32,
            seed_hi: (params.seed >> 32) as u32,
            min_total: prompt_len.saturating_add(params.min_tokens).min(i32::MAX as u32),
            logprobs: params.logprobs.map_or(-1, i32::from),
            stop_count: spec.suppressed().len() as i32,
            bias_count: params.logit_bias.len() as i32,
            arena_offset: -1,
        });
        self.slot_floats.push(SlotFloats {
            temperature: params.temperature,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
        });
        self.tokens.extend_from_slice(tokens);
        self.stop_ids.extend_from_slice(spec.suppressed());
        for &(id, value) in params.logit_bias.iter() {
            self.bias_ids.push(id);
            self.bias_values.push(value);
        }
        if let Some(pooling) = spec.pooling.filter(|pooling| pooling.segment > 0) {
            self.segments.push(SlotValue::new(slot, pooling.segment));
        }
        if let Some(offset) = spec.embeds {
            self.embeds.push(SlotValue::new(slot, offset));
        }
        if let Some(place) = place {
            self.slot_places.push(SlotValue::new(slot, place));
        }
        if let Some(ids) = &params.allowed {
            self.allowed_counts.push(SlotValue::new(slot, ids.len() as u32));
            self.allowed_ids.extend_from_slice(ids);
        }
    }

    /// True if the plan writes a slot.
    #[must_use]
    pub fn writes_slots(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Iterates over the slots that the plan writes.
    pub fn new_slots(&self) -> impl Iterator<Item = SlotWrite<'_>> + '_ {
        let (mut tokens, mut stop_ids) = (self.tokens.as_slice(), self.stop_ids.as_slice());
        let (mut bias_ids, mut bias_values) = (&self.bias_ids[..], &self.bias_values[..]);
        let (mut segments, mut embeds) = (&self.segments[..], &self.embeds[..]);
        let (mut counts, mut allowed) = (&self.allowed_counts[..], &self.allowed_ids[..]);
        let mut places = &self.slot_places[..];
        self.slots.iter().zip(&self.slot_floats).map(move |(record, floats)| {
            let (slot, biases) = (record.slot, record.bias_count as usize);
            let ids = take(&mut bias_ids, biases).iter().copied();
            let biases = ids.zip(take(&mut bias_values, biases).iter().copied());
            let sampling = SamplingParams {
                temperature: floats.temperature,
                top_p: floats.top_p,
                top_k: record.top_k,
                min_p: floats.min_p,
                repetition_penalty: floats.repetition_penalty,
                presence_penalty: floats.presence_penalty,
                frequency_penalty: floats.frequency_penalty,
                seed: u64::from(record.seed_lo) | u64::from(record.seed_hi) << 32,
                min_tokens: record.min_total.saturating_sub(record.prompt_len),
                logprobs: u8::try_from(record.logprobs).ok(),
                logit_bias: if record.bias_count > 0 { biases.collect() } else { Arc::default() },
                allowed: SlotValue::take(&mut counts, slot)
                    .map(|count| take(&mut allowed, count as usize).into()),
            };
            let stop_ids = take(&mut stop_ids, record.stop_count as usize);
            SlotWrite {
                slot,
                tokens: take(&mut tokens, record.inline()),
                token_count: record.token_count.cast_unsigned(),
                arena_offset: u32::try_from(record.arena_offset).ok(),
                prompt_len: record.prompt_len,
                spec: SlotSpec {
                    sampling,
                    stop_ids: if stop_ids.is_empty() { Arc::default() } else { stop_ids.into() },
                    pooling: SlotValue::take(&mut segments, slot)
                        .map(|segment| Pooling { segment }),
                    embeds: SlotValue::take(&mut embeds, slot),
                },
                place: SlotValue::take(&mut places, slot),
            }
        })
    }

    /// Encodes the plan without the tokens of new slots that have at least `min_tokens` tokens.
    /// `place` copies such tokens to the arena and returns their byte offset, or returns `None` if
    /// the arena is full. Then they stay in the plan.
    ///
    /// # Errors
    /// The frame would be too large for a reader.
    pub fn encode_spilling(
        &self,
        out: &mut Vec<u8>,
        min_tokens: usize,
        mut place: impl FnMut(&[i32]) -> Option<u32>,
    ) -> Result<(), FrameError> {
        if self.tokens.len() < min_tokens {
            return self.encode(out);
        }
        let (mut slots, mut left) = (self.slots.clone(), Vec::new());
        let mut rest = self.tokens.as_slice();
        for record in &mut slots {
            let own = take(&mut rest, record.inline());
            let placed = if own.len() >= min_tokens { place(own) } else { None };
            match placed {
                Some(offset) => record.arena_offset = offset.cast_signed(),
                None => left.extend_from_slice(own),
            }
        }
        let mut columns = self.columns();
        for (spec, column) in Self::COLUMNS.iter().zip(&mut columns) {
            match spec.name {
                "slots" => *column = cast_slice(&slots),
                "tokens" => *column = &left,
                _ => {}
            }
        }
        Self::encode_columns(self.step, columns, out)
    }

    /// True if the columns that belong to slots have the right lengths and no surplus values.
    pub(super) fn slots_agree(&self) -> Result<bool, FrameError> {
        let (mut inline, mut stops, mut biases) = (0_u64, 0_u64, 0_u64);
        for record in &self.slots {
            let own = [record.token_count, record.stop_count, record.bias_count].map(u64::try_from);
            let [Ok(_), Ok(stop_count), Ok(bias_count)] = own else {
                return Err(FrameError::Malformed("negative count"));
            };
            inline += record.inline() as u64;
            stops += stop_count;
            biases += bias_count;
        }
        let values = [
            (&self.segments, 0),
            (&self.embeds, 0),
            (&self.allowed_counts, 1),
            (&self.slot_places, 0),
        ];
        let allowed: i64 = self.allowed_counts.iter().map(|count| i64::from(count.value)).sum();
        Ok(self.slot_floats.len() == self.slots.len()
            && self.tokens.len() as u64 == inline
            && self.stop_ids.len() as u64 == stops
            && self.bias_ids.len() as u64 == biases
            && self.bias_values.len() == self.bias_ids.len()
            && values.iter().all(|&(values, least)| SlotValue::agree(values, &self.slots, least))
            && self.allowed_ids.len() as i64 == allowed)
    }
}
