//! Tools that a model may call: what is offered, and what is asked of it.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::limits::WORD_BYTES;

/// Whether calls are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// As the model sees fit.
    #[default]
    Auto,
    /// None.
    None,
}

/// The tools of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OfferedTools {
    /// As the chat template sees them. Empty: there are none, or none may be called.
    pub described: Vec<Value>,
    /// Names and schemas of their arguments, in the same order.
    pub schemas: Vec<(String, Value)>,
    /// Whether an answer may have several calls.
    pub parallel: bool,
    /// Tools that are of a type that is not served, as paths with their types.
    pub skipped: Vec<String>,
}

impl OfferedTools {
    /// Checks `tools`, `tool_choice` and `parallel_tool_calls`.
    ///
    /// # Errors
    /// A tool has no name, two have the same, a schema is no object; or something is asked for that is not served.
    pub(crate) fn new(
        tools: Option<Vec<Value>>,
        choice: Option<&Value>,
        parallel: Option<bool>,
    ) -> Result<Self, ApiError> {
        let mut offered = Self { parallel: parallel.unwrap_or(true), ..Self::default() };
        let mut names = HashSet::new();
        for (index, tool) in tools.into_iter().flatten().enumerate() {
            let path = format!("tools[{index}]");
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
            let (name, schema) = function(&path, &tool)?;
            if !names.insert(name.clone()) {
                return Err(wrong(&format!("{path}.function.name"), "another tool has it"));
            }
            offered.schemas.push((name, schema));
            offered.described.push(Value::Object(tool));
        }
        if offered.choose(choice)? == ToolChoice::None {
            offered.described.clear();
            offered.schemas.clear();
        }
        Ok(offered)
    }

    /// What `tool_choice` says.
    fn choose(&self, choice: Option<&Value>) -> Result<ToolChoice, ApiError> {
        const PARAM: &str = "tool_choice";
        let without_tools = self.schemas.is_empty();
        match choice {
            None | Some(Value::Null) => Ok(ToolChoice::Auto),
            Some(Value::String(word)) => match word.as_str() {
                "auto" => Ok(ToolChoice::Auto),
                "none" => Ok(ToolChoice::None),
                "required" if without_tools => Err(wrong(PARAM, "there are no `tools` to call")),
                "required" => Err(forced(PARAM)),
                _ => Err(wrong(
                    PARAM,
                    "must be auto, none, required or an object that names a function",
                )),
            },
            Some(Value::Object(fields)) => {
                let function = fields.get("function").unwrap_or(&Value::Null);
                let name = function.get("name").or(fields.get("name")).and_then(Value::as_str);
                match name {
                    Some(name) if self.schemas.iter().any(|(known, _)| known == name) => {
                        Err(forced(PARAM))
                    }
                    Some(_) => Err(wrong(&format!("{PARAM}.function.name"), "no tool has it")),
                    None => Err(wrong(&format!("{PARAM}.function.name"), "required and missing")),
                }
            }
            Some(_) => Err(wrong(PARAM, "must be a string or an object")),
        }
    }
}

/// The name of a function and the schema of its arguments.
fn function(path: &str, tool: &Map<String, Value>) -> Result<(String, Value), ApiError> {
    let path = format!("{path}.function");
    let Some(Value::Object(function)) = tool.get("function") else {
        return Err(wrong(&path, "must be an object"));
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
        Some(_) => return Err(wrong(&format!("{path}.parameters"), "must be an object")),
    };
    match function.get("strict") {
        None | Some(Value::Null | Value::Bool(false)) => Ok((name.clone(), schema)),
        Some(Value::Bool(true)) => Err(forced(&format!("{path}.strict"))),
        Some(_) => Err(wrong(&format!("{path}.strict"), "must be true or false")),
    }
}

fn wrong(param: &str, reason: &str) -> ApiError {
    ApiError::invalid(param, format!("`{param}`: {reason}"))
}

/// What needs that the model can't write anything else.
fn forced(param: &str) -> ApiError {
    wrong(param, "calls can't be forced yet: only `auto` and `none` are served, without `strict`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(tools: Value, choice: Value) -> Result<OfferedTools, ApiError> {
        let tools = tools.as_array().cloned();
        OfferedTools::new(tools, Some(&choice), None)
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "description": "d"}})
    }

    #[test]
    fn tools_have_names_and_schemas() {
        let offered = offer(json!([tool("a"), tool("b.c-d")]), json!("auto")).unwrap();
        let schema = json!({"type": "object", "properties": {}});
        assert_eq!(offered.schemas, [("a".into(), schema.clone()), ("b.c-d".into(), schema)]);
        assert_eq!(offered.described.len(), 2);
        assert!(offered.parallel);
        let none = offer(json!([tool("a")]), json!("none")).unwrap();
        assert!(none.described.is_empty() && none.schemas.is_empty());
        let others = json!([tool("a"), {"type": "web_search"}, {"type": "custom", "custom": {}}]);
        let offered = offer(others, Value::Null).unwrap();
        assert_eq!(offered.skipped, ["tools[1].type=web_search", "tools[2].type=custom"]);
        assert_eq!(offered.schemas.len(), 1);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let function = |function: Value| json!([{"type": "function", "function": function}]);
        let auto = json!("auto");
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
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
            (
                function(json!({"name": "a", "strict": true})),
                auto.clone(),
                "tools[0].function.strict",
            ),
            (function(json!({"name": "a", "strict": 1})), auto.clone(), "tools[0].function.strict"),
            (json!([tool("a"), tool("a")]), auto, "tools[1].function.name"),
            (json!([tool("a")]), json!("required"), "tool_choice"),
            (json!([tool("a")]), json!("any"), "tool_choice"),
            (json!([tool("a")]), json!(1), "tool_choice"),
            (json!([tool("a")]), named("a"), "tool_choice"),
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
