//! Validates the generation parameters of a request.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_engine::{Preference, PromptTail};
use forebay_protocol::SamplingParams;

use crate::error::ApiError;
use crate::limits::{LOGPROBS, TOTAL_CHOICES};
use crate::parameter::generation::{GenerationDefaults, GenerationParameters};
use crate::preference::preference;
use crate::prompt::{Strings, in_vocabulary};
use crate::salt::check_salt;
use crate::structure::Structure;

/// The limits on a request that follow from the model and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The largest number of positions of a request, prompt and generated tokens together.
    pub context_length: u32,
    /// The largest number of positions of a prompt. It is smaller than `context_length` if outputs
    /// may exceed the device's memory; prompts may not.
    pub prompt_length: u32,
    /// The size of the vocabulary. Token ids are below it.
    pub vocab_size: u32,
    /// The number of replicas. Replica indices are below it.
    pub replicas: u32,
    /// The largest number of images of a request; 0 means that the model takes none.
    pub images: u32,
}

/// The limit on the tokens to generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaxTokens {
    /// The client's limit. If the context has less room, the limit is reduced and a header reports
    /// it.
    Exactly(u32),
    /// A default limit, which is reduced if the context has less room.
    AtMost(u32),
    /// The rest of the context.
    Rest,
}

/// A validated request without its prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// The sampling parameters; [`Generation::params`] sets the seed.
    pub sampling: SamplingParams,
    /// The client's seed.
    pub seed: Option<u64>,
    /// The number of choices per prompt.
    pub n: u32,
    /// The limit on the tokens to generate.
    pub max_tokens: MaxTokens,
    /// Strings that end the text. None of them is empty.
    pub stop: Vec<String>,
    /// True if the stop string, or the text of the stop token, stays in the output.
    pub include_stop: bool,
    /// Token ids that end the text besides end-of-sequence; ascending, without duplicates.
    pub stop_token_ids: Vec<i32>,
    /// True if end-of-sequence tokens do not end the text.
    pub ignore_eos: bool,
    /// True if special tokens are left out of the text.
    pub skip_special_tokens: bool,
    /// The priority. Under the priority policy, a larger value is scheduled earlier.
    pub priority: i32,
    /// The number of tokens per chunk of a stream, at least one; `None` for the server's default.
    pub stream_interval: Option<u32>,
    /// The preference for a replica.
    pub preference: Preference,
    /// The salt. Cached blocks are shared only between requests with the same salt.
    pub cache_salt: Option<Arc<str>>,
    /// The grammar or schema of the output; `None` for free text.
    pub structure: Option<Structure>,
    /// Words that the output must not contain. None of them is empty.
    pub bad_words: Vec<String>,
    /// The largest number of reasoning tokens before the answer.
    pub thinking_budget: Option<u32>,
    /// Which log-probabilities of each prompt are requested. The first choice of a prompt reports
    /// them.
    pub prompt_logprobs: Option<PromptTail>,
}

impl Generation {
    /// Returns how many tokens to generate after a prompt of `prompt` tokens. `param` is the
    /// parameter with the prompt.
    ///
    /// # Errors
    /// The prompt is empty, or the context has no room for the prompt and the least output.
    pub fn room(
        &self,
        prompt: usize,
        limits: Limits,
        param: &'static str,
    ) -> Result<u32, ApiError> {
        if prompt == 0 {
            return Err(ApiError::invalid(param, format!("`{param}`: the prompt has no tokens")));
        }
        let limit = limits.context_length;
        let error = |max_tokens| ApiError::ContextLength { param, limit, prompt, max_tokens };
        let used = u32::try_from(prompt).unwrap_or(u32::MAX);
        if (limits.prompt_length..limit).contains(&used.saturating_sub(1)) {
            let most = limits.prompt_length;
            let reason = format!(
                "`{param}`: {prompt} tokens, but a prompt may have {most}: all of it has to be on the device at once"
            );
            return Err(ApiError::invalid(param, reason));
        }
        let room = limit.saturating_sub(used);
        let tokens = match self.max_tokens {
            MaxTokens::Exactly(0) if used <= limit => 0,
            _ if room == 0 => return Err(error(None)),
            MaxTokens::Exactly(wanted) | MaxTokens::AtMost(wanted) => wanted.min(room),
            MaxTokens::Rest => room,
        };
        let least = self.sampling.min_tokens;
        if least > tokens {
            let reason =
                format!("{least} is more than the {tokens} tokens that are left to generate");
            return Err(out_of_range("min_tokens", reason));
        }
        Ok(tokens)
    }

