//! Requests of Ollama's API: chats, prompts and texts to embed, with sampling parameters in
//! `options`.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::apis::openai::EmbeddingRequest;
use crate::chat::{
    ChatPrompt, Effort, EffortParams, ReasoningOutput, Streaming, TokenOutput, ValidChat,
};
use crate::error::ApiError;
use crate::images::{IMAGE, ImageUrl};
use crate::limits::{Bound, INPUTS, Limited, MESSAGES, Param};
use crate::parameter::generation::*;
use crate::parameter::{Line, SWITCH, TEXT, component, own, p, refused, skipped, tabled};
use crate::prompt::{Prompts, Strings};
use crate::sampling::{Generation, Limits};
use crate::structure::{JsonSchemaFormat, Raw, ResponseFormat, Spellings};
use crate::tools::{OfferedTools, ToolNames};
use crate::turns::{Content, Turns};

/// A chat request, `POST /api/chat`.
#[derive(Debug, Default)]
pub struct OllamaChatRequest {
    /// The name of the model. A `:latest` suffix is ignored.
    pub model: Option<String>,
    messages: Vec<OllamaMessage>,
    tools: Option<Vec<Value>>,
    stream: Option<bool>,
    format: Option<Raw>,
    options: OllamaOptions,
    think: Option<Value>,
    keep_alive: Option<Value>,
}

#[rustfmt::skip]
const CHAT: &[Line<OllamaChatRequest>] = &[
    own("model", NAME, "The name of the model; a trailing `:latest` is ignored.", |r, v| v.put(&mut r.model)),
    own("messages", Bound::Messages(MESSAGES, &[MESSAGE]), "The conversation; without one, the model is only to be loaded.", |r, v| v.put(&mut r.messages)),
    own("tools", Bound::Tree, "Functions that the model may call.", |r, v| v.put(&mut r.tools)),
    own("stream", Bound::Flag, "Send lines as the model speaks; true if absent.", |r, v| v.put(&mut r.stream)),
    own("format", SOURCE, "`json`, or a JSON schema of the answer.", |r, v| v.put(&mut r.format)),
    own("options", Bound::Object(OllamaOptions::PARAMS), "Sampling parameters.", |r, v| v.object(&mut r.options)),
    own("think", Bound::Tree, "The switch for reasoning, or its effort: `low`, `medium`, `high`.", |r: &mut OllamaChatRequest, v| v.put(&mut r.think)).shown(SWITCH),
    own("keep_alive", Bound::Tree, "Accepted: the model stays.", |r: &mut OllamaChatRequest, v| v.put(&mut r.keep_alive)).shown(TEXT),
];

tabled!(OllamaChatRequest, "A conversation, `POST /api/chat`.", [CHAT]);

/// A request to continue a prompt, `POST /api/generate`.
#[derive(Debug, Default)]
pub struct OllamaGenerateRequest {
    /// The name of the model. A `:latest` suffix is ignored.
    pub model: Option<String>,
    prompt: String,
    system: Option<String>,
    images: Option<Strings>,
    raw: Option<bool>,
    stream: Option<bool>,
    format: Option<Raw>,
    options: OllamaOptions,
    think: Option<Value>,
    keep_alive: Option<Value>,
}

#[rustfmt::skip]
const GENERATE: &[Line<OllamaGenerateRequest>] = &[
    own("model", NAME, "The name of the model; a trailing `:latest` is ignored.", |r, v| v.put(&mut r.model)),
    own("prompt", Bound::Prompt, "The user's text; without it, the model is only to be loaded.", |r, v| v.put(&mut r.prompt)),
    own("system", Bound::Prompt, "Stands in front of it.", |r, v| v.put(&mut r.system)),
    own("images", Bound::Images(1, &[IMAGE]), "Files in base64.", |r, v| v.put(&mut r.images)),
    own("raw", Bound::Flag, "The prompt is continued as it is, without a chat template.", |r, v| v.put(&mut r.raw)),
    refused("suffix"),
    refused("template"),
    refused("context"),
    own("stream", Bound::Flag, "Send lines as the model speaks; true if absent.", |r, v| v.put(&mut r.stream)),
    own("format", SOURCE, "`json`, or a JSON schema of the answer.", |r, v| v.put(&mut r.format)),
    own("options", Bound::Object(OllamaOptions::PARAMS), "Sampling parameters.", |r, v| v.object(&mut r.options)),
    own("think", Bound::Tree, "The switch for reasoning, or its effort: `low`, `medium`, `high`.", |r: &mut OllamaGenerateRequest, v| v.put(&mut r.think)).shown(SWITCH),
    own("keep_alive", Bound::Tree, "Accepted: the model stays.", |r: &mut OllamaGenerateRequest, v| v.put(&mut r.keep_alive)).shown(TEXT),
];

