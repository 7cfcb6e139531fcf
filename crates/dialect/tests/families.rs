//! Tests that the parser reads answers in the formats of the families' chat templates, cut
//! anywhere.

mod turns;

use std::sync::Arc;

use forebay_dialect::{
    Choice, Dialect, Evidence, Instead, Marks, Parser, Part, Parts, Reading, Start, Tools,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use turns::{Answer, FAMILIES, Family};

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
    assert_eq!(dialect.calls_name(), Some(family.name), "the family is detected");
    let start = Start::of(dialect, family.prompt, false);
    Reading { dialect, tools, start, ..Reading::default() }
}

/// Parses `text` in pieces that end at `cuts`.
fn read(reading: Reading, text: &str, cuts: &[usize]) -> (Parts, u32) {
    let mut parser = Parser::new(reading);
    let (mut parts, mut from) = (Parts::default(), 0);
    for &cut in cuts.iter().chain([&text.len()]) {
        if cut > from && text.is_char_boundary(cut) {
            // Each delta has its own `Parts`.
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

/// Text that resembles marks, JSON and code.
const WILD: &str = "[a-z<>{}()\\[\\]\"'`,;:\\\\\n\t é/|=-]{0,16}";

/// Families whose marks are ordinary text.
const PLAIN: &[&str] = &["hermes", "qwen3_coder", "deepseek_v32", "glm45", "glm47", "minimax_m2"];

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
    fn text_without_calls_is_as_it_was_said(
        family in prop::sample::select(PLAIN),
        pieces in prop::collection::vec(any::<prop::sample::Index>(), 0..16),
        junk in prop::collection::vec(WILD, 16),
        cuts in prop::collection::vec(0..2000_usize, 0..40),
        offered: bool,
    ) {
        let family = FAMILIES.iter().find(|one| one.name == family).expect("a family");
        let mut text = "Say: ".to_owned();
        for (at, junk) in pieces.iter().zip(&junk) {
            text.push_str(family.marks[at.index(family.marks.len())]);
            text.push_str(junk);
        }
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (text.len() + 1)).collect();
        cuts.sort_unstable();
        let tools = if offered { tools() } else { Arc::default() };
        let reading = Reading { start: Start::default(), ..reading(family, tools) };
        let (parts, complete) = read(reading, &text, &cuts);
        prop_assert_eq!(parts.as_content(), Some(text.as_str()));
        prop_assert_eq!(complete, 0);
    }

    #[test]
    fn any_text_at_all_splits_alike(
        family in prop::sample::select(FAMILIES),
        pieces in prop::collection::vec(any::<prop::sample::Index>(), 0..24),
        junk in prop::collection::vec(WILD, 24),
        cuts in prop::collection::vec(0..2000_usize, 0..60),
        complete: bool,
    ) {
        // Marks and random text, in any order.
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

#[test]
fn special_tokens_are_forced_by_their_ids() {
    let special = [("<|tool_call_begin|>", 7), ("<|tool_call_end|>", 8), ("<|tool", 9)];
    let marks = Marks::new(special.map(|(text, id)| (text.to_owned(), id)));
    let family = FAMILIES.iter().find(|family| family.name == "kimi_k2").expect("a family");
    let dialect = reading(family, tools()).dialect;
    let grammar = dialect.call_grammar(&["ping"], Instead::Nothing, false, &marks, None);
    let lark = grammar.expect("a grammar").lark;
    assert!(lark.contains("<[7]> body"), "{lark}");
    assert!(lark.contains("body <[8]>"), "{lark}");
    assert_eq!(marks.literal("a<|tool_call_begin|><|toolb"), "\"a\" <[7]> <[9]> \"b\"");
    assert_eq!(marks.literal(""), "");
}

#[test]
fn a_family_without_calls_has_no_grammar() {
    let marks = Marks::default();
    assert_eq!(Dialect::default().call_grammar(&["f"], Instead::Nothing, true, &marks, None), None);
    let dialect = reading(&FAMILIES[0], tools()).dialect;
    assert_eq!(dialect.call_grammar(&[], Instead::Text, true, &marks, None), None);
}
