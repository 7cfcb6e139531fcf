//! `POST /v1/messages`, Anthropic's Messages API: its requests.

pub(crate) mod conversation;
#[cfg(test)]
mod tests;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::chat::{
    ChatPrompt, Effort, EffortParams, ReasoningOutput, Streaming, TokenOutput, ValidChat,
};
use crate::content::TextOr;
use crate::error::ApiError;
use crate::limits::{Bound, MESSAGES, Param};
use crate::parameter::generation::*;
use crate::parameter::{Line, OBJECTS, component, opaque, own, p, refused, tabled};
use crate::sampling::Limits;
use crate::structure::{JsonSchemaFormat, Raw, ResponseFormat, Spellings};
use crate::tools::{OfferedTools, ToolNames};
use crate::turns::Turns;
use conversation::{BLOCK, Block, InMessage, MESSAGE, add, invalid, system_text};

/// A request to Anthropic's Messages API. `/v1/messages/count_tokens` takes the same request.
#[derive(Debug, Default)]
pub struct MessagesRequest {
    generation: GenerationParameters,
    /// The name of the model; `None` means the served model.
    pub model: Option<String>,
    messages: Vec<InMessage>,
    system: Option<TextOr<Block>>,
    stream: Option<bool>,
    thinking: Option<Thinking>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<ToolChoice>,
    output_config: Option<OutputConfig>,
    output_format: Option<OutputFormat>,
}

#[rustfmt::skip]
const LINES: &[Line<MessagesRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("messages", Bound::Messages(MESSAGES, &[MESSAGE]), "The conversation so far.", |r: &mut MessagesRequest, v| v.put(&mut r.messages)).required().shown(OBJECTS),
    own("system", Bound::Content(&[BLOCK]), "The system prompt: a string, or a list of blocks of text.", |r, v| v.put(&mut r.system)),
    p("max_tokens", MAX_TOKENS).bounded(count(1)).described("The largest number of tokens to generate; the rest of the context if absent."),
    p("stop_sequences", STOP).described("Strings that end the text."),
    own("stream", Bound::Flag, "Send typed events.", |r, v| v.put(&mut r.stream)),
    p("temperature", TEMPERATURE),
    p("top_p", TOP_P),
    p("top_k", TOP_K),
    own("thinking", Bound::Object(&[THINKING]), "The switch for reasoning, and its largest number of tokens.", |r, v| v.put(&mut r.thinking)),
    own("tools", Bound::Tree, "Functions that the model may call.", |r, v| v.put(&mut r.tools)),
    own("tool_choice", Bound::Object(&[TOOL_CHOICE]), "The demand for calls: none, any, or certain tools.", |r, v| v.put(&mut r.tool_choice)),
    own("output_config", Bound::Object(&[OUTPUT_CONFIG]), "The form of the answer, and the effort of the reasoning.", |r, v| v.put(&mut r.output_config)),
    own("output_format", Bound::Object(&[OUTPUT_FORMAT]), "The form of the answer.", |r, v| v.put(&mut r.output_format)),
    p("cache_salt", CACHE_SALT),
    refused("mcp_servers"),
    refused("container"),
];

tabled!(
    MessagesRequest,
    "A request of Anthropic's dialect. `/v1/messages/count_tokens` takes it too.",
    [LINES],
    generation
);

/// The names of the parameters that set the reasoning effort.
const EFFORT: EffortParams = EffortParams { level: "output_config.effort", switch: "thinking" };

/// The `thinking` parameter.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Thinking {
    /// `enabled`, `disabled` or `adaptive`.
    #[serde(rename = "type")]
    kind: String,
    /// The largest number of reasoning tokens.
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
    /// The effort of the model's reasoning, for templates that support it.
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

pub(crate) const THINKING: &[Param] = &[param("type", WORD), param("budget_tokens", count(0))];

