//! Structured output: the form of the output, as OpenAI, vLLM and SGLang specify it.

use std::sync::Arc;

use forebay_grammar::{Form, SCHEMA_BYTES, Source, Whitespace};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::error::ApiError;
use crate::limits::bounds::{ANSWERS, GRAMMAR, NAME, PATTERN, SOURCE, WORD, param};
use crate::limits::{Bound, Param, string_bytes};

/// The requested form of the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Structure {
    /// The path of the parameter with the form, for errors.
    pub param: String,
    /// The form.
    pub source: Source,
}

/// A JSON value kept as text, of at most `SCHEMA_BYTES` as a string. Schemas are large, and this
/// crate does not inspect them.
#[derive(Debug, Clone)]
pub(crate) struct Raw(Box<RawValue>);

impl Raw {
    /// The text of the value.
    pub(crate) fn get(&self) -> &str {
        self.0.get()
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        match string_bytes(raw.get()) {
            Some(bytes) if bytes > SCHEMA_BYTES => {
                let reason = format_args!("{bytes} bytes are more than {SCHEMA_BYTES}");
                Err(D::Error::custom(reason))
            }
            _ => Ok(Self(raw)),
        }
    }
}

/// The `response_format` parameter.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub(crate) struct ResponseFormat {
    /// `text`, `json_object`, `json_schema` or `structural_tag`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The schema, if the type is `json_schema`.
    pub json_schema: Option<JsonSchemaFormat>,
    /// A schema in addition to `json_object`, as llama.cpp accepts it.
    #[schema(value_type = Option<Object>)]
    pub(crate) schema: Option<Raw>,
    /// The tree of formats of `structural_tag`.
    #[schema(value_type = Option<Object>)]
    pub(crate) format: Option<Raw>,
    /// The tags with schemas of `structural_tag`, in the older notation.
    #[schema(value_type = Option<Vec<Object>>)]
    pub(crate) structures: Option<Raw>,
    /// The beginnings of tags of `structural_tag`, in the older notation.
    #[schema(value_type = Option<Vec<String>>)]
    pub(crate) triggers: Option<Raw>,
}

/// The `json_schema` of a `response_format`.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub(crate) struct JsonSchemaFormat {
    /// Accepted, without an effect.
    #[expect(dead_code, reason = "its type is checked, and nothing else")]
    pub name: Option<String>,
    /// Accepted, without an effect.
    #[expect(dead_code, reason = "its type is checked, and nothing else")]
    pub description: Option<String>,
    /// The schema.
    #[schema(value_type = Option<Object>)]
    pub(crate) schema: Option<Raw>,
    /// Accepted without effect: a schema is always enforced.
    #[expect(dead_code, reason = "its type is checked, and nothing else")]
    pub strict: Option<bool>,
}

/// vLLM's `structured_outputs` parameter. Only one of its first six fields may be given.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub(crate) struct StructuredOutputs {
    /// A JSON schema, as an object or as text.
    #[schema(value_type = Option<Object>)]
    pub(crate) json: Option<Raw>,
    /// A regular expression that the whole answer matches.
    pub regex: Option<String>,
    /// Texts; the answer is one of them.
    pub choice: Option<Vec<String>>,
    /// A grammar in Lark or GBNF.
    pub grammar: Option<String>,
    /// True for any JSON object.
    pub json_object: Option<bool>,
    /// A structural tag, as an object or as text.
    #[schema(value_type = Option<Object>)]
    pub(crate) structural_tag: Option<Raw>,
    /// A regular expression for white space between JSON tokens.
    pub whitespace_pattern: Option<String>,
    /// True if JSON must not contain white space.
    pub disable_any_whitespace: Option<bool>,
    /// Accepted without effect: there is only one backend.
    #[expect(dead_code, reason = "its type is checked, and nothing else")]
    pub disable_fallback: Option<bool>,
    /// Only false is supported.
    pub disable_additional_properties: Option<bool>,
}

pub(crate) const RESPONSE_FORMAT: &[Param] = &[
    param("type", WORD),
    param("json_schema", Bound::Object(&[JSON_SCHEMA])),
    param("schema", SOURCE),
    param("format", SOURCE),
    param("structures", SOURCE),
    param("triggers", SOURCE),
];

pub(crate) const JSON_SCHEMA: &[Param] = &[
    param("name", NAME),
    param("description", Bound::Text(SCHEMA_BYTES)),
    param("schema", SOURCE),
    param("strict", Bound::Flag),
];

