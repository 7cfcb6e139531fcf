//! `POST /v1/completions`.

use super::shared::{Shared, Shares};
use crate::chat::{Streaming, TokenOutput};
use crate::embeds::PromptEmbeds;
use crate::error::ApiError;
use crate::limits::{Bound, CHOICES, PROMPTS};
use crate::parameter::generation::{ALTERNATIVES, GenerationDefaults, GenerationParameters};
use crate::parameter::{Line, own, refused, tabled};
use crate::prompt::{Prompt, Prompts};
use crate::sampling::{Generation, Limits, check_logprobs, check_total, whole_prompt};

/// The number of tokens that the legacy API generates if the client sets no limit.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A completion request.
#[derive(Debug, Default)]
pub struct CompletionRequest {
    shared: Shared,
    prompt: Option<Prompts>,
    prompt_embeds: PromptEmbeds,
    echo: Option<bool>,
    logprobs: Option<i32>,
    best_of: Option<u32>,
}

#[rustfmt::skip]
const OWN: &[Line<CompletionRequest>] = &[
    own("prompt", Bound::Prompts(PROMPTS), "A string, a list of strings, a list of token ids, or a list of lists of token ids.", |r, v| v.put(&mut r.prompt)),
    own("prompt_embeds", Bound::Embeds(PROMPTS), "Embeddings in place of `prompt`: the bytes of a safetensors file in base64, or a list of such files. Each file has one tensor `[positions, hidden size]`.", |r, v| v.put(&mut r.prompt_embeds)),
    own("echo", Bound::Flag, "Repeat the prompt at the head of the text.", |r: &mut CompletionRequest, v| v.put(&mut r.echo)).note("With `logprobs` the prompt's tokens are in the lists too; see below."),
    own("logprobs", ALTERNATIVES, "Alternatives to return for each token, 0 to 20. With `echo` the prompt's tokens have them too. Absent: no log-probabilities.", |r, v| v.put(&mut r.logprobs)),
    own("best_of", Bound::Number { least: 0.0, most: CHOICES as f64 }, "Choices to generate for each prompt, of which the `n` most likely are returned. Not in a stream, unless it equals `n`.", |r, v| v.put(&mut r.best_of)),
    refused("suffix"),
];

tabled!(
    CompletionRequest,
    "A completion request.",
    [OWN, CompletionRequest::SHARED],
    shared.generation
);

impl Shares for CompletionRequest {
    fn shared(&mut self) -> &mut Shared {
        &mut self.shared
    }
}

/// The prompts of a completion request.
#[derive(Debug, PartialEq)]
pub enum CompletionPrompts {
    /// Prompts as texts and token ids.
    Prompts(Vec<Prompt>),
    /// Prompts as embeddings, which are not checked yet.
    Embeds(PromptEmbeds),
}

/// A completion request, checked except for the lengths of the prompts.
#[derive(Debug)]
pub struct ValidCompletion {
    /// The list of prompts, which has at least one.
    pub prompts: CompletionPrompts,
    /// True if the tokenizer adds its special tokens to text prompts.
    pub add_special_tokens: bool,
    /// True if the response's text begins with the prompt's text.
    pub echo: bool,
    /// The number of choices to return per prompt. More may be generated.
    pub n: u32,
    /// The number of alternatives in each token's log-probabilities, with `echo` also for the
    /// prompt's tokens. `None` if log-probabilities are not requested.
    pub logprobs: Option<u8>,
    /// The number of alternatives in the log-probabilities of the prompt, which are returned in a
    /// separate field. `None` if they are not requested.
    pub prompt_logprobs: Option<u8>,
    /// How tokens are returned in addition to their text.
    pub tokens: TokenOutput,
    /// The generation parameters.
    pub generation: Generation,
    /// The options of the stream; `None` for a single response.
    pub streaming: Option<Streaming>,
}

impl CompletionRequest {
    /// Returns the name of the requested model.
    #[must_use]
    pub fn model(&self) -> Option<&str> {
        self.shared.model.as_deref()
    }

