//! `POST /completion`, the API of llama.cpp's server.

use std::collections::HashMap;

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::limits::{BIAS, BIASES, Bound, PROMPTS};
use crate::parameter::generation::*;
use crate::parameter::{Line, own, p, refused, tabled};
use crate::prompt::{Prompt, Prompts};
use crate::response::StopReason;
use crate::sampling::{Generation, Limits, check_logprobs, check_total};

/// A completion request to llama.cpp's server.
#[derive(Debug, Default)]
pub struct LlamaRequest {
    generation: GenerationParameters,
    prompt: Prompts,
    n_predict: Option<i64>,
    logit_bias: Option<Value>,
    n_probs: Option<i32>,
    stream: Option<bool>,
    return_tokens: Option<bool>,
}

#[rustfmt::skip]
const LINES: &[Line<LlamaRequest>] = &[
    own("prompt", Bound::Prompts(PROMPTS), "A string, a list of token ids, or a list of several of either.", |r: &mut LlamaRequest, v| v.put(&mut r.prompt)).required(),
    own("n_predict", COUNT_OR_REST, "The largest number of tokens to generate; -1 or absent: the rest of the context.", |r, v| v.put(&mut r.n_predict)),
    p("temperature", TEMPERATURE),
    p("top_k", TOP_K).described("The number of candidates; 0 is off."),
    p("top_p", TOP_P),
    p("min_p", MIN_P),
    p("repeat_penalty", REPETITION_PENALTY),
    p("presence_penalty", PRESENCE_PENALTY),
    p("frequency_penalty", FREQUENCY_PENALTY),
    p("seed", SEED).described("The seed, which makes sampling repeatable; -1: a random one."),
    p("stop", STOP).described("Strings that end the text."),
    p("ignore_eos", IGNORE_EOS),
    own("logit_bias", Bound::Tree, "Numbers that are added to the logits: an object, or a list of pairs of a token id and a number or `false`.", |r, v| v.put(&mut r.logit_bias)),
    own("n_probs", ALTERNATIVES, "Alternatives to return for each token, 0 to 20.", |r, v| v.put(&mut r.n_probs)),
    own("stream", Bound::Flag, "Send chunks as server-sent events.", |r, v| v.put(&mut r.stream)),
    own("return_tokens", Bound::Flag, "Return the ids of the generated tokens.", |r, v| v.put(&mut r.return_tokens)),
    own("cache_prompt", Bound::Flag, "Accepted, without an effect: prompts are always looked up in the prefix cache.", |_, v| v.skip::<Option<bool>>()),
    p("cache_salt", CACHE_SALT),
    refused("grammar"),
    refused("json_schema"),
    refused("image_data"),
    refused("lora"),
];

tabled!(LlamaRequest, "A completion request of llama.cpp's server.", [LINES], generation);

/// A llama.cpp request, checked except for the lengths of the prompts.
#[derive(Debug)]
pub struct ValidLlama {
    /// The list of prompts, which has at least one.
    pub prompts: Vec<Prompt>,
    /// True if the response is a list.
    pub batch: bool,
    /// The generation parameters.
    pub generation: Generation,
    /// True if the response is a stream of server-sent events.
    pub stream: bool,
    /// True if the response includes the ids of the generated tokens.
    pub return_tokens: bool,
}

impl LlamaRequest {
    /// Checks everything that can be checked before the prompts are tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidLlama, ApiError> {
        let max_tokens = match self.n_predict {
            None | Some(..0) => None,
            Some(count) => Some(u32::try_from(count).unwrap_or(u32::MAX)),
        };
        let logprobs = self.n_probs.filter(|&count| count > 0);
        let parameters = GenerationParameters {
            max_tokens,
            seed: self.generation.seed.filter(|&seed| seed >= 0),
            logit_bias: self.logit_bias.map(biases).transpose()?,
            logprobs: logprobs.map(|count| check_logprobs("n_probs", count)).transpose()?,
            ..self.generation
        };
        let batch = self.prompt.is_many();
        let prompts = self.prompt.validate("prompt", limits.vocab_size)?;
        check_total("prompt", prompts.len())?;
        Ok(ValidLlama {
            prompts,
            batch,
            generation: parameters.validate("", defaults, limits)?,
            stream: self.stream.unwrap_or(false),
            return_tokens: self.return_tokens.unwrap_or(false),
        })
    }
}

