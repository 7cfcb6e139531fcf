//! Tests of tool calls: a grammar allows exactly what the family's template writes and its parser
//! reads.

mod loose;
mod schemas;
#[path = "../../../../dialect/tests/turns/mod.rs"]
mod turns;
mod walks;

use std::sync::Arc;

use forebay_dialect::{
    ArgumentStyle, CallGrammar, Choice, Dialect, Evidence, Instead, Marks, Parser, Parts, Place,
    Reading, Start, Tools,
};
use forebay_grammar::{
    CallArguments, CallForm, CallText, Form, GrammarConfig, GrammarError, Grammars,
};
use schemas::is_valid;
use serde_json::{Value, json};
use turns::{Answer, FAMILIES, Family};

use crate::support::Bench;

fn dialect(family: &Family) -> Dialect {
    let evidence = Evidence { template: family.turn, has_token: &|_| false };
    Dialect::new(&Choice::Auto, &Choice::Auto, evidence).expect("a dialect")
}

/// Returns the form of answers that call these tools.
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
                strict: true,
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
    // The prompt has ended the reasoning, or there is none.
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

/// Returns the calls as the family's template writes them, without the text before them.
fn written(family: &Family, calls: Vec<(String, Value)>) -> String {
    let text = Answer { calls, ..Answer::default() }.written(family);
    let text = text.trim_start().trim_start_matches("</think>").trim_start();
    // The model does not generate call ids.
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
        assert!(!fits(&tools, Instead::Nothing, false, &two), "{name}: only one call is allowed");
        assert!(!fits(&tools, Instead::Text, false, &two), "{name}: only one call is allowed");
        let other = written(family, vec![weather("a")]);
        assert!(
            !fits(&tools[1..], Instead::Nothing, true, &other),
            "{name}: only the named tool is allowed"
        );
        assert!(
            !fits(&tools[1..], Instead::Text, true, &other),
            "{name}: only the named tool is allowed"
        );
        let text = written(family, vec![ping]);
        assert!(fits(&tools[1..], Instead::Nothing, false, &text), "{name}: {text}");
        assert!(!fits(&tools, Instead::Nothing, true, "Hello"), "{name}: text is not allowed");
        let wrong = json!({"text": "a", "count": "b"});
        let wrong = written(family, vec![("get_weather".to_owned(), wrong)]);
        assert!(!fits(&tools, Instead::Nothing, true, &wrong), "{name}: the schema is enforced");
        assert!(!fits(&tools, Instead::Text, true, &wrong), "{name}: the schema is enforced");
        if name != "openai" {
            assert!(
                fits(&tools, Instead::Text, true, "Hello, <b>."),
                "{name}: any text is allowed"
            );
            assert!(fits(&tools, Instead::Text, true, ""), "{name}: an empty text is allowed");
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
        // Text that begins like a number has to be a number within the bounds.
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

/// Returns the call form of a tool whose argument is a text of this form.
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
