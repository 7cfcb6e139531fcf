//! The parameters that OpenAI's chat completions and completions share.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::chat::{Streaming, TokenOutput};
use crate::error::ApiError;
use crate::limits::{Bound, Param};
use crate::parameter::generation::*;
use crate::parameter::{Generates, Line, Parameter, component, own, p, refused};
use crate::sampling::check_logprobs;
use crate::structure::{RESPONSE_FORMAT, ResponseFormat, STRUCTURED_OUTPUTS, StructuredOutputs};

/// The parameters that OpenAI's chat completions and completions share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(super) model: Option<String>,
    pub(super) generation: GenerationParameters,
    pub(super) stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    pub(super) add_special_tokens: Option<bool>,
    prompt_logprobs: Option<i32>,
    return_token_ids: Option<bool>,
    return_tokens_as_token_ids: Option<bool>,
}

/// The `stream_options` parameter.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// Send a last chunk with the usage.
    pub include_usage: Option<bool>,
    /// Send the usage so far in every chunk.
    pub continuous_usage_stats: Option<bool>,
}

pub(crate) const STREAM_OPTIONS: &[Param] =
    &[param("include_usage", Bound::Flag), param("continuous_usage_stats", Bound::Flag)];

component!(StreamOptions, ResponseFormat, StructuredOutputs);

const RESPONSE_FORM: Parameter = Parameter::new(
    Bound::Object(&[RESPONSE_FORMAT]),
    "The form of the answer.",
    |g, v| v.put::<Option<ResponseFormat>>(&mut g.structure.response_format),
)
.note("`text`, `json_object`, `json_schema`, `structural_tag`; see [the form of answers](#the-form-of-answers).");
const STRUCTURED: Parameter = Parameter::new(
    Bound::Object(&[STRUCTURED_OUTPUTS]),
    "The form of the answer, in vLLM's format.",
    |g, v| v.put::<Option<StructuredOutputs>>(&mut g.structure.structured_outputs),
)
.note("`json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`, and white space.");
const GUIDED_JSON: Parameter = Parameter::new(
    SOURCE,
    "The form of the answer: a JSON schema, as an object or as text.",
    |g, v| v.put(&mut g.structure.guided_json),
)
.note("vLLM's older spelling, as are the next four.");
const GUIDED_REGEX: Parameter =
    Parameter::new(PATTERN, "The form of the answer: a regular expression.", |g, v| {
        v.put(&mut g.structure.guided_regex)
    });
const GUIDED_CHOICE: Parameter =
    Parameter::new(ANSWERS, "The form of the answer: one of these texts.", |g, v| {
        v.put(&mut g.structure.guided_choice)
    });
const GUIDED_GRAMMAR: Parameter =
    Parameter::new(GRAMMAR, "The form of the answer: a grammar in Lark or GBNF.", |g, v| {
        v.put(&mut g.structure.guided_grammar)
    });
const GUIDED_WHITESPACE: Parameter = Parameter::new(
    WORD,
    "A regular expression for the white space between JSON tokens.",
    |g, v| v.put(&mut g.structure.guided_whitespace_pattern),
);

/// A request type with the shared parameters.
pub(crate) trait Shares: Generates {
    /// Returns the shared parameters of the request.
    fn shared(&mut self) -> &mut Shared;

