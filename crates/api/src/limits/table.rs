//! The table.

use forebay_grammar::{CHOICES as CHOICES_OF_FORM, GRAMMAR_BYTES, REGEX_BYTES, SCHEMA_BYTES};

use super::{
    ALLOWED_IDS, BAD_WORD_BYTES, BAD_WORDS, BIASES, Bound, CACHE_SALT_BYTES, CHOICES, IDS, INPUTS,
    LOGPROBS, Limited, MESSAGES, NAME_BYTES, PROMPTS, Param, Params, ROUTING_KEY_BYTES, STOP_BYTES,
    STOP_IDS, STOPS, WORD_BYTES,
};
use crate::chat::ChatRequest;
use crate::completions::CompletionRequest;
use crate::embeddings::EmbeddingRequest;
use crate::generate::GenerateRequest;
use crate::llama::LlamaRequest;
use crate::messages::MessagesRequest;
use crate::ollama::{
    OllamaChatRequest, OllamaEmbedRequest, OllamaGenerateRequest, OllamaShowRequest,
};
use crate::rerank::{RerankRequest, ScoreRequest};
use crate::responses::ResponsesRequest;
use crate::tokenize::{DetokenizeRequest, TokenizeRequest};

/// A route that takes a body.
#[derive(Debug)]
pub struct RouteLimits {
    /// Its path, as it is documented.
    pub path: &'static str,
    /// Its parameters.
    pub params: Params,
}

/// Every route that takes a body.
pub const ROUTES: &[RouteLimits] = &[
    RouteLimits { path: "/v1/chat/completions", params: ChatRequest::PARAMS },
    RouteLimits { path: "/v1/completions", params: CompletionRequest::PARAMS },
    RouteLimits { path: "/v1/messages", params: MessagesRequest::PARAMS },
    RouteLimits { path: "/v1/messages/count_tokens", params: MessagesRequest::PARAMS },
    RouteLimits { path: "/v1/responses", params: ResponsesRequest::PARAMS },
    RouteLimits { path: "/api/chat", params: OllamaChatRequest::PARAMS },
    RouteLimits { path: "/api/generate", params: OllamaGenerateRequest::PARAMS },
    RouteLimits { path: "/api/embed", params: OllamaEmbedRequest::PARAMS },
    RouteLimits { path: "/api/show", params: OllamaShowRequest::PARAMS },
    RouteLimits { path: "/generate", params: GenerateRequest::PARAMS },
    RouteLimits { path: "/completion", params: LlamaRequest::PARAMS },
    RouteLimits { path: "/v1/embeddings", params: EmbeddingRequest::PARAMS },
    RouteLimits { path: "/pooling", params: EmbeddingRequest::PARAMS },
    RouteLimits { path: "/rerank", params: RerankRequest::PARAMS },
    RouteLimits { path: "/v1/rerank", params: RerankRequest::PARAMS },
    RouteLimits { path: "/v2/rerank", params: RerankRequest::PARAMS },
    RouteLimits { path: "/score", params: ScoreRequest::PARAMS },
    RouteLimits { path: "/v1/score", params: ScoreRequest::PARAMS },
    RouteLimits { path: "/tokenize", params: TokenizeRequest::PARAMS },
    RouteLimits { path: "/apply-template", params: TokenizeRequest::PARAMS },
    RouteLimits { path: "/detokenize", params: DetokenizeRequest::PARAMS },
];