tabled!(OllamaGenerateRequest, "A prompt, `POST /api/generate`.", [GENERATE]);

/// A request to embed texts, `POST /api/embed`.
#[derive(Debug, Default)]
pub struct OllamaEmbedRequest {
    /// The name of the model. A `:latest` suffix is ignored.
    pub model: Option<String>,
    input: Option<Prompts>,
    truncate: Option<bool>,
    dimensions: Option<u32>,
}

#[rustfmt::skip]
const EMBED: &[Line<OllamaEmbedRequest>] = &[
    own("model", NAME, "The name of the model; a trailing `:latest` is ignored.", |r, v| v.put(&mut r.model)),
    own("input", Bound::Prompts(INPUTS), "A string, or a list of strings. Of none there are no vectors.", |r: &mut OllamaEmbedRequest, v| v.put(&mut r.input)),
    own("truncate", Bound::Flag, "Cut texts that are too long; true if absent.", |r, v| v.put(&mut r.truncate)),
    own("dimensions", count(1), "Keep this many of each vector's first numbers.", |r, v| v.put(&mut r.dimensions)),
    skipped("options"),
    skipped("keep_alive"),
];

tabled!(OllamaEmbedRequest, "Texts to turn into vectors, `POST /api/embed`.", [EMBED]);

/// A request to embed one text, `POST /api/embeddings`, which is Ollama's older route.
#[derive(Debug, Default)]
pub struct OllamaEmbeddingsRequest {
    /// The name of the model. A `:latest` suffix is ignored.
    pub model: Option<String>,
    prompt: String,
}

#[rustfmt::skip]
const EMBEDDINGS: &[Line<OllamaEmbeddingsRequest>] = &[
    own("model", NAME, "The name of the model; a trailing `:latest` is ignored.", |r, v| v.put(&mut r.model)),
    own("prompt", Bound::Prompt, "The text. Of an empty one there is no vector.", |r, v| v.put(&mut r.prompt)),
    skipped("options"),
    skipped("keep_alive"),
];

tabled!(
    OllamaEmbeddingsRequest,
    "A text to turn into a vector, `POST /api/embeddings`, Ollama's older route.",
    [EMBEDDINGS]
);

/// A request for the description of a model, `POST /api/show`.
#[derive(Debug, Default)]
pub struct OllamaShowRequest {
    /// The name of the model.
    pub model: Option<String>,
    /// The name of the model in the field that older clients use.
    pub name: Option<String>,
}

#[rustfmt::skip]
const SHOW: &[Line<OllamaShowRequest>] = &[
    own("model", NAME, "The name of the model.", |r, v| v.put(&mut r.model)),
    own("name", NAME, "The model's name, as older clients send it.", |r, v| v.put(&mut r.name)),
];

tabled!(
    OllamaShowRequest,
    "The request of `POST /api/show`, which names the model to describe.",
    [SHOW]
);

/// The fields that chat and prompt requests share.
struct Shared {
    stream: Option<bool>,
    format: Option<Raw>,
    options: OllamaOptions,
    think: Option<Value>,
    keep_alive: Option<Value>,
}

/// The sampling parameters. Options about loading the model have no effect.
#[derive(Debug, Default)]
pub(crate) struct OllamaOptions {
    generation: GenerationParameters,
    num_predict: Option<i64>,
}

#[rustfmt::skip]
const OPTIONS: &[Line<OllamaOptions>] = &[
    own("num_predict", COUNT_OR_REST, "The largest number of tokens to generate; below 0: the rest of the context.", |r, v| v.put(&mut r.num_predict)),
    p("temperature", TEMPERATURE).described("0 is greedy."),
    p("top_p", TOP_P).described("Nucleus mass."),
    p("top_k", TOP_K).described("Most likely tokens that are left."),
    p("min_p", MIN_P).described("The least probability, as a part of the largest."),
    p("seed", SEED).described("The seed; equal seeds give equal answers."),
    p("stop", STOP).described("Texts that end the answer."),
    p("repeat_penalty", REPETITION_PENALTY).described("Factor for tokens that were there."),
    p("presence_penalty", PRESENCE_PENALTY).described("The presence penalty of OpenAI's API."),
    p("frequency_penalty", FREQUENCY_PENALTY).described("The frequency penalty of OpenAI's API."),
];

