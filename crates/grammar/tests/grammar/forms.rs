//! Tests which texts each form accepts, and the errors of invalid forms.

use crate::support::{Bench, EOS, allowed, may, wanted};
use forebay_grammar::{Form, GrammarConfig, GrammarError, SCHEMA_BYTES, Source, Whitespace};
use serde_json::{Value, json};

fn bench() -> Bench {
    Bench::new(GrammarConfig::default())
}

fn schema(schema: Value) -> Form {
    Form::JsonSchema(schema.to_string().into())
}

fn tag(tag: Value) -> Form {
    Form::StructuralTag(tag.to_string().into())
}

#[test]
fn each_form_takes_its_answers_and_no_others() {
    let bench = bench();
    let choices = ["yes".to_owned(), "no \"way\"\n".to_owned()];
    let person = json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let cases: Vec<(Form, &[&str], &[&str])> = vec![
        (Form::JsonObject, &["{}", r#"{"a": [1, null]}"#], &["[]", "1", "{", "{} "]),
        (
            schema(person),
            &[
                r#"{"name":"Ada","age":36}"#,
                r#"{"name": "Ada", "age": 36}"#,
                "{\n  \"name\": \"Ada\",\n  \"age\": 36\n}",
            ],
            &[
                r#"{"name":"Ada"}"#,
                r#"{"age":36,"name":"Ada"}"#,
                r#"{"name":"Ada","age":-1}"#,
                r#"{"name":"Adaaaa","age":1}"#,
                r#"{"name":"Ada","age":1,"x":0}"#,
                r#"{"name":  "Ada","age":1}"#,
                "{\n\n\"name\":\"Ada\",\"age\":1}",
            ],
        ),
        (
            Form::Regex(r"^\d{3}/[a-c]+$".into()),
            &["123/abc"],
            &["12/a", "123/", "123/abcd", "x123/a"],
        ),
        (Form::Regex(r"a\$".into()), &["a$"], &["a"]),
        (Form::Choice(choices.into()), &["yes", "no \"way\"\n"], &["no", "ye", "yesno"]),
        (
            Form::Lark("start: NAME (\",\" NAME)*\nNAME: /[a-z]+/".into()),
            &["ab", "a,b,c"],
            &["", "a,", "A"],
        ),
        (
            Form::Ebnf("root ::= \"<\" [a-z]+ \">\" root?".into()),
            &["<ab>", "<a><b>"],
            &["<>", "<a><", "a"],
        ),
    ];
    for (form, good, bad) in cases {
        for text in good {
            assert!(bench.fits(bench.form(form.clone()), text), "{form:?}: {text}");
        }
        for text in bad {
            assert!(!bench.fits(bench.form(form.clone()), text), "{form:?}: {text}");
        }
    }
}

#[test]
fn structural_tags_leave_text_free_and_hold_what_is_between_tags() {
    let bench = bench();
    let get = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false});
    let older = json!({
        "type": "structural_tag",
        "structures": [{"begin": "<f=get>", "schema": get, "end": "</f>"}, {"begin": "<f=now>", "schema": {"type": "object", "maxProperties": 0}, "end": "</f>"}],
        "triggers": ["<f="],
    });
    let good = [
        "",
        "Hello.",
        "Let me see: <f=get>{\"city\": \"Bern\"}</f>",
        "<f=now>{}</f> and <f=now>{}</f> done",
        "a < b",
    ];
    let bad = ["<f=", "<f=other>{}</f>", "<f=get>{}</f>", "<f=now>{}", "x <f=now>{}</f> <f=x"];
    let format = |format: Value| json!({"type": "structural_tag", "format": format});
    let newer = format(json!({
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {"begin": "<f=get>", "content": {"type": "json_schema", "json_schema": get}, "end": "</f>"},
            {"begin": "<f=now>", "content": {"type": "json_schema", "json_schema": {"type": "object", "maxProperties": 0}}, "end": "</f>"},
        ],
    }));
    for source in [older, newer] {
        for text in good {
            assert!(bench.fits(bench.form(tag(source.clone())), text), "{text}");
        }
        for text in bad {
            assert!(!bench.fits(bench.form(tag(source.clone())), text), "{text}");
        }
    }
    let sequence = format(json!({"type": "sequence", "elements": [
        {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
        {"type": "or", "elements": [{"type": "const_string", "value": "A"}, {"type": "regex", "pattern": "[0-9]+"}]},
        {"type": "grammar", "grammar": "root ::= \"!\"{1,2}"},
    ]}));
    for (text, fits) in [
        ("<think>so < it\nis</think>A!", true),
        ("<think></think>42!!", true),
        ("<think>a</think>b</think>A!", false),
        ("A!", false),
        ("<think></think>A!!!", false),
    ] {
        assert_eq!(bench.fits(bench.form(tag(sequence.clone())), text), fits, "{text}");
    }
    let calls = format(
        json!({"type": "tags_with_separator", "separator": ";", "at_least_one": true, "tags": [
            {"begin": "a(", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ")"},
            {"begin": "b(", "content": {"type": "const_string", "value": ""}, "end": ")"},
        ]}),
    );
    for (text, fits) in [("a(1)", true), ("a(1);b();a(2)", true), ("", false), ("a(1)b()", false)] {
        assert_eq!(bench.fits(bench.form(tag(calls.clone())), text), fits, "{text}");
    }
    let forced = format(
        json!({"type": "triggered_tags", "triggers": ["<f"], "at_least_one": true, "stop_after_first": true, "tags": [
            {"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</f>"},
        ]}),
    );
    for (text, fits) in [("so <f>1</f>", true), ("so", false), ("<f>1</f>.", false)] {
        assert_eq!(bench.fits(bench.form(tag(forced.clone())), text), fits, "{text}");
    }
}

