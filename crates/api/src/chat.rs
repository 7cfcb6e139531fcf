//! A validated chat request, independent of the API that it came from.

use serde_json::{Map, Value};

use crate::images::ImagePart;
use crate::sampling::Generation;
use crate::tools::OfferedTools;

/// A conversation ready for the chat template.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatPrompt {
    /// The messages as the chat template expects them, an array of objects. `content` is a string,
    /// or a list of parts if the message has images.
    pub messages: Value,
    /// The images of the messages, in order.
    pub images: Vec<ImagePart>,
    /// True if the template appends the header of the assistant's message.
    pub add_generation_prompt: bool,
    /// True if the model continues the last message, which the template does not close.
    pub continue_final_message: bool,
    /// Descriptions of the tools, or `None` if the request has none.
    pub tools: Option<Value>,
    /// Additional variables for the template.
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
    /// Whether the model should think; `None` leaves the choice to the template.
    pub thinks: Option<bool>,
    /// The names of the parameters for `level` and `thinks`.
    pub params: EffortParams,
}

/// A chat completion request that is checked, except for the prompt's length.
#[derive(Debug)]
pub struct ValidChat {
    /// The conversation.
    pub prompt: ChatPrompt,
    /// Tools that the model may call.
    pub tools: OfferedTools,
    /// How the model's reasoning is returned.
    pub reasoning: ReasoningOutput,
    /// How tokens are returned in addition to their text.
    pub tokens: TokenOutput,
    /// The output that the client predicts.
    pub prediction: Option<String>,
    /// The parameters that all routes share.
    pub generation: Generation,
    /// The options of the stream; `None` for a single response.
    pub streaming: Option<Streaming>,
}

/// How a model's reasoning is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningOutput {
    /// Reasoning is returned in a field beside the content.
    Apart,
    /// Reasoning is left out.
    LeftOut,
    /// Reasoning stays in the content, as the model writes it.
    Content,
}

/// The options of a requested stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streaming {
    /// True if a last chunk reports the usage.
    pub include_usage: bool,
    /// True if every chunk reports the usage so far.
    pub continuous_usage: bool,
}

/// How tokens are returned in addition to their text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenOutput {
    /// True if the response includes the ids of the tokens.
    pub ids: bool,
    /// True if log-probabilities identify tokens by their ids.
    pub as_ids: bool,
}
