//! `POST /v1/messages`, Anthropic's dialect: requests.

pub(crate) mod conversation;
#[cfg(test)]
mod tests;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::chat::{ChatPrompt, Effort, ReasoningOutput, ValidChat};
use crate::content::TextOr;
use crate::error::ApiError;
use crate::inert::Inert;
use crate::openai::{Streaming, TokenOutput};
use crate::prompt::Strings;
use crate::sampling::{Fields, GenerationDefaults, Limits};
use crate::structure::{JsonSchemaFormat, Raw, ResponseFormat, Spellings};
use crate::tools::OfferedTools;
use crate::turns::Turns;
use conversation::{Block, InMessage, add, invalid, system_text};

/// A request of Anthropic's dialect. `/v1/messages/count_tokens` takes it too.
#[derive(Debug, Deserialize, ToSchema)]
pub struct MessagesRequest {
    /// The name of the model; the served one if absent.
    pub model: Option<String>,
    /// The conversation so far.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<InMessage>,
    /// The system prompt: a string, or a list of blocks of text.
    #[schema(value_type = Option<String>)]
    system: Option<TextOr<Block>>,
    /// The largest number of tokens to generate; the rest of the context if absent.
    pub max_tokens: Option<u32>,
    /// Strings that end the text.
    #[schema(value_type = Option<Vec<String>>)]
    stop_sequences: Option<Strings>,
    /// Send typed events.
    pub stream: Option<bool>,
    /// The temperature; 0 is greedy.
    pub temperature: Option<f32>,
    /// The share of probability that is kept (nucleus sampling).
    pub top_p: Option<f32>,
    /// The number of candidates; -1 or 0 is off.
    pub top_k: Option<i32>,
    /// The switch for reasoning, and its largest number of tokens.
    thinking: Option<Thinking>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// The demand for calls: none, any, or certain tools.
    tool_choice: Option<ToolChoice>,
    /// The form of the answer, and the effort of the reasoning.
    output_config: Option<OutputConfig>,
    /// The form of the answer.
    output_format: Option<OutputFormat>,
    /// Blocks of the prompt are shared only with requests of the same salt, 1 to 256 bytes.
    pub cache_salt: Option<String>,
    #[serde(default)]
    #[schema(ignore)]
    mcp_servers: Inert,
    #[serde(default)]
    #[schema(ignore)]
    container: Inert,
}

/// The `thinking` parameter.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Thinking {
    /// `enabled`, `disabled` or `adaptive`.
    #[serde(rename = "type")]
    kind: String,
    /// The largest number of tokens of it.
    budget_tokens: Option<u32>,
}

/// The `tool_choice` parameter.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    kind: String,
    /// The name of the tool, for the kind `tool`.
    name: Option<String>,
    /// True if at most one call is allowed.
    disable_parallel_tool_use: Option<bool>,
}

/// The `output_config` parameter.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct OutputConfig {
    /// The effort of the model's reasoning, for templates that ask.
    effort: Option<String>,
    /// The form of the answer.
    format: Option<OutputFormat>,
}

/// The form of an answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OutputFormat {
    /// `json_schema`.
    #[serde(rename = "type")]
    kind: String,
    /// The schema.
    #[schema(value_type = Option<Object>)]
    schema: Option<Raw>,
}