impl Limited for ChatRequest {
    const PARAMS: Params = &[CHAT, CONVERSATION, OPENAI, NUMBERS, LISTS];
}
impl Limited for CompletionRequest {
    const PARAMS: Params = &[COMPLETION, OPENAI, NUMBERS, LISTS];
}
impl Limited for GenerateRequest {
    const PARAMS: Params = &[GENERATE];
}
impl Limited for LlamaRequest {
    const PARAMS: Params = &[LLAMA];
}
impl Limited for EmbeddingRequest {
    const PARAMS: Params = &[EMBEDDING, POOLING];
}
impl Limited for MessagesRequest {
    const PARAMS: Params = &[ANTHROPIC];
}
impl Limited for ResponsesRequest {
    const PARAMS: Params = &[RESPONSES];
}
impl Limited for OllamaChatRequest {
    const PARAMS: Params = &[OLLAMA, OLLAMA_CHAT];
}
impl Limited for OllamaGenerateRequest {
    const PARAMS: Params = &[OLLAMA, OLLAMA_GENERATE];
}
impl Limited for OllamaEmbedRequest {
    const PARAMS: Params = &[OLLAMA_EMBED];
}
impl Limited for OllamaShowRequest {
    const PARAMS: Params = &[OLLAMA_SHOW];
}
impl Limited for RerankRequest {
    const PARAMS: Params = &[RERANK, POOLING];
}
impl Limited for ScoreRequest {
    const PARAMS: Params = &[SCORE, POOLING];
}
impl Limited for TokenizeRequest {
    const PARAMS: Params = &[TOKENIZE, CONVERSATION];
}
impl Limited for DetokenizeRequest {
    const PARAMS: Params = &[DETOKENIZE];
}

const fn param(name: &'static str, bound: Bound) -> Param {
    Param { name, bound }
}
const fn flag(name: &'static str) -> Param {
    param(name, Bound::Flag)
}
const fn ignored(name: &'static str) -> Param {
    param(name, Bound::Ignored)
}
/// The form of an answer, as JSON or as text.
const fn source(name: &'static str) -> Param {
    param(name, Bound::Form(SCHEMA_BYTES))
}
const fn regex(name: &'static str) -> Param {
    param(name, Bound::Form(REGEX_BYTES))
}
const fn grammar(name: &'static str) -> Param {
    param(name, Bound::Form(GRAMMAR_BYTES))
}
/// Texts of which an answer is one.
const fn choices(name: &'static str) -> Param {
    param(
        name,
        Bound::Strings { count: CHOICES_OF_FORM, each: GRAMMAR_BYTES, total: GRAMMAR_BYTES },
    )
}
const fn text(name: &'static str, bytes: usize) -> Param {
    param(name, Bound::Text(bytes))
}
const fn number(name: &'static str, least: f64, most: f64) -> Param {
    param(name, Bound::Number { least, most })
}
/// A number of tokens or the like, at least `least`.
const fn count(name: &'static str, least: u32) -> Param {
    number(name, least as f64, u32::MAX as f64)
}

/// The smallest number above 0 that is one for the device too.
const ABOVE_0: f64 = f32::MIN_POSITIVE as f64;
const ANY: f64 = f32::MAX as f64;

/// A conversation and how it is rendered.
const CONVERSATION: &[Param] = &[
    param("messages", Bound::Messages(MESSAGES, &[MESSAGE])),
    flag("add_generation_prompt"),
    flag("continue_final_message"),
    param("chat_template_kwargs", Bound::Tree),
    param("tools", Bound::Tree),
];

pub(super) const MESSAGE: &[Param] = &[
    text("role", WORD_BYTES),
    param("content", Bound::Content(&[PART])),
    text("name", WORD_BYTES),
    param("reasoning_content", Bound::Prompt),
    param("reasoning", Bound::Prompt),
    param("thinking", Bound::Prompt),
    param("tool_calls", Bound::Tree),
    text("tool_call_id", WORD_BYTES),
];

pub(super) const PART: &[Param] = &[
    text("type", WORD_BYTES),
    param("text", Bound::Prompt),
    param("image_url", Bound::Image(&[IMAGE])),
];

pub(super) const IMAGE: &[Param] = &[param("url", Bound::Url), text("detail", WORD_BYTES)];

const CHAT: &[Param] = &[
    count("max_completion_tokens", 1),
    flag("logprobs"),
    number("top_logprobs", 0.0, LOGPROBS as f64),
    param("tool_choice", Bound::Tree),
    flag("parallel_tool_calls"),
    text("reasoning_effort", WORD_BYTES),
    flag("enable_thinking"),
    param("reasoning", Bound::Object(&[REASONING])),
    flag("include_reasoning"),
    flag("separate_reasoning"),
    ignored("functions"),
    ignored("function_call"),
    param("modalities", Bound::Strings { count: 16, each: WORD_BYTES, total: 16 * WORD_BYTES }),
    ignored("audio"),
    ignored("prediction"),
    ignored("web_search_options"),
    ignored("documents"),
    ignored("chat_template"),
    ignored("echo"),
];

