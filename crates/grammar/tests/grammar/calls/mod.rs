//! Calls of tools: what a grammar forces is what the family writes, and what its parser reads.

#[path = "../../../dialect/tests/turns/mod.rs"]
mod turns;

use std::sync::Arc;

use forebay_dialect::{
    ArgumentStyle, CallGrammar, Choice, Dialect, Evidence, Instead, Marks, Parser, Parts, Place,
    Reading, Start, Tools,
};
use forebay_engine::Constraint;
use forebay_grammar::{
    CallArguments, CallForm, CallText, Form, GrammarConfig, GrammarError, Grammars, Source,
};
use forebay_text::Tokenizer;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use turns::{Answer, FAMILIES, Family};

use crate::support::{Bench, EOS, allowed, may};

fn dialect(family: &Family) -> Dialect {
    let evidence = Evidence { template: family.turn, has_token: &|_| false };
    Dialect::new(&Choice::Auto, &Choice::Auto, evidence).expect("a dialect")
}

/// The form of answers that call these tools.
fn form(
    family: &Family,
    tools: &[(String, Value)],
    instead: Instead,
    parallel: bool,
    marks: &Marks,
) -> CallForm {
    let names: Vec<&str> = tools.iter().map(|(name, _)| name.as_str()).collect();
    let grammar = dialect(family).call_grammar(&names, instead, parallel, marks, None);
    let CallGrammar { lark, arguments, style } = grammar.expect("a grammar");
    let arguments = arguments.into_iter().zip(tools).enumerate();
    CallForm {
        lark: lark.into(),
        style,
        marks: Arc::new(marks.clone()),
        arguments: arguments
            .map(|(index, (rule, (_, schema)))| CallArguments {
                rule,
                schema: schema.to_string().into(),
                path: format!("tools[{index}]").into(),
                text: None,
            })
            .collect(),
        content: None,
    }
}

fn calls(form: CallForm) -> Form {
    Form::Calls(Arc::new(form))
}

fn read(family: &Family, tools: &[(String, Value)], text: &str) -> (Answer, u32) {
    let dialect = dialect(family);
    let tools = Arc::new(Tools::new(tools.to_vec()));
    // Reasoning is over, or there is none.
    let prompt = if family.prompt.contains("<think>") { "</think>" } else { family.prompt };
    let start = Start::of(dialect, prompt, false);
    let mut parser =
        Parser::new(Reading { dialect, tools, start, bound: true, ..Reading::default() });
    let mut parts = Parts::default();
    parser.push(text, &mut parts);
    parser.finish(true, &mut parts);
    (Answer::read(&parts), parser.complete_calls())
}

fn weather(city: &str) -> (String, Value) {
    ("get_weather".to_owned(), json!({"text": city, "count": 3}))
}

fn two_tools() -> Vec<(String, Value)> {
    let schema = json!({
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
        "required": ["text", "count"],
        "additionalProperties": false,
    });
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    vec![("get_weather".to_owned(), schema), ("ping".to_owned(), nothing)]
}

/// The calls as the family's template writes them, without what comes before.
fn written(family: &Family, calls: Vec<(String, Value)>) -> String {
    let text = Answer { calls, ..Answer::default() }.written(family);
    let text = text.trim_start().trim_start_matches("</think>").trim_start();
    // The name of a call is not for the model to make up.
    text.replace(", \"id\": \"abcdefghi\"", "")
}

