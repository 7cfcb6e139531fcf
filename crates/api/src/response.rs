//! Responses of OpenAI's APIs, as a whole or as chunks of a stream.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// The token counts of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// The number of tokens of all prompts. Each prompt counts once, even with several choices.
    pub prompt_tokens: u32,
    /// The number of tokens of prompt and answer together.
    pub total_tokens: u32,
    /// Tokens generated in all choices, including end-of-sequence tokens.
    pub completion_tokens: u32,
    /// Details of `prompt_tokens`, unless the server hides them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Option<PromptTokensDetails>,
    /// Details of `completion_tokens`, for reasoning models and predicted answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// Details of generated tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Tokens of separated reasoning, without the marks around it.
    pub reasoning_tokens: u32,
    /// Tokens of the client's predicted answer that were generated, if there is a prediction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted_prediction_tokens: Option<u32>,
    /// Tokens of the predicted answer that were verified but not generated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejected_prediction_tokens: Option<u32>,
}

/// Details of a prompt's tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Tokens that were found in the prefix cache.
    pub cached_tokens: u32,
}

impl Usage {
    /// Creates a usage from its counts. `cached_tokens` is `None` if the server hides it.
    pub fn new(prompt_tokens: u32, completion_tokens: u32, cached_tokens: Option<u32>) -> Self {
        let details = |cached_tokens| PromptTokensDetails { cached_tokens };
        Self {
            prompt_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            completion_tokens,
            prompt_tokens_details: cached_tokens.map(details),
            completion_tokens_details: None,
        }
    }

    /// Sets the number of generated tokens that are reasoning.
    #[must_use]
    pub fn with_reasoning(self, reasoning_tokens: u32) -> Self {
        let details = self.completion_tokens_details.unwrap_or_default();
        let details = CompletionTokensDetails { reasoning_tokens, ..details };
        Self { completion_tokens_details: Some(details), ..self }
    }

    /// Sets the numbers of accepted and rejected tokens of a predicted output.
    #[must_use]
    pub fn with_prediction(self, accepted: u32, rejected: u32) -> Self {
        let details = CompletionTokensDetails {
            accepted_prediction_tokens: Some(accepted),
            rejected_prediction_tokens: Some(rejected),
            ..self.completion_tokens_details.unwrap_or_default()
        };
        Self { completion_tokens_details: Some(details), ..self }
    }
}

/// The stop string or stop token that ended a choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StopReason {
    /// A token id.
    Token(i32),
    /// A stop string.
    Text(String),
}

/// A chat completion.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatCompletion {
    /// `chatcmpl-` and a random number.
    pub id: String,
    /// `chat.completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The choices.
    pub choices: Vec<ChatChoice>,
    /// The token counts of the request.
    pub usage: Usage,
    /// The prompt's token ids, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<i32>>,
    /// Log-probabilities of the prompt's tokens, if requested; null for the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub prompt_logprobs: Option<Vec<Option<PromptTokenLogprobs>>>,
}

/// A choice of a chat completion.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    /// The index of the choice.
    pub index: u32,
    /// The model's message.
    pub message: ResponseMessage,
    /// Log-probabilities, if requested.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// The stop string or stop token; null for end-of-sequence.
    pub stop_reason: Option<StopReason>,
    /// The stop string or token that ended the choice, including end-of-sequence. The name is
    /// SGLang's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<StopReason>,
    /// Ids of the generated tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<i32>>,
}

/// The model's message.
#[derive(Debug, Serialize, ToSchema)]
pub struct ResponseMessage {
    /// `assistant`.
    pub role: &'static str,
    /// The text; null if there are only calls or reasoning.
    pub content: Option<String>,
    /// Always null.
    pub refusal: Option<String>,
    /// The reasoning, if it is separated from the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The reasoning under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The model's calls of tools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ToolCall {
    /// The id of the call. The message with the tool's result repeats it as `tool_call_id`.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The called function.
    pub function: FunctionCall,
}

/// A function with its arguments.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct FunctionCall {
    /// The name of the function.
    pub name: String,
    /// A JSON object as the model wrote it. It may be truncated if `finish_reason` is `length`.
    pub arguments: String,
}

/// A choice in a chunk of a chat completion's stream.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatChunkChoice<'a> {
    /// The index of the choice.
    pub index: u32,
    /// The new part.
    pub delta: ChatDelta<'a>,
    /// Log-probabilities of the new tokens, if requested.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls` in the choice's last chunk.
    pub finish_reason: Option<&'static str>,
    /// The stop string or stop token; null for end-of-sequence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// The stop string or token that ended the choice, including end-of-sequence; only in its last
    /// chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<StopReason>,
    /// Ids of the new tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<&'a [i32]>,
}

/// The new part of a choice.
#[derive(Debug, Clone, Copy, Default, Serialize, ToSchema)]
pub struct ChatDelta<'a> {
    /// `assistant`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'a str>,
    /// New text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    /// New reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<&'a str>,
    /// The reasoning under its other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// The beginning of a tool call, or the next piece of a call's arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[ToolCallDelta<'a>; 1]>,
}

/// The new part of a call.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub struct ToolCallDelta<'a> {
    /// The index of the call in the choice.
    pub index: u32,
    /// The id that the tool's answer refers to; only in the first chunk of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    /// The word `function`; only in the first chunk of a call.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// The called function.
    pub function: FunctionDelta<'a>,
}

/// The new part of a function call.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub struct FunctionDelta<'a> {
    /// The whole name; only in the first chunk of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// More of the arguments: a piece of JSON.
    pub arguments: &'a str,
}