    /// The entries of the shared parameters in the table of the request's parameters.
    #[rustfmt::skip]
    const SHARED: &'static [Line<Self>] = &[
        own("model", NAME, "The name of the model; the served one if absent.", |r: &mut Self, v| v.put(&mut r.shared().model)),
        p("max_tokens", MAX_TOKENS).note("A larger value is reduced to the room in the context; the header names the new value. 0 with completions: nothing is generated."),
        p("min_tokens", MIN_TOKENS),
        p("n", N),
        p("temperature", TEMPERATURE),
        p("top_p", TOP_P),
        p("top_k", TOP_K),
        p("min_p", MIN_P),
        p("seed", SEED),
        p("presence_penalty", PRESENCE_PENALTY),
        p("frequency_penalty", FREQUENCY_PENALTY),
        p("repetition_penalty", REPETITION_PENALTY),
        p("logit_bias", LOGIT_BIAS),
        p("allowed_token_ids", ALLOWED_TOKEN_IDS),
        p("stop", STOP).note("Looked for in the content alone, not in reasoning or calls."),
        p("stop_token_ids", STOP_TOKEN_IDS),
        p("include_stop_str_in_output", INCLUDE_STOP),
        p("ignore_eos", IGNORE_EOS),
        p("skip_special_tokens", SKIP_SPECIAL_TOKENS),
        p("spaces_between_special_tokens", SPACES_BETWEEN_SPECIAL_TOKENS),
        own("add_special_tokens", Bound::Flag, "Put the tokenizer's special tokens around a text prompt; a chat's come from its template.", |r: &mut Self, v| v.put(&mut r.shared().add_special_tokens)).note("Chat: false only."),
        p("priority", PRIORITY),
        own("stream", Bound::Flag, "Send chunks as server-sent events.", |r: &mut Self, v| v.put(&mut r.shared().stream)),
        own("stream_options", Bound::Object(&[STREAM_OPTIONS]), "Options of the stream.", |r: &mut Self, v| v.put(&mut r.shared().stream_options)).note("`include_usage`, `continuous_usage_stats`."),
        p("stream_interval", STREAM_INTERVAL),
        p("routing_key", ROUTING_KEY),
        p("routed_dp_rank", ROUTED_DP_RANK),
        p("cache_salt", CACHE_SALT).described("Blocks of the prompt are shared only with requests of the same salt, 1 to 256 bytes. A client without the salt cannot detect earlier prompts by timing."),
        p("bad_words", BAD_WORDS_LIST),
        p("thinking_budget", THINKING_BUDGET),
        p("response_format", RESPONSE_FORM),
        p("structured_outputs", STRUCTURED),
        p("guided_json", GUIDED_JSON),
        p("guided_regex", GUIDED_REGEX),
        p("guided_choice", GUIDED_CHOICE),
        p("guided_grammar", GUIDED_GRAMMAR),
        p("guided_whitespace_pattern", GUIDED_WHITESPACE),
        p("json_schema", JSON_SCHEMA).described("The form of the answer, in SGLang's format: a JSON schema, as text or as an object.").note("The next three are SGLang's too."),
        p("regex", REGEX),
        p("ebnf", EBNF),
        p("structural_tag", STRUCTURAL_TAG),
        own("prompt_logprobs", ALTERNATIVES, "The number of alternatives for each token of the prompt, 0 to 20, whose log-probabilities are returned. Not in a stream.", |r: &mut Self, v| v.put(&mut r.shared().prompt_logprobs)),
        own("return_token_ids", Bound::Flag, "Return the ids of the prompt's and of the generated tokens.", |r: &mut Self, v| v.put(&mut r.shared().return_token_ids)).note("`token_ids` of each choice, `prompt_token_ids` once."),
        own("return_tokens_as_token_ids", Bound::Flag, "Write `token_id:NUMBER` in place of tokens' texts in log-probabilities.", |r: &mut Self, v| v.put(&mut r.shared().return_tokens_as_token_ids)),
        refused("logits_processors"),
        refused("truncate_prompt_tokens"),
        refused("use_beam_search"),
        refused("lora_path"),
        refused("stop_regex"),
        refused("grammar"),
        refused("custom_logit_processor"),
        refused("kv_transfer_params"),
    ];
}

impl Shared {
    /// Returns the number of alternatives per prompt token; `None` if log-probabilities of the
    /// prompt are not requested.
    pub(super) fn prompt_alternatives(&self) -> Result<Option<u8>, ApiError> {
        const PARAM: &str = "prompt_logprobs";
        let Some(count) = self.prompt_logprobs else { return Ok(None) };
        if self.stream == Some(true) {
            let reason = format!("`{PARAM}`: they are not available in a stream");
            return Err(ApiError::invalid(PARAM, reason));
        }
        check_logprobs(PARAM, count).map(Some)
    }

    /// Returns the options of the stream; `None` for a single response.
    pub(super) fn streaming(&self) -> Result<Option<Streaming>, ApiError> {
        match (self.stream.unwrap_or(false), self.stream_options) {
            (false, Some(_)) => Err(ApiError::invalid(
                "stream_options",
                "`stream_options` is only allowed when `stream` is true",
            )),
            (false, None) => Ok(None),
            (true, options) => {
                let options = options.unwrap_or_default();
                let include_usage = options.include_usage.unwrap_or(false);
                let continuous = options.continuous_usage_stats.unwrap_or(false);
                Ok(Some(Streaming { include_usage, continuous_usage: include_usage && continuous }))
            }
        }
    }

    /// Returns how tokens are returned in addition to their text.
    pub(super) fn tokens(&self) -> TokenOutput {
        TokenOutput {
            ids: self.return_token_ids.unwrap_or(false),
            as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_options_need_a_stream() {
        let options = Some(StreamOptions::default());
        assert!(Shared { stream_options: options, ..Shared::default() }.streaming().is_err());
        let unstreamed = Shared { stream: Some(false), ..Shared::default() };
        assert_eq!(unstreamed.streaming(), Ok(None));
        let streamed = Shared { stream: Some(true), ..Shared::default() };
        assert_eq!(streamed.streaming(), Ok(Some(Streaming::default())));
    }
}
