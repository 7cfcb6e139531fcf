//! `POST /v1/completions`.

use crate::embeds::PromptEmbeds;
use crate::error::ApiError;
use crate::inert::Inert;
use crate::openai::{StreamOptions, Streaming, TokenOutput, openai_request};
use crate::prompt::{Prompt, Prompts};
use crate::sampling::{
    Fields, Generation, GenerationDefaults, Limits, check_logprobs, check_total, whole_prompt,
};

/// Tokens that the legacy API generates where the client does not say.
const DEFAULT_MAX_TOKENS: u32 = 16;

openai_request! {
    /// A completion request.
    pub struct CompletionRequest {
        /// A string, a list of strings, a list of token ids, or a list of lists of token ids.
        #[schema(value_type = Option<Object>)]
        pub prompt: Option<Prompts>,
        /// Embeddings in place of `prompt`: the bytes of a safetensors file in base64, or a list of
        /// such files. Each file has one tensor `[positions, hidden size]`.
        #[serde(default)]
        #[schema(value_type = Option<Vec<String>>)]
        pub prompt_embeds: PromptEmbeds,
        /// Repeat the prompt at the head of the text.
        pub echo: Option<bool>,
        /// Alternatives to return for each token, 0 to 20. With `echo` the prompt's tokens have
        /// them too. Absent: no log-probabilities.
        pub logprobs: Option<i32>,
        /// Choices to generate for each prompt, of which the `n` most likely are returned. Not in a
        /// stream, unless it equals `n`.
        pub best_of: Option<u32>,
        #[serde(default)] #[schema(ignore)] suffix: Inert,
    }
}

/// The texts to continue.
#[derive(Debug, PartialEq)]
pub enum CompletionPrompts {
    /// Texts and token ids.
    Prompts(Vec<Prompt>),
    /// Embeddings that are not read yet.
    Embeds(PromptEmbeds),
}

/// A completion request that is checked, except for the prompts' lengths.
#[derive(Debug)]
pub struct ValidCompletion {
    /// The prompts, at least one.
    pub prompts: CompletionPrompts,
    /// True if the tokenizer's special tokens are added to text prompts.
    pub add_special_tokens: bool,
    /// True if the answer's text begins with the prompt's text.
    pub echo: bool,
    /// Choices to return for each prompt; more may be generated.
    pub n: u32,
    /// The number of alternatives for each token's log-probabilities; with `echo` also for the
    /// prompt's tokens. `None`: none are returned.
    pub logprobs: Option<u8>,
    /// The number of alternatives for each log-probability of the prompt, which are returned apart;
    /// `None`: none are returned.
    pub prompt_logprobs: Option<u8>,
    /// The form in which tokens appear beside their text.
    pub tokens: TokenOutput,
    /// The other parameters.
    pub generation: Generation,
    /// The options of the stream; `None`: one response.
    pub streaming: Option<Streaming>,
}

impl CompletionRequest {
    /// Checks everything that can be checked before the prompts are tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not served; the error names the first.
    pub fn validate(
        mut self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidCompletion, ApiError> {
        self.refuse_shared()?;
        self.suffix.refuse("suffix")?;
        let n = self.n.unwrap_or(1);
        let best_of = self.best_of.filter(|&best_of| best_of > 0).unwrap_or(n);
        let wrong =
            |reason: &str| Err(ApiError::invalid("best_of", format!("`best_of`: {reason}")));
        if best_of < n {
            return wrong("must not be less than `n`");
        }
        if best_of > n && self.stream == Some(true) {
            return wrong("a stream can't know which choices will be the most likely");
        }
        let echo = self.echo.unwrap_or(false);
        let logprobs = self.logprobs.map(|count| check_logprobs("logprobs", count)).transpose()?;
        let apart = self.prompt_alternatives()?;
        let fields = Fields {
            logprobs,
            prompt_logprobs: logprobs.filter(|_| echo).max(apart).map(whole_prompt),
            default_max_tokens: Some(DEFAULT_MAX_TOKENS),
            ..self.take_fields()
        };
        let mut generation = fields.validate(defaults, limits)?;
        if best_of > n {
            generation.n = best_of;
            // What they are compared by.
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
            // Clients that insist on a prompt send an empty one.
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
            tokens: TokenOutput {
                ids: self.return_token_ids.unwrap_or(false),
                as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
            },
            streaming: StreamOptions::check(self.stream, self.stream_options)?,
            add_special_tokens: self.add_special_tokens.unwrap_or(true),
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
        assert_eq!(best.generation.sampling.logprobs, Some(0), "to compare them by");
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

    /// One position of one float32.
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
