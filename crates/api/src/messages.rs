//! `POST /v1/messages`, Anthropic's dialect: requests.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::chat::{ChatPrompt, Effort, ReasoningOutput, ValidChat};
use crate::content::TextOr;
use crate::error::ApiError;
use crate::images::ImageUrl;
use crate::inert::Inert;
use crate::openai::{Streaming, TokenOutput};
use crate::prompt::Strings;
use crate::sampling::{Fields, GenerationDefaults, Limits};
use crate::structure::{JsonSchemaFormat, Raw, ResponseFormat, Spellings};
use crate::tools::OfferedTools;
use crate::turns::{Content, Turns};

/// The line that one client puts in front of its system prompt, with another number each time: it
/// would empty the prefix cache.
const BILLING: &str = "x-anthropic-billing-header:";

/// The roles of messages. Anthropic has no system messages; some of its clients write them all the
/// same.
const ROLES: [&str; 3] = ["user", "assistant", "system"];

/// A request of Anthropic's dialect. `/v1/messages/count_tokens` takes it too.
#[derive(Debug, Deserialize, ToSchema)]
pub struct MessagesRequest {
    /// Name of the model; the served one where absent.
    pub model: Option<String>,
    /// The conversation so far.
    #[schema(value_type = Vec<Object>)]
    messages: Vec<InMessage>,
    /// The system prompt: a string, or a list of blocks of text.
    #[schema(value_type = Option<String>)]
    system: Option<TextOr<Block>>,
    /// Most tokens to generate; the rest of the context where absent.
    pub max_tokens: Option<u32>,
    /// Strings that end the text.
    #[schema(value_type = Option<Vec<String>>)]
    stop_sequences: Option<Strings>,
    /// Send typed events.
    pub stream: Option<bool>,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Nucleus mass.
    pub top_p: Option<f32>,
    /// Number of candidates; -1 or 0 is off.
    pub top_k: Option<i32>,
    /// The switch for reasoning, and its largest number of tokens.
    thinking: Option<Thinking>,
    /// Functions that the model may call.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// The demand for calls: none, any, or certain tools.
    tool_choice: Option<ToolChoice>,
    /// The form of the answer, and how long to think.
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
    /// Most tokens of it.
    budget_tokens: Option<u32>,
}

/// The `tool_choice` parameter.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct ToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    kind: String,
    /// Of `tool`: which.
    name: Option<String>,
    /// At most one call.
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

/// A message.
#[derive(Debug, Deserialize)]
pub(crate) struct InMessage {
    role: String,
    content: TextOr<Block>,
}

impl InMessage {
    /// True if the message is an answer that ends in text.
    fn is_begun_answer(&self) -> bool {
        let ends_in_text = match &self.content {
            TextOr::Text(_) => true,
            TextOr::List(blocks) => blocks.last().is_some_and(|block| block.kind == "text"),
        };
        self.role == "assistant" && ends_in_text
    }
}

/// A block of a message: a type, and what blocks of that type have.
#[derive(Debug, Deserialize)]
pub(crate) struct Block {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    thinking: Option<String>,
    source: Option<Source>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Value>,
    tool_use_id: Option<String>,
    is_error: Option<bool>,
    content: Option<TextOr<Inner>>,
    /// Of thinking: what we made of it ourselves.
    #[serde(default, rename = "signature")]
    _signature: Inert,
}

/// A block within a result of a tool.
#[derive(Debug, Deserialize)]
pub(crate) struct Inner {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    source: Option<Source>,
}

/// The source of an image or a text: its data or its URL.
#[derive(Debug, Deserialize)]
pub(crate) struct Source {
    #[serde(rename = "type")]
    kind: String,
    media_type: Option<String>,
    data: Option<String>,
    url: Option<String>,
}

impl MessagesRequest {
    /// Checks everything that can be checked before the prompt is tokenised. The names of what had
    /// no effect are added to `ignored`.
    ///
    /// # Errors
    /// The first parameter that is out of range or not served.
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
    /// In the chat API's words.
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

fn invalid(param: &str, reason: &str) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {reason}"))
}

fn required<T>(value: Option<T>, path: &str, field: &str) -> Result<T, ApiError> {
    value.ok_or_else(|| invalid(&format!("{path}.{field}"), "required and missing"))
}

/// The system prompt, less what is not for the model.
fn system_text(system: TextOr<Block>, ignored: &mut Vec<String>) -> Result<Content, ApiError> {
    let mut content = Content::default();
    let blocks = match system {
        TextOr::Text(text) => {
            content.text(unbilled(text));
            return Ok(content);
        }
        TextOr::List(blocks) => blocks,
    };
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("system[{at}]");
        if block.kind != "text" {
            ignored.push(format!("{path}.type={}", block.kind));
            continue;
        }
        let text = required(block.text, &path, "text")?;
        if !text.starts_with(BILLING) {
            content.text(text);
        }
    }
    Ok(content)
}

/// A system prompt without a line of billing in front of it.
fn unbilled(text: String) -> String {
    if !text.starts_with(BILLING) {
        return text;
    }
    text.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned())
}

