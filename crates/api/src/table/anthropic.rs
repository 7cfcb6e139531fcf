//! Anthropic's dialect.

use super::param::{ABOVE_0, ANY, count, flag, ignored, number, param, source, text};
use crate::limits::{
    Bound, CACHE_SALT_BYTES, MESSAGES, NAME_BYTES, Param, STOP_BYTES, STOPS, WORD_BYTES,
};

pub(super) const ANTHROPIC: &[Param] = &[
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

pub(super) const ANTHROPIC_MESSAGE: &[Param] =
    &[text("role", WORD_BYTES), param("content", Bound::Content(&[BLOCK]))];

pub(super) const BLOCK: &[Param] = &[
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

pub(super) const INNER: &[Param] = &[
    text("type", WORD_BYTES),
    param("text", Bound::Prompt),
    param("source", Bound::Object(&[SOURCE])),
];

pub(super) const SOURCE: &[Param] = &[
    text("type", WORD_BYTES),
    text("media_type", WORD_BYTES),
    param("data", Bound::Url),
    param("url", Bound::Url),
];

pub(super) const THINKING: &[Param] = &[text("type", WORD_BYTES), count("budget_tokens", 0)];

pub(super) const TOOL_CHOICE: &[Param] =
    &[text("type", WORD_BYTES), text("name", WORD_BYTES), flag("disable_parallel_tool_use")];

pub(super) const OUTPUT_CONFIG: &[Param] =
    &[text("effort", WORD_BYTES), param("format", Bound::Object(&[OUTPUT_FORMAT]))];

pub(super) const OUTPUT_FORMAT: &[Param] = &[text("type", WORD_BYTES), source("schema")];