#[test]
fn what_is_not_supported_is_named_with_its_place() {
    let bench = bench();
    let cases = [
        (
            schema(json!({"type": "object", "properties": {"a": {"not": {"type": "null"}}}})),
            ".properties.a.not",
        ),
        (schema(json!({"type": "array", "uniqueItems": true})), ".uniqueItems"),
        (
            schema(
                json!({"anyOf": [{"type": "null"}, {"type": "array", "items": {"contains": {}}}]}),
            ),
            ".anyOf[1].items.contains",
        ),
        (
            schema(
                json!({"$defs": {"x": {"type": "string", "format": "idn-email"}}, "$ref": "#/$defs/x"}),
            ),
            ".$defs.x.format",
        ),
        (
            schema(json!({"properties": {"v": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}})),
            ".properties.v.oneOf",
        ),
        (schema(json!({"type": "object", "x-guidance": {"lenient": true}})), ".x-guidance"),
        (schema(json!({"properties": {"a": {"x-guidance": {}}}})), ".properties.a.x-guidance"),
        (Form::Lark("start: %json {\"x-guidance\": {\"lenient\": true}}".into()), ""),
        (Form::Lark("start: a\na[temperature = 0.5]: /x/".into()), ""),
        (Form::Lark("start: other".into()), ""),
        (Form::Regex("(?=a)b".into()), ""),
        (Form::Regex("[".into()), ""),
        (Form::Ebnf("root ::= x".into()), ""),
        (Form::Choice([].into()), ""),
        (Form::JsonSchema("{".into()), ""),
        (Form::JsonSchema("3".into()), ""),
        (schema(json!({"type": "string", "minLength": 3, "maxLength": 2})), ".minLength"),
        (schema(json!({"$ref": "https://example.com/schema.json"})), ""),
        (tag(json!({"type": "structural_tag"})), ""),
        (tag(json!({"format": {"type": "qwen_xml_parameter"}})), ".format.type"),
        (
            tag(
                json!({"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "x"}]}}),
            ),
            ".format.elements[0]",
        ),
        (
            tag(json!({"format": {"type": "json_schema", "json_schema": {"x-guidance": {}}}})),
            ".format.json_schema.x-guidance",
        ),
        (
            tag(
                json!({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}),
            ),
            "",
        ),
        (
            tag(
                json!({"structures": [{"begin": "<a>", "schema": {}, "end": ""}, {"begin": "b", "schema": {}, "end": ""}], "triggers": ["<a"]}),
            ),
            ".structures[1]",
        ),
    ];
    for (form, place) in cases {
        match bench.refused(form.clone()) {
            GrammarError::Invalid { path, reason } => {
                assert_eq!(path, place, "{form:?}: {reason}");
                assert!(!reason.is_empty());
            }
            other => panic!("{form:?}: {other:?}"),
        }
    }
}

#[test]
fn what_says_nothing_is_no_reason_to_refuse() {
    let bench = bench();
    let harmless = json!({
        "type": "array",
        "uniqueItems": false,
        "unevaluatedItems": true,
        "then": false,
        "items": {"type": "object", "unevaluatedProperties": true, "if": {"type": "null"}, "deprecated": true, "x-order": 3},
    });
    assert!(bench.fits(bench.form(schema(harmless)), "[{}]"));
    let leap = schema(json!({"type": "string", "format": "date", "pattern": "^2"}));
    for (day, fits) in
        [("2024-02-29", true), ("2023-02-29", false), ("2100-02-29", false), ("1999-01-01", false)]
    {
        assert_eq!(bench.fits(bench.form(leap.clone()), &format!("{day:?}")), fits, "{day}");
    }
}

#[test]
fn a_lenient_operator_lets_more_through() {
    let lenient = Bench::new(GrammarConfig { grammar_lenient: true, ..GrammarConfig::default() });
    let form = schema(
        json!({"type": "array", "uniqueItems": true, "items": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}),
    );
    assert!(lenient.fits(lenient.form(form), "[1, 1]"));
    assert!(matches!(
        lenient.refused(schema(json!({"x-guidance": {}}))),
        GrammarError::Invalid { .. }
    ));
}

#[test]
fn sources_have_limits() {
    let bench = bench();
    let large = "x".repeat(SCHEMA_BYTES + 1);
    for form in [
        Form::Regex(large.as_str().into()),
        Form::Lark(large.as_str().into()),
        Form::Choice([large.clone()].into()),
        Form::Choice(vec!["a".to_owned(); 16_385].into()),
        schema(json!({"description": large})),
        schema(json!({"enum": vec![1; 70_000]})),
    ] {
        assert!(matches!(bench.refused(form), GrammarError::Invalid { .. }));
    }
    let deep = (0..100).fold(json!({}), |schema, _| json!({"items": schema}));
    match bench.refused(schema(deep)) {
        GrammarError::Invalid { path, reason } => {
            assert!(path.starts_with(".items.items") && reason.contains("64"), "{path}: {reason}");
        }
        other => panic!("{other:?}"),
    }
    // Forms with a short text whose size explodes when they are compiled or when masks are
    // computed. Each may be rejected, but must not crash or take for ever.
    for form in [
        Form::Regex("(a{0,1000}){0,1000}(b{0,1000}){0,1000}c|(.*x.{2000}){50}".into()),
        schema(
            json!({"type": "array", "minItems": 4_000_000_000_u64, "items": {"type": "array", "minItems": 1_000_000}}),
        ),
        Form::Lark("start: a{0,1000}\na: b{0,1000}\nb: c{0,1000}\nc: \"x\" | a".into()),
    ] {
        match bench.constraints(wanted(Some(form.clone().into()))) {
            Ok(mut made) => drop(bench.draw(&mut *made.choices.remove(0), 1, 50)),
            Err(GrammarError::Invalid { .. }) => {}
            Err(other) => panic!("{form:?}: {other:?}"),
        }
    }
}

#[test]
fn white_space_is_as_asked() {
    let bench = bench();
    let source = |whitespace| Source { form: Form::JsonObject, whitespace };
    let fits =
        |whitespace, text: &str| bench.fits(bench.rules(wanted(Some(source(whitespace)))), text);
    assert!(fits(Whitespace::None, r#"{"a":1}"#) && !fits(Whitespace::None, r#"{"a": 1}"#));
    let dots = Whitespace::Pattern(r"\t+".into());
    assert!(fits(dots.clone(), "{\"a\":\t\t1}") && !fits(dots, r#"{"a": 1}"#));
    let indented = format!("{{\n{}\"a\": 1}}", " ".repeat(24));
    assert!(fits(Whitespace::Bounded, &indented));
    assert!(!fits(Whitespace::Bounded, &indented.replace("\n", "\n ")));
}

#[test]
fn where_nothing_can_follow_only_the_end_can_come() {
    let bench = bench();
    let mut constraint = bench.form(Form::Choice(["ab".to_owned()].into()));
    let ids = bench.tokenizer.encode_as_text("ab").unwrap();
    for id in ids {
        assert!(!may(&mut *constraint, EOS));
        constraint.accept(id).unwrap();
    }
    assert_eq!(allowed(&mut *constraint), [EOS]);
}

#[test]
fn forced_text_is_tokenised_as_the_tokenizer_does() {
    let bench = bench();
    let text = "{\"answer\": \"the dog\"}";
    let mut constraint = bench.form(Form::Choice([text.to_owned()].into()));
    let ids = bench.tokenizer.encode_as_text(text).unwrap();
    for id in ids {
        assert_eq!(allowed(&mut *constraint), [id]);
        constraint.accept(id).unwrap();
    }
}
