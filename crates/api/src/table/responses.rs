//! OpenAI's newer dialect.

use super::param::{ABOVE_0, ANY, count, flag, ignored, number, param, source, text};
use crate::limits::{Bound, CACHE_SALT_BYTES, NAME_BYTES, Param, STOPS, WORD_BYTES};

pub(super) const RESPONSES: &[Param] = &[
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