/// Adds a message at `path`.
fn add(
    turns: &mut Turns,
    path: &str,
    message: InMessage,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let blocks = match message.content {
        TextOr::List(blocks) => blocks,
        TextOr::Text(text) if ROLES.contains(&message.role.as_str()) => {
            let mut content = Content::default();
            content.text(text);
            turns.message(&message.role, content);
            return Ok(());
        }
        TextOr::Text(_) => Vec::new(),
    };
    match message.role.as_str() {
        "assistant" => blocks.into_iter().enumerate().try_for_each(|(at, block)| {
            said(turns, &format!("{path}.content[{at}]"), block, ignored)
        }),
        "user" | "system" => {
            let (mut content, mut results) = (Content::default(), Vec::new());
            for (at, block) in blocks.into_iter().enumerate() {
                let path = format!("{path}.content[{at}]");
                if block.kind == "tool_result" {
                    results.push((path, block));
                } else {
                    asked(turns, &mut content, &path, block, ignored)?;
                }
            }
            // Answers stand behind their calls, and what the user says behind them.
            for (path, block) in results {
                result(turns, &path, block, ignored)?;
            }
            if !content.is_empty() {
                turns.message(&message.role, content);
            }
            Ok(())
        }
        _ => Err(invalid(&format!("{path}.role"), "must be user or assistant")),
    }
}

/// Adds a block of an answer.
fn said(
    turns: &mut Turns,
    path: &str,
    block: Block,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    match block.kind.as_str() {
        "text" => turns.said(&required(block.text, path, "text")?),
        "thinking" => turns.thought(&required(block.thinking, path, "thinking")?),
        "tool_use" => {
            let name = required(block.name, path, "name")?;
            let input = block.input.unwrap_or_else(|| json!({}));
            if !input.is_object() {
                return Err(invalid(&format!("{path}.input"), "must be an object"));
            }
            turns.called(block.id, &name, input);
        }
        // Nobody here can read it.
        "redacted_thinking" => {}
        kind => ignored.push(format!("{path}.type={kind}")),
    }
    Ok(())
}

/// Adds a block of a question.
fn asked(
    turns: &mut Turns,
    content: &mut Content,
    path: &str,
    block: Block,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    match block.kind.as_str() {
        "text" => content.text(required(block.text, path, "text")?),
        "image" => {
            let image = required(block.source, path, "source")?.image(path)?;
            turns.image(content, path, image)?;
        }
        "document" => {
            let source = required(block.source, path, "source")?;
            if source.kind != "text" {
                return Err(ApiError::unsupported(format!("{path}.source.type={}", source.kind)));
            }
            content.text(required(source.data, path, "source.data")?);
        }
        kind => ignored.push(format!("{path}.type={kind}")),
    }
    Ok(())
}

/// Adds what a tool answered.
fn result(
    turns: &mut Turns,
    path: &str,
    block: Block,
    ignored: &mut Vec<String>,
) -> Result<(), ApiError> {
    let id = required(block.tool_use_id, path, "tool_use_id")?;
    let mut content = Content::default();
    if block.is_error == Some(true) {
        content.text("Error:".to_owned());
    }
    match block.content {
        None => {}
        Some(TextOr::Text(text)) => content.text(text),
        Some(TextOr::List(blocks)) => {
            for (at, inner) in blocks.into_iter().enumerate() {
                let path = format!("{path}.content[{at}]");
                match inner.kind.as_str() {
                    "text" => content.text(required(inner.text, &path, "text")?),
                    "image" => {
                        let image = required(inner.source, &path, "source")?.image(&path)?;
                        turns.image(&mut content, &path, image)?;
                    }
                    kind => ignored.push(format!("{path}.type={kind}")),
                }
            }
        }
    }
    turns.tool(Some(id), content);
    Ok(())
}

