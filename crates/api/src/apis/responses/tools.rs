//! Converts the tools of the Responses API to functions of the chat API.

use forebay_grammar::GRAMMAR_BYTES;
use serde_json::{Map, Value, json};

use super::invalid;
use crate::error::ApiError;
use crate::tools::TextForm;

/// The original kind of a tool that was converted to a function for the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolKind {
    /// A custom tool, whose input is text. The function has the text as its only argument,
    /// [`CUSTOM_INPUT`].
    Custom,
    /// A tool that belongs to a namespace.
    Of {
        /// The name of the namespace.
        namespace: String,
        /// The name of the tool within the namespace.
        name: String,
    },
}

/// The only argument of a function that replaces a custom tool.
pub const CUSTOM_INPUT: &str = "input";

/// The tools as functions of the chat API.
#[derive(Default)]
pub(super) struct Functions {
    pub(super) functions: Vec<Value>,
    /// The path of each tool in the request, for errors.
    pub(super) paths: Vec<String>,
    /// The original kinds of tools that are not plain functions, by function name.
    pub(super) kinds: Vec<(String, ToolKind)>,
    /// The required forms of custom tools' inputs, by tool name.
    pub(super) texts: Vec<(String, TextForm)>,
}

/// Converts tools to functions. Tools that run on OpenAI's servers are not supported here.
pub(super) fn functions(
    tools: Vec<Value>,
    ignored: &mut Vec<String>,
) -> Result<Functions, ApiError> {
    let Functions { mut functions, mut paths, mut kinds, mut texts } = Functions::default();
    for (at, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{at}]");
        let Value::Object(mut tool) = tool else {
            return Err(invalid(&path, "must be an object"));
        };
        match tool.get("type").and_then(Value::as_str) {
            Some("function") => {
                paths.push(path);
                functions.push(function(&mut tool, ""));
            }
            Some("custom") => {
                let described = tool.remove("description").unwrap_or(Value::Null);
                let name = tool.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
                if let Some(form) = text_form(&tool, &path)? {
                    texts.push((name.clone(), form));
                }
                paths.push(path);
                kinds.push((name.clone(), ToolKind::Custom));
                functions.push(custom(&name, &described));
            }
            Some("namespace") => {
                let namespace =
                    tool.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
                let Some(Value::Array(inner)) = tool.remove("tools") else {
                    return Err(invalid(&format!("{path}.tools"), "must be a list of tools"));
                };
                for (number, tool) in inner.into_iter().enumerate() {
                    let path = format!("{path}.tools[{number}]");
                    let Value::Object(mut tool) = tool else {
                        return Err(invalid(&path, "must be an object"));
                    };
                    let kind = tool.get("type").and_then(Value::as_str).unwrap_or("function");
                    if kind != "function" {
                        ignored.push(format!("{path}.type={kind}"));
                        continue;
                    }
                    let name =
                        tool.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
                    let known = format!("{namespace}{name}");
                    kinds.push((known, ToolKind::Of { namespace: namespace.clone(), name }));
                    paths.push(path);
                    functions.push(function(&mut tool, &namespace));
                }
            }
            Some(kind) => ignored.push(format!("{path}.type={kind}")),
            None => return Err(invalid(&format!("{path}.type"), "required and missing")),
        }
    }
    Ok(Functions { functions, paths, kinds, texts })
}

/// Converts a function of the Responses API to the chat API's format.
fn function(tool: &mut Map<String, Value>, namespace: &str) -> Value {
    let mut function = Map::new();
    for field in ["name", "description", "parameters", "strict"] {
        if let Some(value) = tool.remove(field) {
            function.insert(field.to_owned(), value);
        }
    }
    if let Some(Value::String(name)) = function.get_mut("name") {
        name.insert_str(0, namespace);
    }
    json!({"type": "function", "function": function})
}

/// Creates the function that replaces a custom tool.
fn custom(name: &str, description: &Value) -> Value {
    let schema = json!({
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": false,
    });
    json!({"type": "function", "function": {"name": name, "description": description, "parameters": schema}})
}

/// Returns the required form of a custom tool's input; `None` if any text is allowed.
fn text_form(tool: &Map<String, Value>, path: &str) -> Result<Option<TextForm>, ApiError> {
    let path = format!("{path}.format");
    let Some(Value::Object(format)) = tool.get("format") else { return Ok(None) };
    let text = |name: &str| format.get(name).and_then(Value::as_str);
    match text("type") {
        Some("text") | None => return Ok(None),
        Some("grammar") => {}
        Some(_) => return Err(invalid(&format!("{path}.type"), "must be text or grammar")),
    }
    let definition = match text("definition") {
        Some(definition) if definition.len() <= GRAMMAR_BYTES => definition.to_owned(),
        Some(_) => {
            let reason = format!("more than {GRAMMAR_BYTES} bytes");
            return Err(invalid(&format!("{path}.definition"), &reason));
        }
        None => return Err(invalid(&format!("{path}.definition"), "required and missing")),
    };
    let is_regex = match text("syntax") {
        Some("lark") => false,
        Some("regex") => true,
        _ => return Err(invalid(&format!("{path}.syntax"), "must be lark or regex")),
    };
    Ok(Some(TextForm { definition, is_regex, path: format!("{path}.definition") }))
}

/// Converts `tool_choice` to the chat API's format, with tools of every kind treated as functions.
pub(super) fn named(mut choice: Value, kinds: &[(String, ToolKind)]) -> Value {
    let is_custom = choice["type"] == "custom"
        && kinds.iter().any(|(name, kind)| *kind == ToolKind::Custom && choice["name"] == **name);
    if is_custom {
        choice["type"] = json!("function");
    }
    choice
}