tabled!(
    OllamaOptions,
    "Sampling parameters. Those about loading have no effect.",
    [OPTIONS],
    generation
);

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OllamaMessage {
    role: String,
    content: Option<String>,
    thinking: Option<String>,
    /// Files in base64.
    #[schema(value_type = Option<Vec<String>>)]
    images: Option<Strings>,
    tool_calls: Option<Vec<OllamaCall>>,
    tool_call_id: Option<String>,
    /// The name of the tool that returned this result.
    tool_name: Option<String>,
}

/// A call of a tool.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OllamaCall {
    id: Option<String>,
    function: OllamaFunction,
}

/// The function that is called.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct OllamaFunction {
    name: String,
    /// A JSON object, or the text of one.
    #[schema(value_type = Option<Object>)]
    arguments: Option<Value>,
}

pub(crate) const MESSAGE: &[Param] = &[
    param("role", WORD),
    param("content", Bound::Prompt),
    param("thinking", Bound::Prompt),
    param("images", Bound::Images(1, &[IMAGE])),
    param("tool_calls", Bound::Objects(MESSAGES, &[CALL])),
    param("tool_call_id", WORD),
    param("tool_name", WORD),
];

pub(crate) const CALL: &[Param] =
    &[param("id", WORD), param("function", Bound::Object(&[FUNCTION]))];

pub(crate) const FUNCTION: &[Param] = &[param("name", WORD), param("arguments", Bound::Tree)];

component!(OllamaMessage);

/// A validated Ollama request, by kind.
#[derive(Debug)]
pub enum OllamaAsk {
    /// A request without a prompt, which loads or unloads the model.
    Load {
        /// True if the model is to be unloaded.
        unload: bool,
    },
    /// A chat, which the model continues.
    Chat(Box<ValidChat>),
    /// A text to continue.
    Raw {
        /// The text.
        prompt: String,
        /// The generation parameters.
        generation: Box<Generation>,
        /// True if the response is streamed as lines of JSON.
        streamed: bool,
    },
}

impl OllamaChatRequest {
    /// Checks everything that can be checked before the prompt is tokenised.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<OllamaAsk, ApiError> {
        let Self { messages, tools, stream, format, options, think, keep_alive, .. } = self;
        let shared = Shared { stream, format, options, think, keep_alive };
        if messages.is_empty() {
            return Ok(shared.load());
        }
        let mut turns = Turns::new(limits.images);
        // A tool result names its tool but not its call. Results are matched to the calls in order.
        let mut calls = Calls::default();
        for (index, message) in messages.into_iter().enumerate() {
            message.add(&mut turns, &mut calls, &format!("messages[{index}]"))?;
        }
        let tools = OfferedTools::new(tools, ToolNames::CHAT, None, None)?;
        shared.chat(turns, tools, defaults, limits)
    }
}

impl OllamaGenerateRequest {
    /// Checks everything that can be checked before the prompt is tokenised. `has_template` is true
    /// if the model has a chat template.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        self,
        has_template: bool,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<OllamaAsk, ApiError> {
        let Self {
            prompt, system, images, raw, stream, format, options, think, keep_alive, ..
        } = self;
        let shared = Shared { stream, format, options, think, keep_alive };
        let images = images.map_or_else(Vec::new, |files| files.0);
        if prompt.is_empty() && images.is_empty() {
            return Ok(shared.load());
        }
        if raw.unwrap_or(!has_template) {
            if !images.is_empty() {
                let reason =
                    "`images`: not supported with a raw prompt, which has no chat template";
                return Err(ApiError::invalid("images", reason));
            }
            let system = system.filter(|system| !system.is_empty());
            if raw == Some(true) && system.is_some() {
                return Err(ApiError::invalid("system", "`system`: not supported with `raw`"));
            }
            let prompt = match system {
                Some(system) => format!("{system}\n\n{prompt}"),
                None => prompt,
            };
            let streamed = shared.streams();
            let generation = Box::new(shared.generation(defaults, limits)?);
            return Ok(OllamaAsk::Raw { prompt, generation, streamed });
        }
        let mut turns = Turns::new(limits.images);
        if let Some(system) = system.filter(|system| !system.is_empty()) {
            let mut content = Content::default();
            content.text(system);
            turns.message("system", content);
        }
        let mut content = Content::default();
        content.text(prompt);
        for (at, file) in images.into_iter().enumerate() {
            turns.image(&mut content, &format!("images[{at}]"), image(file))?;
        }
        turns.message("user", content);
        shared.chat(turns, OfferedTools::default(), defaults, limits)
    }
}