impl Source {
    /// The image that it is.
    fn image(self, path: &str) -> Result<ImageUrl, ApiError> {
        let url = match self.kind.as_str() {
            "base64" => {
                let data = required(self.data, path, "source.data")?;
                format!("data:{};base64,{data}", self.media_type.unwrap_or_default())
            }
            "url" => required(self.url, path, "source.url")?,
            kind => return Err(ApiError::unsupported(format!("{path}.source.type={kind}"))),
        };
        Ok(ImageUrl { url, detail: None })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::MaxTokens;

    const LIMITS: Limits = Limits {
        context_length: 100,
        prompt_length: 100,
        vocab_size: 1000,
        replicas: 1,
        images: 2,
    };

    fn validate(body: &Value) -> Result<(ValidChat, Vec<String>), ApiError> {
        let request =
            crate::parse_request::<MessagesRequest>(body.to_string().as_bytes(), |_| Ok(()))?
                .request;
        let mut ignored = Vec::new();
        let chat = request.validate(&GenerationDefaults::default(), LIMITS, &mut ignored)?;
        Ok((chat, ignored))
    }

    fn with(more: Value) -> Value {
        let mut body = json!({"max_tokens": 7, "messages": [{"role": "user", "content": "hi"}]});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    }

    #[test]
    fn a_conversation_with_tools_is_that_of_the_chat_api() {
        let image = json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}});
        let body = with(json!({
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=9f"},
                {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                    {"type": "server_tool_use", "id": "t2"},
                ]},
                {"role": "user", "content": [
                    {"type": "text", "text": "well?"},
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": true, "content": [{"type": "text", "text": "no"}, image]},
                ]},
            ],
        }));
        let (chat, ignored) = validate(&body).unwrap();
        let call = json!({"type": "function", "id": "t1", "function": {"name": "look", "arguments": {"at": 1}}});
        let text = |text: &str| json!({"type": "text", "text": text});
        let expected = json!([
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [text("what is it?"), {"type": "image"}]},
            {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": [text("Error:"), text("no"), {"type": "image"}]},
            {"role": "user", "content": "well?"},
        ]);
        assert_eq!(chat.prompt.messages, expected);
        assert_eq!(ignored, ["messages[1].content[4].type=server_tool_use"]);
        let params: Vec<&str> = chat.prompt.images.iter().map(|image| &*image.param).collect();
        assert_eq!(params, ["messages[0].content[1]", "messages[2].content[1].content[1]"]);
        assert_eq!(chat.prompt.images[0].url, "data:image/png;base64,aGk=");
        assert!(chat.prompt.add_generation_prompt);
        assert_eq!(chat.generation.max_tokens, MaxTokens::Exactly(7));
    }

    #[test]
    fn tools_and_choices_have_the_chat_api_s_words() {
        let tool = json!({"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}});
        let search = json!({"type": "web_search_20250305", "name": "web_search"});
        let ask = |choice: Value| {
            validate(&with(json!({"tools": [tool, search], "tool_choice": choice})))
        };
        let (chat, ignored) =
            ask(json!({"type": "auto", "disable_parallel_tool_use": true})).unwrap();
        let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
        assert_eq!(chat.tools.described, [json!({"type": "function", "function": function})]);
        assert_eq!((chat.tools.parallel, ignored.len()), (false, 1));
        for (choice, demanded) in [
            (json!({"type": "any"}), true),
            (json!({"type": "tool", "name": "f"}), true),
            (json!({"type": "auto"}), false),
        ] {
            assert_eq!(ask(choice).unwrap().0.tools.demand.is_some(), demanded);
        }
        assert!(ask(json!({"type": "none"})).unwrap().0.tools.functions.is_empty());
    }

    #[test]
    fn thinking_has_a_budget_or_is_off() {
        let of = |thinking: Value| validate(&with(json!({"thinking": thinking}))).unwrap().0;
        let on = of(json!({"type": "enabled", "budget_tokens": 5}));
        assert_eq!((on.prompt.effort.thinks, on.generation.thinking_budget), (Some(true), Some(5)));
        assert_eq!(of(json!({"type": "disabled"})).prompt.effort.thinks, Some(false));
        let effort = json!({"output_config": {"effort": "low"}});
        let (chat, _) = validate(&with(effort)).unwrap();
        assert_eq!(chat.prompt.effort.level.as_deref(), Some("low"));
        let form = json!({"output_format": {"type": "json_schema", "schema": {"type": "object"}}});
        assert!(validate(&with(form)).unwrap().0.generation.structure.is_some());
    }

    #[test]
    fn a_begun_answer_is_gone_on_with() {
        let said = |content: Value| {
            let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]);
            validate(&with(json!({"messages": messages}))).unwrap().0.prompt
        };
        assert!(said(json!("so")).continue_final_message);
        let call = json!([{"type": "tool_use", "id": "t", "name": "f", "input": {}}]);
        assert!(said(call).add_generation_prompt);
        let billed = with(json!({"system": "x-anthropic-billing-header: a\nbe brief"}));
        assert_eq!(validate(&billed).unwrap().0.prompt.messages[0]["content"], "be brief");
    }

    #[test]
    fn what_is_wrong_is_named_by_its_path() {
        let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
        for (more, param) in [
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"role": "root", "content": "a"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (user(json!([{"type": "text"}])), "messages[0].content[0].text"),
            (user(json!([{"type": "tool_result"}])), "messages[0].content[0].tool_use_id"),
            (user(json!([{"type": "image"}])), "messages[0].content[0].source"),
            (json!({"thinking": {"type": "x"}}), "thinking.type"),
            (json!({"tool_choice": {"type": "x"}}), "tool_choice.type"),
            (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
            (json!({"tools": [3]}), "tools[0]"),
            (json!({"tools": [{"name": ""}]}), "tools[0].function.name"),
            (json!({"output_format": {"type": "xml"}}), "output_format.type"),
            (json!({"max_tokens": -1}), "max_tokens"),
        ] {
            match validate(&with(more.clone())) {
                Err(ApiError::Invalid { param: found, .. }) => assert_eq!(found, param, "{more}"),
                other => panic!("{more}: {other:?}"),
            }
        }
        let servers = with(json!({"mcp_servers": [{"url": "x"}]}));
        assert_eq!(validate(&servers).unwrap_err(), ApiError::unsupported("mcp_servers"));
    }
}
