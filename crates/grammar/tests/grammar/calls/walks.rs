//! Tests random answers that the masks allow: each is parsed as valid calls.

use std::sync::Arc;

use forebay_dialect::{Instead, Marks};
use forebay_engine::Constraint;
use forebay_grammar::{GrammarConfig, Source};
use forebay_text::Tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::schemas::{arguments, is_valid};
use super::turns::{Answer, FAMILIES, Family};
use super::{calls, form, read, weather, written};
use crate::support::{Bench, EOS, allowed, may};

/// Returns the tests' tokenizer with the family's marks as special tokens.
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

/// Continues `said` by a random walk through the masks; `None` if the walk did not end.
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
        // Where the answer may end or continue, the walk chooses at random.
        if ids.contains(&EOS) && (ends || ids.len() == 1 || state >> 62 != 0) {
            return Some(tokenizer.decode(&said, false).expect("text"));
        }
        ids.retain(|&id| id != EOS);
        let id = ids[(state >> 33) as usize % ids.len()];
        constraint.accept(id).expect("the mask allowed the token");
        said.push(id);
    }
    None
}

/// True if the text may have a number that JSON allows but no double represents, such as `2E937`.
fn is_out_of_range(text: &str) -> bool {
    let mut rest = text.split(['e', 'E']).skip(1).map(|rest| rest.trim_start_matches(['+', '-']));
    rest.any(|rest| rest.bytes().take_while(u8::is_ascii_digit).count() > 2)
}

/// A `Bench` for each family, and the family's marks if they are special tokens.
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

    /// Draws an answer of each family, and parses it.
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
            // Harmony's messages consist of special tokens.
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
                // A random walk rarely finds the mark of a call, so the text begins with the mark.
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
                    constraint.accept(id).expect("the mask allowed the token");
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
    // Most walks end.
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
