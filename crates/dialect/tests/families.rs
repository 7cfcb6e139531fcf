//! Answers as the families' chat templates write them, cut anywhere: what is read is what was written.

mod turns;

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_dialect::{
    Choice, Dialect, Evidence, Force, Notation, Parser, Part, Parts, Reading, Start, Tools,
};
use forebay_text::{ChatRender, ChatTemplate};
use proptest::prelude::*;
use serde_json::{Value, json};
use turns::{FAMILIES, Family};

/// What an answer says.
#[derive(Debug, Clone, Default, PartialEq)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, Value)>,
}

impl Answer {
    /// The answer as a family's template writes it.
    fn written(&self, family: &Family) -> String {
        let calls = self.calls.iter().enumerate().map(|(number, (name, arguments))| {
            json!({"id": number, "type": "function", "function": {"name": name, "arguments": arguments}})
        });
        let message = json!({
            "role": "assistant",
            "content": self.content,
            "reasoning_content": self.reasoning,
            "tool_calls": calls.collect::<Vec<_>>(),
        });
        let template =
            ChatTemplate::new(family.turn, None, None, &BTreeMap::new()).expect("a template");
        template.render(&ChatRender::new(&json!([message]))).expect("text")
    }

    fn read(parts: &Parts) -> Self {
        let mut answer = Self::default();
        let mut arguments = Vec::new();
        for part in parts.iter() {
            match part {
                Part::Content(text) => answer.content.push_str(text),
                Part::Reasoning(text) => answer.reasoning.push_str(text),
                Part::Call { index, name, .. } => {
                    assert_eq!(index as usize, answer.calls.len());
                    answer.calls.push((name.to_owned(), Value::Null));
                    arguments.push(String::new());
                }
                Part::Arguments { index, text } => {
                    assert_eq!(index as usize + 1, answer.calls.len());
                    arguments[index as usize].push_str(text);
                }
            }
        }
        for ((_, value), text) in answer.calls.iter_mut().zip(arguments) {
            *value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        }
        answer
    }
}

fn tools() -> Arc<Tools> {
    let schema = json!({
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": ["number", "null"]},
            "on": {"type": "boolean"},
            "list": {"type": "array"},
            "any": {"anyOf": [{"$ref": "#/$defs/deep"}, {"type": "null"}]},
        },
        "$defs": {"deep": {"type": "object"}},
    });
    let names = ["get_weather", "write_file", "ping"];
    Arc::new(Tools::new(names.map(|name| (name.to_owned(), schema.clone()))))
}

fn reading(family: &Family, tools: Arc<Tools>) -> Reading {
    let evidence = Evidence { template: family.turn, has_token: &|_| false };
    let dialect = Dialect::new(&Choice::Auto, &Choice::Auto, evidence).expect("a dialect");
    assert_eq!(dialect.calls_name(), Some(family.name), "found by itself");
    let start = Start::of(dialect, family.prompt, false);
    Reading { dialect, tools, start, ..Reading::default() }
}

/// Reads `text` in pieces that end where `cuts` say.
fn read(reading: Reading, text: &str, cuts: &[usize]) -> (Parts, u32) {
    let mut parser = Parser::new(reading);
    let (mut parts, mut from) = (Parts::default(), 0);
    for &cut in cuts.iter().chain([&text.len()]) {
        if cut > from && text.is_char_boundary(cut) {
            // Each delta has parts of its own.
            let mut delta = Parts::default();
            parser.push(&text[from..cut], &mut delta);
            parts.append(&mut delta);
            from = cut;
        }
    }
    parser.finish(true, &mut parts);
    (parts, parser.complete_calls())
}

fn weather(city: &str) -> (String, Value) {
    ("get_weather".to_owned(), json!({"text": city, "count": 3}))
}

#[test]
fn every_family_is_read_as_it_is_written() {
    let ping = ("ping".to_owned(), json!({}));
    let file = (
        "write_file".to_owned(),
        json!({"text": "fn main() {\n    \"a\\b\" < 1;\n}\n", "share": null, "on": true, "list": [1, {"a": "}"}], "any": {"x": 230.0}}),
    );
    for family in FAMILIES {
        for answer in [
            Answer { content: "Hello, world.".into(), ..Answer::default() },
            Answer {
                reasoning: "Hm.".into(),
                content: "Two\n\nlines.".into(),
                ..Answer::default()
            },
            Answer { calls: vec![weather("Paris")], ..Answer::default() },
            Answer {
                reasoning: "Hm.".into(),
                calls: vec![weather("Zürich"), ping.clone()],
                ..Answer::default()
            },
            Answer {
                calls: vec![file.clone(), ping.clone(), weather("Łódź")],
                ..Answer::default()
            },
            Answer { content: "I look.".into(), calls: vec![weather("Rome")], ..Answer::default() },
        ] {
            let answer = family.can(answer);
            let text = answer.written(family);
            let (whole, complete) = read(reading(family, tools()), &text, &[]);
            assert_eq!(Answer::read(&whole), answer, "{}: {text}", family.name);
            assert_eq!(complete as usize, answer.calls.len(), "{}", family.name);
            let every: Vec<usize> = (0..text.len()).collect();
            let (parts, complete) = read(reading(family, tools()), &text, &every);
            assert_eq!(parts, whole, "{}: {text}", family.name);
            assert_eq!(complete as usize, answer.calls.len(), "{}", family.name);
        }
    }
}