impl MessagesRequest {
    /// Checks everything that can be checked before the prompt is tokenised. The names of
    /// parameters without effect are added to `ignored`.
    ///
    /// # Errors
    /// A parameter is out of range or not served; the error names the first.
    pub fn validate(
        self,
        defaults: &GenerationDefaults,
        limits: Limits,
        ignored: &mut Vec<String>,
    ) -> Result<ValidChat, ApiError> {
        self.mcp_servers.refuse("mcp_servers")?;
        self.container.refuse("container")?;
        let mut turns = Turns::new(limits.images);
        if let Some(system) = self.system {
            let content = system_text(system, ignored)?;
            if !content.is_empty() {
                turns.message("system", content);
            }
        }
        if self.messages.is_empty() {
            return Err(invalid("messages", "at least one is needed"));
        }
        // An answer that the client has begun is gone on with.
        let continues = self.messages.last().is_some_and(InMessage::is_begun_answer);
        for (index, message) in self.messages.into_iter().enumerate() {
            add(&mut turns, &format!("messages[{index}]"), message, ignored)?;
        }
        let tools = self.tools.map(|tools| functions(tools, ignored)).transpose()?;
        let choice = self.tool_choice.as_ref().map(ToolChoice::in_chat).transpose()?;
        let parallel =
            self.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use);
        let tools = OfferedTools::new(tools, choice.as_ref(), parallel.map(|disabled| !disabled))?;
        let OutputConfig { effort, format } = self.output_config.unwrap_or_default();
        let (thinks, budget) =
            self.thinking.map_or(Ok((None, None)), |thinking| thinking.check())?;
        let response_format =
            self.output_format.or(format).map(OutputFormat::in_chat).transpose()?;
        let fields = Fields {
            max_tokens_name: "max_tokens",
            max_tokens: self.max_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            stop: self.stop_sequences,
            cache_salt: self.cache_salt,
            thinking_budget: budget,
            structure: Spellings { response_format, ..Spellings::default() },
            ..Fields::default()
        };
        let (messages, images) = turns.finish();
        Ok(ValidChat {
            generation: fields.validate(defaults, limits)?,
            streaming: self.stream.unwrap_or(false).then(Streaming::default),
            tokens: TokenOutput::default(),
            reasoning: ReasoningOutput::Apart,
            prompt: ChatPrompt {
                messages,
                images,
                add_generation_prompt: !continues,
                continue_final_message: continues,
                tools: (!tools.described.is_empty()).then(|| Value::Array(tools.described.clone())),
                kwargs: Map::new(),
                effort: Effort { level: effort, thinks },
            },
            tools,
        })
    }
}

impl Thinking {
    /// The switch for reasoning, and the limit on its tokens.
    fn check(&self) -> Result<(Option<bool>, Option<i64>), ApiError> {
        match self.kind.as_str() {
            "enabled" => Ok((Some(true), self.budget_tokens.map(i64::from))),
            "adaptive" => Ok((Some(true), None)),
            "disabled" => Ok((Some(false), None)),
            _ => Err(invalid("thinking.type", "must be enabled, disabled or adaptive")),
        }
    }
}

impl ToolChoice {
    /// The value in the chat API's words.
    fn in_chat(&self) -> Result<Value, ApiError> {
        match (self.kind.as_str(), &self.name) {
            ("auto" | "none", _) => Ok(json!(self.kind)),
            ("any", _) => Ok(json!("required")),
            ("tool", Some(name)) => Ok(json!({"type": "function", "function": {"name": name}})),
            ("tool", None) => Err(invalid("tool_choice.name", "required and missing")),
            _ => Err(invalid("tool_choice.type", "must be auto, any, tool or none")),
        }
    }
}

impl OutputFormat {
    fn in_chat(self) -> Result<ResponseFormat, ApiError> {
        if self.kind != "json_schema" {
            return Err(invalid("output_format.type", "must be json_schema"));
        }
        let schema = JsonSchemaFormat { schema: self.schema, ..JsonSchemaFormat::default() };
        Ok(ResponseFormat {
            kind: self.kind,
            json_schema: Some(schema),
            ..ResponseFormat::default()
        })
    }
}

/// Tools as the chat API has them. Those that Anthropic's servers run themselves are not served
/// here.
fn functions(tools: Vec<Value>, ignored: &mut Vec<String>) -> Result<Vec<Value>, ApiError> {
    let mut functions = Vec::with_capacity(tools.len());
    for (at, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{at}]");
        let Value::Object(mut tool) = tool else {
            return Err(invalid(&path, "must be an object"));
        };
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or("custom");
        if kind != "custom" {
            ignored.push(format!("{path}.type={kind}"));
            continue;
        }
        let mut function = Map::new();
        for (ours, theirs) in [
            ("name", "name"),
            ("description", "description"),
            ("parameters", "input_schema"),
            ("strict", "strict"),
        ] {
            if let Some(value) = tool.remove(theirs) {
                function.insert(ours.to_owned(), value);
            }
        }
        functions.push(json!({"type": "function", "function": function}));
    }
    Ok(functions)
}