impl OllamaEmbedRequest {
    /// Converts the request to one of OpenAI's API; `None` if it has no text.
    #[must_use]
    pub fn in_openai(self) -> Option<EmbeddingRequest> {
        let input = self.input.filter(|input| !input.is_empty())?;
        Some(EmbeddingRequest::from_ollama(input, true, self.dimensions, self.truncate))
    }
}

impl OllamaEmbeddingsRequest {
    /// Converts the request to one of OpenAI's API; `None` if it has no text. The older route
    /// returns embeddings without normalisation.
    #[must_use]
    pub fn in_openai(self) -> Option<EmbeddingRequest> {
        let text = Some(self.prompt).filter(|text| !text.is_empty())?;
        Some(EmbeddingRequest::from_ollama(Prompts::Text(text), false, None, None))
    }
}

impl Shared {
    fn streams(&self) -> bool {
        self.stream.unwrap_or(true)
    }

    fn load(&self) -> OllamaAsk {
        let none = [json!(0), json!("0"), json!("0s"), json!("0m")];
        OllamaAsk::Load { unload: self.keep_alive.as_ref().is_some_and(|time| none.contains(time)) }
    }

    fn chat(
        self,
        turns: Turns,
        tools: OfferedTools,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<OllamaAsk, ApiError> {
        let effort = match &self.think {
            None | Some(Value::Null) => Effort::default(),
            Some(Value::Bool(thinks)) => {
                Effort { level: None, thinks: Some(*thinks), params: THINK }
            }
            Some(Value::String(level)) => {
                Effort { level: Some(level.clone()), thinks: Some(true), params: THINK }
            }
            Some(_) => return Err(invalid("think", "must be true, false or a word")),
        };
        let streaming = self.streams().then(Streaming::default);
        let (messages, images) = turns.finish();
        Ok(OllamaAsk::Chat(Box::new(ValidChat {
            prediction: None,
            generation: self.generation(defaults, limits)?,
            streaming,
            tokens: TokenOutput::default(),
            reasoning: ReasoningOutput::Apart,
            prompt: ChatPrompt {
                messages,
                images,
                add_generation_prompt: true,
                continue_final_message: false,
                tools: (!tools.described.is_empty()).then(|| Value::Array(tools.described.clone())),
                kwargs: Map::new(),
                effort,
            },
            tools,
        })))
    }

    fn generation(
        self,
        defaults: &GenerationDefaults,
        limits: Limits,
    ) -> Result<Generation, ApiError> {
        let in_format = |text: &str| {
            text.replace("response_format.json_schema.schema", "format")
                .replace("response_format", "format")
        };
        let generation = self.parameters()?.validate("options.", defaults, limits);
        let mut generation = generation.map_err(|error| error.renamed(in_format))?;
        if let Some(structure) = &mut generation.structure {
            structure.param = in_format(&structure.param);
        }
        Ok(generation)
    }

    fn parameters(self) -> Result<GenerationParameters, ApiError> {
        let OllamaOptions { generation, num_predict } = self.options;
        let response_format = self.format.map(in_chat).transpose()?.flatten();
        Ok(GenerationParameters {
            max_tokens: num_predict.and_then(|most| u32::try_from(most).ok()),
            structure: Spellings { response_format, ..Spellings::default() },
            ..generation
        })
    }
}

/// The name of the parameter that sets the reasoning effort.
const THINK: EffortParams = EffortParams { level: "think", switch: "think" };

/// Converts the format to the chat API's `response_format`; `None` for free text, for which
/// Ollama's own clients send an empty string.
fn in_chat(format: Raw) -> Result<Option<ResponseFormat>, ApiError> {
    let kind = match format.get() {
        r#""""# => return Ok(None),
        r#""json""# => "json_object",
        schema if schema.starts_with('{') => "json_schema",
        _ => return Err(invalid("format", "must be json or a JSON schema")),
    };
    let json_schema = (kind == "json_schema")
        .then(|| JsonSchemaFormat { schema: Some(format), ..JsonSchemaFormat::default() });
    Ok(Some(ResponseFormat { kind: kind.to_owned(), json_schema, ..ResponseFormat::default() }))
}

/// The ids of tool calls whose results have not come yet.
#[derive(Default)]
struct Calls {
    made: usize,
    /// Pairs of tool name and call id, the oldest first.
    open: Vec<(String, String)>,
}

impl OllamaMessage {
    fn add(self, turns: &mut Turns, calls: &mut Calls, path: &str) -> Result<(), ApiError> {
        let mut content = Content::default();
        let said = self.content.unwrap_or_default();
        if !said.is_empty() || self.images.is_none() {
            content.text(said.clone());
        }
        for (at, file) in self.images.map_or_else(Vec::new, |files| files.0).into_iter().enumerate()
        {
            turns.image(&mut content, &format!("{path}.images[{at}]"), image(file))?;
        }
        match self.role.as_str() {
            "assistant" => {
                if let Some(thinking) = &self.thinking {
                    turns.thought(thinking);
                }
                turns.said(&said);
                for (at, call) in self.tool_calls.into_iter().flatten().enumerate() {
                    let OllamaFunction { name, arguments } = call.function;
                    let arguments = match arguments {
                        // Clients in some languages omit the arguments if there are none.
                        None => json!({}),
                        Some(arguments @ (Value::Object(_) | Value::String(_))) => arguments,
                        Some(_) => {
                            let path = format!("{path}.tool_calls[{at}].function.arguments");
                            return Err(invalid(&path, "must be an object"));
                        }
                    };
                    let id = call.id.unwrap_or_else(|| format!("call_{}", calls.made));
                    calls.made += 1;
                    calls.open.push((name.clone(), id.clone()));
                    turns.called(Some(id), &name, arguments);
                }
            }
            "tool" => {
                let named = |(tool, _): &(String, String)| self.tool_name.as_ref() == Some(tool);
                let open = calls.open.iter().position(named);
                let open = open.or((!calls.open.is_empty()).then_some(0));
                let id = match self.tool_call_id {
                    Some(id) => {
                        calls.open.retain(|(_, open)| *open != id);
                        Some(id)
                    }
                    None => open.map(|at| calls.open.remove(at).1),
                };
                turns.tool(id, content);
            }
            role => turns.message(role, content),
        }
        Ok(())
    }
}

fn image(file: String) -> ImageUrl {
    let url = if file.contains(':') { file } else { format!("data:;base64,{file}") };
    ImageUrl { url }
}

fn invalid(param: &str, reason: &str) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trial::{LIMITS, request};

