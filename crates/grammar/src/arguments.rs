//! Rules for arguments of calls that are not written as JSON: in tags, in Python's notation, or in
//! Gemma's.
//!
//! For each schema of a value, a rule in the family's notation is written. A schema that cannot be
//! expressed in the notation is an error with its path. If a schema allows more than a rule can
//! express, such as unnamed properties, the rule allows less.

use std::collections::HashMap;

use forebay_dialect::{ArgumentStyle, ArgumentTags, Marks, text_without};
use serde_json::{Map, Value, json};

use crate::error::GrammarError;
use crate::keywords;
use crate::kinds::{
    INTEGER, Kind, Kinds, NUMBER, NUMERIC, defined, resolve, scalars, without_strings,
};
use crate::lark::literal;
use crate::schema::with_options;
use crate::source::Whitespace;
use crate::strings::texts;
use crate::work::Work;

/// The deepest nesting of values.
const DEPTH: usize = 32;
type Written = Result<String, GrammarError>;

/// Writes the rules of one tool's arguments.
pub(crate) struct Arguments<'a> {
    root: &'a Value,
    marks: &'a Marks,
    whitespace: &'a Whitespace,
    lenient: bool,
    work: &'a mut Work,
    /// The index of the tool. The names of the tool's rules start with this index.
    tool: usize,
    lines: Vec<String>,
    /// The name of the rule for each referenced schema, by the reference's target.
    references: HashMap<String, String>,
    any: Option<String>,
    notation: Notation,
}

/// The notation in which values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notation {
    Python,
    /// Strings are enclosed in this text.
    Quoted(&'static str),
}

/// A property of an object.
struct Field<'v> {
    name: &'v str,
    schema: &'v Value,
    path: String,
    required: bool,
}

impl<'a> Arguments<'a> {
    /// Creates the writer of the argument rules of the tool with index `tool`, whose schema is
    /// `root`.
    pub(crate) fn new(
        root: &'a Value,
        marks: &'a Marks,
        whitespace: &'a Whitespace,
        lenient: bool,
        work: &'a mut Work,
        tool: usize,
    ) -> Self {
        Self {
            root,
            marks,
            whitespace,
            lenient,
            work,
            tool,
            lines: Vec::new(),
            references: HashMap::new(),
            any: None,
            notation: Notation::Python,
        }
    }

    /// Returns the rules that the result of [`Arguments::all`] refers to.
    pub(crate) fn rules(&self) -> String {
        self.lines.join("\n")
    }

    /// Returns the right side of the rule for all arguments.
    pub(crate) fn all(&mut self, style: &ArgumentStyle) -> Written {
        let root = self.root;
        let Value::Object(schema) = root else {
            return Err(GrammarError::invalid("the arguments are an object"));
        };
        match style {
            ArgumentStyle::Json => Err(GrammarError::invalid("JSON needs no notation")),
            ArgumentStyle::Python => {
                self.notation = Notation::Python;
                self.fields(schema, "", ", ", &|name| format!("{name}="), 0)
            }
            ArgumentStyle::Quoted(quote) => {
                self.notation = Notation::Quoted(quote);
                self.fields(schema, "", ",", &|name| format!("{name}:"), 0)
            }
            ArgumentStyle::Tagged(tags) => self.tagged(schema, tags),
        }
    }

    fn name(&self) -> String {
        format!("x{}n{}", self.tool, self.lines.len())
    }

    /// Adds a rule and returns its name.
    fn rule(&mut self, body: &str) -> Written {
        let name = self.name();
        self.define(&name, body)?;
        Ok(name)
    }

    fn define(&mut self, name: &str, body: &str) -> Result<(), GrammarError> {
        self.work.write(name.len() + body.len())?;
        self.lines.push(format!("{name}: {body}"));
        Ok(())
    }

    /// Returns a rule for text that `terminal` describes, up to `close`.
    fn until(&mut self, terminal: &str, close: &str) -> Written {
        let name = format!("X{}N{}", self.tool, self.lines.len());
        self.work.write(terminal.len())?;
        let (definition, until) = self.marks.until(&name, terminal, close);
        self.lines.push(definition);
        Ok(until)
    }

