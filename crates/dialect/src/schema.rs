//! Converts arguments that a model wrote as text to the types in their schemas.

use std::collections::HashMap;

use serde_json::{Map, Number, Value};

use crate::python;

/// The largest number of schemas that are visited for one argument, because schemas may be
/// recursive.
const STEPS: u32 = 512;

/// The tools that a request offers: their names, and the JSON schemas of their arguments.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tools {
    /// The names of the tools, in the order of the request.
    names: Vec<String>,
    schemas: HashMap<String, Value>,
}

impl Tools {
    /// Creates the tools from their names and the schemas of their arguments.
    pub fn new(tools: impl IntoIterator<Item = (String, Value)>) -> Self {
        let mut all = Self::default();
        for (name, schema) in tools {
            all.names.push(name.clone());
            all.schemas.insert(name, schema);
        }
        all
    }

    /// True if there are no tools.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// True if there is a tool with this name.
    pub fn has(&self, name: &str) -> bool {
        self.schemas.contains_key(name)
    }

    /// Iterates over names and schemas, in the order of the request.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.names.iter().map(|name| (name.as_str(), &self.schemas[name]))
    }

    /// Returns the argument of `tool` with this name.
    pub(crate) fn argument(&self, tool: &str, name: &str) -> Argument<'_> {
        let root = self.schemas.get(tool);
        let schema = root.and_then(|root| property(root, root, name, &mut { STEPS }));
        Argument { root, schema }
    }

    /// Returns the name of the argument of `tool` at position `index`.
    pub(crate) fn argument_name(&self, tool: &str, index: usize) -> Option<&str> {
        let properties = self.schemas.get(tool)?.get("properties")?.as_object()?;
        properties.keys().nth(index).map(String::as_str)
    }
}

/// The schema of one argument; `None` if the argument has no schema.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Argument<'a> {
    root: Option<&'a Value>,
    schema: Option<&'a Value>,
}

/// The kinds of values that a schema allows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Kinds {
    null: bool,
    boolean: bool,
    integer: bool,
    number: bool,
    string: bool,
    array: bool,
    object: bool,
}

impl Kinds {
    const ALL: Self = Self {
        null: true,
        boolean: true,
        integer: true,
        number: true,
        string: true,
        array: true,
        object: true,
    };
    const STRING: Self = Self {
        null: false,
        boolean: false,
        integer: false,
        number: false,
        string: true,
        array: false,
        object: false,
    };

    fn add(&mut self, name: &str) {
        match name {
            "null" => self.null = true,
            "boolean" | "bool" => self.boolean = true,
            "integer" | "int" => self.integer = true,
            "number" | "float" => self.number = true,
            "string" | "str" => self.string = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => {}
        }
    }

    fn or(self, other: Self) -> Self {
        Self {
            null: self.null || other.null,
            boolean: self.boolean || other.boolean,
            integer: self.integer || other.integer,
            number: self.number || other.number,
            string: self.string || other.string,
            array: self.array || other.array,
            object: self.object || other.object,
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            null: self.null && other.null,
            boolean: self.boolean && other.boolean,
            // An integer is a number too.
            integer: self.integer && (other.integer || other.number)
                || other.integer && self.number,
            number: self.number && other.number,
            string: self.string && other.string,
            array: self.array && other.array,
            object: self.object && other.object,
        }
    }

    fn of_value(value: &Value) -> Self {
        let mut kinds = Self::default();
        kinds.add(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(number) if number.is_f64() => "number",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        });
        kinds
    }

    fn has(self, value: &Value) -> bool {
        match value {
            Value::Null => self.null,
            Value::Bool(_) => self.boolean,
            Value::Number(number) => self.number || self.integer && !number.is_f64(),
            Value::String(_) => self.string,
            Value::Array(_) => self.array,
            Value::Object(_) => self.object,
        }
    }
}

impl Argument<'_> {
    fn kinds(&self) -> Kinds {
        match (self.root, self.schema) {
            (Some(root), Some(schema)) => kinds(root, schema, &mut { STEPS }),
            _ => Kinds::ALL,
        }
    }

    /// True if the argument is always a string, whatever the model wrote.
    pub(crate) fn is_string(&self) -> bool {
        self.kinds() == Kinds::STRING
    }

    /// Returns the value that the text represents if the schema accepts that value, otherwise the
    /// text.
    pub(crate) fn value(&self, text: &str) -> Value {
        if let (Some(root), Some(schema)) = (self.root, self.schema)
            && let Some(value) = listed(root, schema, text, &mut { STEPS })
        {
            return value;
        }
        let kinds = self.kinds();
        let trimmed = text.trim();
        let others = || {
            if kinds.null && matches!(trimmed, "null" | "None") {
                return Some(Value::Null);
            }
            if kinds.boolean {
                match trimmed {
                    "true" | "True" => return Some(Value::Bool(true)),
                    "false" | "False" => return Some(Value::Bool(false)),
                    _ => {}
                }
            }
            if let Some(number) = number(trimmed, kinds) {
                return Some(Value::Number(number));
            }
            if kinds.array || kinds.object {
                let value = serde_json::from_str(trimmed).ok();
                let value = value.or_else(|| python::literal(trimmed));
                return value.filter(|value| {
                    matches!(value, Value::Array(_) | Value::Object(_)) && kinds.has(value)
                });
            }
            None
        };
        if kinds == Kinds::STRING {
            return Value::String(text.to_owned());
        }
        others().unwrap_or_else(|| Value::String(text.to_owned()))
    }
}

