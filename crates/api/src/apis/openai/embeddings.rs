//! `POST /v1/embeddings`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::limits::{Bound, INPUTS};
use crate::parameter::generation::*;
use crate::parameter::{Line, component, own, tabled};
use crate::pooling::{PoolingUsage, check_inputs, check_truncate};
use crate::prompt::{Prompt, Prompts};
use crate::salt::check_salt;
use crate::sampling::Limits;

/// A request to embed texts.
#[derive(Debug, Default)]
pub struct EmbeddingRequest {
    /// The name of the model; `None` means the served one.
    pub model: Option<String>,
    pub(crate) input: Prompts,
    pub(crate) encoding_format: Option<EncodingFormat>,
    pub(crate) dimensions: Option<u32>,
    pub(crate) normalize: Option<bool>,
    pub(crate) use_activation: Option<bool>,
    pub(crate) truncate_prompt_tokens: Option<i64>,
    pub(crate) add_special_tokens: Option<bool>,
    pub(crate) priority: Option<i32>,
    pub(crate) cache_salt: Option<String>,
    /// The task of `/pooling`: `embed`, `score` or `classify`. It must be the model's task.
    pub task: Option<String>,
}

#[rustfmt::skip]
const LINES: &[Line<EmbeddingRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("input", Bound::Prompts(INPUTS), "A string, a list of strings, a list of token ids, or a list of lists of token ids.", |r: &mut EmbeddingRequest, v| v.put(&mut r.input)).required(),
    own("encoding_format", WORD, "The form of a vector: `float` (a list of numbers, the default) or `base64` (of little-endian float32).", |r, v| v.put(&mut r.encoding_format)),
    own("dimensions", count(1), "Keep this many of each vector's first numbers; all if absent. For models that were trained for it (Matryoshka).", |r, v| v.put(&mut r.dimensions)),
    own("normalize", Bound::Flag, "Divide each vector by its length; absent: the choice of the model's authors.", |r, v| v.put(&mut r.normalize)),
    own("use_activation", Bound::Flag, "The same, in vLLM's newer words; false for a model that scores: its own scores, without a function of its authors.", |r, v| v.put(&mut r.use_activation)),
    own("truncate_prompt_tokens", COUNT_OR_ALL, "Cut longer inputs to this many tokens, and do not refuse them; -1: to the limit of the model.", |r, v| v.put(&mut r.truncate_prompt_tokens)),
    own("add_special_tokens", Bound::Flag, "Put the tokenizer's special tokens around a text; true if absent.", |r, v| v.put(&mut r.add_special_tokens)),
    own("priority", I32, "The priority; larger is sooner, under the priority policy.", |r, v| v.put(&mut r.priority)),
    own("cache_salt", CACHE_SALT.bound, "Blocks of the texts are shared only with requests of the same salt, 1 to 256 bytes.", |r, v| v.put(&mut r.cache_salt)),
    own("user", NAME, "Accepted, without an effect.", |_, v| v.skip::<Option<String>>()),
    own("task", WORD, "The task of `/pooling`: `embed`, `score` or `classify`. It has to be the model's own.", |r, v| v.put(&mut r.task)),
];

tabled!(EmbeddingRequest, "Texts to turn into vectors.", [LINES]);

component!(EncodingFormat);

/// The form in which vectors are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// Little-endian float32 in base64.
    Base64,
}

/// An embeddings request, checked except for the lengths of the inputs.
#[derive(Debug, PartialEq)]
pub struct ValidEmbedding {
    /// The prompts, from 1 to [`crate::limits::INPUTS`].
    pub prompts: Vec<Prompt>,
    /// The format of the embeddings in the response.
    pub format: EncodingFormat,
    /// The number of leading elements to keep of each embedding, at most its dimension.
    pub dimensions: Option<usize>,
    /// True if each vector is normalised to length 1.
    pub normalize: bool,
    /// True if scores are returned as the model computes them, without a sigmoid or softmax.
    pub raw: bool,
    /// The number of tokens that inputs are truncated to: at least one and at most the context
    /// length. `None` if longer inputs are refused.
    pub truncate: Option<usize>,
    /// True if the tokenizer adds its special tokens around each text.
    pub add_special_tokens: bool,
    /// The scheduling priority.
    pub priority: i32,
    /// The salt. Cached blocks are shared only between requests with the same salt.
    pub cache_salt: Option<Arc<str>>,
}

impl EmbeddingRequest {
    /// Creates the request from a request of Ollama's API.
    pub(crate) fn from_ollama(
        input: Prompts,
        normalize: bool,
        dimensions: Option<u32>,
        truncate: Option<bool>,
    ) -> Self {
        Self {
            input,
            dimensions,
            normalize: Some(normalize),
            truncate_prompt_tokens: truncate.unwrap_or(true).then_some(-1),
            ..Self::default()
        }
    }

