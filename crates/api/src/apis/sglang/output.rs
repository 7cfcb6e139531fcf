//! `POST /generate`, SGLang's native API: responses.

use serde::ser::{Serialize, SerializeTuple, Serializer};
use utoipa::ToSchema;

use crate::response::StopReason;

/// The answer to a native request, or a chunk of its stream.
#[derive(Debug, serde::Serialize, ToSchema)]
pub struct GenerateOutput {
    /// The index of the prompt and choice in the batch; only in the chunks of a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// All of the text so far.
    pub text: String,
    /// All of the generated tokens so far.
    pub output_ids: Vec<i32>,
    /// The facts about the request.
    pub meta_info: GenerateMeta,
}

/// The facts about a native request.
#[derive(Debug, serde::Serialize, ToSchema)]
pub struct GenerateMeta {
    /// The client's `rid`, or a random name.
    pub id: String,
    /// The reason why generation ended; null before the end.
    pub finish_reason: Option<GenerateFinish>,
    /// The number of prompt tokens.
    pub prompt_tokens: u32,
    /// The number of tokens generated so far.
    pub completion_tokens: u32,
    /// The number of prompt tokens that were found in the prefix cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
    /// Seconds since the arrival of the request.
    pub e2e_latency: f64,
    /// The name of the current weights, on servers that can load other weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_version: Option<String>,
    /// One (log-probability, id, text) for each token of the prompt, from `logprob_start_len` on.
    /// The log-probability of the first one is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub input_token_logprobs: Option<Vec<LogprobTriple>>,
    /// The most likely tokens for each entry of `input_token_logprobs`; null for the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub input_top_logprobs: Option<Vec<Option<Vec<LogprobTriple>>>>,
    /// One (log-probability, id, text) for each generated token.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub output_token_logprobs: Option<Vec<LogprobTriple>>,
    /// The most likely tokens for each generated token.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub output_top_logprobs: Option<Vec<Vec<LogprobTriple>>>,
}

/// The reason for the end of a native request.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum GenerateFinish {
    /// A stop string or stop token.
    Stop {
        /// The stop string or token that ended the output.
        matched: StopReason,
    },
    /// The answer has the requested number of tokens.
    Length {
        /// The number of tokens in the output.
        length: u32,
    },
}

/// A token in SGLang's native format: `[log-probability, id, text or null]`.
#[derive(Debug, Clone, PartialEq)]
pub struct LogprobTriple {
    /// The natural logarithm of the token's probability; `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The id of the token.
    pub id: i32,
    /// The text of the token, if requested.
    pub text: Option<String>,
}

impl Serialize for LogprobTriple {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(3)?;
        tuple.serialize_element(&self.logprob)?;
        tuple.serialize_element(&self.id)?;
        tuple.serialize_element(&self.text)?;
        tuple.end()
    }
}
