//! Generates random schemas of arguments, and checks which values they accept.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// True if a value is valid by the keywords that [`schema`] generates.
pub(super) fn is_valid(root: &Value, schema: &Value, value: &Value) -> bool {
    let Value::Object(map) = schema else { return schema == &Value::Bool(true) };
    let kind = |name: &str| match (name, value) {
        ("null", Value::Null) | ("boolean", Value::Bool(_)) => true,
        ("integer", Value::Number(number)) => number.as_f64().is_some_and(|x| x.fract() == 0.0),
        ("number", Value::Number(_)) | ("string", Value::String(_)) => true,
        ("array", Value::Array(_)) | ("object", Value::Object(_)) => true,
        _ => false,
    };
    map.iter().all(|(key, says)| match (key.as_str(), value) {
        ("$ref", _) => {
            let target = says.as_str().and_then(|target| target.strip_prefix('#'));
            target.and_then(|target| root.pointer(target)).is_some_and(|s| is_valid(root, s, value))
        }
        ("type", _) => match says {
            Value::Array(names) => names.iter().filter_map(Value::as_str).any(kind),
            name => name.as_str().is_some_and(kind),
        },
        ("enum", _) => says.as_array().is_some_and(|all| all.contains(value)),
        ("const", _) => says == value,
        ("anyOf", _) => {
            says.as_array().is_some_and(|all| all.iter().any(|s| is_valid(root, s, value)))
        }
        ("minimum", Value::Number(number)) => number.as_f64() >= says.as_f64(),
        ("maximum", Value::Number(number)) => number.as_f64() <= says.as_f64(),
        ("minLength", Value::String(text)) => {
            text.chars().count() as u64 >= says.as_u64().expect("a number")
        }
        ("maxLength", Value::String(text)) => {
            text.chars().count() as u64 <= says.as_u64().expect("a number")
        }
        // The tests use only this pattern.
        ("pattern", Value::String(text)) => {
            assert_eq!(says, "^[a-c]+$");
            !text.is_empty() && text.chars().all(|c| ('a'..='c').contains(&c))
        }
        ("items", Value::Array(all)) => all.iter().all(|item| is_valid(root, says, item)),
        ("minItems", Value::Array(all)) => all.len() as u64 >= says.as_u64().expect("a number"),
        ("maxItems", Value::Array(all)) => all.len() as u64 <= says.as_u64().expect("a number"),
        ("properties", Value::Object(fields)) => fields
            .iter()
            .all(|(name, value)| says.get(name).is_none_or(|schema| is_valid(root, schema, value))),
        ("required", Value::Object(fields)) => says.as_array().is_some_and(|all| {
            all.iter().all(|n| fields.contains_key(n.as_str().expect("a name")))
        }),
        ("additionalProperties", Value::Object(fields)) => fields.iter().all(|(name, value)| {
            map.get("properties").is_some_and(|known| known.get(name).is_some())
                || is_valid(root, says, value)
        }),
        _ => true,
    })
}

/// Generates schemas whose strings are all short, because a random walk rarely ends a long one.
fn schema() -> impl Strategy<Value = Value> {
    let text = json!({"type": "string", "maxLength": 5});
    let leaf = prop::sample::select(vec![
        text.clone(),
        json!({"type": "string", "minLength": 2, "maxLength": 4}),
        json!({"type": "string", "pattern": "^[a-c]+$", "maxLength": 4}),
        json!({"enum": ["red", "light <green>", "\n"]}),
        json!({"enum": ["1", 2, null, "null"]}),
        json!({"const": "a \"b\""}),
        json!({"type": "integer"}),
        json!({"type": "integer", "minimum": -3, "maximum": 40}),
        json!({"type": "number"}),
        json!({"type": "boolean"}),
        json!({"type": "null"}),
        json!({"type": ["string", "null"], "maxLength": 5}),
        json!({"type": ["integer", "string", "boolean"], "maxLength": 4}),
        json!({"anyOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 3}]}),
        json!({"anyOf": [text, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]}),
        json!({"$ref": "#/$defs/point"}),
        json!({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}),
    ]);
    leaf.prop_recursive(2, 12, 3, |inner| {
        let fields = prop::collection::btree_map("[a-z]{1,4}", (inner.clone(), any::<bool>()), 0..3);
        prop_oneof![
            (inner, 0..2_u32, 2..4_u32).prop_map(
                |(items, least, most)| json!({"type": "array", "items": items, "minItems": least, "maxItems": most})
            ),
            fields.prop_map(object),
        ]
    })
}

fn object(fields: BTreeMap<String, (Value, bool)>) -> Value {
    let required: Vec<&String> =
        fields.iter().filter(|(_, (_, required))| *required).map(|(name, _)| name).collect();
    let properties: Map<String, Value> =
        fields.iter().map(|(name, (schema, _))| (name.clone(), schema.clone())).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// Generates schemas of arguments.
pub(super) fn arguments() -> impl Strategy<Value = Value> {
    let fields = prop::collection::btree_map("[a-z][a-z_]{0,6}", (schema(), any::<bool>()), 0..4);
    fields.prop_map(|fields| {
        let mut schema = object(fields);
        schema["$defs"] = json!({"point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}},
            "required": ["x", "next"],
            "additionalProperties": false,
        }});
        schema
    })
}
