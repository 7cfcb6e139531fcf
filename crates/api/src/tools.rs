//! The tools that a model may call, and the calls that a request requires.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::limits::WORD_BYTES;

/// A restriction of the model's calls: required calls, or a subset of the tools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallDemand {
    /// Indices of the tools that may be called, ascending.
    pub callable: Vec<usize>,
    /// Which calls are required.
    pub calls: Calls,
    /// The path of the parameter with the restriction.
    pub param: String,
}

/// Which calls a request requires of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    /// The model chooses the number of calls.
    Any,
    /// The model makes at least one call.
    Some,
    /// The model makes exactly one call, of a tool that the client names.
    Named,
}

/// A function that a model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct OfferedTool {
    /// The name of the function.
    pub name: String,
    /// The JSON schema of its arguments.
    pub schema: Value,
    /// True if arguments must match the schema; otherwise their form is not enforced.
    pub strict: bool,
    /// The path of the schema in the request.
    pub path: String,
    /// The form of a custom tool's input, which is its only argument; `None` for other tools.
    pub text: Option<TextForm>,
}

/// The required form of a text, as the client specified it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextForm {
    /// A grammar in Lark, or a regular expression.
    pub definition: String,
    /// True for a regular expression, false for a grammar.
    pub is_regex: bool,
    /// The path of the form in the request.
    pub path: String,
}

/// The tools of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OfferedTools {
    /// The tools for the chat template. Empty if there are none, or if none may be called.
    pub described: Vec<Value>,
    /// The tools as functions that may be called.
    pub functions: Vec<OfferedTool>,
    /// True if one response may have several calls.
    pub parallel: bool,
    /// The restriction of the calls; `None` if the model may call any tools or none.
    pub demand: Option<CallDemand>,
    /// Tools of unsupported types: their paths, with the types.
    pub skipped: Vec<String>,
}

/// The names that an API uses for tools and their fields, for errors.
#[derive(Clone, Copy)]
pub(crate) struct ToolNames<'a> {
    /// The path of each function; `None` for the paths of the chat API.
    pub(crate) paths: Option<&'a [String]>,
    /// The name of a function's field with the schema of its arguments.
    pub(crate) schema: &'static str,
    /// The path of the function's name within `tool_choice`.
    pub(crate) name: &'static str,
}

impl ToolNames<'_> {
    /// The names that the chat API uses.
    pub(crate) const CHAT: Self =
        Self { paths: None, schema: "parameters", name: ".function.name" };

    fn tool(&self, index: usize) -> String {
        let path = self.paths.and_then(|paths| paths.get(index)).cloned();
        path.unwrap_or_else(|| format!("tools[{index}]"))
    }

    fn function(&self, index: usize) -> String {
        let tool = self.tool(index);
        if self.paths.is_some() { tool } else { format!("{tool}.function") }
    }
}

/// The value of `tool_choice`.
enum ToolChoice {
    None,
    Some(Calls, Vec<usize>),
}

const CHOICE: &str = "tool_choice";

