//! OpenAI's chats and completions.

use forebay_grammar::SCHEMA_BYTES;

use super::param::{choices, count, flag, grammar, ignored, number, param, regex, source, text};
use crate::limits::{
    ALLOWED_IDS, BAD_WORD_BYTES, BAD_WORDS, Bound, CACHE_SALT_BYTES, CHOICES, LOGPROBS, NAME_BYTES,
    PROMPTS, Param, ROUTING_KEY_BYTES, STOP_BYTES, WORD_BYTES,
};

pub(super) const CHAT: &[Param] = &[
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

pub(super) const COMPLETION: &[Param] = &[
    param("prompt", Bound::Prompts(PROMPTS)),
    param("prompt_embeds", Bound::Embeds(PROMPTS)),
    flag("echo"),
    number("logprobs", 0.0, LOGPROBS as f64),
    number("best_of", 0.0, CHOICES as f64),
    ignored("suffix"),
];

/// The parameters that OpenAI's two dialects share, beside [`NUMBERS`] and [`LISTS`].
pub(super) const OPENAI: &[Param] = &[
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

const REASONING: &[Param] = &[
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
