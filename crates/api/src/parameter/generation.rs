//! The generation parameters that several APIs share. Each has a bound, a description, a target
//! field, and a mapping to the sampling parameters of a slot.
//!
//! An API accepts such a parameter by a line in its table.

use std::collections::HashMap;

use forebay_engine::PromptTail;
use forebay_protocol::SamplingParams;
use serde::Serialize;

use super::{Parameter, TEXT};
pub(crate) use crate::limits::bounds::*;
use crate::limits::{
    ALLOWED_IDS, BAD_WORD_BYTES, BAD_WORDS, BIASES, Bound, CACHE_SALT_BYTES, CHOICES,
    ROUTING_KEY_BYTES, STOP_BYTES, STOP_IDS, STOPS,
};
use crate::prompt::Strings;
use crate::structure::Spellings;

/// Older names of `use_activation`.
pub(crate) const ACTIVATIONS: &[&str] = &["activation", "softmax"];
const PENALTY: Bound = Bound::Number { least: -2.0, most: 2.0 };

pub(crate) const TEMPERATURE: Parameter = Parameter::new(Bound::Number { least: 0.0, most: f32::MAX as f64 }, "The temperature; 0 is greedy.", |g, v| v.put(&mut g.temperature));
pub(crate) const TOP_P: Parameter = Parameter::new(Bound::Number { least: 0.0, most: 1.0 }, "The share of probability that is kept (nucleus sampling); 0 is greedy.", |g, v| v.put(&mut g.top_p));
pub(crate) const TOP_K: Parameter = Parameter::new(Bound::Amount { least: -1.0, most: i32::MAX as f64 }, "The number of candidates; -1 or 0 is off.", |g, v| v.put(&mut g.top_k));
pub(crate) const MIN_P: Parameter = Parameter::new(Bound::Number { least: 0.0, most: 1.0 }, "The share of the largest probability below which tokens are dropped.", |g, v| v.put(&mut g.min_p));
pub(crate) const SEED: Parameter = Parameter::new(SEEDS, "The seed, which makes sampling repeatable.", |g, v| v.put(&mut g.seed));
pub(crate) const N: Parameter = Parameter::new(Bound::Number { least: 1.0, most: CHOICES as f64 }, "Choices to generate for each prompt.", |g, v| v.put(&mut g.n));
pub(crate) const PRESENCE_PENALTY: Parameter = Parameter::new(PENALTY, "A number that is subtracted from the logits of generated tokens.", |g, v| v.put(&mut g.presence_penalty));
pub(crate) const FREQUENCY_PENALTY: Parameter = Parameter::new(PENALTY, "A number that is subtracted from the logits of generated tokens, for each occurrence.", |g, v| v.put(&mut g.frequency_penalty));
// Logits are multiplied or divided by this value. Extreme values would make them infinite or NaN.
pub(crate) const REPETITION_PENALTY: Parameter = Parameter::new(Bound::Number { least: 1e-3, most: 1e3 }, "A number that divides positive logits of earlier tokens, and multiplies negative ones.", |g, v| v.put(&mut g.repetition_penalty));
pub(crate) const LOGIT_BIAS: Parameter = Parameter::new(Bound::Biases(BIASES), "Numbers that are added to the logits, by token id.", |g, v| v.put(&mut g.logit_bias));
pub(crate) const ALLOWED_TOKEN_IDS: Parameter = Parameter::new(Bound::Ids(ALLOWED_IDS), "The only token ids that may be sampled.", |g, v| v.put(&mut g.allowed_token_ids));
pub(crate) const STOP: Parameter = Parameter::new(Bound::Strings { count: STOPS, each: STOP_BYTES, total: STOP_BYTES }, "A string or a list of strings that end the text.", |g, v| v.put(&mut g.stop));
pub(crate) const STOP_TOKEN_IDS: Parameter = Parameter::new(Bound::Ids(STOP_IDS), "Token ids that end the text.", |g, v| v.put(&mut g.stop_token_ids));
pub(crate) const INCLUDE_STOP: Parameter = Parameter::new(Bound::Flag, "Keep the stop string in the output.", |g, v| v.put(&mut g.include_stop));
pub(crate) const IGNORE_EOS: Parameter = Parameter::new(Bound::Flag, "Continue after an end-of-sequence token.", |g, v| v.put(&mut g.ignore_eos));
pub(crate) const SKIP_SPECIAL_TOKENS: Parameter = Parameter::new(Bound::Flag, "Leave special tokens out of the text.", |g, v| v.put(&mut g.skip_special_tokens)).note("Marks of calls and reasoning are parsed all the same.");
pub(crate) const SPACES_BETWEEN_SPECIAL_TOKENS: Parameter = Parameter::new(Bound::Flag, "Accepted, without an effect: tokenizers with fast detokenisation have no such spaces.", |_, v| v.skip::<Option<bool>>());
pub(crate) const MAX_TOKENS: Parameter = Parameter::new(count(0), "The largest number of tokens to generate.", |g, v| v.put(&mut g.max_tokens));
pub(crate) const MIN_TOKENS: Parameter = Parameter::new(count(0), "Tokens to generate before a stop string or stop token counts.", |g, v| v.put(&mut g.min_tokens));
pub(crate) const PRIORITY: Parameter = Parameter::new(I32, "The priority; larger is sooner, under the priority policy.", |g, v| v.put(&mut g.priority));
pub(crate) const STREAM_INTERVAL: Parameter = Parameter::new(count(1), "The number of tokens per chunk of the stream; the server's flag if absent. The first token does not wait.", |g, v| v.put(&mut g.stream_interval));
pub(crate) const ROUTING_KEY: Parameter = Parameter::new(Bound::Text(ROUTING_KEY_BYTES), "Requests with the same key are computed by the same replica.", |g, v| v.put(&mut g.routing_key));
pub(crate) const ROUTED_DP_RANK: Parameter = Parameter::new(I64, "The number of the replica for the request; `data_parallel_rank` is its older name.", |g, v| v.put(&mut g.routed_dp_rank)).also(&["data_parallel_rank"]);
pub(crate) const CACHE_SALT: Parameter = Parameter::new(Bound::Text(CACHE_SALT_BYTES), "Blocks of the prompt are shared only with requests of the same salt, 1 to 256 bytes.", |g, v| v.put(&mut g.cache_salt));
pub(crate) const BAD_WORDS_LIST: Parameter = Parameter::new(Bound::Strings { count: BAD_WORDS, each: STOP_BYTES, total: BAD_WORD_BYTES }, "Words that must not appear in the answer.", |g, v| v.put(&mut g.bad_words));
pub(crate) const THINKING_BUDGET: Parameter = Parameter::new(COUNT_OR_ALL, "The largest number of tokens of the reasoning before the answer. Then the reasoning is ended. -1: without a limit.", |g, v| v.put(&mut g.thinking_budget)).also(&["thinking_token_budget", "reasoning_budget"]).note("Also `thinking_token_budget`, `reasoning_budget`.");
pub(crate) const JSON_SCHEMA: Parameter = Parameter::new(SOURCE, "The form of the answer: a JSON schema, as text or as an object.", |g, v| v.put(&mut g.structure.json_schema)).shown(TEXT);
pub(crate) const REGEX: Parameter = Parameter::new(PATTERN, "The form of the answer: a regular expression.", |g, v| v.put(&mut g.structure.regex));
pub(crate) const EBNF: Parameter = Parameter::new(GRAMMAR, "The form of the answer: a grammar in GBNF.", |g, v| v.put(&mut g.structure.ebnf));
pub(crate) const STRUCTURAL_TAG: Parameter = Parameter::new(SOURCE, "The form of the answer: a structural tag, as text or as an object.", |g, v| v.put(&mut g.structure.structural_tag)).shown(TEXT);

