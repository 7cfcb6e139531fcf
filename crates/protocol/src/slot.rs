//! The parameters of a request's slot, which are all that the device knows of the request.

use std::sync::Arc;

/// The sampling parameters of a slot. They are in the device's slot table, and are replaced
/// together when a slot is written.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// The temperature; 0 is greedy.
    pub temperature: f32,
    /// The share of probability that is kept (nucleus sampling); 1 is off.
    pub top_p: f32,
    /// The number of candidates; 0 is off.
    pub top_k: i32,
    /// The share of the largest probability below which tokens are dropped; 0 is off.
    pub min_p: f32,
    /// A number that divides positive logits of seen tokens, and multiplies negative ones; 1 is off
    /// (Keskar et al. 2019).
    pub repetition_penalty: f32,
    /// A number that is subtracted once from the logit of each generated token.
    pub presence_penalty: f32,
    /// A number that is subtracted from the logit of each generated token, for each occurrence.
    pub frequency_penalty: f32,
    /// The seed. Together with the position it is the only source of randomness.
    pub seed: u64,
    /// The number of generated tokens before a stop id may be sampled.
    pub min_tokens: u32,
    /// The number of most likely tokens in the log-probabilities, beside the sampled token; `None`:
    /// no log-probabilities.
    pub logprobs: Option<u8>,
    /// Numbers that are added to the logits, by token id. The choices of a client's request share
    /// them.
    pub logit_bias: Arc<[(i32, f32)]>,
    /// The only ids that can be sampled, ascending, at least one; `None`: all. The choices of a
    /// client's request share them.
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

/// The parameters of a prompt for a vector, in place of sampling parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pooling {
    /// The position at which the second text of a pair begins; 0: the prompt is one text.
    pub segment: u32,
}

/// The facts about a request for the device, beside its tokens. They are written with its slot. A
/// new kind of parameter is a field here and a column of the plan.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SlotSpec {
    /// The sampling parameters. `seed` is always set, at random if the client gave none.
    pub sampling: SamplingParams,
    /// Token ids that end the request: end-of-sequence (unless ignored) and the client's
    /// `stop_token_ids`; ascending, each once.
    pub stop_ids: Arc<[i32]>,
    /// The parameters of a prompt for one vector, without generation; `None`: tokens are generated.
    /// Only for models that pool.
    pub pooling: Option<Pooling>,
    /// The byte offset in the arena of embeddings in place of the prompt's tokens, one row of
    /// `hidden_size` elements each. The blocks of such a prompt have no names and are not shared,
    /// because its tokens do not determine their content.
    pub embeds: Option<u32>,
}

impl SlotSpec {
    /// The stop ids that the hand suppresses.
    #[must_use]
    pub fn suppressed(&self) -> &[i32] {
        if self.sampling.min_tokens == 0 { &[] } else { &self.stop_ids }
    }
}

/// A slot to overwrite: its tokens and its parameters.
#[derive(Debug, Clone, Copy)]
pub struct NewSlot<'a> {
    /// Row of the device tables.
    pub slot: u32,
    /// The prompt. A replayed or preempted request also has its generated tokens.
    pub tokens: &'a [i32],
    /// The number of tokens of the prompt.
    pub prompt_len: u32,
    /// The parameters.
    pub spec: &'a SlotSpec,
}

impl NewSlot<'_> {
    /// Words that [`crate::StepPlan::write_slot`] adds to a plan.
    #[must_use]
    pub fn words(&self) -> usize {
        let spec = self.spec;
        let allowed = spec.sampling.allowed.as_deref();
        let lists = spec.suppressed().len()
            + 2 * spec.sampling.logit_bias.len()
            + allowed.map_or(0, <[i32]>::len);
        let pairs = [spec.pooling.is_some(), spec.embeds.is_some(), allowed.is_some()];
        let pairs = pairs.into_iter().filter(|&there| there).count();
        SlotRecord::WORDS + SLOT_FLOATS + self.tokens.len() + lists + PAIR_WORDS * pairs
    }
}

/// The sampling parameters of a new slot in a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotSampling<'a> {
    /// The temperature, as in [`SamplingParams`].
    pub temperature: f32,
    /// The parameter of this name, as in [`SamplingParams`].
    pub top_p: f32,
    /// The parameter of this name, as in [`SamplingParams`].
    pub min_p: f32,
    /// The parameter of this name, as in [`SamplingParams`].
    pub repetition_penalty: f32,
    /// The parameter of this name, as in [`SamplingParams`].
    pub presence_penalty: f32,
    /// The parameter of this name, as in [`SamplingParams`].
    pub frequency_penalty: f32,
    /// The parameter of this name, as in [`SamplingParams`].
    pub top_k: i32,
    /// The parameter of this name, as in [`SamplingParams`].
    pub seed: u64,
    /// Token ids with a number that is added to their logits.
    pub bias_ids: &'a [i32],
    /// The added numbers, one for each id.
    pub bias_values: &'a [f32],
}

