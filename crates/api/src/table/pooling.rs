//! Requests of models that pool.

use super::param::{count, flag, ignored, number, param, text, texts};
use crate::limits::{Bound, CACHE_SALT_BYTES, INPUTS, NAME_BYTES, Param, WORD_BYTES};

/// The limits that the routes of models that pool share.
pub(super) const POOLING: &[Param] = &[
    text("model", NAME_BYTES),
    number("truncate_prompt_tokens", -1.0, u32::MAX as f64),
    number("priority", i32::MIN as f64, i32::MAX as f64),
    text("user", NAME_BYTES),
    text("cache_salt", CACHE_SALT_BYTES),
];

pub(super) const EMBEDDING: &[Param] = &[
    param("input", Bound::Prompts(INPUTS)),
    text("encoding_format", WORD_BYTES),
    count("dimensions", 1),
    flag("normalize"),
    flag("add_special_tokens"),
    text("task", WORD_BYTES),
];

pub(super) const RERANK: &[Param] = &[
    param("query", Bound::Prompt),
    param("documents", Bound::Documents(INPUTS, &[DOCUMENT])),
    number("top_n", 0.0, u32::MAX as f64),
    flag("return_documents"),
];

const DOCUMENT: &[Param] = &[param("text", Bound::Prompt)];

pub(super) const SCORE: &[Param] = &[
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