    /// Returns the sampling parameters of one choice of a request whose seed is `seed`.
    pub fn params(&self, seed: u64, choice: u32) -> SamplingParams {
        SamplingParams { seed: choice_seed(seed, choice), ..self.sampling.clone() }
    }

    /// Returns the ids that end the request in the engine, ascending and without duplicates. All
    /// choices of the request share them.
    pub fn stop_ids(&self, eos: &[i32]) -> Arc<[i32]> {
        let eos = if self.ignore_eos { &[] } else { eos };
        ascending([eos, &self.stop_token_ids].concat()).into()
    }
}

/// Sorts the ids and removes duplicates.
fn ascending(mut ids: Vec<i32>) -> Vec<i32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Derives the seed of choice `choice` from the request's seed. Choice 0 uses the request's seed
/// itself, as a request with one choice does.
pub fn choice_seed(seed: u64, choice: u32) -> u64 {
    if choice == 0 {
        return seed;
    }
    // The finaliser of splitmix64 (Steele, Lea, Flood 2014), so that seeds of neighbouring choices
    // are unrelated.
    let z = seed ^ u64::from(choice).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl GenerationParameters {
    /// Checks the model's limits, and combinations of parameters. Each single parameter is already
    /// within its bound ([`crate::limits`]). Absent parameters take their values from `defaults`.
    /// `prefix` is the path of the object with the parameters, with a trailing dot.
    pub(crate) fn validate(
        self,
        prefix: &str,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<Generation, ApiError> {
        let sampling = self.sampling(defaults);
        let max_tokens = match (self.max_tokens, self.default_max_tokens) {
            (Some(wanted), _) => MaxTokens::Exactly(wanted),
            (None, Some(default)) => MaxTokens::AtMost(default),
            (None, None) => MaxTokens::Rest,
        };
        let min_tokens = sampling.min_tokens;
        if let MaxTokens::Exactly(most) | MaxTokens::AtMost(most) = max_tokens
            && min_tokens > most
        {
            let reason = format!("{min_tokens} is more than the {most} tokens to generate");
            return Err(out_of_range(&format!("{prefix}min_tokens"), reason));
        }
        let stop = filled(self.stop, &format!("{prefix}stop"))?;
        let bad_words = filled(self.bad_words, &format!("{prefix}bad_words"))?;
        let stop_token_ids = self.stop_token_ids.unwrap_or_default();
        check_ids(&format!("{prefix}stop_token_ids"), &stop_token_ids, limits)?;
        if let Some(allowed) = &self.allowed_token_ids {
            let param = format!("{prefix}allowed_token_ids");
            check_ids(&param, allowed, limits)?;
            if allowed.is_empty() {
                return Err(out_of_range(&param, "must not be empty".to_owned()));
            }
        }
        let key = ("routing_key", self.routing_key.as_deref());
        let preference = preference(key, ("routed_dp_rank", self.routed_dp_rank), limits)?;
        let logit_bias = biases(prefix, self.logit_bias.unwrap_or_default(), limits)?;
        let allowed = self.allowed_token_ids.map(|ids| ascending(ids).into());
        Ok(Generation {
            sampling: SamplingParams { logit_bias, allowed, ..sampling },
            // A negative seed is read as its unsigned 64-bit value (two's complement).
            seed: self.seed.map(|seed| seed as u64),
            n: self.n.unwrap_or(1),
            max_tokens,
            stop,
            include_stop: self.include_stop.unwrap_or(false),
            stop_token_ids: ascending(stop_token_ids),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
            priority: self.priority.unwrap_or(0),
            stream_interval: self.stream_interval,
            preference,
            cache_salt: check_salt(self.cache_salt.as_deref())?,
            structure: self.structure.resolve(prefix)?,
            bad_words,
            thinking_budget: self.thinking_budget.and_then(|budget| u32::try_from(budget).ok()),
            prompt_logprobs: self.prompt_logprobs,
        })
    }
}

/// Returns the strings, or an error if one of them is empty.
fn filled(strings: Option<Strings>, param: &str) -> Result<Vec<String>, ApiError> {
    let strings = strings.unwrap_or_default().0;
    match strings.iter().position(String::is_empty) {
        Some(index) => {
            Err(out_of_range(&format!("{param}[{index}]"), "must not be empty".to_owned()))
        }
        None => Ok(strings),
    }
}

fn check_ids(param: &str, ids: &[i32], limits: Limits) -> Result<(), ApiError> {
    let beyond = |id: &i32| !in_vocabulary(*id, limits.vocab_size);
    let Some(index) = ids.iter().position(beyond) else { return Ok(()) };
    let reason = format!("token id {} is not below {}", ids[index], limits.vocab_size);
    Err(out_of_range(&format!("{param}[{index}]"), reason))
}

fn out_of_range(param: &str, reason: String) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {reason}"))
}

/// Returns the biases sorted by token id, so that equal requests give equal plans.
fn biases(
    prefix: &str,
    given: HashMap<String, f32>,
    limits: Limits,
) -> Result<Arc<[(i32, f32)]>, ApiError> {
    let mut biases = Vec::with_capacity(given.len());
    for (key, bias) in given {
        let param = || format!("{prefix}logit_bias.{key}");
        let id = key.parse().ok().filter(|&id| in_vocabulary(id, limits.vocab_size));
        let Some(id) = id else {
            let reason = format!("the key is not a token id below {}", limits.vocab_size);
            return Err(out_of_range(&param(), reason));
        };
        biases.push((id, bias));
    }
    biases.sort_by_key(|&(id, _)| id);
    Ok(biases.into())
}

/// Checks the total number of choices of all prompts of a request.
pub(crate) fn check_total(param: &str, choices: usize) -> Result<(), ApiError> {
    if choices > TOTAL_CHOICES {
        let reason = format!("{choices} choices in all are more than {TOTAL_CHOICES}");
        return Err(out_of_range(param, reason));
    }
    Ok(())
}

/// Requests log-probabilities of the whole prompt except its first token, which no token precedes.
pub(crate) fn whole_prompt(most: u8) -> PromptTail {
    PromptTail { first: 1, most }
}

/// Checks the requested number of alternatives.
pub(crate) fn check_logprobs(param: &str, count: i32) -> Result<u8, ApiError> {
    u8::try_from(count)
        .ok()
        .filter(|&count| count <= LOGPROBS)
        .ok_or_else(|| out_of_range(param, format!("{count} is not between 0 and {LOGPROBS}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::trial::LIMITS;

    fn validate(parameters: GenerationParameters) -> Result<Generation, ApiError> {
        parameters.validate("", &GenerationDefaults::default(), LIMITS)
    }

    fn fields() -> GenerationParameters {
        GenerationParameters::default()
    }

    #[test]
    fn what_the_model_decides_is_checked_and_named() {
        let bias = |key: &str, value| Some(HashMap::from([(key.to_owned(), value)]));
        let cases = [
            (
                GenerationParameters { max_tokens: Some(3), min_tokens: Some(4), ..fields() },
                "min_tokens",
            ),
            (GenerationParameters { routed_dp_rank: Some(2), ..fields() }, "routed_dp_rank"),
            (GenerationParameters { routed_dp_rank: Some(-1), ..fields() }, "routed_dp_rank"),
            (GenerationParameters { routing_key: Some(String::new()), ..fields() }, "routing_key"),
            (
                GenerationParameters { stop: Some(Strings(vec![String::new()])), ..fields() },
                "stop[0]",
            ),
            (
                GenerationParameters { stop_token_ids: Some(vec![1, 1000]), ..fields() },
                "stop_token_ids[1]",
            ),
            (
                GenerationParameters { allowed_token_ids: Some(vec![1000, 7]), ..fields() },
                "allowed_token_ids[0]",
            ),
            (
                GenerationParameters { allowed_token_ids: Some(vec![]), ..fields() },
                "allowed_token_ids",
            ),
            (GenerationParameters { logit_bias: bias("1000", 1.0), ..fields() }, "logit_bias.1000"),
            (GenerationParameters { logit_bias: bias("x", 1.0), ..fields() }, "logit_bias.x"),
        ];
        for (fields, expected) in cases {
            match validate(fields) {
                Err(ApiError::Invalid { param, .. }) => assert_eq!(param, expected),
                other => panic!("{expected}: {other:?}"),
            }
        }
        assert!(check_logprobs("logprobs", 21).is_err());
        assert!(check_logprobs("logprobs", -1).is_err());
        assert_eq!(check_logprobs("logprobs", 20), Ok(20));
    }

    #[test]
    fn the_least_has_to_fit_the_room_too() {
        let generation =
            validate(GenerationParameters { min_tokens: Some(50), ..fields() }).unwrap();
        let room = LIMITS.context_length as usize;
        assert_eq!(generation.room(room - 50, LIMITS, "prompt"), Ok(50));
        match generation.room(room - 49, LIMITS, "prompt") {
            Err(ApiError::Invalid { param, .. }) => assert_eq!(param, "min_tokens"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn defaults_give_way_to_the_client() {
        let defaults = GenerationDefaults {
            temperature: Some(0.6),
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: None,
            repetition_penalty: Some(1.1),
        };
        let fields = GenerationParameters { top_k: Some(-1), temperature: Some(0.0), ..fields() };
        let sampling = fields.validate("", &defaults, LIMITS).unwrap().sampling;
        assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.0, 0.9, 0));
        assert_eq!(sampling.repetition_penalty, 1.1);
    }

    #[test]
    fn biases_are_sorted() {
        let given = (0..50).map(|id: i32| (id.to_string(), id as f32)).collect();
        let generation =
            validate(GenerationParameters { logit_bias: Some(given), ..fields() }).unwrap();
        let ids: Vec<i32> = generation.sampling.logit_bias.iter().map(|&(id, _)| id).collect();
        assert_eq!(ids, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn stop_ids_are_eos_and_the_clients() {
        let mut generation =
            validate(GenerationParameters { stop_token_ids: Some(vec![5, 2, 5]), ..fields() })
                .unwrap();
        assert_eq!(generation.stop_ids(&[3, 2])[..], [2, 3, 5]);
        generation.ignore_eos = true;
        assert_eq!(generation.stop_ids(&[2, 3])[..], [2, 5]);
    }

    #[test]
    fn choices_have_different_seeds() {
        let seeds: std::collections::HashSet<u64> = (0..128).map(|i| choice_seed(42, i)).collect();
        assert_eq!(seeds.len(), 128);
        assert_eq!(choice_seed(42, 0), 42);
    }

    proptest! {
        #[test]
        fn room_never_exceeds_the_context(
            prompt in 0usize..300,
            wanted in prop_oneof![
                (1u32..300).prop_map(MaxTokens::Exactly),
                (1u32..300).prop_map(MaxTokens::AtMost),
                Just(MaxTokens::Rest),
            ],
        ) {
            let mut generation = validate(fields()).unwrap();
            generation.max_tokens = wanted;
            match generation.room(prompt, LIMITS, "prompt") {
                Ok(room) => {
                    let left = LIMITS.context_length - prompt as u32;
                    prop_assert!(room >= 1 && prompt >= 1);
                    match wanted {
                        MaxTokens::Exactly(wanted) | MaxTokens::AtMost(wanted) => {
                            prop_assert_eq!(room, wanted.min(left));
                        }
                        MaxTokens::Rest => prop_assert_eq!(room, left),
                    }
                }
                Err(_) => {
                    prop_assert!(prompt == 0 || prompt as u32 >= LIMITS.context_length);
                }
            }
        }
    }
}