/// A new slot in a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotWrite<'a> {
    /// Row of the device tables.
    pub slot: u32,
    /// The tokens of the slot; empty if they are in the arena.
    pub tokens: &'a [i32],
    /// The number of tokens, in the plan or in the arena.
    pub token_count: u32,
    /// The byte offset of the tokens in the arena; `None`: they are in the plan.
    pub arena_offset: Option<u32>,
    /// The sampling parameters.
    pub sampling: SlotSampling<'a>,
    /// The number of tokens of the prompt.
    pub prompt_len: u32,
    /// The position below which `stop_ids` can't be sampled.
    pub min_total: u32,
    /// The stop ids; empty if `min_tokens` is 0.
    pub stop_ids: &'a [i32],
    /// The number of most likely tokens in the log-probabilities; `None`: no log-probabilities.
    pub logprobs: Option<u8>,
    /// The only ids that can be sampled; `None`: all.
    pub allowed: Option<&'a [i32]>,
    /// The position at which the second text of a pair begins; 0: the prompt is one text.
    pub segment: u32,
    /// The byte offset in the arena of embeddings in place of the prompt's tokens.
    pub embeds: Option<u32>,
}

/// Words of a new slot's record in the `slot_floats` column.
pub(crate) const SLOT_FLOATS: usize = 6;
/// Words of a record of a column with one value for some of the new slots: slot, value.
pub(crate) const PAIR_WORDS: usize = 2;

/// A record of the `slots` column, its words by name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotRecord {
    pub(crate) slot: i32,
    pub(crate) token_count: i32,
    pub(crate) prompt_len: i32,
    pub(crate) top_k: i32,
    pub(crate) seed_lo: i32,
    pub(crate) seed_hi: i32,
    pub(crate) min_total: i32,
    pub(crate) logprobs: i32,
    pub(crate) stop_count: i32,
    pub(crate) bias_count: i32,
    pub(crate) arena_offset: i32,
}

impl SlotRecord {
    pub(crate) const WORDS: usize = 11;

    /// Makes the record of a slot whose tokens are in the plan.
    pub(crate) fn new(new: &NewSlot<'_>) -> Self {
        let params = &new.spec.sampling;
        let min_total = new.prompt_len.saturating_add(params.min_tokens).min(i32::MAX as u32);
        Self {
            slot: new.slot.cast_signed(),
            token_count: new.tokens.len() as i32,
            prompt_len: new.prompt_len.cast_signed(),
            top_k: params.top_k,
            seed_lo: (params.seed as u32).cast_signed(),
            seed_hi: ((params.seed >> 32) as u32).cast_signed(),
            min_total: min_total.cast_signed(),
            logprobs: params.logprobs.map_or(-1, i32::from),
            stop_count: new.spec.suppressed().len() as i32,
            bias_count: params.logit_bias.len() as i32,
            arena_offset: -1,
        }
    }

    pub(crate) fn of(words: &[i32; Self::WORDS]) -> Self {
        let [
            slot,
            token_count,
            prompt_len,
            top_k,
            seed_lo,
            seed_hi,
            min_total,
            logprobs,
            stop_count,
            bias_count,
            arena_offset,
        ] = *words;
        Self {
            slot,
            token_count,
            prompt_len,
            top_k,
            seed_lo,
            seed_hi,
            min_total,
            logprobs,
            stop_count,
            bias_count,
            arena_offset,
        }
    }

    pub(crate) fn words(self) -> [i32; Self::WORDS] {
        [
            self.slot,
            self.token_count,
            self.prompt_len,
            self.top_k,
            self.seed_lo,
            self.seed_hi,
            self.min_total,
            self.logprobs,
            self.stop_count,
            self.bias_count,
            self.arena_offset,
        ]
    }

    /// The sampling parameters, with the record of floats and the slot's parts of the lists of
    /// biases.
    pub(crate) fn sampling<'a>(
        self,
        floats: &[f32; SLOT_FLOATS],
        bias_ids: &'a [i32],
        bias_values: &'a [f32],
    ) -> SlotSampling<'a> {
        let &[temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty] =
            floats;
        SlotSampling {
            temperature,
            top_p,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            top_k: self.top_k,
            seed: u64::from(self.seed_lo.cast_unsigned())
                | u64::from(self.seed_hi.cast_unsigned()) << 32,
            bias_ids,
            bias_values,
        }
    }

    /// Tokens in the plan itself.
    pub(crate) fn inline(self) -> usize {
        if self.arena_offset < 0 { self.token_count as usize } else { 0 }
    }
}
