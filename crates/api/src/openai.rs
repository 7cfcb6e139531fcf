//! The parameters that OpenAI's two dialects share.

use serde::Deserialize;
use utoipa::ToSchema;

use crate::error::ApiError;

/// The options of a requested stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streaming {
    /// True if a last chunk has the usage.
    pub include_usage: bool,
    /// True if every chunk has the usage so far.
    pub continuous_usage: bool,
}

/// The form in which tokens appear beside their text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenOutput {
    /// True if the tokens' ids come with the answer.
    pub ids: bool,
    /// True if log-probabilities name tokens by their ids.
    pub as_ids: bool,
}

/// The `stream_options` parameter.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Send a last chunk with the usage.
    pub include_usage: Option<bool>,
    /// Send the usage so far in every chunk.
    pub continuous_usage_stats: Option<bool>,
}

impl StreamOptions {
    /// `None`: no stream.
    pub(crate) fn check(
        stream: Option<bool>,
        options: Option<Self>,
    ) -> Result<Option<Streaming>, ApiError> {
        match (stream.unwrap_or(false), options) {
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
}

/// Declares a request type of OpenAI's dialect: its own fields and the shared ones.
///
/// `#[serde(flatten)]` would do it in fewer lines, but errors lose the path of the field at fault,
/// and every value is buffered.
macro_rules! openai_request {
    ($(#[$meta:meta])* pub struct $name:ident { $($own:tt)* }) => {
        $(#[$meta])*
        #[derive(Debug, serde::Deserialize, utoipa::ToSchema)]
        pub struct $name {
            $($own)*
            /// The name of the model; the served one if absent.
            pub model: Option<String>,
            /// The largest number of tokens to generate.
            pub max_tokens: Option<u32>,
            /// Tokens to generate before a stop string or stop token counts.
            pub min_tokens: Option<u32>,
            /// Choices to generate for each prompt.
            pub n: Option<u32>,
            /// The temperature; 0 is greedy.
            pub temperature: Option<f32>,
            /// The share of probability that is kept (nucleus sampling).
            pub top_p: Option<f32>,
            /// The number of candidates; -1 or 0 is off.
            pub top_k: Option<i32>,
            /// The share of the largest probability below which tokens are dropped.
            pub min_p: Option<f32>,
            /// The seed, which makes sampling repeatable.
            pub seed: Option<i64>,
            /// A number that is subtracted from the logits of generated tokens.
            pub presence_penalty: Option<f32>,
            /// A number that is subtracted from the logits of generated tokens, for each
            /// occurrence.
            pub frequency_penalty: Option<f32>,
            /// A number that divides positive logits of earlier tokens, and multiplies negative
            /// ones.
            pub repetition_penalty: Option<f32>,
            /// Numbers that are added to the logits, by token id.
            pub logit_bias: Option<std::collections::HashMap<String, f32>>,
            /// The only token ids that may be sampled.
            pub allowed_token_ids: Option<Vec<i32>>,
            /// A string or a list of strings that end the text.
            #[schema(value_type = Option<Vec<String>>)]
            pub stop: Option<$crate::prompt::Strings>,
            /// Token ids that end the text.
            pub stop_token_ids: Option<Vec<i32>>,
            /// Keep the stop string in the output.
            pub include_stop_str_in_output: Option<bool>,
            /// Go on after an end-of-sequence token.
            pub ignore_eos: Option<bool>,
            /// Leave special tokens out of the text.
            pub skip_special_tokens: Option<bool>,
            /// Accepted, without an effect: tokenizers with fast detokenisation have no such
            /// spaces.
            pub spaces_between_special_tokens: Option<bool>,
            /// Put the tokenizer's special tokens around a text prompt; a chat's come from its
            /// template.
            pub add_special_tokens: Option<bool>,
            /// The priority; larger is sooner, under the priority policy.
            pub priority: Option<i32>,
            /// Send chunks as server-sent events.
            pub stream: Option<bool>,
            /// Options of the stream.
            pub stream_options: Option<$crate::openai::StreamOptions>,
            /// The number of tokens for a chunk of the stream; the server's flag if absent. The
            /// first token does not wait.
            pub stream_interval: Option<u32>,
            /// Requests with the same key are computed by the same replica.
            pub routing_key: Option<String>,
            /// The number of the replica for the request; `data_parallel_rank` is its older name.
            #[serde(alias = "data_parallel_rank")]
            pub routed_dp_rank: Option<i64>,
            /// Blocks of the prompt are shared only with requests of the same salt, 1 to 256 bytes.
            /// A client that does not know the salt cannot find out earlier prompts by the time of
            /// an answer.
            pub cache_salt: Option<String>,
            /// Words that the answer does not have.
            #[schema(value_type = Option<Vec<String>>)]
            pub bad_words: Option<$crate::prompt::Strings>,
            /// The largest number of tokens of the reasoning before the answer. Then the reasoning
            /// is ended. -1: without a limit.
            #[serde(alias = "thinking_token_budget", alias = "reasoning_budget")]
            pub thinking_budget: Option<i64>,
            /// The form of the answer.
            pub response_format: Option<$crate::structure::ResponseFormat>,
            /// The form of the answer, in vLLM's words.
            pub structured_outputs: Option<$crate::structure::StructuredOutputs>,
            /// The form of the answer: a JSON schema, as an object or as text.
            #[schema(value_type = Option<Object>)]
            guided_json: Option<$crate::structure::Raw>,
            /// The form of the answer: a regular expression.
            pub guided_regex: Option<String>,
            /// The form of the answer: one of these texts.
            pub guided_choice: Option<Vec<String>>,
            /// The form of the answer: a grammar in Lark or GBNF.
            pub guided_grammar: Option<String>,
            /// A regular expression of the white space at each place of JSON.
            pub guided_whitespace_pattern: Option<String>,
            /// The form of the answer, in SGLang's words: a JSON schema, as text or as an object.
            #[schema(value_type = Option<String>)]
            json_schema: Option<$crate::structure::Raw>,
            /// The form of the answer: a regular expression.
            pub regex: Option<String>,
            /// The form of the answer: a grammar in GBNF.
            pub ebnf: Option<String>,
            /// The form of the answer: a structural tag, as text or as an object.
            #[schema(value_type = Option<String>)]
            structural_tag: Option<$crate::structure::Raw>,
            /// The number of alternatives for each token of the prompt, 0 to 20, whose
            /// log-probabilities are returned. Not in a stream.
            pub prompt_logprobs: Option<i32>,
            /// Return the ids of the prompt's and of the generated tokens.
            pub return_token_ids: Option<bool>,
            /// Write `token_id:NUMBER` in place of tokens' texts in log-probabilities.
            pub return_tokens_as_token_ids: Option<bool>,
            #[serde(default)] #[schema(ignore)] logits_processors: $crate::inert::Inert,
            #[serde(default)] #[schema(ignore)] truncate_prompt_tokens: $crate::inert::Inert,
            #[serde(default)] #[schema(ignore)] use_beam_search: $crate::inert::Inert,
            #[serde(default)] #[schema(ignore)] lora_path: $crate::inert::Inert,
            #[serde(default)] #[schema(ignore)] stop_regex: $crate::inert::Inert,
            #[serde(default)] #[schema(ignore)] grammar: $crate::inert::Inert,
            #[serde(default)] #[schema(ignore)] custom_logit_processor: $crate::inert::Inert,
            #[serde(default)] #[schema(ignore)] kv_transfer_params: $crate::inert::Inert,
        }

        impl $name {
            /// Refuses parameters that neither of OpenAI's dialects serves.
            fn refuse_shared(&self) -> Result<(), $crate::error::ApiError> {
                for (param, inert) in [
                    ("logits_processors", self.logits_processors),
                    ("truncate_prompt_tokens", self.truncate_prompt_tokens),
                    ("use_beam_search", self.use_beam_search),
                    ("lora_path", self.lora_path),
                    ("stop_regex", self.stop_regex),
                    ("grammar", self.grammar),
                    ("custom_logit_processor", self.custom_logit_processor),
                    ("kv_transfer_params", self.kv_transfer_params),
                ] {
                    inert.refuse(param)?;
                }
                Ok(())
            }

            /// Alternatives for each of the prompt's tokens, if their log-probabilities are
            /// requested.
            fn prompt_alternatives(&self) -> Result<Option<u8>, $crate::error::ApiError> {
                const PARAM: &str = "prompt_logprobs";
                let Some(count) = self.prompt_logprobs else { return Ok(None) };
                if self.stream == Some(true) {
                    let reason = format!("`{PARAM}`: they are not available in a stream");
                    return Err($crate::error::ApiError::invalid(PARAM, reason));
                }
                $crate::sampling::check_logprobs(PARAM, count).map(Some)
            }

            /// Takes the shared parameters out.
            fn take_fields(&mut self) -> $crate::sampling::Fields {
                $crate::sampling::Fields {
                    prefix: "",
                    max_tokens_name: "max_tokens",
                    max_tokens: self.max_tokens,
                    default_max_tokens: None,
                    min_tokens: self.min_tokens,
                    n: self.n,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    seed: self.seed,
                    presence_penalty: self.presence_penalty,
                    frequency_penalty: self.frequency_penalty,
                    repetition_penalty: self.repetition_penalty,
                    logit_bias: self.logit_bias.take(),
                    allowed_token_ids: self.allowed_token_ids.take(),
                    stop: self.stop.take(),
                    include_stop_str_in_output: self.include_stop_str_in_output,
                    stop_token_ids: self.stop_token_ids.take(),
                    ignore_eos: self.ignore_eos,
                    skip_special_tokens: self.skip_special_tokens,
                    priority: self.priority,
                    stream_interval: self.stream_interval,
                    routing_key: self.routing_key.take(),
                    routed_dp_rank: self.routed_dp_rank,
                    cache_salt: self.cache_salt.take(),
                    bad_words: self.bad_words.take(),
                    thinking_budget: self.thinking_budget,
                    structure: $crate::structure::Spellings {
                        prefix: "",
                        response_format: self.response_format.take(),
                        structured_outputs: self.structured_outputs.take(),
                        guided_json: self.guided_json.take(),
                        guided_regex: self.guided_regex.take(),
                        guided_choice: self.guided_choice.take(),
                        guided_grammar: self.guided_grammar.take(),
                        guided_whitespace_pattern: self.guided_whitespace_pattern.take(),
                        json_schema: self.json_schema.take(),
                        regex: self.regex.take(),
                        ebnf: self.ebnf.take(),
                        structural_tag: self.structural_tag.take(),
                    },
                    logprobs: None,
                    prompt_logprobs: None,
                }
            }
        }
    };
}
pub(crate) use openai_request;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_options_need_a_stream() {
        let options = Some(StreamOptions::default());
        assert!(StreamOptions::check(None, options).is_err());
        assert_eq!(StreamOptions::check(Some(false), None), Ok(None));
        assert_eq!(StreamOptions::check(Some(true), None), Ok(Some(Streaming::default())));
    }
}