pub(crate) const STRUCTURED_OUTPUTS: &[Param] = &[
    param("json", SOURCE),
    param("regex", PATTERN),
    param("choice", ANSWERS),
    param("grammar", GRAMMAR),
    param("json_object", Bound::Flag),
    param("structural_tag", SOURCE),
    param("whitespace_pattern", WORD),
    param("disable_any_whitespace", Bound::Flag),
    param("disable_fallback", Bound::Flag),
    param("disable_additional_properties", Bound::Flag),
];

/// The parameters for the form of the output in the APIs of OpenAI, vLLM (with its older names) and
/// SGLang.
#[derive(Debug, Default)]
pub(crate) struct Spellings {
    pub(crate) response_format: Option<ResponseFormat>,
    pub(crate) structured_outputs: Option<StructuredOutputs>,
    pub(crate) guided_json: Option<Raw>,
    pub(crate) guided_regex: Option<String>,
    pub(crate) guided_choice: Option<Vec<String>>,
    pub(crate) guided_grammar: Option<String>,
    pub(crate) guided_whitespace_pattern: Option<String>,
    pub(crate) json_schema: Option<Raw>,
    pub(crate) regex: Option<String>,
    pub(crate) ebnf: Option<String>,
    pub(crate) structural_tag: Option<Raw>,
}

/// The form found so far. A second form is an error.
#[derive(Default)]
struct Found(Option<Structure>);

impl Found {
    fn add(&mut self, param: String, form: Option<Form>) -> Result<(), ApiError> {
        let Some(form) = form else { return Ok(()) };
        if form.is_empty() {
            // With an empty form any text would match, which the client can't have intended.
            let reason = format!("`{param}`: must not be empty");
            return Err(ApiError::invalid(param, reason));
        }
        if let Some(first) = &self.0 {
            let reason = format!("`{param}` and `{}` exclude each other", first.param);
            return Err(ApiError::invalid(param, reason));
        }
        let source = Source::from(form);
        let (bytes, limit) = (source.bytes(), source.limit());
        if bytes > limit {
            let reason = format!("`{param}`: {bytes} bytes are more than {limit}");
            return Err(ApiError::invalid(param, reason));
        }
        self.0 = Some(Structure { param, source });
        Ok(())
    }
}

impl Spellings {
    /// Returns the requested form. More than one form is an error. `prefix` is the path of the
    /// object with the parameters, with a trailing dot.
    pub(crate) fn resolve(self, prefix: &str) -> Result<Option<Structure>, ApiError> {
        let named = |name: &str| format!("{prefix}{name}");
        let mut found = Found::default();
        let mut whitespace = Whitespace::default();
        if let Some(format) = self.response_format {
            format.find(&mut found)?;
        }
        if let Some(outputs) = self.structured_outputs {
            whitespace = outputs.find(&mut found)?;
        }
        if let Some(pattern) = self.guided_whitespace_pattern {
            whitespace = Whitespace::Pattern(pattern.into());
        }
        let (json, tag) = (named("guided_json"), named("structural_tag"));
        found.add(json.clone(), schema(self.guided_json, &json)?)?;
        found.add(named("guided_regex"), regex(self.guided_regex))?;
        found.add(named("guided_choice"), choice(self.guided_choice))?;
        found.add(named("guided_grammar"), grammar(self.guided_grammar))?;
        let json = named("json_schema");
        found.add(json.clone(), schema(self.json_schema, &json)?)?;
        found.add(named("regex"), regex(self.regex))?;
        found.add(named("ebnf"), grammar(self.ebnf))?;
        let structural = text(self.structural_tag, &tag)?;
        found.add(tag, structural.map(Form::StructuralTag))?;
        Ok(found.0.map(|mut structure| {
            structure.source.whitespace = whitespace;
            structure
        }))
    }
}

