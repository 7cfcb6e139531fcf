//! Tests of forced calls of tools that are not strict, and of errors about strict tools.

use forebay_dialect::{Instead, Marks};
use forebay_grammar::{CallForm, GrammarConfig, GrammarError};
use serde_json::{Value, json};

use super::turns::{FAMILIES, Family};
use super::{calls, form};
use crate::support::{Bench, wanted};

/// Returns the schema of a tool with one argument `x`.
fn tool(argument: &Value) -> Value {
    json!({"type": "object", "properties": {"x": argument}, "required": ["x"]})
}

/// Returns the call form that allows only the second of two tools.
fn call(family: &Family, argument: &Value, strict: bool) -> CallForm {
    let tools = [("a".to_owned(), json!({"type": "object"})), ("b".to_owned(), tool(argument))];
    let mut form = form(family, &tools, Instead::Nothing, true, &Marks::default());
    for tool in &mut form.arguments {
        tool.strict = strict;
    }
    form
}

/// Returns a schema of nested objects.
fn nested(depth: usize) -> Value {
    (0..depth).fold(json!({"type": "string"}), |inner, _| tool(&inner))
}

/// Returns arguments that cannot be enforced, each with the keyword at fault and a part of the
/// error.
fn unkept() -> Vec<(Value, &'static str, &'static str)> {
    let text = |key: &str, value: &str| json!({"type": "string", key: value});
    vec![
        (json!({"not": {}}), "not", "not supported"),
        (
            json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}),
            "uniqueItems",
            "not supported",
        ),
        (
            json!({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}}),
            "propertyNames",
            "not supported",
        ),
        (text("format", "path"), "format", "the format"),
        (text("format", "binary"), "format", "the format"),
        (text("format", "password"), "format", "the format"),
        (text("format", "uri-reference"), "format", "the format"),
        (text("pattern", "^(?=.*[A-Z]).+$"), "pattern", "look-around"),
        (text("pattern", "(a)\\1"), "pattern", "backreference"),
        (text("pattern", "a["), "pattern", "unclosed"),
        (
            json!({"type": "object", "dependentRequired": {"a": ["b"]}}),
            "dependentRequired",
            "not supported",
        ),
    ]
}

#[test]
fn what_is_not_enforced_of_a_loose_tool_is_named_and_the_call_is_made() {
    let bench = Bench::new(GrammarConfig::default());
    for family in FAMILIES {
        for (argument, key, _) in unkept() {
            let form = calls(call(family, &argument, false));
            let constraints = bench.constraints(wanted(Some(form.into())));
            let constraints =
                constraints.unwrap_or_else(|e| panic!("{} {argument}: {e:?}", family.name));
            let expected = format!("tools[1].properties.x.{key}");
            assert_eq!(constraints.left_out[..], [expected], "{} {argument}", family.name);
        }
    }
}

#[test]
fn a_strict_tool_is_refused_with_the_place_and_the_reason() {
    let bench = Bench::new(GrammarConfig::default());
    for family in FAMILIES {
        for (argument, key, why) in unkept() {
            let error = bench.refused(calls(call(family, &argument, true)));
            let GrammarError::Invalid { path, reason } = error else { panic!("{error:?}") };
            let name = family.name;
            assert_eq!(path, format!("tools[1].properties.x.{key}"), "{name} {argument}: {reason}");
            let own = reason.contains("not supported in the model's own notation");
            assert!(reason.contains(why) || own, "{name} {argument}: {reason}");
        }
    }
}

#[test]
fn what_can_be_enforced_is_enforced_of_a_loose_tool_too() {
    let bench = Bench::new(GrammarConfig::default());
    let all = json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX});
    let unsigned = json!({"type": "integer", "minimum": 0, "maximum": u64::MAX});
    for family in FAMILIES {
        for argument in [&all, &unsigned, &nested(15)] {
            let form = calls(call(family, argument, false));
            let constraints = bench.constraints(wanted(Some(form.into())));
            let constraints =
                constraints.unwrap_or_else(|e| panic!("{} {argument}: {e:?}", family.name));
            assert!(constraints.left_out.is_empty(), "{} {argument}", family.name);
            let strict = calls(call(family, argument, true));
            assert!(bench.constraints(wanted(Some(strict.into()))).is_ok(), "{}", family.name);
        }
    }
    let hermes = FAMILIES.iter().find(|family| family.name == "hermes").expect("hermes");
    let fits = |argument: &Value, x: &str| {
        let text = format!(
            "<tool_call>\n{{\"name\": \"b\", \"arguments\": {{\"x\": {x}}}}}\n</tool_call>"
        );
        bench.fits(bench.form(calls(call(hermes, argument, false))), &text)
    };
    for x in ["0", "-5", "1234567890123456789", "-1234567890123456789"] {
        assert!(fits(&all, x), "{x}");
    }
    assert!(!fits(&all, "99999999999999999999") && !fits(&unsigned, "-1") && !fits(&all, "0.5"));
    let array =
        json!({"type": "array", "items": {"type": "integer", "minimum": 3}, "uniqueItems": true});
    assert!(fits(&array, "[3,3]") && !fits(&array, "[2]"), "the rest of the schema is enforced");
}

#[test]
fn arguments_without_a_finite_value_are_refused_of_any_tool() {
    let bench = Bench::new(GrammarConfig::default());
    for family in FAMILIES {
        for strict in [true, false] {
            let mut form = call(family, &json!({"$ref": "#"}), strict);
            form.arguments[1].schema = tool(&json!({"$ref": "#"})).to_string().into();
            let error = bench.refused(calls(form));
            let GrammarError::Invalid { path, .. } = error else { panic!("{error:?}") };
            assert_eq!(path, "tools[1].properties.x", "{}", family.name);
        }
        let mut form = call(family, &json!(true), true);
        form.arguments[1].schema = json!({"type": "object", "properties": {"x": tool(&json!({"$ref": "#/properties/x"})), "y": {"type": "integer"}}}).to_string().into();
        assert!(bench.constraints(wanted(Some(calls(form).into()))).is_ok(), "{}", family.name);
    }
}