const COMPLETION: &[Param] = &[
    param("prompt", Bound::Prompts(PROMPTS)),
    param("prompt_embeds", Bound::Embeds(PROMPTS)),
    flag("echo"),
    number("logprobs", 0.0, LOGPROBS as f64),
    number("best_of", 0.0, CHOICES as f64),
    ignored("suffix"),
];

/// The parameters that OpenAI's two dialects share, beside [`NUMBERS`] and [`LISTS`].
const OPENAI: &[Param] = &[
    text("model", NAME_BYTES),
    count("max_tokens", 0),
    count("min_tokens", 0),
    param("allowed_token_ids", Bound::Ids(ALLOWED_IDS)),
    flag("include_stop_str_in_output"),
    flag("add_special_tokens"),
    number("priority", i32::MIN as f64, i32::MAX as f64),
    flag("stream"),
    param("stream_options", Bound::Object(&[STREAM_OPTIONS])),
    text("routing_key", ROUTING_KEY_BYTES),
    text("cache_salt", CACHE_SALT_BYTES),
    number("routed_dp_rank", i64::MIN as f64, i64::MAX as f64),
    number("data_parallel_rank", i64::MIN as f64, i64::MAX as f64),
    flag("return_token_ids"),
    flag("return_tokens_as_token_ids"),
    param("response_format", Bound::Object(&[RESPONSE_FORMAT])),
    param("structured_outputs", Bound::Object(&[STRUCTURED_OUTPUTS])),
    source("guided_json"),
    regex("guided_regex"),
    choices("guided_choice"),
    grammar("guided_grammar"),
    text("guided_whitespace_pattern", WORD_BYTES),
    source("structural_tag"),
    source("json_schema"),
    regex("regex"),
    grammar("ebnf"),
    param(
        "bad_words",
        Bound::Strings { count: BAD_WORDS, each: STOP_BYTES, total: BAD_WORD_BYTES },
    ),
    number("thinking_budget", -1.0, u32::MAX as f64),
    number("thinking_token_budget", -1.0, u32::MAX as f64),
    number("reasoning_budget", -1.0, u32::MAX as f64),
    ignored("logits_processors"),
    number("prompt_logprobs", 0.0, LOGPROBS as f64),
    ignored("truncate_prompt_tokens"),
    ignored("use_beam_search"),
    ignored("lora_path"),
    ignored("stop_regex"),
    ignored("grammar"),
    ignored("custom_logit_processor"),
    ignored("kv_transfer_params"),
];

pub(super) const REASONING: &[Param] = &[
    text("effort", WORD_BYTES),
    number("max_tokens", -1.0, u32::MAX as f64),
    flag("enabled"),
    flag("exclude"),
];

pub(super) const STREAM_OPTIONS: &[Param] =
    &[flag("include_usage"), flag("continuous_usage_stats")];

pub(super) const RESPONSE_FORMAT: &[Param] = &[
    text("type", WORD_BYTES),
    param("json_schema", Bound::Object(&[JSON_SCHEMA])),
    source("schema"),
    source("format"),
    source("structures"),
    source("triggers"),
];

pub(super) const JSON_SCHEMA: &[Param] = &[
    text("name", NAME_BYTES),
    text("description", SCHEMA_BYTES),
    source("schema"),
    flag("strict"),
];

pub(super) const STRUCTURED_OUTPUTS: &[Param] = &[
    source("json"),
    regex("regex"),
    choices("choice"),
    grammar("grammar"),
    flag("json_object"),
    source("structural_tag"),
    text("whitespace_pattern", WORD_BYTES),
    flag("disable_any_whitespace"),
    flag("disable_fallback"),
    flag("disable_additional_properties"),
];