#[test]
fn what_is_forced_is_what_the_template_writes() {
    let bench = Bench::new(GrammarConfig::default());
    let (tools, marks) = (two_tools(), Marks::default());
    for family in FAMILIES {
        let name = family.name;
        let fits = |some: &[(String, Value)], instead, parallel, text: &str| {
            let form = form(family, some, instead, parallel, &marks);
            bench.fits(bench.form(calls(form)), text)
        };
        let ping = ("ping".to_owned(), json!({}));
        for calls in [vec![weather("Zürich <b>")], vec![weather("a\n\"b\""), ping.clone()]] {
            let text = written(family, calls);
            assert!(fits(&tools, Instead::Nothing, true, &text), "{name}: {text}");
            assert!(fits(&tools, Instead::Text, true, &text), "{name}: {text}");
        }
        let two = written(family, vec![weather("a"), ping.clone()]);
        assert!(!fits(&tools, Instead::Nothing, false, &two), "{name}: only one call");
        assert!(!fits(&tools, Instead::Text, false, &two), "{name}: only one call");
        let other = written(family, vec![weather("a")]);
        assert!(!fits(&tools[1..], Instead::Nothing, true, &other), "{name}: only that tool");
        assert!(!fits(&tools[1..], Instead::Text, true, &other), "{name}: only that tool");
        let text = written(family, vec![ping]);
        assert!(fits(&tools[1..], Instead::Nothing, false, &text), "{name}: {text}");
        assert!(!fits(&tools, Instead::Nothing, true, "Hello"), "{name}: no text");
        let wrong = json!({"text": "a", "count": "b"});
        let wrong = written(family, vec![("get_weather".to_owned(), wrong)]);
        assert!(!fits(&tools, Instead::Nothing, true, &wrong), "{name}: the schema is kept");
        assert!(!fits(&tools, Instead::Text, true, &wrong), "{name}: the schema is kept");
        if name != "openai" {
            assert!(fits(&tools, Instead::Text, true, "Hello, <b>."), "{name}: any text");
            assert!(fits(&tools, Instead::Text, true, ""), "{name}: no text");
        }
        let said =
            Answer { content: "I look.".into(), calls: vec![weather("b")], ..Answer::default() };
        let said = family.can(said);
        if !said.content.is_empty() && name != "openai" {
            let text = said.written(family);
            let text =
                text.trim_start_matches("</think>").trim_start().trim_start_matches("</think>");
            let text = text.replace(", \"id\": \"abcdefghi\"", "");
            assert!(fits(&tools, Instead::Text, true, &text), "{name}: {text}");
        }
    }
}