pub(crate) const TOOL_CHOICE: &[Param] =
    &[param("type", WORD), param("name", WORD), param("disable_parallel_tool_use", Bound::Flag)];

pub(crate) const OUTPUT_CONFIG: &[Param] =
    &[param("effort", WORD), param("format", Bound::Object(&[OUTPUT_FORMAT]))];

pub(crate) const OUTPUT_FORMAT: &[Param] = &[param("type", WORD), param("schema", SOURCE)];

component!(Thinking, ToolChoice, OutputConfig, OutputFormat);
opaque!(InMessage);

impl MessagesRequest {
    /// Checks everything that can be checked before the prompt is tokenised. The names of
    /// parameters that have no effect are added to `ignored`.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        self,
        defaults: &GenerationDefaults,
        limits: Limits,
        ignored: &mut Vec<String>,
    ) -> Result<ValidChat, ApiError> {
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
        // The model continues the last message if the client has begun the assistant's message.
        let continues = self.messages.last().is_some_and(InMessage::is_begun_answer);
        for (index, message) in self.messages.into_iter().enumerate() {
            add(&mut turns, &format!("messages[{index}]"), message, ignored)?;
        }
        let tools = self.tools.map(|tools| functions(tools, ignored)).transpose()?;
        let (tools, paths) = tools.unzip();
        let api = ToolNames {
            paths: Some(&paths.unwrap_or_default()),
            schema: "input_schema",
            name: ".name",
        };
        let choice = self.tool_choice.as_ref().map(ToolChoice::in_chat).transpose()?;
        let parallel =
            self.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use);
        let tools =
            OfferedTools::new(tools, api, choice.as_ref(), parallel.map(|disabled| !disabled))?;
        let OutputConfig { effort, format } = self.output_config.unwrap_or_default();
        let (thinks, budget) =
            self.thinking.map_or(Ok((None, None)), |thinking| thinking.check())?;
        let form =
            if self.output_format.is_some() { "output_format" } else { "output_config.format" };
        let response_format = self.output_format.or(format);
        let response_format = response_format.map(|format| format.in_chat(form)).transpose()?;
        let renamed = |text: &str| {
            text.replace("response_format.json_schema", form).replace("response_format", form)
        };
        let parameters = GenerationParameters {
            thinking_budget: budget,
            structure: Spellings { response_format, ..Spellings::default() },
            ..self.generation
        };
        let (messages, images) = turns.finish();
        let mut generation =
            parameters.validate("", defaults, limits).map_err(|error| error.renamed(renamed))?;
        if let Some(structure) = &mut generation.structure {
            structure.param = renamed(&structure.param);
        }
        Ok(ValidChat {
            prediction: None,
            generation,
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
                effort: Effort { level: effort, thinks, params: EFFORT },
            },
            tools,
        })
    }
}

impl Thinking {
    /// Returns whether the model should think, and the limit on its reasoning tokens.
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
    /// Converts the value to the chat API's `tool_choice`.
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
    /// Converts the format to the chat API's `response_format`. `param` is the path of this object,
    /// for errors.
    fn in_chat(self, param: &str) -> Result<ResponseFormat, ApiError> {
        if self.kind != "json_schema" {
            return Err(invalid(&format!("{param}.type"), "must be json_schema"));
        }
        let schema = JsonSchemaFormat { schema: self.schema, ..JsonSchemaFormat::default() };
        Ok(ResponseFormat {
            kind: self.kind,
            json_schema: Some(schema),
            ..ResponseFormat::default()
        })
    }
}

/// Converts the tools to the chat API's form, and returns the path of each in the request, for
/// errors. Tools that run on Anthropic's servers are not supported here.
fn functions(
    tools: Vec<Value>,
    ignored: &mut Vec<String>,
) -> Result<(Vec<Value>, Vec<String>), ApiError> {
    let (mut functions, mut paths) = (Vec::with_capacity(tools.len()), Vec::new());
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
        paths.push(path);
    }
    Ok((functions, paths))
}