/// Sampling parameters that all dialects name alike.
const NUMBERS: &[Param] = &[
    number("n", 1.0, CHOICES as f64),
    number("temperature", 0.0, ANY),
    number("top_p", ABOVE_0, 1.0),
    number("top_k", -1.0, i32::MAX as f64),
    number("min_p", 0.0, 1.0),
    number("seed", i64::MIN as f64, i64::MAX as f64),
    number("presence_penalty", -2.0, 2.0),
    number("frequency_penalty", -2.0, 2.0),
    // Logits are divided and multiplied by it: far outside, they are no numbers any more.
    number("repetition_penalty", 1e-3, 1e3),
    flag("ignore_eos"),
    flag("skip_special_tokens"),
    flag("spaces_between_special_tokens"),
    count("stream_interval", 1),
];

/// Lists among them.
const LISTS: &[Param] = &[
    param("logit_bias", Bound::Biases(BIASES)),
    param("stop", Bound::Strings { count: STOPS, each: STOP_BYTES, total: STOP_BYTES }),
    param("stop_token_ids", Bound::Ids(STOP_IDS)),
];

const GENERATE: &[Param] = &[
    param("text", Bound::Prompts(PROMPTS)),
    param("input_ids", Bound::Prompts(PROMPTS)),
    param("sampling_params", Bound::Objects(PROMPTS, &[SAMPLING, NUMBERS, LISTS])),
    flag("stream"),
    flag("return_logprob"),
    number("top_logprobs_num", 0.0, LOGPROBS as f64),
    flag("return_text_in_logprobs"),
    number("logprob_start_len", i32::MIN as f64, i32::MAX as f64),
    param("rid", Bound::Strings { count: PROMPTS, each: NAME_BYTES, total: PROMPTS * NAME_BYTES }),
    number("priority", i32::MIN as f64, i32::MAX as f64),
    text("routing_key", ROUTING_KEY_BYTES),
    text("cache_salt", CACHE_SALT_BYTES),
    number("routed_dp_rank", i64::MIN as f64, i64::MAX as f64),
    number("data_parallel_rank", i64::MIN as f64, i64::MAX as f64),
    ignored("input_embeds"),
    param("image_data", Bound::Images(2, &[IMAGE])),
    ignored("audio_data"),
    ignored("video_data"),
    ignored("lora_path"),
    ignored("session_params"),
    ignored("token_ids_logprob"),
    ignored("return_hidden_states"),
    ignored("custom_logit_processor"),
];

/// Sampling parameters that only the native dialect names so.
const SAMPLING: &[Param] = &[
    count("max_new_tokens", 0),
    count("min_new_tokens", 0),
    number("sampling_seed", i64::MIN as f64, i64::MAX as f64),
    flag("no_stop_trim"),
    source("json_schema"),
    regex("regex"),
    grammar("ebnf"),
    source("structural_tag"),
    ignored("stop_regex"),
    ignored("custom_params"),
];

const LLAMA: &[Param] = &[
    param("prompt", Bound::Prompts(PROMPTS)),
    number("n_predict", i64::MIN as f64, i64::MAX as f64),
    number("temperature", 0.0, ANY),
    number("top_k", -1.0, i32::MAX as f64),
    number("top_p", ABOVE_0, 1.0),
    number("min_p", 0.0, 1.0),
    number("repeat_penalty", 1e-3, 1e3),
    number("presence_penalty", -2.0, 2.0),
    number("frequency_penalty", -2.0, 2.0),
    number("seed", i64::MIN as f64, i64::MAX as f64),
    param("stop", Bound::Strings { count: STOPS, each: STOP_BYTES, total: STOP_BYTES }),
    flag("ignore_eos"),
    param("logit_bias", Bound::Tree),
    number("n_probs", 0.0, LOGPROBS as f64),
    flag("stream"),
    flag("return_tokens"),
    flag("cache_prompt"),
    text("cache_salt", CACHE_SALT_BYTES),
    ignored("grammar"),
    ignored("json_schema"),
    ignored("image_data"),
    ignored("lora"),
];