/// Reads the biases by token id, from either of the two formats. `false` forbids a token.
fn biases(given: Value) -> Result<HashMap<String, f32>, ApiError> {
    const PARAM: &str = "logit_bias";
    /// The smallest bias, which forbids a token.
    const NEVER: f32 = -BIAS as f32;
    let wrong = |at: &str, reason: &str| {
        Err(ApiError::invalid(format!("{PARAM}{at}"), format!("`{PARAM}{at}`: {reason}")))
    };
    let pairs: Vec<(String, Value)> = match given {
        Value::Null => return Ok(HashMap::new()),
        Value::Object(fields) => fields.into_iter().collect(),
        Value::Array(pairs) => {
            let mut all = Vec::with_capacity(pairs.len());
            for (index, pair) in pairs.into_iter().enumerate() {
                match pair {
                    Value::Array(pair) if pair.len() == 2 && pair[0].is_i64() => {
                        all.push((pair[0].to_string(), pair[1].clone()));
                    }
                    _ => {
                        return wrong(&format!("[{index}]"), "must be a token id and its bias");
                    }
                }
            }
            all
        }
        _ => return wrong("", "must be a list of pairs or an object"),
    };
    if pairs.len() > BIASES {
        return wrong("", &format!("more than {BIASES} entries"));
    }
    let mut biases = HashMap::with_capacity(pairs.len());
    for (id, value) in pairs {
        let bias = match value {
            Value::Bool(false) => NEVER,
            value => match value.as_f64() {
                Some(bias) if (-BIAS..=BIAS).contains(&bias) => bias as f32,
                _ => {
                    let reason = format!("must be false or from -{BIAS} to {BIAS}");
                    return wrong(&format!(".{id}"), &reason);
                }
            },
        };
        biases.insert(id, bias);
    }
    Ok(biases)
}

/// An answer of llama.cpp's server, or a chunk of its stream.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct LlamaCompletion {
    /// The index of the prompt.
    pub index: u32,
    /// The text; in a stream, the new text.
    pub content: String,
    /// Ids of the tokens, if requested or in a stream.
    pub tokens: Vec<i32>,
    /// True in the last chunk.
    pub stop: bool,
    /// The fields of the last chunk; `None` before it.
    #[serde(flatten)]
    pub end: Option<LlamaEnd>,
    /// Log-probabilities of the tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_probabilities: Option<Vec<LlamaProbability>>,
}

/// The end of an answer.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct LlamaEnd {
    /// The name of the model.
    pub model: String,
    /// `eos`, `word`, `limit` or `none`.
    pub stop_type: &'static str,
    /// The stop string that was found.
    pub stopping_word: String,
    /// The number of prompt tokens.
    pub tokens_evaluated: u32,
    /// The number of generated tokens.
    pub tokens_predicted: u32,
    /// The number of prompt tokens that were found in the prefix cache.
    pub tokens_cached: u32,
    /// Always false: a prompt that is too long is refused.
    pub truncated: bool,
    /// The times that the request took.
    pub timings: LlamaTimings,
}

/// Times of an answer.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct LlamaTimings {
    /// The number of prompt tokens that were computed.
    pub prompt_n: u32,
    /// The number of prompt tokens that were found in the prefix cache.
    pub cache_n: u32,
    /// The number of generated tokens.
    pub predicted_n: u32,
    /// Milliseconds from the request to the end.
    pub predicted_ms: f64,
    /// Generated tokens for each second of `predicted_ms`.
    pub predicted_per_second: f64,
}