    /// Checks everything that can be checked before the inputs are tokenised. Embeddings have
    /// `size` dimensions. `normalized` is true if the model's authors normalise them.
    ///
    /// # Errors
    /// A parameter is out of range. The error names the first such parameter.
    pub fn validate(
        self,
        limits: Limits,
        size: usize,
        normalized: bool,
    ) -> Result<ValidEmbedding, ApiError> {
        let prompts = self.input.validate("input", limits.vocab_size)?;
        if matches!(&prompts[..], [Prompt::Text(text)] if text.is_empty()) {
            return Err(ApiError::invalid("input", "`input`: must not be empty"));
        }
        check_inputs("input", prompts.len())?;
        let dimensions = self.dimensions.map(|kept| kept as usize);
        if let Some(kept) = dimensions.filter(|kept| !(1..=size).contains(kept)) {
            let reason = format!("`dimensions`: {kept} is not within 1 to {size}");
            return Err(ApiError::invalid("dimensions", reason));
        }
        Ok(ValidEmbedding {
            prompts,
            format: self.encoding_format.unwrap_or_default(),
            dimensions,
            normalize: self.normalize.or(self.use_activation).unwrap_or(normalized),
            raw: self.use_activation == Some(false),
            truncate: check_truncate(self.truncate_prompt_tokens, limits)?,
            add_special_tokens: self.add_special_tokens.unwrap_or(true),
            priority: self.priority.unwrap_or(0),
            cache_salt: check_salt(self.cache_salt.as_deref())?,
        })
    }
}

/// The response of `/pooling`.
#[derive(Debug, Serialize, ToSchema)]
pub struct PoolingResponse {
    /// `pool-` and a random number.
    pub id: String,
    /// `list`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The results, one for each input, in order.
    pub data: Vec<PoolingData>,
    /// The token counts of the request.
    pub usage: PoolingUsage,
}

/// The vector of one input.
#[derive(Debug, Serialize, ToSchema)]
pub struct PoolingData {
    /// The index of the input.
    pub index: usize,
    /// `pooling`.
    pub object: &'static str,
    /// A vector. For a scoring model, a list with one number for each label.
    pub data: Vector,
}

/// Vectors of the inputs.
#[derive(Debug, Serialize, ToSchema)]
pub struct EmbeddingResponse {
    /// `embd-` and a random number.
    pub id: String,
    /// `list`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The vectors, one for each input, in order.
    pub data: Vec<Embedding>,
    /// The token counts of the request.
    pub usage: PoolingUsage,
}

/// The vector of one input.
#[derive(Debug, Serialize, ToSchema)]
pub struct Embedding {
    /// `embedding`.
    pub object: &'static str,
    /// The index of the input.
    pub index: usize,
    /// The vector.
    pub embedding: Vector,
}

/// A vector in one of its forms.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum Vector {
    /// A list of numbers.
    Float(Vec<f32>),
    /// Little-endian float32 in base64.
    Base64(String),
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::trial::{LIMITS, request};

    fn validate(body: Value) -> Result<ValidEmbedding, ApiError> {
        request::<EmbeddingRequest>(&body)?.validate(LIMITS, 384, true)
    }

    #[test]
    fn defaults_are_openai_s() {
        let valid = validate(json!({"model": "m", "input": "a", "user": "u"})).unwrap();
        let expected = ValidEmbedding {
            prompts: vec![Prompt::Text("a".into())],
            format: EncodingFormat::Float,
            dimensions: None,
            normalize: true,
            raw: false,
            truncate: None,
            add_special_tokens: true,
            priority: 0,
            cache_salt: None,
        };
        assert_eq!(valid, expected);
    }

    #[test]
    fn vectors_are_divided_unless_the_client_says_otherwise() {
        for (more, normalize) in [
            (json!({}), true),
            (json!({"normalize": false}), false),
            (json!({"use_activation": false}), false),
            (json!({"use_activation": true}), true),
            (json!({"use_activation": false, "normalize": true}), true),
        ] {
            let body = crate::trial::with(json!({"input": "a"}), &more);
            assert_eq!(validate(body).unwrap().normalize, normalize, "{more}");
        }
    }

    #[test]
    fn inputs_have_four_shapes_and_a_limit() {
        for (input, count) in [
            (json!("a"), 1),
            (json!(["a", "b"]), 2),
            (json!([1, 2, 3]), 1),
            (json!([[1], [2]]), 2),
            (json!(vec!["a"; INPUTS]), INPUTS),
        ] {
            assert_eq!(validate(json!({"input": input})).unwrap().prompts.len(), count);
        }
    }

    #[test]
    fn truncation_is_to_a_number_or_to_what_fits() {
        for (asked, expected) in [(json!(-1), Some(100)), (json!(7), Some(7)), (json!(null), None)]
        {
            let body = json!({"input": "a", "truncate_prompt_tokens": asked});
            assert_eq!(validate(body).unwrap().truncate, expected);
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |key: &str, value: Value| {
            let mut body = json!({"input": "a"});
            body[key] = value;
            body
        };
        let cases = [
            (json!({}), "input"),
            (with("input", json!([])), "input"),
            (with("input", json!([[]])), "input[0]"),
            (with("input", json!([1000])), "input[0]"),
            (with("input", json!(vec!["a"; INPUTS + 1])), "input"),
            (with("cache_salt", json!("")), "cache_salt"),
            (with("dimensions", json!(0)), "dimensions"),
            (with("dimensions", json!(385)), "dimensions"),
            (with("encoding_format", json!("int8")), "encoding_format"),
            (with("truncate_prompt_tokens", json!(0)), "truncate_prompt_tokens"),
            (with("truncate_prompt_tokens", json!(101)), "truncate_prompt_tokens"),
            (with("truncate_prompt_tokens", json!(-2)), "truncate_prompt_tokens"),
        ];
        for (body, expected) in cases {
            let error = validate(body.clone()).unwrap_err();
            assert_eq!(error.body().error.param.as_deref(), Some(expected), "{body}");
            assert_eq!(error.status(), 400);
        }
    }
}