/// Whether a value is valid, by the keywords of [`schema`].
fn is_valid(root: &Value, schema: &Value, value: &Value) -> bool {
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
        // The only one.
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

/// Schemas of values, all of whose strings are short: a walk at random hardly ends a long one.
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

fn object(fields: std::collections::BTreeMap<String, (Value, bool)>) -> Value {
    let required: Vec<&String> =
        fields.iter().filter(|(_, (_, required))| *required).map(|(name, _)| name).collect();
    let properties: Map<String, Value> =
        fields.iter().map(|(name, (schema, _))| (name.clone(), schema.clone())).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// Schemas of arguments.
fn arguments() -> impl Strategy<Value = Value> {
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

/// The tokenizer of the tests, whose special tokens are a family's marks.
fn marked(family: &Family) -> (Arc<Tokenizer>, Marks) {
    const PLACES: [&str; 8] = [
        "<repo_name>",
        "<reponame>",
        "<file_sep>",
        "<filename>",
        "<gh_stars>",
        "<issue_start>",
        "<issue_comment>",
        "<issue_closed>",
    ];
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../text/tests/data/tiny-llama-tokenizer.json");
    let mut json = std::fs::read_to_string(file).expect("a file");
    let marks = family.marks.iter().filter(|mark| !mark.contains("think") && mark.len() > 3);
    let marks: Vec<&str> = marks.copied().take(PLACES.len()).collect();
    for (place, mark) in PLACES.iter().zip(&marks) {
        let mark = Value::from(*mark).to_string();
        json = json.replace(&format!("\"{place}\""), &mark);
    }
    let tokenizer = Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer");
    let id = |mark: &&str| ((*mark).to_owned(), tokenizer.token_to_id(mark).expect("a token"));
    let marks = Marks::new(marks.iter().map(id));
    (Arc::new(tokenizer), marks)
}

/// Walks through the masks by `seed` from what was `said`; `None`: there was no end.
fn walk(
    tokenizer: &Tokenizer,
    constraint: &mut dyn Constraint,
    mut said: Vec<i32>,
    seed: u64,
    ends: bool,
) -> Option<String> {
    let mut state = seed;
    for _ in 0..600 {
        let mut ids = allowed(constraint);
        assert!(!ids.is_empty());
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Where it may end or go on, it does either.
        if ids.contains(&EOS) && (ends || ids.len() == 1 || state >> 62 != 0) {
            return Some(tokenizer.decode(&said, false).expect("text"));
        }
        ids.retain(|&id| id != EOS);
        let id = ids[(state >> 33) as usize % ids.len()];
        constraint.accept(id).expect("it was allowed");
        said.push(id);
    }
    None
}

/// Whether there may be a number in it that is JSON and no double, such as `2E937`.
fn is_out_of_range(text: &str) -> bool {
    let mut rest = text.split(['e', 'E']).skip(1).map(|rest| rest.trim_start_matches(['+', '-']));
    rest.any(|rest| rest.bytes().take_while(u8::is_ascii_digit).count() > 2)
}

/// A bench for each family, with its marks as special tokens or without.
struct Walks {
    benches: Vec<(Bench, Marks)>,
}

impl Walks {
    fn new(special: bool) -> Self {
        let bench = |family: &Family| {
            let (tokenizer, marks) = marked(family);
            match special {
                true => (Bench::of(tokenizer, GrammarConfig::default()), marks),
                false => (Bench::new(GrammarConfig::default()), Marks::default()),
            }
        };
        Self { benches: FAMILIES.iter().map(bench).collect() }
    }

    /// Draws an answer of each family, and has it read.
    fn check(
        &self,
        tools: &[(String, Value)],
        chosen: usize,
        (instead, parallel): (Instead, bool),
        seed: u64,
    ) -> Result<usize, TestCaseError> {
        let mut ended = 0;
        for (family, (bench, marks)) in FAMILIES.iter().zip(&self.benches) {
            let name = family.name;
            if instead == Instead::Text && name == "openai" {
                continue;
            }
            // Harmony's messages are made of special tokens.
            if marks == &Marks::default() && name == "openai" && parallel {
                continue;
            }
            let some = &tools[..chosen.min(tools.len())];
            let form = form(family, some, instead, parallel, marks);
            let lark = form.lark.clone();
            let source: Source = calls(form).into();
            let mut constraint = bench.rules(crate::support::wanted(Some(source)));
            let mut said = Vec::new();
            if instead == Instead::Text {
                // A walk at random does not come upon the mark of a call.
                let open = written(family, vec![("\u{0}".to_owned(), json!({}))]);
                let open = open.split('\u{0}').next().unwrap_or_default();
                let family_can = family.can(Answer {
                    content: "I look.\n".into(),
                    calls: vec![weather("a")],
                    ..Answer::default()
                });
                let open = format!("{}{open}", family_can.content);
                said = bench.tokenizer.encode(&open, false).expect("tokens");
                for &id in &said {
                    prop_assert!(may(&mut *constraint, id), "{name}: {open:?} {lark}");
                    constraint.accept(id).expect("it was allowed");
                }
            }
            let text = walk(&bench.tokenizer, &mut *constraint, said, seed, !parallel);
            let Some(text) = text.filter(|text| !is_out_of_range(text)) else { continue };
            ended += 1;
            let (answer, complete) = read(family, tools, &text);
            prop_assert_eq!(answer.calls.len(), complete as usize, "{}: {}", name, text);
            prop_assert!(complete >= 1 && (parallel || complete == 1), "{name}: {text}");
            let content = if instead == Instead::Text
                && family
                    .can(Answer {
                        content: "x".into(),
                        calls: vec![weather("a")],
                        ..Answer::default()
                    })
                    .content
                    == "x"
            {
                "I look."
            } else {
                ""
            };
            prop_assert_eq!(answer.content.trim(), content, "{}: {}", name, text);
            for (tool, value) in &answer.calls {
                let known = some.iter().find(|(name, _)| name == tool);
                let (_, schema) =
                    known.ok_or_else(|| TestCaseError::fail(format!("{name}: {tool}")))?;
                prop_assert!(is_valid(schema, schema, value), "{name}: {text}\n{value}\n{schema}");
            }
        }
        Ok(ended)
    }
}

fn walks(special: bool) {
    let walks = Walks::new(special);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 40,
        failure_persistence: None,
        max_shrink_iters: 60,
        ..ProptestConfig::default()
    });
    let ended = std::cell::Cell::new(0);
    let strategy = (
        prop::collection::vec(arguments(), 3),
        1..4_usize,
        prop::sample::select(vec![Instead::Nothing, Instead::Text]),
        any::<bool>(),
        any::<u64>(),
    );
    runner
        .run(&strategy, |(schemas, chosen, instead, parallel, seed)| {
            let names = ["get_weather", "write.file-2", "ping"];
            let tools: Vec<_> = names.map(str::to_owned).into_iter().zip(schemas).collect();
            ended.set(ended.get() + walks.check(&tools, chosen, (instead, parallel), seed)?);
            Ok(())
        })
        .expect("valid calls");
    // Most walks come to an end.
    assert!(ended.get() > 40 * FAMILIES.len() / 2, "{}", ended.get());
}

#[test]
fn whatever_the_masks_allow_is_read_as_calls_that_are_valid() {
    walks(false);
}

#[test]
fn marks_that_are_special_tokens_are_read_too() {
    walks(true);
}

#[test]
fn text_that_would_be_read_as_another_value_is_none() {
    let bench = Bench::new(GrammarConfig::default());
    let family = FAMILIES.iter().find(|family| family.name == "qwen3_coder").expect("a family");
    let number = json!({"type": "integer", "maximum": 5});
    let text = json!({"type": "string", "maxLength": 8});
    let either = json!({"anyOf": [number, text]});
    let free = json!({"type": ["integer", "string", "boolean"], "maxLength": 8});
    let list = json!({"anyOf": [{"type": "array", "items": {"type": "boolean"}}, text]});
    let nullable = json!({"type": ["string", "null"], "maxLength": 8});
    let listed = json!({"anyOf": [{"enum": ["77"]}, number]});
    for (schema, value, fitting) in [
        (&either, "77", false),
        (&either, " 77\n", false),
        // What begins as a number with bounds has to be one.
        (&either, "7 apples", false),
        (&either, "5", true),
        (&either, "apples", true),
        (&free, "7 apples", true),
        (&free, "77", true),
        (&free, "true", true),
        (&list, "[1]", false),
        (&list, "(1,)", false),
        (&list, "[true]", true),
        (&list, "a [1]", true),
        (&nullable, "null", true),
        (&nullable, "77", true),
        (&listed, "77", true),
        (&listed, "78", false),
        (&text, "</parameter>", false),
        (&text, "</para", true),
    ] {
        let arguments = json!({"type": "object", "properties": {"x": schema}, "required": ["x"]});
        let tools = vec![("f".to_owned(), arguments.clone())];
        let form = form(family, &tools, Instead::Nothing, false, &Marks::default());
        let said = format!(
            "<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        let fits = bench.fits(bench.form(calls(form)), &said);
        assert_eq!(fits, fitting, "{value:?}: {schema}");
        if fits {
            let (answer, _) = read(family, &tools, &said);
            assert!(is_valid(&arguments, &arguments, &answer.calls[0].1), "{value:?}: {schema}");
        }
    }
}

fn refused(family: &str, schema: Value) -> String {
    let bench = Bench::new(GrammarConfig::default());
    let family = FAMILIES.iter().find(|known| known.name == family).expect("a family");
    let tools = [("a".to_owned(), json!({})), ("f".to_owned(), schema)];
    let form = form(family, &tools, Instead::Nothing, true, &Marks::default());
    match bench.refused(calls(form)) {
        GrammarError::Invalid { path, .. } => path,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_no_rule_can_say_is_named_with_its_path() {
    let property = |schema: Value| json!({"type": "object", "properties": {"x": schema}});
    for (family, schema, path) in [
        ("hermes", property(json!({"uniqueItems": true})), ".properties.x.uniqueItems"),
        ("hermes", json!({"type": "array"}), ".type"),
        ("hermes", json!({"x-guidance": {}}), ".x-guidance"),
        (
            "hermes",
            property(json!({"type": "string", "format": "nonsense"})),
            ".properties.x.format",
        ),
        (
            "qwen3_coder",
            property(json!({"type": "string", "format": "nonsense"})),
            ".properties.x.format",
        ),
        ("qwen3_coder", property(json!({"not": {}})), ".properties.x.not"),
        ("qwen3_coder", json!({"minProperties": 2}), ".minProperties"),
        ("qwen3_coder", json!({"properties": {"a>b": {}}}), ".properties.a>b"),
        ("pythonic", json!({"properties": {"a-b": {}}}), ".properties.a-b"),
        (
            "pythonic",
            property(json!({"type": "array", "uniqueItems": true})),
            ".properties.x.uniqueItems",
        ),
        ("gemma4", property(json!({"$ref": "#/$defs/none"})), ".properties.x.$ref"),
        (
            "gemma4",
            property(json!({"oneOf": [{"type": "integer"}, {"type": "number"}]})),
            ".properties.x.oneOf",
        ),
    ] {
        assert_eq!(
            refused(family, schema.clone()),
            format!("tools[1]{path}"),
            "{family}: {schema}"
        );
    }
}

#[test]
fn content_in_place_of_calls_has_a_form_of_its_own() {
    let bench = Bench::new(GrammarConfig::default());
    let family = FAMILIES.iter().find(|family| family.name == "hermes").expect("a family");
    let mut form = form(family, &two_tools(), Instead::Content, true, &Marks::default());
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    form.content = Some(("response_format".into(), Form::JsonSchema(schema.to_string().into())));
    let fits = |text: &str| bench.fits(bench.form(calls(form.clone())), text);
    assert!(fits("{\"a\": 5}"));
    assert!(fits(&written(family, vec![weather("b")])));
    assert!(fits(&format!("\n\n{}", written(family, vec![weather("b")]))));
    assert!(!fits("Hello") && !fits("{\"a\": \"5\"}"));
    for (content, text) in [
        (Form::Regex("[0-9]{2}".into()), "42"),
        (Form::Choice(["yes".to_owned()].into()), "yes"),
        (Form::Lark("start: \"a\" b\nb: \"b\"".into()), "ab"),
        (Form::Ebnf("root ::= \"a\" b\nb ::= \"b\"".into()), "ab"),
        (
            Form::StructuralTag(
                json!({"format": {"type": "const_string", "value": "x"}}).to_string().into(),
            ),
            "x",
        ),
        (Form::JsonObject, "{\"b\": [1]}"),
    ] {
        let form = CallForm { content: Some(("response_format".into(), content)), ..form.clone() };
        assert!(bench.fits(bench.form(calls(form.clone())), text), "{text}");
        assert!(!bench.fits(bench.form(calls(form)), "nothing"), "{text}");
    }
    form.content = Some((
        "guided_json".into(),
        Form::JsonSchema(json!({"uniqueItems": true}).to_string().into()),
    ));
    let error = bench.refused(calls(form));
    assert!(
        matches!(&error, GrammarError::Invalid { path, .. } if path == "guided_json.uniqueItems"),
        "{error:?}"
    );
}

#[test]
fn reasoning_whose_marks_are_no_tokens_is_a_part_of_the_grammar() {
    let bench = Bench::new(GrammarConfig::default());
    let family = FAMILIES.iter().find(|family| family.name == "hermes").expect("a family");
    let call = written(family, vec![("ping".to_owned(), json!({}))]);
    for (place, instead, fitting, others) in [
        (
            Place::Either,
            Instead::Nothing,
            vec!["", "<think>\nA <tool_call> b\n</think>\n\n"],
            vec!["a</think>", "<think>a"],
        ),
        (
            Place::Reasoning,
            Instead::Nothing,
            vec!["a <tool_call> b\n</think>\n\n", "</think>"],
            vec!["", "a"],
        ),
        (Place::Answer, Instead::Nothing, vec![""], vec!["<think>a</think>"]),
        (
            Place::Either,
            Instead::Text,
            vec!["Hm. ", "<think>\na</think>I look: "],
            vec!["<think>a"],
        ),
    ] {
        let dialect = dialect(family);
        let marks = Marks::default();
        let grammar =
            dialect.call_grammar(&["ping"], instead, true, &marks, Some(place)).expect("a grammar");
        let tools = [("ping".to_owned(), json!({"additionalProperties": false}))];
        let form =
            CallForm { lark: grammar.lark.into(), ..form(family, &tools, instead, true, &marks) };
        let fits =
            |text: &str| bench.fits(bench.form(calls(form.clone())), &format!("{text}{call}"));
        for text in fitting {
            assert!(fits(text), "{place:?}: {text}");
        }
        for text in others {
            assert!(!fits(text), "{place:?}: {text}");
        }
    }
}

/// `Grammars` is what a server has.
/// A tool that takes a text of this form.
fn taking_text(family: &Family, text: Form, marks: &Marks) -> CallForm {
    let schema = json!({"type": "object", "properties": {"input": {"type": "string"}}});
    let tools = [("edit".to_owned(), schema)];
    let mut form = form(family, &tools, Instead::Text, false, marks);
    let path = "tools[0].format".into();
    form.arguments[0].text = Some(CallText { name: "input".into(), form: text, path });
    form
}

#[test]
fn a_text_has_its_form_in_every_notation_that_can_keep_it() {
    const PATCH: &str = "start: \"*** Begin\" LF line+ \"*** \\\"End\\\"\"\n\
        line: (\"+\" | \"-\") /(.*)/ LF -> line\n\
        %import common.LF\n";
    let bench = Bench::new(GrammarConfig::default());
    let marks = Marks::default();
    let mut kept = 0;
    for family in FAMILIES {
        let name = family.name;
        let written =
            |text: &str| written(family, vec![("edit".to_owned(), json!({"input": text}))]);
        let lark = taking_text(family, Form::Lark(PATCH.into()), &marks);
        if matches!(lark.style, ArgumentStyle::Python | ArgumentStyle::Quoted(_)) {
            let refused = bench.refused(calls(lark));
            assert!(
                matches!(&refused, GrammarError::Invalid { path, .. } if path == "tools[0].format")
            );
            continue;
        }
        kept += 1;
        let fits = |form: &CallForm, text: &str| bench.fits(bench.form(calls(form.clone())), text);
        for right in ["*** Begin\n+a \"b\"\\\n*** \"End\"", "*** Begin\n-é\n+\n*** \"End\""] {
            let text = written(right);
            assert!(fits(&lark, &text), "{name}: {text}");
        }
        for wrong in ["*** Begin\n*** \"End\"", "*** Begin\n a\n*** \"End\"", "x", ""] {
            let text = written(wrong);
            assert!(!fits(&lark, &text), "{name}: {text}");
        }
        let regex = taking_text(family, Form::Regex("[a-z\\n\"]+".into()), &marks);
        assert!(fits(&regex, &written("ab\n\"c")), "{name}");
        assert!(!fits(&regex, &written("ab1")), "{name}");
    }
    assert!(kept >= 6, "{kept}");
}

#[test]
fn equal_calls_are_compiled_once() {
    let bench = Bench::new(GrammarConfig::default());
    let family = &FAMILIES[0];
    let make = || calls(form(family, &two_tools(), Instead::Text, true, &Marks::default()));
    bench.form(make());
    bench.form(make());
    let grammars: &Grammars = &bench.grammars;
    assert_eq!((grammars.stats().compiled, grammars.stats().hits), (1, 1));
}
