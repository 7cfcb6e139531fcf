//! Grammars of tool calls in the form of a dialect, with arguments that follow their schemas.

use forebay_dialect::{ArgumentStyle, CONTENT, text_without};
use serde_json::{Value, json};

use crate::arguments::Arguments;
use crate::ebnf;
use crate::error::GrammarError;
use crate::faults;
use crate::lark;
use crate::one_text::{self, Place};
use crate::schema;
use crate::source::{CallForm, CallText, Form, Whitespace};
use crate::tag::{self, below};
use crate::work::Work;

/// The path that the errors of a schema start with, and the parsed schema.
pub(crate) type Named = (String, Value);

/// The grammar of a form of calls.
pub(crate) struct Calls {
    /// The complete grammar in Lark.
    pub(crate) lark: String,
    /// The schemas of the arguments, for errors.
    pub(crate) schemas: Vec<Named>,
    /// The paths of keywords that were ignored, in tools that are not strict.
    pub(crate) left_out: Vec<String>,
}

/// Writes the grammar for a form of calls.
pub(crate) fn to_lark(
    form: &CallForm,
    whitespace: &Whitespace,
    lenient: bool,
    work: &mut Work,
) -> Result<Calls, GrammarError> {
    let mut left_out = Vec::new();
    let mut lark = form.lark.to_string();
    let mut add = |lines: &str| {
        lark.push_str(lines);
        lark.push('\n');
    };
    let mut schemas = Vec::new();
    for (number, tool) in form.arguments.iter().enumerate() {
        if let Some(text) = &tool.text {
            let rules = text_rules(form, &tool.rule, text, number, work);
            add(&rules.map_err(|error| below(&text.path, error))?);
            continue;
        }
        let placed = |error| below(&tool.path, error);
        let mut schema = read(&tool.schema, work).map_err(placed)?;
        if !tool.strict {
            let loosened = faults::loosened(schema, work).map_err(placed)?;
            schema = loosened.0;
            left_out.extend(loosened.1.into_iter().map(|path| format!("{}{path}", tool.path)));
        }
        let rules = match &form.style {
            ArgumentStyle::Json => {
                let with = schema::with_options(schema.clone(), whitespace, lenient);
                format!("{}: %json {with}", tool.rule)
            }
            style => loop {
                let mut writer =
                    Arguments::new(&schema, &form.marks, whitespace, lenient, work, number);
                let body = writer.all(style);
                let rules = writer.rules();
                match body {
                    Ok(body) => break format!("{}: {body}\n{rules}", tool.rule),
                    // The notation cannot express a keyword: it is removed, and the schema is tried
                    // again.
                    Err(GrammarError::Invalid { path, .. })
                        if !tool.strict && faults::leave_out(&mut schema, &path) =>
                    {
                        work.copy(&schema).map_err(placed)?;
                        left_out.push(format!("{}{path}", tool.path));
                    }
                    Err(error) => return Err(placed(error)),
                }
            },
        };
        add(&rules);
        schemas.push((tool.path.to_string(), schema));
    }
    if let Some((param, content)) = &form.content {
        let (body, schema) =
            rule(content, whitespace, lenient, work).map_err(|error| below(param, error))?;
        add(&format!("{CONTENT}: {body}"));
        schemas.extend(schema.map(|schema| (param.to_string(), schema)));
    }
    Ok(Calls { lark, schemas, left_out })
}

/// Reads the schema of a tool's arguments, which must be an object.
fn read(text: &str, work: &mut Work) -> Result<Value, GrammarError> {
    let mut schema = schema::read(text, work)?;
    let Value::Object(fields) = &mut schema else {
        return Err(GrammarError::invalid("the arguments are an object"));
    };
    match fields.get("type") {
        None => {
            fields.insert("type".to_owned(), json!("object"));
        }
        Some(Value::String(name)) if name == "object" => {}
        Some(Value::Array(names)) if names.contains(&json!("object")) => {
            fields.insert("type".to_owned(), json!("object"));
        }
        Some(_) => return Err(GrammarError::at(".type", "the arguments are an object")),
    }
    Ok(schema)
}

