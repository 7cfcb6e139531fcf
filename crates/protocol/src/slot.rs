//! The parameters of a request's slot: all that the device knows of the request.

use std::sync::Arc;

/// The sampling parameters of a slot. They are part of the device's slot table, and replaced as a
/// whole when a slot is written.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus mass, 1 is off.
    pub top_p: f32,
    /// Number of candidates, 0 is off.
    pub top_k: i32,
    /// Share of the largest probability below which tokens are dropped, 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of seen tokens, 1 is off (Keskar et al.
    /// 2019).
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each generated token.
    pub presence_penalty: f32,
    /// Subtracted per occurrence from the logit of each generated token.
    pub frequency_penalty: f32,
    /// With the position, the only source of randomness.
    pub seed: u64,
    /// Generated tokens before a stop id may be sampled.
    pub min_tokens: u32,
    /// `None`: no log-probabilities; `Some(n)`: of the sampled token and the `n` most likely.
    pub logprobs: Option<u8>,
    /// Added to the logits, by token id. The choices of a client's request share it.
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

/// The parameters of a prompt that is to become a vector, in place of sampling parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pooling {
    /// The position at which the second text of a pair begins; 0: the prompt is one text.
    pub segment: u32,
}

/// The facts about a request, beside its tokens, that the device must know; written with its slot.
/// A new kind of parameter is a field here and a column of the plan.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SlotSpec {
    /// The sampling parameters. `seed` is always set, at random if the client gave none.
    pub sampling: SamplingParams,
    /// Token ids that end the request: end-of-sequence (unless ignored) and the client's
    /// `stop_token_ids`; ascending, each once.
    pub stop_ids: Arc<[i32]>,
    /// One vector is made of the prompt, and nothing is generated. For models that pool, and no
    /// others.
    pub pooling: Option<Pooling>,
    /// Byte offset in the arena of embeddings that stand for the prompt's tokens, one row of
    /// `hidden_size` elements each. Its blocks are nobody's but its own: they have no name, because
    /// its tokens do not say what is in them.
    pub embeds: Option<u32>,
}

impl SlotSpec {
    /// Stop ids that the hand must know: those that it suppresses.
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
    /// Prompt and, for a replayed or preempted request, what was generated so far.
    pub tokens: &'a [i32],
    /// The number of `tokens` that are the prompt.
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

/// The sampling parameters of a new slot, as they stand in a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotSampling<'a> {
    /// As [`SamplingParams`] have it.
    pub temperature: f32,
    /// As above.
    pub top_p: f32,
    /// As above.
    pub min_p: f32,
    /// As above.
    pub repetition_penalty: f32,
    /// As above.
    pub presence_penalty: f32,
    /// As above.
    pub frequency_penalty: f32,
    /// As above.
    pub top_k: i32,
    /// As above.
    pub seed: u64,
    /// Token ids whose logits something is added to.
    pub bias_ids: &'a [i32],
    /// The added values, one an id.
    pub bias_values: &'a [f32],
}

/// A new slot as it stands in a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotWrite<'a> {
    /// Row of the device tables.
    pub slot: u32,
    /// Its tokens; empty where they are in the arena.
    pub tokens: &'a [i32],
    /// The number of tokens, in the plan or in the arena.
    pub token_count: u32,
    /// Byte offset in the arena of its tokens; `None`: they are in the plan.
    pub arena_offset: Option<u32>,
    /// The sampling parameters.
    pub sampling: SlotSampling<'a>,
    /// The number of tokens that are the prompt.
    pub prompt_len: u32,
    /// Below this position `stop_ids` can't be sampled.
    pub min_total: u32,
    /// Empty when `min_tokens` is 0.
    pub stop_ids: &'a [i32],
    /// Log-probabilities asked for.
    pub logprobs: Option<u8>,
    /// The only ids that can be sampled; `None`: all.
    pub allowed: Option<&'a [i32]>,
    /// The position at which the second text of a pair begins; 0: the prompt is one text.
    pub segment: u32,
    /// Byte offset in the arena of the prompt's embeddings, which stand for its tokens' own.
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

    /// Of a slot whose tokens are in the plan.
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

    /// With its record of floats and its parts of the lists of biases.
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