#[test]
fn an_answer_that_ends_anywhere_leaves_no_mark_in_its_text() {
    for family in FAMILIES {
        let answer = Answer {
            reasoning: "Hm, well.".into(),
            content: "I look.".into(),
            calls: vec![weather("Rome"), weather("Oslo")],
        };
        let answer = family.can(answer);
        let text = answer.written(family);
        for end in (0..text.len()).filter(|&end| text.is_char_boundary(end)) {
            let mut parser = Parser::new(reading(family, tools()));
            let mut parts = Parts::default();
            parser.push(&text[..end], &mut parts);
            parser.finish(false, &mut parts);
            for part in parts.iter() {
                if let Part::Content(said) | Part::Reasoning(said) = part {
                    for mark in family.marks {
                        assert!(
                            !said.contains(mark),
                            "{}: {said:?} of {:?}",
                            family.name,
                            &text[..end]
                        );
                    }
                }
            }
            assert!(parser.complete_calls() <= 2);
        }
    }
}

#[test]
fn without_tools_nothing_is_a_call() {
    for family in FAMILIES.iter().filter(|family| family.name != "openai") {
        let answer = family.can(Answer { calls: vec![weather("Rome")], ..Answer::default() });
        let text = answer.written(family);
        let (parts, complete) = read(reading(family, Arc::default()), &text, &[]);
        assert_eq!(complete, 0);
        assert!(parts.iter().all(|part| matches!(part, Part::Content(_) | Part::Reasoning(_))));
    }
}

#[test]
fn one_call_only_ends_after_it() {
    for family in FAMILIES {
        let answer = family
            .can(Answer { calls: vec![weather("Rome"), weather("Oslo")], ..Answer::default() });
        let text = answer.written(family);
        let mut parser = Parser::new(Reading { single: true, ..reading(family, tools()) });
        let mut parts = Parts::default();
        parser.push(&text, &mut parts);
        assert!(parser.is_over(), "{}", family.name);
        parser.finish(true, &mut parts);
        assert_eq!(Answer::read(&parts).calls, [weather("Rome")], "{}", family.name);
    }
}

/// Text that looks like other things.
const WILD: &str = "[a-z<>{}()\\[\\]\"'`,;:\\\\\n\t é/|=-]{0,16}";

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn any_split_gives_the_same(
        family in prop::sample::select(FAMILIES),
        reasoning in "([a-z]{1,5} ?){0,4}",
        content in "([a-z.]{1,5}[ \n]?){0,4}",
        calls in prop::collection::vec(
            (prop::sample::select(&["get_weather", "write_file", "ping"][..]), WILD, any::<i32>(), any::<bool>(), WILD, any::<bool>()),
            0..3,
        ),
        cuts in prop::collection::vec(0..2000_usize, 0..40),
    ) {
        let calls = calls.into_iter().map(|(name, text, count, on, item, empty)| {
            let full = json!({"text": text, "count": count, "on": on, "list": [item, null], "any": {"k": 1}});
            (name.to_owned(), if empty { json!({}) } else { full })
        });
        let answer = family.can(Answer {
            reasoning: reasoning.trim().to_owned(),
            content: content.trim().to_owned(),
            calls: calls.collect(),
        });
        let text = answer.written(&family);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (text.len() + 1)).collect();
        cuts.sort_unstable();
        let (whole, complete) = read(reading(&family, tools()), &text, &[]);
        prop_assert_eq!(Answer::read(&whole), answer.clone(), "{}", text);
        prop_assert_eq!(complete as usize, answer.calls.len());
        let (parts, complete) = read(reading(&family, tools()), &text, &cuts);
        prop_assert_eq!(parts, whole);
        prop_assert_eq!(complete as usize, answer.calls.len());
    }

    #[test]
    fn any_text_at_all_splits_alike(
        family in prop::sample::select(FAMILIES),
        pieces in prop::collection::vec(any::<prop::sample::Index>(), 0..24),
        junk in prop::collection::vec(WILD, 24),
        cuts in prop::collection::vec(0..2000_usize, 0..60),
        complete: bool,
    ) {
        // Marks and junk in any order.
        let text: String = pieces.iter().zip(&junk).map(|(at, junk)| {
            let all = family.marks.len() + 1;
            family.marks.get(at.index(all)).map_or(junk.clone(), |mark| format!("{mark}{junk}"))
        }).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (text.len() + 1)).collect();
        cuts.sort_unstable();
        let run = |cuts: &[usize]| {
            let mut parser = Parser::new(reading(&family, tools()));
            let (mut parts, mut from) = (Parts::default(), 0);
            for &cut in cuts.iter().chain([&text.len()]) {
                if cut > from && text.is_char_boundary(cut) {
                    parser.push(&text[from..cut], &mut parts);
                    from = cut;
                }
            }
            parser.finish(complete, &mut parts);
            (parts, parser.complete_calls())
        };
        prop_assert_eq!(run(&cuts), run(&[]), "{}", text);
    }
}