/// The generation parameters as the client gave them, independent of the API.
#[derive(Debug, Default)]
pub(crate) struct GenerationParameters {
    pub(crate) max_tokens: Option<u32>,
    /// The default number of tokens to generate.
    pub(crate) default_max_tokens: Option<u32>,
    pub(crate) min_tokens: Option<u32>,
    pub(crate) n: Option<u32>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<i32>,
    pub(crate) min_p: Option<f32>,
    pub(crate) seed: Option<i128>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) logit_bias: Option<HashMap<String, f32>>,
    pub(crate) allowed_token_ids: Option<Vec<i32>>,
    pub(crate) stop: Option<Strings>,
    pub(crate) include_stop: Option<bool>,
    pub(crate) stop_token_ids: Option<Vec<i32>>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) skip_special_tokens: Option<bool>,
    pub(crate) priority: Option<i32>,
    pub(crate) stream_interval: Option<u32>,
    pub(crate) routing_key: Option<String>,
    pub(crate) routed_dp_rank: Option<i64>,
    pub(crate) cache_salt: Option<String>,
    pub(crate) bad_words: Option<Strings>,
    /// The largest number of reasoning tokens; -1: no limit.
    pub(crate) thinking_budget: Option<i64>,
    pub(crate) structure: Spellings,
    /// Checked by [`check_logprobs`](crate::sampling::check_logprobs).
    pub(crate) logprobs: Option<u8>,
    /// Checked by [`check_logprobs`](crate::sampling::check_logprobs) as well.
    pub(crate) prompt_logprobs: Option<PromptTail>,
}

impl GenerationParameters {
    /// Returns the sampling parameters, with `defaults` for absent ones. Lists of ids and the seed
    /// are set elsewhere.
    pub(crate) fn sampling(&self, defaults: &GenerationDefaults) -> SamplingParams {
        // A `top_p` of 0 leaves only the most likely token.
        let is_greedy = self.top_p == Some(0.0);
        let top_p = self.top_p.filter(|_| !is_greedy);
        let temperature = self.temperature.filter(|_| !is_greedy).or(defaults.temperature);
        SamplingParams {
            temperature: if is_greedy { 0.0 } else { temperature.unwrap_or(1.0) },
            top_p: top_p.or(defaults.top_p.filter(|_| !is_greedy)).unwrap_or(1.0),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(0).max(0),
            min_p: self.min_p.or(defaults.min_p).unwrap_or(0.0),
            repetition_penalty: self
                .repetition_penalty
                .or(defaults.repetition_penalty)
                .unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            min_tokens: self.min_tokens.unwrap_or(0),
            logprobs: self.logprobs,
            ..SamplingParams::default()
        }
    }
}

/// The values of the model's `generation_config.json`, used for absent parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct GenerationDefaults {
    /// The default of `temperature`.
    pub temperature: Option<f32>,
    /// The default of `top_p`.
    pub top_p: Option<f32>,
    /// The default of `top_k`.
    pub top_k: Option<i32>,
    /// The default of `min_p`.
    pub min_p: Option<f32>,
    /// The default of `repetition_penalty`.
    pub repetition_penalty: Option<f32>,
}
