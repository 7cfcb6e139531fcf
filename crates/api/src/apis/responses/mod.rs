//! `POST /v1/responses`: requests of OpenAI's newer API, whose conversation is a list of items.

mod item;
mod tools;

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::chat::{
    ChatPrompt, Effort, EffortParams, ReasoningOutput, Streaming, TokenOutput, ValidChat,
};
use crate::content::TextOr;
use crate::error::ApiError;
use crate::inert::Inert;
use crate::limits::{Bound, NAME_BYTES, Param, STOPS, WORD_BYTES};
use crate::parameter::generation::*;
use crate::parameter::{Line, TEXT, component, own, p, refused, tabled};
use crate::sampling::Limits;
use crate::structure::{JsonSchemaFormat, Raw, ResponseFormat};
use crate::tools::{OfferedTools, ToolNames};
use crate::turns::{Content, Turns};
pub(crate) use item::ITEM;
#[cfg(test)]
pub(crate) use item::ITEM_PART;
pub use item::{Item, ItemPart, sealed};
pub use tools::{CUSTOM_INPUT, ToolKind};
use tools::{Functions, functions, named};

/// A request to the Responses API.
#[derive(Debug, Default)]
pub struct ResponsesRequest {
    generation: GenerationParameters,
    /// The name of the model; `None` means the served one.
    pub model: Option<String>,
    input: Option<TextOr<Item>>,
    instructions: Option<String>,
    /// The id of the response that this request continues.
    pub previous_response_id: Option<String>,
    /// Whether to store the response, so that later requests can continue it; true if absent.
    pub store: Option<bool>,
    /// Whether to return at once and compute the response in the background.
    pub background: Option<bool>,
    /// Whether to stream the response as typed events.
    pub stream: Option<bool>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning: Option<ResponsesReasoning>,
    text: Option<ResponsesText>,
    metadata: Option<Value>,
    include: Option<Vec<String>>,
}

#[rustfmt::skip]
const LINES: &[Line<ResponsesRequest>] = &[
    own("model", NAME, "The name of the model; the served one if absent.", |r, v| v.put(&mut r.model)),
    own("input", Bound::Content(&[ITEM]), "A string, or the items of the conversation that are new.", |r, v| v.put(&mut r.input)),
    own("instructions", Bound::Prompt, "The instructions in front of the conversation, of this response only.", |r, v| v.put(&mut r.instructions)),
    own("previous_response_id", NAME, "The response that this one continues.", |r, v| v.put(&mut r.previous_response_id)),
    own("store", Bound::Flag, "Keep the response, so that others can continue it; true if absent.", |r, v| v.put(&mut r.store)),
    own("background", Bound::Flag, "Answer at once, and compute in the background.", |r, v| v.put(&mut r.background)),
    own("stream", Bound::Flag, "Send typed events.", |r, v| v.put(&mut r.stream)),
    p("max_output_tokens", MAX_TOKENS).bounded(count(1)).described("The largest number of tokens to generate; the rest of the context if absent."),
    p("temperature", TEMPERATURE),
    p("top_p", TOP_P),
    own("tools", Bound::Tree, "Functions that the model may call, and tools whose input is text.", |r, v| v.put(&mut r.tools)),
    own("tool_choice", Bound::Tree, "`auto`, `none`, `required`, or an object that names a tool.", |r: &mut ResponsesRequest, v| v.put(&mut r.tool_choice)).shown(TEXT),
    own("parallel_tool_calls", Bound::Flag, "True if an answer may have several calls; true if absent.", |r, v| v.put(&mut r.parallel_tool_calls)),
    own("reasoning", Bound::Object(&[REASONING]), "The effort of the model's reasoning.", |r, v| v.put(&mut r.reasoning)),
    own("text", Bound::Object(&[ANSWER]), "The form of the answer.", |r, v| v.put(&mut r.text)),
    own("metadata", Bound::Tree, "Data that comes back with the response.", |r, v| v.put(&mut r.metadata)),
    own("include", Bound::Strings { count: STOPS, each: WORD_BYTES, total: NAME_BYTES }, "Further parts of the response: `reasoning.encrypted_content`.", |r, v| v.put(&mut r.include)),
    p("cache_salt", CACHE_SALT),
    refused("conversation"),
    refused("prompt"),
];

tabled!(ResponsesRequest, "A request of the Responses API.", [LINES], generation);

/// The names of the parameters that set the reasoning effort.
const EFFORT: EffortParams = EffortParams { level: "reasoning.effort", switch: "reasoning.effort" };

/// The `reasoning` parameter.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct ResponsesReasoning {
    /// The effort of the model's reasoning, for templates that support it; `none` means no
    /// reasoning.
    effort: Option<String>,
    /// Accepted without effect: reasoning is never summarised.
    #[serde(default, rename = "summary")]
    #[schema(ignore)]
    _summary: Inert,
}