/// How much of `text` a grammar takes, and whether it may end there.
fn taken(lark: &str, text: &str) -> (usize, bool) {
    use llguidance::api::TopLevelGrammar;
    use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities};
    use llguidance::{Matcher, ParserFactory};
    let env = ApproximateTokEnv::single_byte_env();
    let factory =
        ParserFactory::new(&env, InferenceCapabilities::default(), &[]).expect("a factory");
    let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned()));
    let mut matcher = Matcher::new(parser);
    assert_eq!(matcher.get_error(), None, "{lark}");
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let count =
        matcher.try_consume_tokens(&tokens).unwrap_or_else(|error| panic!("{error}\n{lark}"));
    (count, matcher.is_accepting().expect("an answer"))
}

#[test]
fn what_a_grammar_forces_is_what_the_template_writes() {
    let schema = json!({
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
        "required": ["text", "count"],
        "additionalProperties": false,
    });
    let nothing = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let tools =
        Arc::new(Tools::new([("get_weather".to_owned(), schema), ("ping".to_owned(), nothing)]));
    let json = |schema: &Value| format!("%json {schema}");
    for family in FAMILIES {
        let reading = reading(family, Arc::clone(&tools));
        let grammar = |force: Force<'_>, parallel: bool| {
            let notation = Notation { special: &[], json: &json };
            reading.dialect.grammar(&tools, force, parallel, notation)
        };
        let written = |calls: Vec<(String, Value)>| {
            let text = Answer { calls, ..Answer::default() }.written(family);
            let text = text.trim_start().trim_start_matches("</think>").trim_start();
            // The name of a call is not for the model to make up.
            text.replace(", \"id\": \"abcdefghi\"", "")
        };
        let name = family.name;
        let any = grammar(Force::Any, true).expect("a grammar");
        let ping = ("ping".to_owned(), json!({}));
        for calls in [vec![weather("Zürich <b>")], vec![weather("a\n\"b\""), ping.clone()]] {
            let text = written(calls);
            assert_eq!(taken(&any, &text), (text.len(), true), "{name}: {text}\n{any}");
        }
        let one = grammar(Force::Any, false).expect("a grammar");
        let two = written(vec![weather("a"), ping.clone()]);
        assert!(taken(&one, &two).0 < two.len(), "{name}: only one call");
        let named = grammar(Force::Named("ping"), false).expect("a grammar");
        let other = written(vec![weather("a")]);
        assert!(taken(&named, &other).0 < other.len(), "{name}: only that tool");
        let text = written(vec![ping]);
        assert_eq!(taken(&named, &text), (text.len(), true), "{name}: {text}\n{named}");
        assert_eq!(taken(&any, "Hello").0, 0, "{name}: no text");
        assert_eq!(grammar(Force::Named("nothing"), true), None);
        let wrong = written(vec![("get_weather".to_owned(), json!({"text": "a", "count": "b"}))]);
        assert!(taken(&any, &wrong).0 < wrong.len(), "{name}: the schema is kept");
    }
}

#[test]
fn special_tokens_are_forced_by_their_ids() {
    let json = |schema: &Value| format!("%json {schema}");
    let special = [("<|tool_call_begin|>".to_owned(), 7), ("<|tool_call_end|>".to_owned(), 8)];
    let family = FAMILIES.iter().find(|family| family.name == "kimi_k2").expect("a family");
    let tools = tools();
    let dialect = reading(family, Arc::clone(&tools)).dialect;
    let notation = Notation { special: &special, json: &json };
    let grammar =
        dialect.grammar(&tools, Force::Named("ping"), false, notation).expect("a grammar");
    assert!(grammar.contains("<[7]> \"functions.ping:\""), "{grammar}");
    assert!(grammar.contains("<[8]>"), "{grammar}");
}