/// Parses a number that these kinds accept. `230.0` is an integer.
fn number(text: &str, kinds: Kinds) -> Option<Number> {
    if !kinds.integer && !kinds.number {
        return None;
    }
    // Numbers that are not valid JSON, such as 007 or 1_000, remain text.
    let value: Number = serde_json::from_str(text).ok()?;
    if !value.is_f64() || kinds.number && !kinds.integer {
        return Some(value);
    }
    let float = value.as_f64()?;
    let whole = float.fract() == 0.0 && float.abs() < 9e15;
    match (kinds.integer && whole, kinds.number) {
        (true, _) => Some(Number::from(float as i64)),
        (false, true) => Some(value),
        (false, false) => None,
    }
}

/// Returns the value in a schema's `enum` or `const` that is spelled like `text`.
fn listed(root: &Value, schema: &Value, text: &str, steps: &mut u32) -> Option<Value> {
    let schema = resolve(root, schema, steps)?;
    let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    let mut values = values.chain(schema.get("const"));
    let written = |value: &&Value| match value {
        Value::String(string) => string == text,
        other => serde_json::to_string(other).is_ok_and(|other| other == text.trim()),
    };
    if let Some(value) = values.find(written) {
        return Some(value.clone());
    }
    let parts = ["anyOf", "oneOf"].iter().filter_map(|key| schema.get(*key)?.as_array()).flatten();
    parts.into_iter().find_map(|part| listed(root, part, text, steps))
}

/// Follows `$ref`s and returns the schema that they refer to.
fn resolve<'a>(root: &'a Value, schema: &'a Value, steps: &mut u32) -> Option<&'a Value> {
    let mut schema = schema;
    loop {
        *steps = steps.checked_sub(1)?;
        let Some(path) = schema.get("$ref").and_then(Value::as_str) else { return Some(schema) };
        schema = root.pointer(path.strip_prefix('#')?)?;
    }
}

fn kinds(root: &Value, schema: &Value, steps: &mut u32) -> Kinds {
    let Some(schema) = resolve(root, schema, steps).and_then(Value::as_object) else {
        return Kinds::ALL;
    };
    let mut found = Kinds::ALL;
    match schema.get("type") {
        Some(Value::String(name)) => {
            found = Kinds::default();
            found.add(name);
        }
        Some(Value::Array(names)) => {
            found = Kinds::default();
            names.iter().filter_map(Value::as_str).for_each(|name| found.add(name));
        }
        _ => {}
    }
    if found == Kinds::default() {
        found = Kinds::ALL;
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        let values = values.iter().map(Kinds::of_value);
        found = found.and(values.fold(Kinds::default(), Kinds::or));
    }
    if let Some(value) = schema.get("const") {
        found = found.and(Kinds::of_value(value));
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(parts) = schema.get(key).and_then(Value::as_array) {
            let parts = parts.iter().map(|part| kinds(root, part, steps));
            found = found.and(parts.fold(Kinds::default(), Kinds::or));
        }
    }
    if let Some(parts) = schema.get("allOf").and_then(Value::as_array) {
        found = parts.iter().fold(found, |found, part| found.and(kinds(root, part, steps)));
    }
    let looks_like = |keys: &[&str]| keys.iter().any(|key| schema.contains_key(*key));
    if found == Kinds::ALL && looks_like(&["properties", "additionalProperties"]) {
        found = Kinds { object: true, ..Kinds::default() };
    } else if found == Kinds::ALL && looks_like(&["items", "prefixItems"]) {
        found = Kinds { array: true, ..Kinds::default() };
    }
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        found.null = true;
    }
    found
}