    /// Checks everything that can be checked before the prompts are tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        mut self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidCompletion, ApiError> {
        let n = self.shared.generation.n.unwrap_or(1);
        let best_of = self.best_of.filter(|&best_of| best_of > 0).unwrap_or(n);
        let wrong =
            |reason: &str| Err(ApiError::invalid("best_of", format!("`best_of`: {reason}")));
        if best_of < n {
            return wrong("must not be less than `n`");
        }
        if best_of > n && self.shared.stream == Some(true) {
            return wrong("a stream can't know which choices will be the most likely");
        }
        let echo = self.echo.unwrap_or(false);
        let logprobs = self.logprobs.map(|count| check_logprobs("logprobs", count)).transpose()?;
        let apart = self.shared.prompt_alternatives()?;
        let parameters = GenerationParameters {
            logprobs,
            prompt_logprobs: logprobs.filter(|_| echo).max(apart).map(whole_prompt),
            default_max_tokens: Some(DEFAULT_MAX_TOKENS),
            ..std::mem::take(&mut self.shared.generation)
        };
        let mut generation = parameters.validate("", defaults, limits)?;
        if best_of > n {
            generation.n = best_of;
            // The generated choices are ranked by their log-probabilities.
            generation.sampling.logprobs.get_or_insert(0);
        }
        let (prompts, param, count) = if self.prompt_embeds.is_empty() {
            let given = self.prompt.ok_or_else(|| {
                ApiError::invalid("prompt", "one of `prompt` and `prompt_embeds` is needed")
            })?;
            let prompts = given.validate("prompt", limits.vocab_size)?;
            let count = prompts.len();
            (CompletionPrompts::Prompts(prompts), "prompt", count)
        } else {
            // Some clients always send `prompt`, and leave it empty if they send embeddings.
            if self.prompt.as_ref().is_some_and(|prompt| !prompt.is_empty()) {
                return Err(ApiError::invalid(
                    "prompt_embeds",
                    "`prompt_embeds` and `prompt` exclude each other",
                ));
            }
            if echo {
                return Err(ApiError::invalid("echo", "`echo`: embeddings have no text"));
            }
            if apart.is_some() {
                return Err(ApiError::invalid(
                    "prompt_logprobs",
                    "`prompt_logprobs`: embeddings have no tokens",
                ));
            }
            let count = self.prompt_embeds.len();
            (CompletionPrompts::Embeds(self.prompt_embeds), "prompt_embeds", count)
        };
        check_total(param, count.saturating_mul(generation.n as usize))?;
        Ok(ValidCompletion {
            generation,
            n,
            logprobs,
            prompt_logprobs: apart,
            tokens: self.shared.tokens(),
            streaming: self.shared.streaming()?,
            add_special_tokens: self.shared.add_special_tokens.unwrap_or(true),
            echo,
            prompts,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::sampling::MaxTokens;
    use crate::trial::{LIMITS, request, with};

    fn validate(more: Value) -> Result<ValidCompletion, ApiError> {
        let request = request::<CompletionRequest>(&with(json!({"prompt": "once"}), &more))?;
        request.validate(&GenerationDefaults::default(), LIMITS)
    }

    #[test]
    fn legacy_defaults() {
        let completion = validate(json!({"best_of": 1, "suffix": null})).unwrap();
        assert_eq!(completion.generation.max_tokens, MaxTokens::AtMost(16));
        let once = vec![Prompt::Text("once".into())];
        assert_eq!(completion.prompts, CompletionPrompts::Prompts(once));
        assert!(completion.add_special_tokens && !completion.echo);
    }

    #[test]
    fn what_is_not_served_is_named() {
        let cases = [
            (json!({"suffix": "x"}), "suffix"),
            (json!({"n": 3, "best_of": 2}), "best_of"),
            (json!({"best_of": 3, "stream": true}), "best_of"),
            (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
            (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
            (json!({"logprobs": 21}), "logprobs"),
            (json!({"prompt": null}), "prompt"),
            (json!({"prompt": [1000]}), "prompt[0]"),
            (json!({"prompt": vec!["a"; 33], "n": 128}), "prompt"),
        ];
        for (case, expected) in cases {
            let error = validate(case.clone()).unwrap_err();
            assert_eq!(error.body().error.param.as_deref(), Some(expected), "{case}");
            assert_eq!(error.status(), 400);
        }
        let missing = validate(json!({"prompt": null, "prompt_embeds": ""})).unwrap_err();
        assert_eq!(missing.body().error.param.as_deref(), Some("prompt"));
    }

    #[test]
    fn of_several_the_best_are_returned() {
        let best = validate(json!({"n": 2, "best_of": 5})).unwrap();
        assert_eq!((best.generation.n, best.n, best.logprobs), (5, 2, None));
        assert_eq!(
            best.generation.sampling.logprobs,
            Some(0),
            "`best_of` compares choices by log-probabilities"
        );
        let same = validate(json!({"n": 2, "best_of": 2, "stream": true})).unwrap();
        assert_eq!((same.generation.n, same.generation.sampling.logprobs), (2, None));
        let none = validate(json!({"best_of": 0, "max_tokens": 0})).unwrap();
        assert_eq!((none.n, none.generation.max_tokens), (1, MaxTokens::Exactly(0)));
    }

    #[test]
    fn the_prompt_s_log_probabilities_are_wanted_once_for_both_shapes() {
        let wanted = |more| {
            let valid = validate(more).unwrap();
            (valid.generation.prompt_logprobs.map(|tail| (tail.first, tail.most)), valid.logprobs)
        };
        assert_eq!(wanted(json!({"echo": true})), (None, None));
        assert_eq!(wanted(json!({"logprobs": 3})), (None, Some(3)));
        let evaluator = json!({"echo": true, "logprobs": 1, "max_tokens": 0, "stream": true});
        assert_eq!(wanted(evaluator), (Some((1, 1)), Some(1)));
        assert_eq!(wanted(json!({"prompt_logprobs": 0})), (Some((1, 0)), None));
        let both = json!({"prompt_logprobs": 2, "echo": true, "logprobs": 5});
        assert_eq!(wanted(both), (Some((1, 5)), Some(5)));
    }

    /// Returns embeddings for one position, with a single float32 element.
    fn embeds() -> String {
        let header = br#"{"x":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
        base64::Engine::encode(&base64::prelude::BASE64_STANDARD, file)
    }

    #[test]
    fn embeddings_stand_in_place_of_a_prompt() {
        for prompt in [json!(null), json!(""), json!([])] {
            let one = validate(json!({"prompt": prompt, "prompt_embeds": embeds()})).unwrap();
            assert!(matches!(one.prompts, CompletionPrompts::Embeds(embeds) if embeds.len() == 1));
        }
        for (more, expected) in [
            (json!({"prompt": "once"}), "prompt_embeds"),
            (json!({"prompt": [7]}), "prompt_embeds"),
            (json!({"prompt": "", "echo": true}), "echo"),
            (json!({"prompt": "", "prompt_logprobs": 0}), "prompt_logprobs"),
            (json!({"prompt": "", "prompt_embeds": vec![embeds(); 33], "n": 128}), "prompt_embeds"),
        ] {
            let error = validate(with(json!({"prompt_embeds": embeds()}), &more)).unwrap_err();
            assert_eq!(error.body().error.param.as_deref(), Some(expected), "{more}");
        }
    }
}