    fn json(&mut self, schema: &Value) -> Written {
        let defined = defined(self.root, schema, self.work)?;
        let with = with_options(defined, self.whitespace, self.lenient);
        self.rule(&format!("%json {with}"))
    }

    /// Rejects keywords that the notation cannot express.
    fn check(&self, schema: &Map<String, Value>, path: &str) -> Result<(), GrammarError> {
        match schema.keys().find(|key| !keywords::known(key)) {
            Some(key) if !self.lenient => {
                let why = "the keyword is not supported in the model's own notation of calls";
                Err(GrammarError::at(format!("{path}.{key}"), why))
            }
            _ => Ok(()),
        }
    }

    /// Returns the properties of an object, required ones first. If the schema describes only
    /// unnamed properties, returns their schema.
    fn split<'v>(
        &self,
        schema: &'v Map<String, Value>,
        path: &str,
    ) -> Result<(Vec<Field<'v>>, Option<&'v Value>), GrammarError> {
        const ANY: &Value = &Value::Bool(true);
        self.check(schema, path)?;
        for key in ["anyOf", "oneOf", "allOf", "$ref", "enum", "const"] {
            if schema.contains_key(key) && !self.lenient {
                let why = "not supported beside properties in the model's own notation of calls";
                return Err(GrammarError::at(format!("{path}.{key}"), why));
            }
        }
        let others = match schema.get("additionalProperties") {
            Some(Value::Bool(false)) => None,
            None => Some(ANY),
            Some(schema) => Some(schema),
        };
        let declared = schema.get("properties").and_then(Value::as_object);
        let named = schema.get("required").and_then(Value::as_array);
        let named = |name: &str| named.is_some_and(|all| all.iter().any(|other| other == name));
        let own = declared.into_iter().flatten().map(|(name, schema)| {
            let path = format!("{path}.properties.{name}");
            Field { name, schema, path, required: named(name) }
        });
        let mut fields: Vec<Field<'v>> = own.collect();
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        for name in required.filter_map(Value::as_str) {
            if !fields.iter().any(|field| field.name == name) {
                let path = format!("{path}.required");
                let Some(schema) = others else {
                    return Err(GrammarError::at(
                        path,
                        format!(
                            "{name} is required, but other properties than those listed are not allowed"
                        ),
                    ));
                };
                fields.push(Field { name, schema, path, required: true });
            }
        }
        // Optional fields whose schema no value satisfies are left out.
        fields.retain(|field| field.required || field.schema != &Value::Bool(false));
        fields.sort_by_key(|field| !field.required);
        let others = others.filter(|_| fields.is_empty());
        Ok((fields, others))
    }

    /// Writes properties separated by `comma`. `key` returns the text before a value, given the
    /// property's name.
    fn fields(
        &mut self,
        schema: &Map<String, Value>,
        path: &str,
        comma: &str,
        key: &dyn Fn(&str) -> String,
        depth: usize,
    ) -> Written {
        let (fields, others) = self.split(schema, path)?;
        let comma = literal(comma);
        if let Some(others) = others {
            let value = self.value(others, &format!("{path}.additionalProperties"), depth + 1)?;
            // Keys that may be unquoted may also be quoted.
            let around = key("\0");
            let (before, after) = around.split_once('\0').unwrap_or_default();
            let one = self.rule(&format!(
                "{} /[A-Za-z_][A-Za-z0-9_]{{0,40}}/ {} {value}",
                self.marks.literal(before),
                self.marks.literal(after)
            ))?;
            return Ok(format!("({one} ({comma} {one})*)?"));
        }
        let (mut required, mut optional) = (Vec::new(), Vec::new());
        for field in &fields {
            self.nameable(field)?;
            let value = self.value(field.schema, &field.path, depth + 1)?;
            let before = self.marks.literal(&key(field.name));
            let rule = self.rule(&format!("{before} {value}"))?;
            if field.required { required.push(rule) } else { optional.push(rule) }
        }
        if required.is_empty() {
            let some = self.some(&optional, &comma)?;
            return Ok(if some.is_empty() { some } else { format!("({some})?") });
        }
        let required = required.join(&format!(" {comma} "));
        Ok(format!("{required}{}", after(&optional, &comma)))
    }

    /// Writes one or more of `optional`, in their order. The list is halved recursively, and the
    /// rules of each half are shared: a list of all that may follow each field would have quadratic
    /// length.
    fn some(&mut self, optional: &[String], comma: &str) -> Written {
        let (left, right) = match optional {
            [] => return Ok(String::new()),
            [one] => return Ok(one.clone()),
            more => more.split_at(more.len() / 2),
        };
        let more = self.rule(&after(right, comma))?;
        let (left, right) = (self.some(left, comma)?, self.some(right, comma)?);
        self.rule(&format!("{left} {more} | {right}"))
    }

    /// Rejects a name that would be ambiguous without quotes.
    fn nameable(&self, field: &Field<'_>) -> Result<(), GrammarError> {
        let fits = |c: char| match self.notation {
            Notation::Python => c.is_alphanumeric() || c == '_',
            Notation::Quoted(_) => c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '$'),
        };
        if !field.name.is_empty() && field.name.chars().all(fits) {
            return Ok(());
        }
        let why = "the model's format of tool calls can't express this name";
        Err(GrammarError::at(field.path.clone(), why))
    }

    /// Writes a value, for the right side of a rule.
    fn value(&mut self, schema: &Value, path: &str, depth: usize) -> Written {
        if depth > DEPTH {
            return Err(GrammarError::at(path, format!("deeper than {DEPTH} levels")));
        }
        let map = match schema {
            Value::Bool(true) => return self.anything(),
            Value::Object(map) => map,
            _ => return Err(GrammarError::at(path, "nothing is valid here")),
        };
        self.work.visit()?;
        self.check(map, path)?;
        if let Some(target) = map.get("$ref").and_then(Value::as_str) {
            return self.reference(target, path, depth);
        }
        if let Some(values) = map.get("enum").and_then(Value::as_array) {
            let kinds = Kinds::declared(map);
            let values = values.iter().filter(|value| kinds.has(Kind::of(value)));
            let values: Vec<String> = values.map(|value| self.constant(value)).collect();
            return match values.is_empty() {
                true => Err(GrammarError::at(format!("{path}.enum"), "no value is valid")),
                false => Ok(format!("({})", values.join(" | "))),
            };
        }
        if let Some(value) = map.get("const") {
            return Ok(self.constant(value));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(parts) = map.get(key).and_then(Value::as_array) {
                return self.alternatives(parts, key, path, depth);
            }
        }
        let only_string = Kinds::declared(map).is_only(Kind::String);
        if let Some(Value::Array(parts)) = map.get("allOf").filter(|_| !only_string) {
            return match &parts[..] {
                [part] if Kinds::declared(map) == Kinds::ALL => {
                    self.value(part, &format!("{path}.allOf[0]"), depth + 1)
                }
                _ => {
                    let why = "not supported in the model's own notation of calls";
                    Err(GrammarError::at(format!("{path}.allOf"), why))
                }
            };
        }
        let kinds = Kinds::meant(map);
        if kinds == Kinds::ALL {
            return self.anything();
        }
        let mut ways = Vec::new();
        for kind in kinds.iter() {
            ways.push(match kind {
                Kind::Null | Kind::Boolean => self.word(kind).to_owned(),
                Kind::Integer | Kind::Number => self.number(map, kind)?,
                Kind::String => self.string(schema, path)?,
                Kind::Array => self.list(map, path, depth)?,
                Kind::Object => self.object(map, path, depth)?,
            });
        }
        Ok(format!("({})", ways.join(" | ")))
    }

    fn alternatives(&mut self, parts: &[Value], key: &str, path: &str, depth: usize) -> Written {
        if key == "oneOf" && !self.lenient {
            let mut before = Kinds::default();
            for part in parts {
                let kinds = Kinds::reached(self.root, part, self.work)?;
                if before.meets(kinds) {
                    let why = "only alternatives that exclude each other are supported: use anyOf";
                    return Err(GrammarError::at(format!("{path}.oneOf"), why));
                }
                before = before.or(kinds);
            }
        }
        let mut ways = Vec::new();
        for (at, part) in parts.iter().enumerate().filter(|(_, part)| **part != Value::Bool(false))
        {
            ways.push(self.value(part, &format!("{path}.{key}[{at}]"), depth + 1)?);
        }
        Ok(format!("({})", ways.join(" | ")))
    }

    fn reference(&mut self, target: &str, path: &str, depth: usize) -> Written {
        if let Some(name) = self.references.get(target) {
            return Ok(name.clone());
        }
        let Some(schema) = resolve(self.root, target) else {
            return Err(GrammarError::at(format!("{path}.$ref"), "there is no such schema"));
        };
        let name = format!("x{}r{}", self.tool, self.references.len());
        self.references.insert(target.to_owned(), name.clone());
        let path = target.trim_start_matches('#').replace('/', ".");
        let body = self.value(schema, &path, depth + 1)?;
        self.define(&name, &body)?;
        Ok(name)
    }

    /// Returns the spelling of JSON's `null`, `true` and `false` in this notation.
    fn word(&self, kind: Kind) -> &'static str {
        match (self.notation, kind) {
            (Notation::Python, Kind::Null) => "\"None\"",
            (Notation::Python, _) => "(\"True\" | \"False\")",
            (Notation::Quoted(_), Kind::Null) => "\"null\"",
            (Notation::Quoted(_), _) => "(\"true\" | \"false\")",
        }
    }

    fn constant(&self, value: &Value) -> String {
        let literals = |values: Vec<String>, open: &str, close: &str, comma: &str| {
            let comma = format!(" {} ", literal(comma));
            format!("{} {} {}", literal(open), values.join(&comma), literal(close))
        };
        match (self.notation, value) {
            (Notation::Python, Value::Null) => "\"None\"".to_owned(),
            (Notation::Python, Value::Bool(true)) => "\"True\"".to_owned(),
            (Notation::Python, Value::Bool(false)) => "\"False\"".to_owned(),
            (Notation::Quoted(quote), Value::String(text)) => {
                self.marks.literal(&format!("{quote}{text}{quote}"))
            }
            (notation, Value::Array(values)) => {
                let comma = if notation == Notation::Python { ", " } else { "," };
                let values = values.iter().map(|value| self.constant(value)).collect();
                literals(values, "[", "]", comma)
            }
            (notation, Value::Object(fields)) => {
                let python = notation == Notation::Python;
                let key = |name: &str| {
                    if python { format!("{}: ", Value::from(name)) } else { format!("{name}:") }
                };
                let fields = fields.iter().map(|(name, value)| {
                    format!("{} {}", self.marks.literal(&key(name)), self.constant(value))
                });
                literals(fields.collect(), "{", "}", if python { ", " } else { "," })
            }
            (_, scalar) => literal(&scalar.to_string()),
        }
    }

    fn number(&mut self, schema: &Map<String, Value>, kind: Kind) -> Written {
        let name = if kind == Kind::Integer { "integer" } else { "number" };
        let bounds = schema.iter().filter(|(key, _)| NUMERIC.contains(&key.as_str()));
        let mut bounded: Map<String, Value> =
            bounds.map(|(key, value)| (key.clone(), value.clone())).collect();
        if bounded.is_empty() {
            return Ok(if kind == Kind::Integer { INTEGER } else { NUMBER }.to_owned());
        }
        bounded.insert("type".to_owned(), json!(name));
        self.json(&Value::Object(bounded))
    }

    fn string(&mut self, schema: &Value, path: &str) -> Written {
        match self.notation {
            Notation::Python => {
                // Strings in JSON notation are valid in Python too.
                self.work.copy(schema)?;
                let mut own = schema.clone();
                if let Value::Object(map) = &mut own {
                    map.insert("type".to_owned(), json!("string"));
                    let kept = ["type", "pattern", "minLength", "maxLength", "format", "allOf"];
                    map.retain(|key, _| kept.contains(&key.as_str()));
                }
                self.json(&own)
            }
            Notation::Quoted(quote) => {
                let texts = texts(self.root, schema, 0, self.work);
                let texts = texts.map_err(|error| crate::tag::below(path, error))?;
                let ways: Vec<String> =
                    texts.into_iter().map(|text| format!("({})", text.terminal)).collect();
                if ways.is_empty() {
                    return Err(GrammarError::at(path, "no string is valid here"));
                }
                let terminal = format!("({}) & {}", ways.join(" | "), text_without([quote]));
                let open = self.marks.literal(quote);
                let until = self.until(&terminal, quote)?;
                Ok(format!("{open} {until}"))
            }
        }
    }

    fn list(&mut self, schema: &Map<String, Value>, path: &str, depth: usize) -> Written {
        let number = |name: &str| -> Result<Option<u64>, GrammarError> {
            let Some(value) = schema.get(name) else { return Ok(None) };
            let number = value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..65536.0).contains(x));
            let why = "expected a number of elements";
            number
                .map(|x| Some(x as u64))
                .ok_or_else(|| GrammarError::at(format!("{path}.{name}"), why))
        };
        let (least, most) = (number("minItems")?.unwrap_or(0), number("maxItems")?);
        if most.is_some_and(|most| least > most) {
            return Err(GrammarError::at(format!("{path}.minItems"), "it is more than maxItems"));
        }
        let items = schema.get("items").unwrap_or(&Value::Bool(true));
        if most == Some(0) || items == &Value::Bool(false) && least == 0 {
            return Ok("\"[]\"".to_owned());
        }
        let item = self.value(items, &format!("{path}.items"), depth + 1)?;
        let item = self.rule(&item)?;
        let comma = if self.notation == Notation::Python { "\", \"" } else { "\",\"" };
        let more = match (least.saturating_sub(1), most.map(|most| most - 1)) {
            (_, Some(0)) => String::new(),
            (least, Some(most)) => format!(" ({comma} {item}){{{least},{most}}}"),
            (0, None) => format!(" ({comma} {item})*"),
            (least, None) => format!(" ({comma} {item}){{{least},}}"),
        };
        Ok(match least {
            0 => format!("\"[\" ({item}{more})? \"]\""),
            _ => format!("\"[\" {item}{more} \"]\""),
        })
    }

    fn object(&mut self, schema: &Map<String, Value>, path: &str, depth: usize) -> Written {
        let fields = match self.notation {
            Notation::Python => {
                let key = |name: &str| match name {
                    "\0" => "\"\0\": ".to_owned(),
                    name => format!("{}: ", Value::from(name)),
                };
                self.fields(schema, path, ", ", &key, depth)?
            }
            Notation::Quoted(_) => {
                self.fields(schema, path, ",", &|name| format!("{name}:"), depth)?
            }
        };
        Ok(format!("\"{{\" {fields} \"}}\""))
    }

    /// Writes a value without a schema.
    fn anything(&mut self) -> Written {
        if let Some(name) = &self.any {
            return Ok(name.clone());
        }
        let name = format!("x{}any", self.tool);
        self.any = Some(name.clone());
        let string = self.string(&json!({"type": "string"}), "")?;
        let (comma, key) = match self.notation {
            Notation::Python => ("\", \"", "\"\\\"\" /[A-Za-z_][A-Za-z0-9_]{0,40}/ \"\\\": \""),
            Notation::Quoted(_) => ("\",\"", "/[A-Za-z_][A-Za-z0-9_]{0,40}/ \":\""),
        };
        let (null, truth) = (self.word(Kind::Null), self.word(Kind::Boolean));
        let field = self.rule(&format!("{key} {name}"))?;
        self.lines.push(format!(
            "{name}: {null} | {truth} | {NUMBER} | {string} | \"[\" ({name} ({comma} {name})*)? \"]\" | \"{{\" ({field} ({comma} {field})*)? \"}}\""
        ));
        Ok(name)
    }

    /// Writes arguments in tags, in the order of the schema, so that the grammar does not have to
    /// track which arguments were written.
    fn tagged(&mut self, schema: &Map<String, Value>, tags: &ArgumentTags) -> Written {
        let (fields, others) = self.split(schema, "")?;
        let mut parts = Vec::new();
        for field in &fields {
            let fits = |c: char| !c.is_control() && !matches!(c, '<' | '>' | '"' | '\u{ff5c}');
            let name = field.name;
            if name.is_empty() || name.trim() != name || !name.chars().all(fits) {
                let why = "the model's format of tool calls can't express this name";
                return Err(GrammarError::at(field.path.clone(), why));
            }
            let name = self.marks.literal(name);
            let argument = self
                .argument(tags, &name, field.schema)
                .map_err(|error| crate::tag::below(&field.path, error))?;
            parts.push(if field.required { argument } else { format!("{argument}?") });
        }
        if let Some(others) = others {
            let name = "/[A-Za-z_][A-Za-z0-9_]{0,40}/";
            let argument = self.argument(tags, name, others);
            let argument =
                argument.map_err(|error| crate::tag::below(".additionalProperties", error))?;
            parts.push(format!("{argument}*"));
        }
        Ok(parts.join(" "))
    }

    /// Writes the rule of an argument in tags. `name` matches the argument's name, on a rule's
    /// right side.
    fn argument(&mut self, tags: &ArgumentTags, name: &str, schema: &Value) -> Written {
        let texts = texts(self.root, schema, 0, self.work)?;
        let mut other = without_strings(self.root, schema, 0, self.work)?;
        let open = self.marks.literal(tags.before_name);
        let mut ways = Vec::new();
        if !texts.is_empty() {
            let mut said: Vec<String> = Vec::new();
            let mut looks = Vec::new();
            if let Some(all) = other.take_if(|_| !tags.declares) {
                // Text that looks like another value is read as that value, unless the schema lists
                // the text. Among several terminals the longest match wins. So short values are in
                // the same terminal, and text that begins like another value does not match the
                // terminal.
                let (values, rest) = scalars(&all);
                said.extend(values);
                looks.extend(Kinds::reached(self.root, &all, self.work)?.written(false));
                if let Some(rest) = &rest {
                    looks.extend(Kinds::reached(self.root, rest, self.work)?.written(true));
                }
                other = rest;
            }
            let looks: String = looks.iter().map(|looks| format!(" & ~{looks}")).collect();
            said.extend(texts.iter().map(|text| match text.listed {
                true => format!("({})", text.terminal),
                false => format!("(({}){looks})", text.terminal),
            }));
            let terminal = text_without(tags.stops.iter().copied());
            let terminal = format!("({}) & {terminal}", said.join(" | "));
            let before = self.marks.literal(&tags.before_text);
            let until = self.until(&terminal, tags.after)?;
            ways.push(format!("{open} {name} {before} {until}"));
        }
        if let Some(other) = &other {
            let before = self.marks.literal(&tags.before_json);
            let after = self.marks.literal(tags.after);
            let value = match other.as_object().filter(|map| map.len() == 1) {
                Some(map) if map.get("type") == Some(&json!("integer")) => INTEGER.to_owned(),
                Some(map) if map.get("type") == Some(&json!("number")) => NUMBER.to_owned(),
                _ => self.json(other)?,
            };
            ways.push(format!("{open} {name} {before} {value} {after}"));
        }
        if ways.is_empty() {
            return Err(GrammarError::invalid("nothing is valid here"));
        }
        self.rule(&ways.join(" | "))
    }
}

/// Writes the rules of `optional` fields that follow another field.
fn after(optional: &[String], comma: &str) -> String {
    optional.iter().map(|rule| format!(" ({comma} {rule})?")).collect()
}