/// The log-probability of a token.
#[derive(Debug, Serialize, ToSchema)]
pub struct LlamaProbability {
    /// The id of the token.
    pub id: i32,
    /// The text of the token.
    pub token: String,
    /// The bytes of the token.
    pub bytes: Vec<u8>,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The most likely tokens, descending.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(no_recursion)]
    pub top_logprobs: Vec<LlamaProbability>,
}

impl LlamaEnd {
    /// Sets why the text ended. `by`: the stop string or token; `None` if the length limit was
    /// reached. `eos`: the token is an end-of-sequence token.
    pub fn stopped(&mut self, by: Option<StopReason>, eos: bool) {
        (self.stop_type, self.stopping_word) = match by {
            None => ("limit", String::new()),
            Some(StopReason::Text(text)) => ("word", text),
            Some(StopReason::Token(_)) if eos => ("eos", String::new()),
            Some(StopReason::Token(_)) => ("word", String::new()),
        };
    }
}

/// A slot, in the form of llama.cpp's server.
#[derive(Debug, Serialize, ToSchema)]
pub struct LlamaSlot {
    /// The index of the slot.
    pub id: u32,
    /// The largest number of positions of a request.
    pub n_ctx: u32,
    /// True if a request is in the slot.
    pub is_processing: bool,
    /// Always false.
    pub speculative: bool,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::sampling::MaxTokens;
    use crate::trial::{LIMITS, request};

    fn validate(body: Value) -> Result<ValidLlama, ApiError> {
        request::<LlamaRequest>(&body)?.validate(&GenerationDefaults::default(), LIMITS)
    }

    #[test]
    fn its_words_are_understood() {
        let valid = validate(json!({
            "prompt": "a", "n_predict": -1, "seed": -1, "repeat_penalty": 1.1, "n_probs": 3,
            "logit_bias": [[5, 1.5], [7, false]], "cache_prompt": true,
        }))
        .unwrap();
        let generation = valid.generation;
        assert_eq!((generation.max_tokens, generation.seed), (MaxTokens::Rest, None));
        assert_eq!(generation.sampling.repetition_penalty, 1.1);
        assert_eq!(generation.sampling.logprobs, Some(3));
        assert_eq!(generation.sampling.logit_bias[..], [(5, 1.5), (7, -100.0)]);
        assert!(!valid.batch && !valid.stream);
        let valid = validate(json!({"prompt": ["a", "b"], "n_predict": 0})).unwrap();
        assert!(valid.batch);
        assert_eq!(valid.generation.max_tokens, MaxTokens::Exactly(0));
        let biases = validate(json!({"prompt": [1], "logit_bias": {"5": -1}})).unwrap();
        assert_eq!(biases.generation.sampling.logit_bias[..], [(5, -1.0)]);
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, param) in [
            (json!({}), "prompt"),
            (json!({"prompt": []}), "prompt"),
            (json!({"prompt": "a", "grammar": "root ::= a"}), "grammar"),
            (json!({"prompt": "a", "json_schema": {"type": "object"}}), "json_schema"),
            (json!({"prompt": "a", "n_probs": 21}), "n_probs"),
            (json!({"prompt": "a", "logit_bias": [[5]]}), "logit_bias[0]"),
            (json!({"prompt": "a", "logit_bias": [["x", 1]]}), "logit_bias[0]"),
            (json!({"prompt": "a", "logit_bias": [[5, "x"]]}), "logit_bias.5"),
            (json!({"prompt": "a", "logit_bias": [[5000, 1]]}), "logit_bias.5000"),
            (json!({"prompt": "a", "logit_bias": 3}), "logit_bias"),
            (json!({"prompt": "a", "temperature": -1}), "temperature"),
        ] {
            let error = validate(body.clone()).unwrap_err();
            assert_eq!(error.body().error.param.as_deref(), Some(param), "{body}");
        }
    }
}