const ANTHROPIC: &[Param] = &[
    text("model", NAME_BYTES),
    param("messages", Bound::Messages(MESSAGES, &[ANTHROPIC_MESSAGE])),
    param("system", Bound::Content(&[BLOCK])),
    count("max_tokens", 1),
    param("stop_sequences", Bound::Strings { count: STOPS, each: STOP_BYTES, total: STOP_BYTES }),
    flag("stream"),
    number("temperature", 0.0, ANY),
    number("top_p", ABOVE_0, 1.0),
    number("top_k", -1.0, i32::MAX as f64),
    param("thinking", Bound::Object(&[THINKING])),
    param("tools", Bound::Tree),
    param("tool_choice", Bound::Object(&[TOOL_CHOICE])),
    param("output_config", Bound::Object(&[OUTPUT_CONFIG])),
    param("output_format", Bound::Object(&[OUTPUT_FORMAT])),
    text("cache_salt", CACHE_SALT_BYTES),
    ignored("mcp_servers"),
    ignored("container"),
];

const ANTHROPIC_MESSAGE: &[Param] =
    &[text("role", WORD_BYTES), param("content", Bound::Content(&[BLOCK]))];

const BLOCK: &[Param] = &[
    text("type", WORD_BYTES),
    param("text", Bound::Prompt),
    param("thinking", Bound::Prompt),
    param("source", Bound::Object(&[SOURCE])),
    text("id", WORD_BYTES),
    text("name", WORD_BYTES),
    param("input", Bound::Tree),
    text("tool_use_id", WORD_BYTES),
    flag("is_error"),
    param("content", Bound::Content(&[INNER])),
    ignored("signature"),
];

const INNER: &[Param] = &[
    text("type", WORD_BYTES),
    param("text", Bound::Prompt),
    param("source", Bound::Object(&[SOURCE])),
];

const SOURCE: &[Param] = &[
    text("type", WORD_BYTES),
    text("media_type", WORD_BYTES),
    param("data", Bound::Url),
    param("url", Bound::Url),
];

const THINKING: &[Param] = &[text("type", WORD_BYTES), count("budget_tokens", 0)];

const TOOL_CHOICE: &[Param] =
    &[text("type", WORD_BYTES), text("name", WORD_BYTES), flag("disable_parallel_tool_use")];

const OUTPUT_CONFIG: &[Param] =
    &[text("effort", WORD_BYTES), param("format", Bound::Object(&[OUTPUT_FORMAT]))];

const OUTPUT_FORMAT: &[Param] = &[text("type", WORD_BYTES), source("schema")];

const RESPONSES: &[Param] = &[
    text("model", NAME_BYTES),
    param("input", Bound::Content(&[ITEM])),
    param("instructions", Bound::Prompt),
    text("previous_response_id", NAME_BYTES),
    flag("store"),
    flag("background"),
    flag("stream"),
    count("max_output_tokens", 1),
    number("temperature", 0.0, ANY),
    number("top_p", ABOVE_0, 1.0),
    param("tools", Bound::Tree),
    param("tool_choice", Bound::Tree),
    flag("parallel_tool_calls"),
    param("reasoning", Bound::Object(&[RESPONSES_REASONING])),
    param("text", Bound::Object(&[RESPONSES_TEXT])),
    param("metadata", Bound::Tree),
    param("include", Bound::Strings { count: STOPS, each: WORD_BYTES, total: NAME_BYTES }),
    text("cache_salt", CACHE_SALT_BYTES),
    ignored("conversation"),
    ignored("prompt"),
];

const RESPONSES_REASONING: &[Param] = &[text("effort", WORD_BYTES), ignored("summary")];

const RESPONSES_TEXT: &[Param] = &[param("format", Bound::Object(&[TEXT_FORMAT]))];

const TEXT_FORMAT: &[Param] =
    &[text("type", WORD_BYTES), text("name", WORD_BYTES), source("schema"), flag("strict")];

const ITEM: &[Param] = &[
    text("type", WORD_BYTES),
    text("role", WORD_BYTES),
    param("content", Bound::Content(&[ITEM_PART])),
    text("call_id", WORD_BYTES),
    text("name", WORD_BYTES),
    text("namespace", WORD_BYTES),
    param("arguments", Bound::Prompt),
    param("input", Bound::Prompt),
    param("output", Bound::Content(&[ITEM_PART])),
    param("summary", Bound::Content(&[ITEM_PART])),
    param("encrypted_content", Bound::Prompt),
];