/// The `text` parameter.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct ResponsesText {
    /// The form of the answer.
    format: Option<TextFormat>,
}

/// The form of an answer.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TextFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    kind: String,
    /// Accepted without effect.
    name: Option<String>,
    /// The schema.
    #[schema(value_type = Option<Object>)]
    schema: Option<Raw>,
    /// Accepted without effect: a schema is always enforced.
    strict: Option<bool>,
}

pub(crate) const REASONING: &[Param] = &[param("effort", WORD), param("summary", Bound::Ignored)];

pub(crate) const ANSWER: &[Param] = &[param("format", Bound::Object(&[TEXT_FORMAT]))];

pub(crate) const TEXT_FORMAT: &[Param] = &[
    param("type", WORD),
    param("name", WORD),
    param("schema", SOURCE),
    param("strict", Bound::Flag),
];

component!(ResponsesReasoning, ResponsesText);

/// A Responses request, checked except for the length of the prompt.
#[derive(Debug)]
pub struct ValidResponses {
    /// The conversation, and the parameters that chat requests have too.
    pub chat: ValidChat,
    /// The original kinds of tools that are not plain functions, by the function's name in the
    /// prompt.
    pub kinds: Vec<(String, ToolKind)>,
    /// The new input items of this request.
    pub input: Vec<Item>,
    /// True if the response is stored, so that later requests can continue it.
    pub store: bool,
    /// True if the request returns at once and the response is computed in the background.
    pub background: bool,
    /// True if reasoning is also returned in an opaque form that clients send back.
    pub sealed: bool,
    /// The request parameters that are repeated in the response.
    pub echo: Map<String, Value>,
}

/// The largest size in bytes of the tools that a response repeats. A stream repeats them three
/// times.
const ECHOED_TOOLS: usize = 1 << 16;

impl ResponsesRequest {
    /// Returns the ids of stored items that the input refers to, with the paths of the references.
    #[must_use]
    pub fn references(&self) -> Vec<(&str, String)> {
        let Some(TextOr::List(items)) = &self.input else { return Vec::new() };
        let mut references = Vec::new();
        for (at, item) in items.iter().enumerate() {
            references.extend(item.reference().map(|id| (id, format!("input[{at}].id"))));
        }
        references
    }

    /// Replaces references by the stored items, which `kept` maps by id.
    pub fn resolve(&mut self, kept: &HashMap<String, Item>) {
        let Some(TextOr::List(items)) = &mut self.input else { return };
        for item in items {
            if let Some(found) = item.reference().and_then(|id| kept.get(id)) {
                *item = found.clone();
            }
        }
    }

    /// Checks everything that can be checked before the prompt is tokenised. `before` has the items
    /// of the earlier responses. The names of fields that have no effect are added to `ignored`.
    ///
    /// # Errors
    /// A parameter is out of range or not supported. The error names the first such parameter.
    pub fn validate(
        self,
        before: &[&Item],
        defaults: &GenerationDefaults,
        limits: Limits,
        ignored: &mut Vec<String>,
    ) -> Result<ValidResponses, ApiError> {
        let background = self.background.unwrap_or(false);
        if background && self.stream == Some(true) {
            return Err(invalid("background", "a response in the background has no stream"));
        }
        if background && self.store == Some(false) {
            return Err(invalid(
                "background",
                "needs `store`: a response that is not stored can't be fetched",
            ));
        }
        let sealed = self.seals(ignored);
        let mut echo = self.echo();
        let input = match self.input {
            None => Vec::new(),
            Some(TextOr::Text(text)) => vec![Item::said_by_user(text)],
            Some(TextOr::List(items)) => items,
        };
        if input.is_empty() && before.is_empty() {
            return Err(invalid("input", "required and missing"));
        }
        let images = limits.images;
        let turns = conversation(self.instructions, before, &input, images, ignored)?;
        let functions = functions(self.tools.unwrap_or_default(), ignored)?;
        let Offered { tools, kinds } =
            offered(functions, self.tool_choice, self.parallel_tool_calls)?;
        let effort = self.reasoning.unwrap_or_default().effort;
        let thinks = (effort.as_deref() == Some("none")).then_some(false);
        let format = self.text.unwrap_or_default().format;
        let mut parameters = self.generation;
        let (temperature, top_p) = (parameters.temperature, parameters.top_p);
        parameters.structure.response_format = format.map(TextFormat::in_chat);
        let mut generation =
            parameters.validate("", defaults, limits).map_err(|error| error.renamed(in_text))?;
        if let Some(structure) = &mut generation.structure {
            structure.param = in_text(&structure.param);
        }
        let (messages, images) = turns.finish();
        let described = &tools.described;
        let chat = ValidChat {
            prediction: None,
            generation,
            streaming: self.stream.unwrap_or(false).then(Streaming::default),
            tokens: TokenOutput::default(),
            reasoning: ReasoningOutput::Apart,
            prompt: ChatPrompt {
                messages,
                images,
                add_generation_prompt: true,
                continue_final_message: false,
                tools: (!described.is_empty()).then(|| Value::Array(described.clone())),
                kwargs: Map::new(),
                effort: Effort { level: effort, thinks, params: EFFORT },
            },
            tools,
        };
        let sampling = &chat.generation.sampling;
        echo.insert("temperature".into(), json!(temperature.unwrap_or(sampling.temperature)));
        echo.insert("top_p".into(), json!(top_p.unwrap_or(sampling.top_p)));
        let store = self.store.unwrap_or(true);
        Ok(ValidResponses { chat, kinds, input, store, background, sealed, echo })
    }