/// Writes the rules of arguments that are a single text.
fn text_rules(
    form: &CallForm,
    rule: &str,
    text: &CallText,
    number: usize,
    work: &mut Work,
) -> Result<String, GrammarError> {
    let (name, prefix) = (format!("TEXT{number}"), format!("T{number}"));
    match &form.style {
        ArgumentStyle::Json => {
            let (body, rules) = one_text::terminal(&text.form, Place::Json, &prefix, work)?;
            let key = lark::escaped(&Value::from(&*text.name).to_string());
            Ok(format!("{rule}: /\\{{ ?{key}: ?\"/ {name} \"\\\"}}\"\n{name}: {body}\n{rules}"))
        }
        ArgumentStyle::Tagged(tags) => {
            let (body, rules) = one_text::terminal(&text.form, Place::Tags, &prefix, work)?;
            let literal = |text: &str| form.marks.literal(text);
            let body = format!("({body}) & {}", text_without(tags.stops.iter().copied()));
            let (definition, until) = form.marks.until(&name, &body, tags.after);
            let before = [tags.before_name, &text.name, &tags.before_text].map(literal).join(" ");
            Ok(format!("{rule}: {before} {until}\n{definition}{rules}"))
        }
        ArgumentStyle::Python | ArgumentStyle::Quoted(_) => {
            let why = "the model's format of tool calls can't constrain a tool's text";
            Err(GrammarError::invalid(why))
        }
    }
}