const ITEM_PART: &[Param] = &[
    text("type", WORD_BYTES),
    param("text", Bound::Prompt),
    param("refusal", Bound::Prompt),
    param("image_url", Bound::Url),
    text("detail", WORD_BYTES),
];

const OLLAMA: &[Param] = &[
    text("model", NAME_BYTES),
    flag("stream"),
    source("format"),
    param("options", Bound::Object(&[OLLAMA_OPTIONS])),
    param("think", Bound::Tree),
    param("keep_alive", Bound::Tree),
];

const OLLAMA_CHAT: &[Param] =
    &[param("messages", Bound::Messages(MESSAGES, &[OLLAMA_MESSAGE])), param("tools", Bound::Tree)];

const OLLAMA_GENERATE: &[Param] = &[
    param("prompt", Bound::Prompt),
    param("system", Bound::Prompt),
    param("images", Bound::Images(1, &[IMAGE])),
    flag("raw"),
    ignored("suffix"),
    ignored("template"),
    ignored("context"),
];

const OLLAMA_EMBED: &[Param] = &[
    text("model", NAME_BYTES),
    param("input", Bound::Prompts(INPUTS)),
    flag("truncate"),
    count("dimensions", 1),
    ignored("options"),
    ignored("keep_alive"),
];

const OLLAMA_SHOW: &[Param] = &[text("model", NAME_BYTES), text("name", NAME_BYTES)];

const OLLAMA_OPTIONS: &[Param] = &[
    number("num_predict", i64::MIN as f64, i64::MAX as f64),
    number("temperature", 0.0, ANY),
    number("top_p", ABOVE_0, 1.0),
    number("top_k", -1.0, i32::MAX as f64),
    number("min_p", 0.0, 1.0),
    number("seed", i64::MIN as f64, i64::MAX as f64),
    param("stop", Bound::Strings { count: STOPS, each: STOP_BYTES, total: STOP_BYTES }),
    number("repeat_penalty", 1e-3, 1e3),
    number("presence_penalty", -2.0, 2.0),
    number("frequency_penalty", -2.0, 2.0),
];

const OLLAMA_MESSAGE: &[Param] = &[
    text("role", WORD_BYTES),
    param("content", Bound::Prompt),
    param("thinking", Bound::Prompt),
    param("images", Bound::Images(1, &[IMAGE])),
    param("tool_calls", Bound::Objects(MESSAGES, &[OLLAMA_CALL])),
    text("tool_call_id", WORD_BYTES),
    text("tool_name", WORD_BYTES),
];

const OLLAMA_CALL: &[Param] =
    &[text("id", WORD_BYTES), param("function", Bound::Object(&[OLLAMA_FUNCTION]))];

const OLLAMA_FUNCTION: &[Param] = &[text("name", WORD_BYTES), param("arguments", Bound::Tree)];

/// The limits that the routes of models that pool share.
const POOLING: &[Param] = &[
    text("model", NAME_BYTES),
    number("truncate_prompt_tokens", -1.0, u32::MAX as f64),
    number("priority", i32::MIN as f64, i32::MAX as f64),
    text("user", NAME_BYTES),
    text("cache_salt", CACHE_SALT_BYTES),
];

const EMBEDDING: &[Param] = &[
    param("input", Bound::Prompts(INPUTS)),
    text("encoding_format", WORD_BYTES),
    count("dimensions", 1),
    flag("normalize"),
    flag("add_special_tokens"),
    text("task", WORD_BYTES),
];

const RERANK: &[Param] = &[
    param("query", Bound::Prompt),
    param("documents", Bound::Documents(INPUTS, &[DOCUMENT])),
    number("top_n", 0.0, u32::MAX as f64),
    flag("return_documents"),
];

pub(super) const DOCUMENT: &[Param] = &[param("text", Bound::Prompt)];

/// One or many texts.
const fn texts(name: &'static str) -> Param {
    param(name, Bound::Strings { count: INPUTS, each: usize::MAX, total: usize::MAX })
}