    /// True if `include` requests reasoning in the opaque form. Other values of `include` have no
    /// effect and are added to `ignored`.
    fn seals(&self, ignored: &mut Vec<String>) -> bool {
        let included = self.include.iter().flatten();
        let (seals, others): (Vec<&String>, Vec<&String>) =
            included.partition(|name| *name == "reasoning.encrypted_content");
        ignored.extend(others.into_iter().map(|name| format!("include={name}")));
        !seals.is_empty()
    }

    /// Returns the request parameters that are repeated in the response.
    fn echo(&self) -> Map<String, Value> {
        let tools = self.tools.as_deref().unwrap_or_default();
        let bytes: usize = tools.iter().map(|tool| tool.to_string().len()).sum();
        let tools = if bytes <= ECHOED_TOOLS { tools } else { &[] };
        let format = self.text.as_ref().and_then(|text| text.format.as_ref());
        let effort = self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref());
        let echo = json!({
            "background": self.background.unwrap_or(false),
            "instructions": self.instructions,
            "max_output_tokens": self.generation.max_tokens,
            "metadata": self.metadata.as_ref().unwrap_or(&json!({})),
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": effort, "summary": null},
            "store": self.store.unwrap_or(true),
            "text": {"format": format.map_or_else(|| json!({"type": "text"}), TextFormat::echo)},
            "tool_choice": self.tool_choice.as_ref().unwrap_or(&json!("auto")),
            "tools": tools,
            "truncation": "disabled",
        });
        match echo {
            Value::Object(echo) => echo,
            _ => Map::new(),
        }
    }
}

impl TextFormat {
    /// Returns the format without its schema, which may be large.
    fn echo(&self) -> Value {
        match self.kind.as_str() {
            "json_schema" => json!({
                "type": self.kind,
                "name": self.name,
                "strict": self.strict,
                "schema": {},
            }),
            _ => json!({"type": self.kind}),
        }
    }

    fn in_chat(self) -> ResponseFormat {
        let Self { kind, name, schema, strict } = self;
        let json_schema = (kind == "json_schema").then(|| JsonSchemaFormat {
            name,
            schema,
            strict,
            ..JsonSchemaFormat::default()
        });
        ResponseFormat { kind, json_schema, ..ResponseFormat::default() }
    }
}

/// Builds the conversation from the items of `before`, then those of `input`.
fn conversation(
    instructions: Option<String>,
    before: &[&Item],
    input: &[Item],
    most_images: u32,
    ignored: &mut Vec<String>,
) -> Result<Turns, ApiError> {
    let mut turns = Turns::new(most_images);
    if let Some(instructions) = instructions {
        let mut content = Content::default();
        content.text(instructions);
        turns.message("system", content);
    }
    for (index, item) in before.iter().enumerate() {
        // Parameters without effect were reported when the item was first sent.
        item.add(&mut turns, &format!("previous_response_id[{index}]"), &mut Vec::new())?;
    }
    for (index, item) in input.iter().enumerate() {
        item.add(&mut turns, &format!("input[{index}]"), ignored)?;
    }
    Ok(turns)
}

/// The tools of a request, as functions, and their original kinds.
struct Offered {
    tools: OfferedTools,
    kinds: Vec<(String, ToolKind)>,
}

fn offered(
    Functions { functions, paths, kinds, texts }: Functions,
    choice: Option<Value>,
    parallel: Option<bool>,
) -> Result<Offered, ApiError> {
    let choice = choice.map(|choice| named(choice, &kinds));
    let api = ToolNames { paths: Some(&paths), schema: "parameters", name: ".name" };
    let mut tools = OfferedTools::new(Some(functions), api, choice.as_ref(), parallel)?;
    tools.bind(texts);
    Ok(Offered { tools, kinds })
}

fn in_text(text: &str) -> String {
    text.replace("response_format.json_schema", "text.format")
        .replace("response_format", "text.format")
}

fn invalid(param: &str, reason: &str) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {reason}"))
}

fn required<T>(value: Option<T>, path: &str, field: &str) -> Result<T, ApiError> {
    value.ok_or_else(|| invalid(&format!("{path}.{field}"), "required and missing"))
}
