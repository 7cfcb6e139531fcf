//! Validated chats, from whichever API.

use serde_json::{Map, Value};

use crate::images::ImagePart;
use crate::sampling::Generation;
use crate::tools::OfferedTools;

/// A conversation ready for the chat template.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatPrompt {
    /// Messages in the template's form, an array of objects: `content` is a string, or a list of
    /// parts if there are images.
    pub messages: Value,
    /// The images in them, in order.
    pub images: Vec<ImagePart>,
    /// True if the template opens the assistant's turn.
    pub add_generation_prompt: bool,
    /// True if the last message is left open.
    pub continue_final_message: bool,
    /// Descriptions of tools; `None`: the request has none.
    pub tools: Option<Value>,
    /// More variables for the template.
    pub kwargs: Map<String, Value>,
    /// The effort of the model's reasoning.
    pub effort: Effort,
}

/// The names of the parameters for reasoning effort, for error messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EffortParams {
    /// The parameter with the effort in words.
    pub level: &'static str,
    /// The parameter with the switch.
    pub switch: &'static str,
}

impl Default for EffortParams {
    fn default() -> Self {
        Self { level: "reasoning_effort", switch: "enable_thinking" }
    }
}

/// The requested reasoning effort.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Effort {
    /// The effort level: `low`, `medium`, `high`, or another word that the template accepts.
    pub level: Option<String>,
    /// True if the model should think; `None` leaves it to the template.
    pub thinks: Option<bool>,
    /// The parameters of both.
    pub params: EffortParams,
}

/// A chat completion request that is checked, except for the prompt's length.
#[derive(Debug)]
pub struct ValidChat {
    /// The conversation.
    pub prompt: ChatPrompt,
    /// Tools that the model may call.
    pub tools: OfferedTools,
    /// The treatment of its reasoning.
    pub reasoning: ReasoningOutput,
    /// How tokens are returned in addition to their text.
    pub tokens: TokenOutput,
    /// The answer that the client predicts.
    pub prediction: Option<String>,
    /// The parameters that all routes share.
    pub generation: Generation,
    /// The options of the stream; `None`: one response.
    pub streaming: Option<Streaming>,
}

/// The treatment of a model's reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningOutput {
    /// Reasoning stands apart from the content.
    Apart,
    /// Reasoning is left out.
    LeftOut,
    /// Reasoning is content, as the model writes it.
    Content,
}

/// The options of a requested stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streaming {
    /// True if a last chunk has the usage.
    pub include_usage: bool,
    /// True if every chunk has the usage so far.
    pub continuous_usage: bool,
}

/// How tokens are returned in addition to their text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenOutput {
    /// True if the answer includes the tokens' ids.
    pub ids: bool,
    /// True if log-probabilities name tokens by their ids.
    pub as_ids: bool,
}