    fn chat(messages: Value) -> Result<Value, ApiError> {
        let request = request::<OllamaChatRequest>(&json!({"messages": messages}))?;
        match request.validate(&GenerationDefaults::default(), LIMITS)? {
            OllamaAsk::Chat(chat) => Ok(chat.prompt.messages),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_go_and_javascript_write_for_nothing_is_nothing() {
        let call = |function: Value| json!([{"function": function}]);
        let called = |arguments: Value| {
            let function = json!({"name": "f", "arguments": arguments});
            json!([{"type": "function", "id": "call_0", "function": function}])
        };
        for (arguments, expected) in [
            (json!({"name": "f"}), json!({})),
            (json!({"name": "f", "arguments": null}), json!({})),
            (json!({"name": "f", "arguments": {"x": 1}}), json!({"x": 1})),
            (json!({"name": "f", "arguments": "{\"x\": 1}"}), json!("{\"x\": 1}")),
        ] {
            let messages = chat(json!([
                {"role": "user", "content": "hi", "images": null, "tool_calls": null},
                {"role": "assistant", "content": null, "tool_calls": call(arguments)},
                {"role": "tool", "content": null, "tool_name": "f"},
            ]))
            .unwrap();
            assert_eq!(messages[1]["tool_calls"], called(expected));
            let result = json!({"role": "tool", "content": "", "tool_call_id": "call_0"});
            assert_eq!(messages[2], result);
        }
        let wrong = call(json!({"name": "f", "arguments": [1]}));
        let error = chat(json!([{"role": "assistant", "tool_calls": wrong}])).unwrap_err();
        let param = error.body().error.param;
        assert_eq!(param.as_deref(), Some("messages[0].tool_calls[0].function.arguments"));
    }

    #[test]
    fn a_raw_prompt_has_no_system_prompt() {
        let ask = |system: Value| {
            let body = json!({"prompt": "a", "raw": true, "system": system});
            let request = request::<OllamaGenerateRequest>(&body).unwrap();
            request.validate(true, &GenerationDefaults::default(), LIMITS)
        };
        let error = ask(json!("be brief")).unwrap_err().body().error;
        assert_eq!(error.param.as_deref(), Some("system"));
        for nothing in [json!(""), json!(null)] {
            assert!(matches!(ask(nothing), Ok(OllamaAsk::Raw { prompt, .. }) if prompt == "a"));
        }
    }
}