const SCORE: &[Param] = &[
    texts("text_1"),
    texts("text_2"),
    texts("queries"),
    texts("documents"),
    texts("data_1"),
    texts("data_2"),
    texts("query"),
    texts("items"),
    flag("use_activation"),
    ignored("label_token_ids"),
];

const TOKENIZE: &[Param] = &[
    text("model", NAME_BYTES),
    param("prompt", Bound::Strings { count: PROMPTS, each: usize::MAX, total: usize::MAX }),
    param("content", Bound::Prompt),
    flag("add_special_tokens"),
    flag("add_special"),
    flag("return_token_strs"),
    flag("with_pieces"),
];

const DETOKENIZE: &[Param] = &[text("model", NAME_BYTES), param("tokens", Bound::Ids(IDS))];

#[cfg(test)]
mod tests {
    use serde::de::value::Error;
    use serde::de::{Deserialize, Deserializer, Visitor};
    use serde::forward_to_deserialize_any;

    use super::*;
    use crate::chat::{ChatMessage, ContentPart};
    use crate::generate::GenerateSampling;
    use crate::images::ImageObject;
    use crate::messages::{
        Block, InMessage, Inner, OutputConfig, OutputFormat, Source, Thinking, ToolChoice,
    };
    use crate::openai::StreamOptions;
    use crate::structure::{JsonSchemaFormat, ResponseFormat, StructuredOutputs};

    /// Asks a type for the names of its fields, aliases too, by not giving it any.
    struct Fields<'a>(&'a mut Vec<&'static str>);

    impl<'de> Deserializer<'de> for Fields<'_> {
        type Error = Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(serde::de::Error::custom("a request is an object"))
        }
        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Error> {
            self.0.extend(fields);
            self.deserialize_any(visitor)
        }
        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
            unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    fn compare<T: for<'de> Deserialize<'de>>(params: Params) {
        let mut fields = Vec::new();
        assert!(T::deserialize(Fields(&mut fields)).is_err());
        fields.sort_unstable();
        let mut names: Vec<_> =
            params.iter().flat_map(|group| group.iter()).map(|p| p.name).collect();
        names.sort_unstable();
        assert_eq!(fields, names, "{}: fields and limits", std::any::type_name::<T>());
    }

    #[test]
    fn every_field_of_every_request_has_a_limit() {
        compare::<ChatRequest>(ChatRequest::PARAMS);
        compare::<CompletionRequest>(CompletionRequest::PARAMS);
        compare::<GenerateRequest>(GenerateRequest::PARAMS);
        compare::<LlamaRequest>(LlamaRequest::PARAMS);
        compare::<EmbeddingRequest>(EmbeddingRequest::PARAMS);
        compare::<MessagesRequest>(MessagesRequest::PARAMS);
        compare::<InMessage>(&[ANTHROPIC_MESSAGE]);
        compare::<Block>(&[BLOCK]);
        compare::<Inner>(&[INNER]);
        compare::<Source>(&[SOURCE]);
        compare::<Thinking>(&[THINKING]);
        compare::<ToolChoice>(&[TOOL_CHOICE]);
        compare::<OutputConfig>(&[OUTPUT_CONFIG]);
        compare::<OutputFormat>(&[OUTPUT_FORMAT]);
        compare::<RerankRequest>(RerankRequest::PARAMS);
        compare::<ScoreRequest>(ScoreRequest::PARAMS);
        compare::<TokenizeRequest>(TokenizeRequest::PARAMS);
        compare::<DetokenizeRequest>(DetokenizeRequest::PARAMS);
        compare::<ChatMessage>(&[MESSAGE]);
        compare::<ContentPart>(&[PART]);
        compare::<ImageObject>(&[IMAGE]);
        compare::<GenerateSampling>(&[SAMPLING, NUMBERS, LISTS]);
        compare::<StreamOptions>(&[STREAM_OPTIONS]);
        compare::<ResponseFormat>(&[RESPONSE_FORMAT]);
        compare::<JsonSchemaFormat>(&[JSON_SCHEMA]);
        compare::<StructuredOutputs>(&[STRUCTURED_OUTPUTS]);
    }
}