impl OfferedTools {
    /// Checks `tools`, `tool_choice` and `parallel_tool_calls`.
    ///
    /// # Errors
    /// A tool has no name, two tools have the same name, a schema is not an object, or the required
    /// tool is not among the tools.
    pub(crate) fn new(
        tools: Option<Vec<Value>>,
        api: ToolNames<'_>,
        choice: Option<&Value>,
        parallel: Option<bool>,
    ) -> Result<Self, ApiError> {
        let mut offered = Self { parallel: parallel.unwrap_or(true), ..Self::default() };
        let mut names = HashSet::new();
        for (index, tool) in tools.into_iter().flatten().enumerate() {
            let path = api.tool(index);
            let Value::Object(tool) = tool else {
                return Err(wrong(&path, "must be an object"));
            };
            match tool.get("type").map(|kind| kind.as_str()) {
                None | Some(Some("function")) => {}
                Some(Some(kind)) if kind.len() <= WORD_BYTES => {
                    offered.skipped.push(format!("{path}.type={kind}"));
                    continue;
                }
                Some(_) => return Err(wrong(&format!("{path}.type"), "must be a short string")),
            }
            let path = api.function(index);
            let function = function(&path, api.schema, &tool)?;
            if !names.insert(function.name.clone()) {
                return Err(wrong(&format!("{path}.name"), "another tool has this name"));
            }
            offered.functions.push(function);
            offered.described.push(Value::Object(tool));
        }
        match offered.choose(choice, api.name)? {
            ToolChoice::None => {
                offered.described.clear();
                offered.functions.clear();
            }
            ToolChoice::Some(calls, callable) => {
                // A named tool is called exactly once, as in OpenAI's API and vLLM.
                offered.parallel &= calls != Calls::Named;
                let asked = calls != Calls::Any || callable.len() < offered.functions.len();
                let strict = callable.iter().find(|&&tool| offered.functions[tool].strict);
                let param = match strict {
                    _ if asked => Some(CHOICE.to_owned()),
                    Some(&tool) => {
                        let path = offered.functions[tool].path.rsplit_once('.');
                        path.map(|(function, _)| format!("{function}.strict"))
                    }
                    None => None,
                };
                offered.demand = param.map(|param| CallDemand { callable, calls, param });
            }
        }
        Ok(offered)
    }

    /// Sets the forms of tools' inputs, by tool name. The forms take effect only if the request
    /// does not restrict calls otherwise.
    pub(crate) fn bind(&mut self, texts: Vec<(String, TextForm)>) {
        for (name, text) in texts {
            let callable = (0..self.functions.len()).collect();
            let Some(tool) = self.functions.iter_mut().find(|tool| tool.name == name) else {
                continue;
            };
            let param = text.path.clone();
            self.demand.get_or_insert(CallDemand { callable, calls: Calls::Any, param });
            tool.text = Some(text);
        }
    }

    /// Reads the value of `tool_choice`.
    fn choose(&self, choice: Option<&Value>, name: &str) -> Result<ToolChoice, ApiError> {
        let all = || (0..self.functions.len()).collect();
        match choice {
            None | Some(Value::Null) => Ok(ToolChoice::Some(Calls::Any, all())),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => Ok(ToolChoice::Some(Calls::Any, all())),
                "none" => Ok(ToolChoice::None),
                "required" | "any" if self.functions.is_empty() => {
                    Err(wrong(CHOICE, "there are no `tools` to call"))
                }
                // `any` is Mistral's word for `required`.
                "required" | "any" => Ok(ToolChoice::Some(Calls::Some, all())),
                _ => Err(wrong(
                    CHOICE,
                    "must be auto, none, required or an object that names functions",
                )),
            },
            Some(Value::Object(fields)) => self.choose_object(fields, name),
            Some(_) => Err(wrong(CHOICE, "must be a string or an object")),
        }
    }

    /// Reads `tool_choice` given as an object, which selects one function by name or a subset of
    /// the tools.
    fn choose_object(
        &self,
        fields: &Map<String, Value>,
        name: &str,
    ) -> Result<ToolChoice, ApiError> {
        match fields.get("type").map(|kind| kind.as_str()) {
            None | Some(Some("function")) => {
                let tool = self.named(fields, CHOICE, name)?;
                Ok(ToolChoice::Some(Calls::Named, vec![tool]))
            }
            Some(Some("allowed_tools")) => {
                // The chat API nests the fields in an object; the Responses API has them at the top
                // level.
                let (path, allowed) = match fields.get("allowed_tools") {
                    Some(Value::Object(inner)) => (format!("{CHOICE}.allowed_tools"), inner),
                    Some(_) => {
                        return Err(wrong(&format!("{CHOICE}.allowed_tools"), "must be an object"));
                    }
                    None => (CHOICE.to_owned(), fields),
                };
                let calls = match allowed.get("mode").map(|mode| mode.as_str()) {
                    None | Some(Some("auto")) => Calls::Any,
                    Some(Some("required")) => Calls::Some,
                    Some(_) => {
                        return Err(wrong(&format!("{path}.mode"), "must be auto or required"));
                    }
                };
                let path = format!("{path}.tools");
                let Some(Value::Array(tools)) = allowed.get("tools") else {
                    return Err(wrong(&path, "must be a list of tools"));
                };
                let mut callable = Vec::with_capacity(tools.len());
                for (index, tool) in tools.iter().enumerate() {
                    let path = format!("{path}[{index}]");
                    let Value::Object(tool) = tool else {
                        return Err(wrong(&path, "must be an object"));
                    };
                    callable.push(self.named(tool, &path, name)?);
                }
                if callable.is_empty() {
                    return Err(wrong(&path, "must name at least one tool"));
                }
                callable.sort_unstable();
                callable.dedup();
                Ok(ToolChoice::Some(calls, callable))
            }
            Some(_) => Err(wrong(&format!("{CHOICE}.type"), "must be function or allowed_tools")),
        }
    }

    /// Returns the index of the tool that the object names, in the format of the chat API or of the
    /// Responses API.
    fn named(
        &self,
        fields: &Map<String, Value>,
        path: &str,
        place: &str,
    ) -> Result<usize, ApiError> {
        let function = fields.get("function").unwrap_or(&Value::Null);
        let name = function.get("name").or(fields.get("name")).and_then(Value::as_str);
        let path = format!("{path}{place}");
        let name = name.ok_or_else(|| wrong(&path, "required and missing"))?;
        let tool = self.functions.iter().position(|tool| tool.name == name);
        tool.ok_or_else(|| wrong(&path, "no tool has this name"))
    }
}

