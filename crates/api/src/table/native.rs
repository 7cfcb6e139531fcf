//! SGLang's native dialect, and that of llama.cpp's server.

use super::param::{
    ABOVE_0, ANY, count, flag, grammar, ignored, number, param, regex, source, text,
};
use super::shared::{IMAGE, LISTS, NUMBERS};
use crate::limits::{
    Bound, CACHE_SALT_BYTES, LOGPROBS, NAME_BYTES, PROMPTS, Param, ROUTING_KEY_BYTES, STOP_BYTES,
    STOPS,
};

pub(super) const GENERATE: &[Param] = &[
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
pub(super) const SAMPLING: &[Param] = &[
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

pub(super) const LLAMA: &[Param] = &[
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