/// Log-probabilities of a choice.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// The log-probabilities, one for each token.
    pub content: Vec<ChatTokenLogprob>,
}

/// Log-probability of a token.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ChatTokenLogprob {
    /// The token's text; U+FFFD for a part of a character.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// The token's bytes.
    pub bytes: Vec<u8>,
    /// The most likely tokens, descending.
    pub top_logprobs: Vec<ChatTopLogprob>,
}

/// Log-probability of an alternative.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ChatTopLogprob {
    /// The token's text.
    pub token: String,
    /// Natural logarithm.
    pub logprob: f32,
    /// The token's bytes.
    pub bytes: Vec<u8>,
}

/// A completion, or a chunk of its stream.
#[derive(Debug, Serialize, ToSchema)]
pub struct Completion {
    /// `cmpl-` and a random number.
    pub id: String,
    /// `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name of the model.
    pub model: String,
    /// The choices: first those of the first prompt, then those of the second, and so on.
    pub choices: Vec<CompletionChoice>,
    /// The token counts of the request.
    pub usage: Usage,
}

/// A choice of a completion.
#[derive(Debug, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// The index of the choice, counted over all prompts.
    pub index: u32,
    /// The text; in a stream, the new text.
    pub text: String,
    /// Log-probabilities, if requested.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`, at the end.
    pub finish_reason: Option<&'static str>,
    /// The stop string or stop token; null for end-of-sequence.
    pub stop_reason: Option<StopReason>,
    /// The stop string or token that ended the choice, including end-of-sequence; only at its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub matched_stop: Option<StopReason>,
    /// Ids of the prompt's tokens, if requested; in a stream, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<i32>>,
    /// Ids of the generated tokens, if requested; in a stream, the new ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<i32>>,
    /// Log-probabilities of the prompt's tokens, if requested; null for the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Object>>)]
    pub prompt_logprobs: Option<Vec<Option<PromptTokenLogprobs>>>,
}

/// A prompt token and the most likely tokens at its position, in vLLM's format: a JSON object keyed
/// by token id.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PromptTokenLogprobs(pub Vec<(i32, PromptTokenLogprob)>);

impl Serialize for PromptTokenLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, entry)| (id, entry)))
    }
}

/// The log-probability of a token at a prompt position.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptTokenLogprob {
    /// Natural logarithm.
    pub logprob: f32,
    /// The rank of the token; 1 is the most likely one.
    pub rank: u32,
    /// The token's text.
    pub decoded_token: String,
}

/// Log-probabilities in the legacy shape: four lists with one entry for each token.
#[derive(Debug, Clone, Default, PartialEq, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// The offset of each token's text in the whole text, in characters.
    pub text_offset: Vec<u32>,
    /// Natural logarithms; null for the first token of an echoed prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// The tokens' text.
    pub tokens: Vec<String>,
    /// The most likely tokens by their text; the sampled one is always among them. Null for the
    /// first token of an echoed prompt.
    #[schema(value_type = Vec<Object>)]
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
}

/// The served models.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// One card for each served name.
    pub data: Vec<ModelCard>,
    /// The id of the first item. This and the next two fields are for Anthropic's clients.
    pub first_id: Option<String>,
    /// The id of the last item.
    pub last_id: Option<String>,
    /// Always false: the list is whole.
    pub has_more: bool,
}

/// A served model.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct ModelCard {
    /// The name that requests use.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// `model`. This and the next two fields are for Anthropic's clients.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The same as `id`.
    pub display_name: String,
    /// When the server started, in RFC 3339 format.
    pub created_at: String,
    /// When the server started, in seconds since 1970.
    pub created: u64,
    /// `forebay`.
    pub owned_by: &'static str,
    /// The hub id or path of the loaded model, or the path of an adapter.
    pub root: String,
    /// The base model of an adapter; absent for a model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// A hash of an adapter's content; absent for a model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// The largest number of positions of a request; null until the model is loaded.
    pub max_model_len: Option<u32>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_chunk_says_only_what_is_new() {
        let chunk = ChatChunkChoice {
            index: 0,
            delta: ChatDelta { content: Some("a"), ..ChatDelta::default() },
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            matched_stop: None,
            token_ids: None,
        };
        assert_eq!(
            serde_json::to_value(chunk).unwrap(),
            json!({"index": 0, "delta": {"content": "a"}, "logprobs": null, "finish_reason": null})
        );
        assert_eq!(serde_json::to_value(StopReason::Text("x".into())).unwrap(), json!("x"));
    }

    #[test]
    fn tokens_of_a_prompt_are_by_their_ids_and_in_order() {
        let entry = |rank| PromptTokenLogprob { logprob: -0.5, rank, decoded_token: "é".into() };
        let tokens = PromptTokenLogprobs(vec![(9, entry(3)), (5, entry(1))]);
        let expected = r#"[null,{"9":{"logprob":-0.5,"rank":3,"decoded_token":"é"},"5":{"logprob":-0.5,"rank":1,"decoded_token":"é"}}]"#;
        assert_eq!(serde_json::to_string(&[None, Some(tokens)]).unwrap(), expected);
    }

    #[test]
    fn usage_adds_up() {
        let usage = serde_json::to_value(Usage::new(3, 4, Some(2))).unwrap();
        assert_eq!(
            usage,
            json!({"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4,
                   "prompt_tokens_details": {"cached_tokens": 2}})
        );
        let hidden = serde_json::to_value(Usage::new(3, 4, None)).unwrap();
        assert_eq!(hidden, json!({"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}));
    }
}