/// Returns the right side of a rule for a form, and the form's schema, if it has one.
fn rule(
    form: &Form,
    whitespace: &Whitespace,
    lenient: bool,
    work: &mut Work,
) -> Result<(String, Option<Value>), GrammarError> {
    let json = |schema: Value| {
        let with = schema::with_options(schema.clone(), whitespace, lenient);
        Ok((format!("%json {with}"), Some(schema)))
    };
    let nested = |lark: String| Ok((format!("%lark {{\n{lark}\n}}"), None));
    match form {
        Form::JsonObject => json(json!({ "type": "object" })),
        Form::JsonSchema(text) => json(schema::read(text, work)?),
        Form::Regex(pattern) => Ok((tag::regex(pattern)?, None)),
        Form::Choice(choices) => {
            let choices: Vec<String> = choices.iter().map(|choice| lark::literal(choice)).collect();
            Ok((choices.join(" | "), None))
        }
        Form::Lark(text) => {
            lark::no_options(text)?;
            nested(text.to_string())
        }
        Form::Ebnf(text) => nested(ebnf::to_lark(text)?),
        Form::StructuralTag(text) => nested(tag::to_lark(text, whitespace, lenient, work)?),
        Form::Calls(_) => Err(GrammarError::invalid("calls are no content")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use forebay_dialect::{Choice, Dialect, Evidence, Instead, Marks};
    use serde_json::Value;

    use super::*;
    use crate::source::CallArguments;

    /// Families whose arguments are not JSON, and `hermes`, whose arguments are JSON.
    const FAMILIES: [&str; 10] = [
        "qwen3_coder",
        "glm45",
        "glm47",
        "minimax_m2",
        "deepseek_v32",
        "deepseek_v4",
        "pythonic",
        "gemma4",
        "functiongemma",
        "hermes",
    ];
    /// How many times a schema refers to itself, or to the next schema. A walk that did not
    /// remember visited schemas would make up to `AGAIN` to the power of 16 visits.
    const AGAIN: usize = 12;

    /// Writes the grammar for a call of a tool with one argument `x`. Also returns the units of
    /// work.
    fn write(family: &str, schema: &Value) -> (Result<String, GrammarError>, usize) {
        let evidence = Evidence { template: "", has_token: &|_| false };
        let family = Choice::Named(family.to_owned());
        let dialect = Dialect::new(&family, &Choice::None, evidence).unwrap();
        let marks = Marks::default();
        let grammar = dialect.call_grammar(&["f"], Instead::Nothing, true, &marks, None).unwrap();
        let form = CallForm {
            lark: grammar.lark.into(),
            style: grammar.style,
            marks: Arc::new(marks),
            arguments: vec![CallArguments {
                rule: grammar.arguments[0].clone(),
                schema: schema.to_string().into(),
                path: "tools[0]".into(),
                strict: true,
                text: None,
            }],
            content: None,
        };
        let mut work = Work::default();
        let lark = to_lark(&form, &Whitespace::default(), false, &mut work);
        (lark.map(|calls| calls.lark), work.spent())
    }

    fn tool(argument: &Value, definitions: &Value) -> Value {
        json!({
            "type": "object",
            "properties": {"x": argument},
            "required": ["x"],
            "$defs": definitions,
            "additionalProperties": false,
        })
    }

    /// The work budget bounds every walk, which ends in an error when the budget is used up. Twenty
    /// million units take less than a second.
    #[test]
    fn schemas_that_refer_to_themselves_are_walked_in_bounded_steps() {
        for family in FAMILIES {
            for key in ["anyOf", "oneOf", "allOf"] {
                for types in [json!(["number", "null"]), json!(["string", "null"])] {
                    let again = vec![json!({"$ref": "#/$defs/a"}); AGAIN];
                    let itself = json!({"a": {"type": types, key: again}});
                    let schema = tool(&json!({"$ref": "#/$defs/a"}), &itself);
                    let (written, spent) = write(family, &schema);
                    assert!(spent <= 20 << 20, "{family} {key} {types}: {spent}");
                    // The schema may be rejected, but then only a little text was written.
                    let bytes = written.map_or(0, |lark| lark.len());
                    assert!(bytes < 100_000, "{family} {key} {types}: {bytes} bytes");
                }
            }
        }
    }

    #[test]
    fn schemas_that_double_by_references_are_walked_in_bounded_steps() {
        for family in FAMILIES {
            for last in [json!({"type": "number"}), json!({"type": "string"})] {
                let mut definitions = serde_json::Map::new();
                for level in 0..15 {
                    let next = json!({"$ref": format!("#/$defs/d{}", level + 1)});
                    let next = json!({"anyOf": vec![next; AGAIN]});
                    definitions.insert(format!("d{level}"), next);
                }
                definitions.insert("d15".to_owned(), last.clone());
                let schema = tool(&json!({"$ref": "#/$defs/d0"}), &Value::Object(definitions));
                let (written, spent) = write(family, &schema);
                assert!(spent <= 20 << 20, "{family} {last}: {spent}");
                let bytes = written.map_or(0, |lark| lark.len());
                assert!(bytes < 100_000, "{family} {last}: {bytes} bytes");
            }
        }
    }

    /// The size of the grammar grows linearly with the schema, not quadratically.
    #[test]
    fn a_large_schema_is_written_out_about_once() {
        let many = 2000;
        let definitions: serde_json::Map<String, Value> = (0..many)
            .map(|at| (format!("d{at}"), json!({"type": "array", "items": {"type": "integer"}})))
            .collect();
        let own: serde_json::Map<String, Value> = (0..many)
            .map(|at| (format!("p{at}"), json!({"$ref": format!("#/$defs/d{at}")})))
            .collect();
        let optional = json!({
            "type": "object",
            "properties": own,
            "$defs": definitions,
            "additionalProperties": false,
        });
        let size = optional.to_string().len();
        for family in FAMILIES {
            let (written, spent) = write(family, &optional);
            let bytes = written.unwrap_or_else(|error| panic!("{family}: {error}")).len();
            assert!(bytes < 10 * size && spent < 20 * size, "{family}: {bytes}, {spent} of {size}");
        }
        let cases = [
            // The alternatives are all false, so none excludes another.
            json!({"oneOf": vec![json!(false); 30_000]}),
            // Every text has to be checked against every pattern.
            json!({
                "enum": (0..4000).map(|at| format!("{at}{}", "x".repeat(20))).collect::<Vec<_>>(),
                "allOf": vec![json!({"pattern": "y".repeat(9000)}); 40],
            }),
        ];
        for argument in cases {
            for family in ["qwen3_coder", "deepseek_v32", "pythonic", "gemma4"] {
                let (_, spent) = write(family, &tool(&argument, &json!({})));
                assert!(spent <= 20 << 20, "{family}: {spent}");
            }
        }
    }

    #[test]
    fn tags_that_many_triggers_begin_are_written_in_bounded_steps() {
        let many = 6000;
        let triggers = vec!["<"; many];
        let tag = json!({"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"});
        let text = json!({"structures": vec![tag; many], "triggers": triggers}).to_string();
        let mut work = Work::default();
        let error = tag::to_lark(&text, &Whitespace::default(), false, &mut work).unwrap_err();
        assert!(error.to_string().contains("refer to each other"), "{error}");
    }
}