impl ResponseFormat {
    fn find(self, found: &mut Found) -> Result<(), ApiError> {
        const PARAM: &str = "response_format";
        let missing = |field: &str| {
            let param = format!("{PARAM}.{field}");
            let reason = format!("`{param}`: required and missing");
            ApiError::invalid(param, reason)
        };
        match self.kind.as_str() {
            "text" => Ok(()),
            "json_object" => {
                let param = format!("{PARAM}.schema");
                match schema(self.schema, &param)? {
                    Some(form) => found.add(param, Some(form)),
                    None => found.add(PARAM.to_owned(), Some(Form::JsonObject)),
                }
            }
            "json_schema" => {
                let format = self.json_schema.ok_or_else(|| missing("json_schema"))?;
                let param = format!("{PARAM}.json_schema.schema");
                let form = schema(format.schema.or(self.schema), &param)?;
                let form = form.ok_or_else(|| missing("json_schema.schema"))?;
                found.add(param, Some(form))
            }
            "structural_tag" => {
                let parts = [
                    ("format", self.format),
                    ("structures", self.structures),
                    ("triggers", self.triggers),
                ];
                let mut tag = Map::new();
                for (name, raw) in parts {
                    if let Some(raw) = raw {
                        tag.insert(name.to_owned(), value(&raw, &format!("{PARAM}.{name}"))?);
                    }
                }
                let tag = Value::Object(tag).to_string();
                found.add(PARAM.to_owned(), Some(Form::StructuralTag(tag.into())))
            }
            _ => Err(ApiError::unsupported(format!("{PARAM}.type"))),
        }
    }
}

impl StructuredOutputs {
    fn find(self, found: &mut Found) -> Result<Whitespace, ApiError> {
        let named = |name: &str| format!("structured_outputs.{name}");
        if self.disable_additional_properties == Some(true) {
            return Err(ApiError::unsupported(named("disable_additional_properties")));
        }
        let (json, tag) = (named("json"), named("structural_tag"));
        found.add(json.clone(), schema(self.json, &json)?)?;
        found.add(named("regex"), regex(self.regex))?;
        found.add(named("choice"), choice(self.choice))?;
        found.add(named("grammar"), grammar(self.grammar))?;
        let object = self.json_object == Some(true);
        found.add(named("json_object"), object.then_some(Form::JsonObject))?;
        let structural = text(self.structural_tag, &tag)?;
        found.add(tag, structural.map(Form::StructuralTag))?;
        Ok(match (self.disable_any_whitespace, self.whitespace_pattern) {
            (Some(true), _) => Whitespace::None,
            (_, Some(pattern)) => Whitespace::Pattern(pattern.into()),
            (_, None) => Whitespace::default(),
        })
    }
}

fn regex(pattern: Option<String>) -> Option<Form> {
    pattern.map(|pattern| Form::Regex(pattern.into()))
}

fn grammar(text: Option<String>) -> Option<Form> {
    text.map(|text| Source::grammar(&text).form)
}

fn choice(choices: Option<Vec<String>>) -> Option<Form> {
    choices.map(|choices| Form::Choice(choices.into()))
}

fn schema(raw: Option<Raw>, param: &str) -> Result<Option<Form>, ApiError> {
    Ok(text(raw, param)?.map(Form::JsonSchema))
}

/// Returns the JSON text of a value that is either an object or a string that contains JSON.
fn text(raw: Option<Raw>, param: &str) -> Result<Option<Arc<str>>, ApiError> {
    let Some(raw) = raw else { return Ok(None) };
    let json = raw.get();
    if json.starts_with('"') {
        let text: String = serde_json::from_str(json)
            .map_err(|error| ApiError::invalid(param, format!("`{param}`: {error}")))?;
        return Ok(Some(text.into()));
    }
    Ok(Some(json.into()))
}

