//! Calls of tools in a dialect's form, with arguments by their schemas.

use forebay_dialect::{ArgumentStyle, CONTENT, text_without};
use serde_json::{Value, json};

use crate::arguments::Arguments;
use crate::ebnf;
use crate::error::GrammarError;
use crate::lark;
use crate::one_text::{self, Place};
use crate::schema;
use crate::source::{CallForm, CallText, Form, Whitespace};
use crate::tag::{self, below};

/// A schema that was read, and the path that errors of it begin with.
pub(crate) type Named = (String, Value);

/// The grammar with everything in it, and the schemas of the arguments, for errors.
pub(crate) fn to_lark(
    form: &CallForm,
    whitespace: &Whitespace,
    lenient: bool,
) -> Result<(String, Vec<Named>), GrammarError> {
    let mut lark = form.lark.to_string();
    let mut add = |lines: &str| {
        lark.push_str(lines);
        lark.push('\n');
    };
    let mut schemas = Vec::new();
    for (number, tool) in form.arguments.iter().enumerate() {
        if let Some(text) = &tool.text {
            let rules = text_rules(form, &tool.rule, text, number);
            add(&rules.map_err(|error| below(&text.path, error))?);
            continue;
        }
        let schema = read(&tool.schema).map_err(|error| below(&tool.path, error))?;
        match &form.style {
            ArgumentStyle::Json => {
                let with = schema::with_options(schema.clone(), whitespace, lenient);
                add(&format!("{}: %json {with}", tool.rule));
            }
            style => {
                let mut writer = Arguments::new(&schema, &form.marks, whitespace, lenient, number);
                let body = writer.all(style).map_err(|error| below(&tool.path, error))?;
                add(&format!("{}: {body}", tool.rule));
                add(&writer.rules());
            }
        }
        schemas.push((tool.path.to_string(), schema));
    }
    if let Some((param, content)) = &form.content {
        let (body, schema) =
            rule(content, whitespace, lenient).map_err(|error| below(param, error))?;
        add(&format!("{CONTENT}: {body}"));
        schemas.extend(schema.map(|schema| (param.to_string(), schema)));
    }
    Ok((lark, schemas))
}

/// Reads the schema of a tool's arguments, which are an object.
fn read(text: &str) -> Result<Value, GrammarError> {
    let mut schema = schema::read(text)?;
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

/// The rules of arguments that are one text.
fn text_rules(
    form: &CallForm,
    rule: &str,
    text: &CallText,
    number: usize,
) -> Result<String, GrammarError> {
    let (name, prefix) = (format!("TEXT{number}"), format!("T{number}"));
    match &form.style {
        ArgumentStyle::Json => {
            let (body, rules) = one_text::terminal(&text.form, Place::Json, &prefix)?;
            let key = lark::escaped(&Value::from(&*text.name).to_string());
            Ok(format!("{rule}: /\\{{ ?{key}: ?\"/ {name} \"\\\"}}\"\n{name}: {body}\n{rules}"))
        }
        ArgumentStyle::Tagged(tags) => {
            let (body, rules) = one_text::terminal(&text.form, Place::Tags, &prefix)?;
            let literal = |text: &str| form.marks.literal(text);
            let body = format!("({body}) & {}", text_without(tags.stops.iter().copied()));
            let (definition, until) = form.marks.until(&name, &body, tags.after);
            let before = [tags.before_name, &text.name, &tags.before_text].map(literal).join(" ");
            Ok(format!("{rule}: {before} {until}\n{definition}{rules}"))
        }
        ArgumentStyle::Python | ArgumentStyle::Quoted(_) => {
            let why = "the model's notation of calls has no way to keep the form of a text";
            Err(GrammarError::invalid(why))
        }
    }
}

/// The right side of a rule for a form, and the form's schema, if it is one.
fn rule(
    form: &Form,
    whitespace: &Whitespace,
    lenient: bool,
) -> Result<(String, Option<Value>), GrammarError> {
    let json = |schema: Value| {
        let with = schema::with_options(schema.clone(), whitespace, lenient);
        Ok((format!("%json {with}"), Some(schema)))
    };
    let nested = |lark: String| Ok((format!("%lark {{\n{lark}\n}}"), None));
    match form {
        Form::JsonObject => json(json!({ "type": "object" })),
        Form::JsonSchema(text) => json(schema::read(text)?),
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
        Form::StructuralTag(text) => nested(tag::to_lark(text, whitespace, lenient)?),
        Form::Calls(_) => Err(GrammarError::invalid("calls are no content")),
    }
}