/// Reads the function at `path` from a tool. `parameters` is the API's name for the schema.
fn function(
    path: &str,
    parameters: &str,
    tool: &Map<String, Value>,
) -> Result<OfferedTool, ApiError> {
    let Some(Value::Object(function)) = tool.get("function") else {
        return Err(wrong(path, "must be an object"));
    };
    let name = match function.get("name") {
        Some(Value::String(name)) => name,
        _ => return Err(wrong(&format!("{path}.name"), "must be a string")),
    };
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
    if name.is_empty() || name.len() > WORD_BYTES || !name.chars().all(fits) {
        let reason = format!("must have 1 to {WORD_BYTES} letters, digits or any of _-.:/");
        return Err(wrong(&format!("{path}.name"), &reason));
    }
    let schema = match function.get("parameters") {
        None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema.clone(),
        Some(_) => return Err(wrong(&format!("{path}.{parameters}"), "must be an object")),
    };
    let strict = match function.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(_) => return Err(wrong(&format!("{path}.strict"), "must be true or false")),
    };
    let path = format!("{path}.{parameters}");
    Ok(OfferedTool { name: name.clone(), schema, strict, path, text: None })
}

fn wrong(param: &str, reason: &str) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(tools: Value, choice: Value) -> Result<OfferedTools, ApiError> {
        let tools = tools.as_array().cloned();
        OfferedTools::new(tools, ToolNames::CHAT, Some(&choice), None)
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "description": "d"}})
    }

    #[test]
    fn tools_have_names_and_schemas() {
        let offered = offer(json!([tool("a"), tool("b.c-d")]), json!("auto")).unwrap();
        let schema = json!({"type": "object", "properties": {}});
        let names: Vec<&str> = offered.functions.iter().map(|tool| &*tool.name).collect();
        assert_eq!(names, ["a", "b.c-d"]);
        assert!(offered.functions.iter().all(|tool| tool.schema == schema && !tool.strict));
        assert_eq!(offered.demand, None);
        assert_eq!(offered.described.len(), 2);
        assert!(offered.parallel);
        let none = offer(json!([tool("a")]), json!("none")).unwrap();
        assert!(none.described.is_empty() && none.functions.is_empty());
        let others = json!([tool("a"), {"type": "web_search"}, {"type": "custom", "custom": {}}]);
        let offered = offer(others, Value::Null).unwrap();
        assert_eq!(offered.skipped, ["tools[1].type=web_search", "tools[2].type=custom"]);
        assert_eq!(offered.functions.len(), 1);
    }

    #[test]
    fn what_is_asked_of_calls() {
        let strict = json!({"type": "function", "function": {"name": "s", "strict": true}});
        let web = json!({"type": "web_search"});
        let tools = json!([tool("a"), web, tool("b"), strict]);
        let demand = |tools: &Value, choice: Value| {
            let offered = offer(tools.clone(), choice).unwrap();
            offered
                .demand
                .map(|demand| (demand.callable, demand.calls, demand.param, offered.parallel))
        };
        let flat = |name: &str| json!({"type": "function", "name": name});
        let nested = |name: &str| json!({"type": "function", "function": {"name": name}});
        let choice = || CHOICE.to_owned();
        let all = || vec![0, 1, 2];
        assert_eq!(
            demand(&tools, json!("auto")),
            Some((all(), Calls::Any, "tools[3].function.strict".to_owned(), true))
        );
        assert_eq!(demand(&json!([tool("a")]), Value::Null), None);
        assert_eq!(demand(&tools, json!("none")), None);
        for word in ["required", "any"] {
            let expected = Some((all(), Calls::Some, choice(), true));
            assert_eq!(demand(&tools, json!(word)), expected);
        }
        for named in [flat("b"), nested("b"), json!({"function": {"name": "b"}})] {
            let expected = Some((vec![1], Calls::Named, choice(), false));
            assert_eq!(demand(&tools, named), expected, "called once");
        }
        let allowed = |mode: &str| json!({"mode": mode, "tools": [flat("s"), nested("a")]});
        let chat = json!({"type": "allowed_tools", "allowed_tools": allowed("auto")});
        let expected = Some((vec![0, 2], Calls::Any, choice(), true));
        assert_eq!(demand(&tools, chat), expected);
        let mut responses = allowed("required");
        responses["type"] = "allowed_tools".into();
        let expected = Some((vec![0, 2], Calls::Some, choice(), true));
        assert_eq!(demand(&tools, responses), expected);
        let path = offer(tools, Value::Null).unwrap().functions[1].path.clone();
        assert_eq!(path, "tools[2].function.parameters");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let function = |function: Value| json!([{"type": "function", "function": function}]);
        let auto = json!("auto");
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let allowed = |inner: Value| json!({"type": "allowed_tools", "allowed_tools": inner});
        for (tools, choice, param) in [
            (json!(["a"]), auto.clone(), "tools[0]"),
            (json!([{"type": 3}]), auto.clone(), "tools[0].type"),
            (json!([{"type": "function"}]), auto.clone(), "tools[0].function"),
            (function(json!({})), auto.clone(), "tools[0].function.name"),
            (function(json!({"name": ""})), auto.clone(), "tools[0].function.name"),
            (function(json!({"name": "a b"})), auto.clone(), "tools[0].function.name"),
            (function(json!({"name": "x".repeat(300)})), auto.clone(), "tools[0].function.name"),
            (
                function(json!({"name": "a", "parameters": []})),
                auto.clone(),
                "tools[0].function.parameters",
            ),
            (function(json!({"name": "a", "strict": 1})), auto.clone(), "tools[0].function.strict"),
            (json!([tool("a"), tool("a")]), auto, "tools[1].function.name"),
            (json!([tool("a")]), json!("all"), "tool_choice"),
            (json!([tool("a")]), json!(1), "tool_choice"),
            (json!([tool("a")]), json!({"type": "custom"}), "tool_choice.type"),
            (json!([tool("a")]), allowed(json!({})), "tool_choice.allowed_tools.tools"),
            (json!([tool("a")]), allowed(json!({"tools": []})), "tool_choice.allowed_tools.tools"),
            (json!([tool("a")]), allowed(json!({"mode": "x"})), "tool_choice.allowed_tools.mode"),
            (
                json!([tool("a")]),
                allowed(json!({"tools": [named("b")]})),
                "tool_choice.allowed_tools.tools[0].function.name",
            ),
            (json!([tool("a")]), named("b"), "tool_choice.function.name"),
            (json!([tool("a")]), json!({}), "tool_choice.function.name"),
            (json!([]), json!("required"), "tool_choice"),
        ] {
            match offer(tools.clone(), choice) {
                Err(ApiError::Invalid { param: found, .. }) => assert_eq!(found, param, "{tools}"),
                other => panic!("{tools}: {other:?}"),
            }
        }
    }
}
