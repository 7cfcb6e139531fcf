//! `POST /v1/completions`.

use crate::error::ApiError;
use crate::inert::Inert;
use crate::openai::{StreamOptions, Streaming, openai_request};
use crate::prompt::{Prompt, Prompts};
use crate::sampling::{
    Fields, Generation, GenerationDefaults, Limits, check_logprobs, check_total,
};

/// Tokens that the legacy API generates where the client does not say.
const DEFAULT_MAX_TOKENS: u32 = 16;

openai_request! {
    /// A completion request.
    pub struct CompletionRequest {
        /// A string, a list of strings, a list of token ids, or a list of lists of token ids.
        #[schema(value_type = Object)]
        pub prompt: Prompts,
        /// Repeat the prompt at the head of the text.
        pub echo: Option<bool>,
        /// Alternatives to return for each token, 0 to 20; absent: no log-probabilities.
        pub logprobs: Option<i32>,
        /// Must equal `n`.
        pub best_of: Option<u32>,
        #[serde(default)] #[schema(ignore)] suffix: Inert,
        #[serde(default)] #[schema(ignore)] prompt_embeds: Inert,
    }
}

/// A completion request without anything left to check but the prompts' lengths.
#[derive(Debug)]
pub struct ValidCompletion {
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// The tokenizer's special tokens go around text prompts.
    pub add_special_tokens: bool,
    /// The prompt's text comes first.
    pub echo: bool,
    /// Everything else.
    pub generation: Generation,
    /// `None`: one response.
    pub streaming: Option<Streaming>,
}

impl CompletionRequest {
    /// Checks everything that can be checked before the prompts are tokenised.
    ///
    /// # Errors
    /// The first parameter that is out of range or not served.
    pub fn validate(
        mut self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<ValidCompletion, ApiError> {
        self.refuse_shared()?;
        self.suffix.refuse("suffix")?;
        self.prompt_embeds.refuse("prompt_embeds")?;
        let n = self.n.unwrap_or(1);
        if self.best_of.is_some_and(|best_of| best_of != n) {
            return Err(ApiError::invalid(
                "best_of",
                "`best_of` other than `n` is not supported yet",
            ));
        }
        let echo = self.echo.unwrap_or(false);
        let logprobs = self.logprobs.map(|count| check_logprobs("logprobs", count)).transpose()?;
        if echo && logprobs.is_some() {
            return Err(ApiError::invalid(
                "logprobs",
                "`logprobs` of an echoed prompt are not supported yet",
            ));
        }
        let fields =
            Fields { logprobs, default_max_tokens: Some(DEFAULT_MAX_TOKENS), ..self.take_fields() };
        let generation = fields.validate(defaults, limits)?;
        let prompts = self.prompt.validate("prompt", limits.vocab_size)?;
        check_total("prompt", prompts.len().saturating_mul(generation.n as usize))?;
        Ok(ValidCompletion {
            generation,
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

    fn validate(more: Value) -> Result<ValidCompletion, ApiError> {
        let mut body = json!({"prompt": "once"});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        let request: CompletionRequest = crate::parse(body.to_string().as_bytes())?;
        request.validate(
            &GenerationDefaults::default(),
            Limits { context_length: 100, vocab_size: 1000 },
        )
    }

    #[test]
    fn legacy_defaults() {
        let completion = validate(json!({"best_of": 1, "suffix": null})).unwrap();
        assert_eq!(completion.generation.max_tokens, MaxTokens::AtMost(16));
        assert_eq!(completion.prompts, [Prompt::Text("once".into())]);
        assert!(completion.add_special_tokens && !completion.echo);
    }

    #[test]
    fn what_is_not_served_is_named() {
        let cases = [
            (json!({"suffix": "x"}), "suffix"),
            (json!({"best_of": 2}), "best_of"),
            (json!({"n": 2, "best_of": 3}), "best_of"),
            (json!({"echo": true, "logprobs": 0}), "logprobs"),
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
        let missing = crate::parse::<CompletionRequest>(b"{}").unwrap_err();
        assert_eq!(missing.body().error.param.as_deref(), Some("prompt"));
    }
}