fn value(raw: &Raw, param: &str) -> Result<Value, ApiError> {
    serde_json::from_str(raw.get())
        .map_err(|error| ApiError::invalid(param, format!("`{param}`: {error}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::trial::{LIMITS, request, with};
    use crate::{
        ChatRequest, CompletionRequest, GenerateRequest, GenerationDefaults, parse_request,
    };

    fn chat(more: Value) -> Result<Option<Structure>, ApiError> {
        let body = with(json!({"messages": [{"role": "user", "content": "hi"}]}), &more);
        let request = request::<ChatRequest>(&body)?;
        Ok(request.validate(&GenerationDefaults::default(), LIMITS)?.generation.structure)
    }

    fn completion(more: Value) -> Result<Option<Structure>, ApiError> {
        let request = request::<CompletionRequest>(&with(json!({"prompt": "once"}), &more))?;
        Ok(request.validate(&GenerationDefaults::default(), LIMITS)?.generation.structure)
    }

    fn generate(params: Value) -> Result<Option<Structure>, ApiError> {
        let body = json!({"text": "once", "sampling_params": params});
        let request = request::<GenerateRequest>(&body)?;
        let valid = request.validate(&GenerationDefaults::default(), LIMITS)?;
        Ok(valid.generations.into_iter().next().unwrap().structure)
    }

    #[test]
    fn every_spelling_means_what_it_says() {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
        let json = Form::JsonSchema(schema.to_string().into());
        let regex = Form::Regex("a+".into());
        let choice = Form::Choice(["x".to_owned(), "y".to_owned()].into());
        let lark = Form::Lark("start: \"a\"".into());
        let ebnf = Form::Ebnf("root ::= \"a\"".into());
        let tag = json!({"format": {"type": "any_text"}});
        let tagged = Form::StructuralTag(tag.to_string().into());
        let format = |format: Value| json!({"response_format": format});
        let outputs = |outputs: Value| json!({"structured_outputs": outputs});
        let cases = [
            (format(json!({"type": "json_object"})), "response_format", Form::JsonObject),
            (
                format(json!({"type": "json_object", "schema": schema})),
                "response_format.schema",
                json.clone(),
            ),
            (
                format(
                    json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}}),
                ),
                "response_format.json_schema.schema",
                json.clone(),
            ),
            (
                format(json!({"type": "structural_tag", "format": {"type": "any_text"}})),
                "response_format",
                tagged.clone(),
            ),
            (outputs(json!({"json": schema})), "structured_outputs.json", json.clone()),
            (outputs(json!({"json": schema.to_string()})), "structured_outputs.json", json.clone()),
            (outputs(json!({"regex": "a+"})), "structured_outputs.regex", regex.clone()),
            (outputs(json!({"choice": ["x", "y"]})), "structured_outputs.choice", choice.clone()),
            (
                outputs(json!({"grammar": "start: \"a\""})),
                "structured_outputs.grammar",
                lark.clone(),
            ),
            (
                outputs(json!({"json_object": true})),
                "structured_outputs.json_object",
                Form::JsonObject,
            ),
            (
                outputs(json!({"structural_tag": tag.to_string()})),
                "structured_outputs.structural_tag",
                tagged.clone(),
            ),
            (json!({"guided_json": schema}), "guided_json", json.clone()),
            (json!({"guided_json": schema.to_string()}), "guided_json", json.clone()),
            (json!({"guided_regex": "a+"}), "guided_regex", regex.clone()),
            (json!({"guided_choice": ["x", "y"]}), "guided_choice", choice),
            (json!({"guided_grammar": "root ::= \"a\""}), "guided_grammar", ebnf.clone()),
            (json!({"regex": "a+"}), "regex", regex.clone()),
            (json!({"ebnf": "root ::= \"a\""}), "ebnf", ebnf.clone()),
            (json!({"json_schema": schema.to_string()}), "json_schema", json.clone()),
            (json!({"structural_tag": tag}), "structural_tag", tagged.clone()),
        ];
        for (body, param, form) in cases {
            let expected = Some(Structure { param: param.to_owned(), source: form.into() });
            assert_eq!(chat(body.clone()), Ok(expected.clone()), "{body}");
            assert_eq!(completion(body.clone()), Ok(expected), "{body}");
        }
        for (params, param, form) in [
            (json!({"regex": "a+"}), "sampling_params.regex", regex),
            (json!({"ebnf": "root ::= \"a\""}), "sampling_params.ebnf", ebnf),
            (
                json!({"json_schema": schema.to_string()}),
                "sampling_params.json_schema",
                json.clone(),
            ),
            (json!({"json_schema": schema}), "sampling_params.json_schema", json),
            (json!({"structural_tag": tag.to_string()}), "sampling_params.structural_tag", tagged),
        ] {
            let expected = Some(Structure { param: param.to_owned(), source: form.into() });
            assert_eq!(generate(params.clone()), Ok(expected.clone()), "{params}");
            assert_eq!(generate(json!([params])), Ok(expected), "{params}");
        }
    }

    #[test]
    fn nothing_asked_for_is_nothing() {
        for body in [
            json!({}),
            json!({"response_format": {"type": "text"}}),
            json!({"response_format": null, "guided_json": null, "structured_outputs": null}),
            json!({"structured_outputs": {"json_object": false, "disable_fallback": true}}),
            json!({"regex": null, "ebnf": null, "structured_outputs": {"grammar": null}}),
        ] {
            assert_eq!(chat(body), Ok(None));
        }
    }

    /// An empty form is an error. It is not ignored, because the client did not request free text.
    #[test]
    fn an_empty_form_is_refused() {
        let in_outputs = |name: &str, value: Value| json!({"structured_outputs": {name: value}});
        let format = |format: Value| json!({"response_format": format});
        for (body, param) in [
            (in_outputs("grammar", json!("")), "structured_outputs.grammar"),
            (in_outputs("regex", json!("")), "structured_outputs.regex"),
            (in_outputs("json", json!("")), "structured_outputs.json"),
            (in_outputs("choice", json!([])), "structured_outputs.choice"),
            (in_outputs("structural_tag", json!("")), "structured_outputs.structural_tag"),
            (json!({"guided_json": ""}), "guided_json"),
            (json!({"guided_regex": ""}), "guided_regex"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_grammar": ""}), "guided_grammar"),
            (json!({"json_schema": ""}), "json_schema"),
            (json!({"regex": ""}), "regex"),
            (json!({"ebnf": ""}), "ebnf"),
            (json!({"structural_tag": ""}), "structural_tag"),
            (
                format(json!({"type": "json_schema", "json_schema": {"schema": ""}})),
                "response_format.json_schema.schema",
            ),
            (format(json!({"type": "json_object", "schema": ""})), "response_format.schema"),
        ] {
            for asked in [chat(body.clone()), completion(body.clone())] {
                let error = asked.expect_err(param).body().error;
                assert_eq!(error.param.as_deref(), Some(param), "{body}");
            }
        }
        for name in ["json_schema", "regex", "ebnf", "structural_tag"] {
            let error = generate(json!({name: ""})).expect_err(name).body().error;
            assert_eq!(error.param, Some(format!("sampling_params.{name}")));
        }
    }

    #[test]
    fn white_space_is_part_of_the_form() {
        for (more, whitespace) in [
            (
                json!({"structured_outputs": {"json_object": true, "disable_any_whitespace": true}}),
                Whitespace::None,
            ),
            (
                json!({"structured_outputs": {"json_object": true, "whitespace_pattern": " ?"}}),
                Whitespace::Pattern(" ?".into()),
            ),
            (
                json!({"guided_json": {}, "guided_whitespace_pattern": "\\n"}),
                Whitespace::Pattern("\\n".into()),
            ),
        ] {
            assert_eq!(chat(more).unwrap().unwrap().source.whitespace, whitespace);
        }
    }

    #[test]
    fn faults_name_the_parameter() {
        let cases = [
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": 3}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
            (json!({"structured_outputs": {"regex": 3}}), "structured_outputs.regex"),
            (
                json!({"structured_outputs": {"json": {}, "disable_additional_properties": true}}),
                "structured_outputs.disable_additional_properties",
            ),
            (
                json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
                "structured_outputs.choice",
            ),
            (
                json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}),
                "guided_regex",
            ),
            (json!({"regex": "a", "ebnf": "root ::= \"a\""}), "ebnf"),
            (json!({"regex": "a".repeat(forebay_grammar::REGEX_BYTES + 1)}), "regex"),
            (
                json!({"guided_json": {"description": "a".repeat(forebay_grammar::SCHEMA_BYTES)}}),
                "guided_json",
            ),
        ];
        for (case, param) in cases {
            let error = chat(case).unwrap_err();
            assert_eq!(
                (error.body().error.param.as_deref(), error.status()),
                (Some(param), 400),
                "{error}"
            );
        }
        let error = generate(json!({"regex": "a", "ebnf": "b"})).unwrap_err();
        assert_eq!(error.body().error.param.as_deref(), Some("sampling_params.ebnf"));
    }

    #[test]
    fn a_schema_is_kept_as_it_was_sent() {
        let body = r#"{"messages": [{"role": "user", "content": "x"}], "guided_json": {"b" : 1.50, "a":[ 1e3 ]}}"#;
        let request = parse_request::<ChatRequest>(body.as_bytes(), |_| Ok(())).unwrap().request;
        let valid = request.validate(&GenerationDefaults::default(), LIMITS).unwrap();
        let form = valid.generation.structure.unwrap().source.form;
        assert_eq!(form, Form::JsonSchema(r#"{"b" : 1.50, "a":[ 1e3 ]}"#.into()));
    }
}
