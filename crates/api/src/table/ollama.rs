//! Ollama's dialect.

use super::param::{ABOVE_0, ANY, count, flag, ignored, number, param, source, text};
use super::shared::IMAGE;
use crate::limits::{Bound, INPUTS, MESSAGES, NAME_BYTES, Param, STOP_BYTES, STOPS, WORD_BYTES};

pub(super) const OLLAMA: &[Param] = &[
    text("model", NAME_BYTES),
    flag("stream"),
    source("format"),
    param("options", Bound::Object(&[OLLAMA_OPTIONS])),
    param("think", Bound::Tree),
    param("keep_alive", Bound::Tree),
];

pub(super) const OLLAMA_CHAT: &[Param] =
    &[param("messages", Bound::Messages(MESSAGES, &[OLLAMA_MESSAGE])), param("tools", Bound::Tree)];

pub(super) const OLLAMA_GENERATE: &[Param] = &[
    param("prompt", Bound::Prompt),
    param("system", Bound::Prompt),
    param("images", Bound::Images(1, &[IMAGE])),
    flag("raw"),
    ignored("suffix"),
    ignored("template"),
    ignored("context"),
];

pub(super) const OLLAMA_EMBED: &[Param] = &[
    text("model", NAME_BYTES),
    param("input", Bound::Prompts(INPUTS)),
    flag("truncate"),
    count("dimensions", 1),
    ignored("options"),
    ignored("keep_alive"),
];

pub(super) const OLLAMA_SHOW: &[Param] = &[text("model", NAME_BYTES), text("name", NAME_BYTES)];

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
