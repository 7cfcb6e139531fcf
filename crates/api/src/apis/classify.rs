//! `/classify`: the probabilities of labels, in vLLM's format.

use serde::Serialize;
use utoipa::ToSchema;

use super::openai::{EmbeddingRequest, ValidEmbedding};
use crate::error::ApiError;
use crate::limits::{Bound, INPUTS};
use crate::parameter::generation::*;
use crate::parameter::{Line, own, tabled};
use crate::pooling::PoolingUsage;
use crate::prompt::Prompts;
use crate::sampling::Limits;

/// A request to classify texts.
#[derive(Debug, Default)]
pub struct ClassifyRequest {
    /// The name of the model; `None` means the served one.
    pub model: Option<String>,
    input: Prompts,
    use_activation: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    add_special_tokens: Option<bool>,
    priority: Option<i32>,
    cache_salt: Option<String>,
}

#[rustfmt::skip]
const LINES: &[Line<ClassifyRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("input", Bound::Prompts(INPUTS), "A string, a list of strings, a list of token ids, or a list of lists of token ids.", |r: &mut ClassifyRequest, v| v.put(&mut r.input)).required(),
    own("use_activation", Bound::Flag, "False: the model's own scores, without the function that makes probabilities of them.", |r: &mut ClassifyRequest, v| v.put(&mut r.use_activation)).also(ACTIVATIONS),
    own("truncate_prompt_tokens", COUNT_OR_ALL, "Cut longer inputs to this many tokens, and do not refuse them; -1: to the limit of the model.", |r, v| v.put(&mut r.truncate_prompt_tokens)),
    own("add_special_tokens", Bound::Flag, "Put the tokenizer's special tokens around a text; true if absent.", |r, v| v.put(&mut r.add_special_tokens)),
    own("priority", I32, "The priority; larger is sooner, under the priority policy.", |r, v| v.put(&mut r.priority)),
    own("cache_salt", CACHE_SALT.bound, "Blocks of the texts are shared only with requests of the same salt, 1 to 256 bytes.", |r, v| v.put(&mut r.cache_salt)),
    own("user", NAME, "Accepted, without an effect.", |_, v| v.skip::<Option<String>>()),
];

tabled!(ClassifyRequest, "Texts to classify, in the shape of vLLM.", [LINES]);

impl ClassifyRequest {
    /// Checks everything that can be checked before the inputs are tokenised. `size` is the number
    /// of scores per input.
    ///
    /// # Errors
    /// A parameter is out of range. The error names the first such parameter.
    pub fn validate(self, limits: Limits, size: usize) -> Result<ValidEmbedding, ApiError> {
        let Self { model, input, use_activation, .. } = self;
        let same = EmbeddingRequest {
            model,
            input,
            use_activation,
            normalize: Some(false),
            truncate_prompt_tokens: self.truncate_prompt_tokens,
            add_special_tokens: self.add_special_tokens,
            priority: self.priority,
            cache_salt: self.cache_salt,
            ..EmbeddingRequest::default()
        };
        same.validate(limits, size, false)
    }
}

/// Probabilities of labels.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifyResponse {
    /// `classify-` and a random number.
    pub id: String,
    /// `list`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The results, one for each input, in order.
    pub data: Vec<ClassifyData>,
    /// The token counts of the request.
    pub usage: PoolingUsage,
}

/// The classes of one input.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClassifyData {
    /// The index of the input.
    pub index: usize,
    /// The label with the largest value in `probs`.
    pub label: String,
    /// The probability of each label, in the order of the model's `id2label`; its raw score if
    /// `use_activation` is false.
    pub probs: Vec<f32>,
    /// The number of labels.
    pub num_classes: usize,
}
