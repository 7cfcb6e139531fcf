//! Parameters that several dialects have.

use super::param::{ABOVE_0, ANY, count, flag, number, param, text};
use crate::limits::{
    BIASES, Bound, CHOICES, MESSAGES, Param, STOP_BYTES, STOP_IDS, STOPS, WORD_BYTES,
};

/// A conversation and the parameters of its rendering.
pub(super) const CONVERSATION: &[Param] = &[
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

/// Sampling parameters that all dialects name alike.
pub(super) const NUMBERS: &[Param] = &[
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
pub(super) const LISTS: &[Param] = &[
    param("logit_bias", Bound::Biases(BIASES)),
    param("stop", Bound::Strings { count: STOPS, each: STOP_BYTES, total: STOP_BYTES }),
    param("stop_token_ids", Bound::Ids(STOP_IDS)),
];