/// Returns the schema of a property of an object.
fn property<'a>(
    root: &'a Value,
    schema: &'a Value,
    name: &str,
    steps: &mut u32,
) -> Option<&'a Value> {
    let schema: &Map<String, Value> = resolve(root, schema, steps)?.as_object()?;
    let own = schema.get("properties").and_then(|properties| properties.get(name));
    own.or_else(|| {
        let parts = ["allOf", "anyOf", "oneOf"];
        let mut parts = parts.iter().filter_map(|key| schema.get(*key)?.as_array()).flatten();
        parts.find_map(|part| property(root, part, name, steps))
    })
    .or_else(|| schema.get("additionalProperties").filter(|schema| schema.is_object()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn value(schema: Value, text: &str) -> Value {
        let root = json!({
            "type": "object",
            "properties": {"x": schema},
            "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
        });
        let tools = Tools::new([("f".to_owned(), root)]);
        tools.argument("f", "x").value(text)
    }

    #[test]
    fn text_becomes_what_the_schema_takes() {
        let cases = [
            (json!({"type": "string"}), "230", json!("230")),
            (json!({"type": "string"}), " null ", json!(" null ")),
            (json!({"type": "integer"}), "230", json!(230)),
            (json!({"type": "integer"}), "230.0", json!(230)),
            (json!({"type": "integer"}), "230.5", json!("230.5")),
            (json!({"type": "integer"}), "many", json!("many")),
            (json!({"type": "number"}), "230.0", json!(230.0)),
            (json!({"type": "number"}), "230", json!(230)),
            (json!({"type": "number"}), " 1e3\n", json!(1e3)),
            (json!({"type": "number"}), "NaN", json!("NaN")),
            (json!({"type": "boolean"}), "True", json!(true)),
            (json!({"type": "boolean"}), "false", json!(false)),
            (json!({"type": "boolean"}), "yes", json!("yes")),
            (json!({"type": "null"}), "None", json!(null)),
            (json!({"type": "array"}), "[1, 2]", json!([1, 2])),
            (json!({"type": "array"}), "['a', True]", json!(["a", true])),
            (json!({"type": "array"}), "1, 2", json!("1, 2")),
            (json!({"type": "object"}), "{\"a\": null}", json!({"a": null})),
            (json!({"type": "object"}), "{'a': None}", json!({"a": null})),
            (json!({"type": ["string", "null"]}), "null", json!(null)),
            (json!({"type": ["integer", "string"]}), "5", json!(5)),
            (json!({"type": ["integer", "string"]}), "five", json!("five")),
            (json!({"type": ["string", "number"]}), "007", json!("007")),
            (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "null", json!(null)),
            (json!({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}), "7.0", json!(7)),
            (json!({"$ref": "#/$defs/count"}), "7", json!(7)),
            (json!({"$ref": "#/$defs/none"}), "7", json!(7)),
            (json!({"$ref": "#/$defs/loop"}), "7", json!(7)),
            (json!({"type": "integer", "nullable": true}), "null", json!(null)),
            (json!({"type": "string", "nullable": true}), "null", json!(null)),
            (json!({"allOf": [{"type": "number"}, {"type": "integer"}]}), "4.0", json!(4)),
            (json!({"enum": ["1", "2"]}), "1", json!("1")),
            (json!({"enum": [1, "two"]}), "1", json!(1)),
            (json!({"enum": [1, "two"]}), "two", json!("two")),
            (json!({"const": true}), "true", json!(true)),
            (json!({"items": {"type": "integer"}}), "[3]", json!([3])),
            (json!({"properties": {}}), "{}", json!({})),
            (json!({}), "5", json!(5)),
            (json!({}), "5 apples", json!("5 apples")),
            (json!(true), "true", json!(true)),
            (json!({"type": "tuple"}), "x", json!("x")),
        ];
        for (schema, text, expected) in cases {
            assert_eq!(value(schema.clone(), text), expected, "{schema}: {text}");
        }
    }

    #[test]
    fn a_schema_without_an_end_has_one() {
        let again = json!({"$ref": "#/$defs/wide"});
        let wide = json!({"anyOf": vec![again.clone(); 100], "allOf": vec![again.clone(); 100]});
        let root = json!({"properties": {"x": again}, "$defs": {"wide": wide}});
        let tools = Tools::new([("f".to_owned(), root)]);
        assert_eq!(tools.argument("f", "x").value("5"), json!(5));
        assert!(!tools.argument("f", "x").is_string());
    }

    #[test]
    fn arguments_and_tools_that_nobody_described_are_kept() {
        let tools = Tools::new([("f".to_owned(), json!({"type": "object"}))]);
        assert_eq!(tools.argument("f", "y").value("x"), json!("x"));
        assert_eq!(tools.argument("g", "y").value("[1]"), json!([1]));
        assert!(!tools.argument("g", "y").is_string());
        let tools =
            Tools::new([("f".to_owned(), json!({"additionalProperties": {"type": "string"}}))]);
        assert!(tools.argument("f", "y").is_string());
    }
}
