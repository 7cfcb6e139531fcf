//! Tests of constraints other than the form of an answer, and of their combinations.

use std::sync::Arc;

use forebay_engine::Constraint;
use forebay_grammar::{Bounds, Form, GrammarConfig, Markers, Reasoning, Start, WantedForm};
use proptest::prelude::*;
use serde_json::json;

use crate::support::{Bench, EOS, allowed, may, reasons, wanted};

/// The ids of `<|im_start|>` and `<|im_end|>` in the tests' tokenizer, which open and close the
/// reasoning here.
const OPEN: i32 = 1;
const CLOSE: i32 = 2;

fn bench() -> Bench {
    Bench::new(GrammarConfig::default())
}

fn digits() -> Form {
    Form::Regex("[0-9]{1,20}".into())
}

fn bounded(form: Option<Form>, bounds: Bounds) -> WantedForm {
    let bounds = Bounds { ends: [EOS].into(), ..bounds };
    WantedForm { bounds, ..wanted(form.map(Into::into)) }
}

fn thinking(start: Start, budget: Option<u32>) -> Reasoning {
    let markers = Markers { open: [OPEN].into(), close: [CLOSE].into() };
    Reasoning { markers, start, budget }
}

fn say(constraint: &mut dyn Constraint, ids: &[i32]) {
    for &id in ids {
        assert!(may(constraint, id), "{id}");
        constraint.accept(id).expect("the token is allowed");
    }
}

#[test]
fn without_a_restriction_everything_may_come() {
    let bench = bench();
    let mut rules = bench.rules(bounded(None, Bounds::default()));
    assert_eq!(allowed(&mut *rules).len(), 2048);
    rules.accept(7).unwrap();
    assert_eq!(allowed(&mut *rules).len(), 2048);
}

#[test]
fn bad_words_are_cut_at_their_last_token() {
    let bench = bench();
    let bad: Arc<[Box<[i32]>]> = [[9].into(), [5, 6, 7].into()].into();
    let mut rules = bench.rules(bounded(None, Bounds { bad_words: bad, ..Bounds::default() }));
    assert!(!may(&mut *rules, 9) && may(&mut *rules, 7));
    say(&mut *rules, &[5, 5, 6]);
    assert!(!may(&mut *rules, 7) && !may(&mut *rules, 9) && may(&mut *rules, 5));
    say(&mut *rules, &[8]);
    assert!(may(&mut *rules, 7));
}

#[test]
fn a_bad_word_comes_where_nothing_else_can() {
    let bench = bench();
    let a = bench.tokenizer.encode_as_text("a").unwrap();
    let bounds = Bounds { bad_words: [a.clone().into()].into(), ..Bounds::default() };
    let mut rules = bench.rules(bounded(Some(Form::Regex("a".into())), bounds));
    assert_eq!(allowed(&mut *rules), a);
}

#[test]
fn a_short_answer_does_not_end_unless_it_has_to() {
    let bench = bench();
    let seven = bench.tokenizer.encode_as_text("7").unwrap();
    let bounds = Bounds { min_tokens: 3, ..Bounds::default() };
    let mut rules = bench.rules(bounded(Some(digits()), bounds.clone()));
    for said in 0..5 {
        assert_eq!(may(&mut *rules, EOS), said >= 3, "{said}");
        say(&mut *rules, &seven);
    }
    let mut one = bench.rules(bounded(Some(Form::Regex("7".into())), bounds.clone()));
    say(&mut *one, &seven);
    assert_eq!(allowed(&mut *one), [EOS]);
    let mut free = bench.rules(bounded(None, bounds));
    assert_eq!(allowed(&mut *free).len(), 2047);
}

#[test]
fn allowed_ids_and_a_form_go_together_or_are_an_error() {
    let bench = bench();
    let seven = bench.tokenizer.encode_as_text("7").unwrap()[0];
    let only = |ids: &[i32]| Bounds { allowed: Some(ids.into()), ..Bounds::default() };
    let mut rules = bench.rules(bounded(Some(digits()), only(&[EOS, seven, 900])));
    assert_eq!(allowed(&mut *rules), [seven]);
    say(&mut *rules, &[seven]);
    assert_eq!(allowed(&mut *rules), [EOS, seven]);
    let mut never = bench.rules(bounded(Some(digits()), only(&[900])));
    let broken = never.mask(&mut [0; 64]).unwrap_err();
    assert!(broken.to_string().contains("allowed_token_ids"), "{broken}");
}

#[test]
fn the_clients_own_ends_may_come_where_the_form_is_complete() {
    let bench = bench();
    let bounds = Bounds { ends: [EOS, 5].into(), ..Bounds::default() };
    let mut rules = bench.rules(WantedForm { bounds, ..wanted(Some(digits().into())) });
    assert!(!may(&mut *rules, 5));
    say(&mut *rules, &bench.tokenizer.encode_as_text("7").unwrap());
    assert!(may(&mut *rules, 5) && may(&mut *rules, EOS));
    // With `ignore_eos` the answer continues after the end token.
    rules.accept(EOS).unwrap();
    assert_eq!(allowed(&mut *rules).len(), 2048);
    rules.accept(900).unwrap();
}

#[test]
fn an_end_of_the_client_that_is_a_part_of_the_form_does_not_end_it() {
    let bench = bench();
    let seven = bench.tokenizer.encode_as_text("7").unwrap()[0];
    let bounds = Bounds { ends: [EOS, seven].into(), ..Bounds::default() };
    let mut rules = bench.rules(WantedForm { bounds, ..wanted(Some(digits().into())) });
    assert!(may(&mut *rules, seven) && !may(&mut *rules, EOS));
}

#[test]
fn a_token_that_does_not_fit_breaks_the_constraint() {
    let bench = bench();
    let mut rules = bench.form(digits());
    assert!(rules.accept(900).is_err());
    let seven = bench.tokenizer.encode_as_text("7").unwrap()[0];
    let mut rules = bench.form(digits());
    say(&mut *rules, &[seven]);
    assert!(rules.accept(900).is_err());
    assert!(rules.mask(&mut [0; 64]).is_err());
}

#[test]
fn the_form_begins_behind_the_reasoning() {
    let bench = bench();
    let seven = bench.tokenizer.encode_as_text("7").unwrap()[0];
    let source = Some(digits().into());
    let mut inside = bench.rules(reasons(source.clone(), thinking(Start::Inside, None)));
    // An answer is required, so the text cannot end within the reasoning.
    assert_eq!(allowed(&mut *inside).len(), 2047);
    say(&mut *inside, &[900, 901, CLOSE]);
    assert!(!may(&mut *inside, 900) && may(&mut *inside, seven));
    let mut open = bench.rules(reasons(source.clone(), thinking(Start::Open, None)));
    let first = allowed(&mut *open);
    assert!(first.contains(&OPEN) && first.contains(&seven) && !first.contains(&900));
    say(&mut *open, &[OPEN, 900, CLOSE, seven]);
    assert!(may(&mut *open, EOS) && !may(&mut *open, OPEN));
    let mut over = bench.rules(reasons(source, thinking(Start::Answer, None)));
    assert!(!may(&mut *over, OPEN));
}

#[test]
fn a_spent_budget_ends_the_reasoning() {
    let bench = bench();
    let mut rules = bench.rules(reasons(None, thinking(Start::Inside, Some(2))));
    say(&mut *rules, &[900, 901]);
    assert_eq!(allowed(&mut *rules), [CLOSE]);
    say(&mut *rules, &[CLOSE]);
    assert_eq!(allowed(&mut *rules).len(), 2048);
}

#[test]
fn choices_go_their_own_ways_and_go_on_where_others_were() {
    let bench = bench();
    let source = Some(Form::Choice(["left".to_owned(), "right".to_owned()].into()).into());
    let both = WantedForm { choices: 2, ..wanted(source.clone()) };
    let mut both = bench.constraints(both).unwrap().choices;
    let (left, right) = (
        bench.tokenizer.encode_as_text("left").unwrap(),
        bench.tokenizer.encode_as_text("right").unwrap(),
    );
    say(&mut *both[0], &left);
    say(&mut *both[1], &right);
    let resumed = WantedForm { said: left[..1].to_vec(), ..wanted(source.clone()) };
    let mut resumed = bench.rules(resumed);
    say(&mut *resumed, &left[1..]);
    assert_eq!(allowed(&mut *resumed), [EOS]);
    // The tokens `said` are checked when the next mask is computed.
    for said in [vec![900], vec![left[0], 900], vec![left[0], right[0]]] {
        let mut wrong = bench.rules(WantedForm { said, ..wanted(source.clone()) });
        let broken = wrong.mask(&mut [0; 64]).unwrap_err().to_string();
        assert!(broken.contains("the tokens so far do not fit"), "{broken}");
        assert!(wrong.accept(left[0]).is_err() && wrong.mask(&mut [0; 64]).is_err());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn whatever_is_drawn_by_the_masks_is_an_answer(seed in any::<u64>()) {
        let bench = bench();
        let schema = json!({
            "type": "object",
            "properties": {
                "kind": {"enum": ["a", "bb", null, 3]},
                "size": {"type": "integer", "minimum": -5, "maximum": 120},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
            },
            "required": ["kind", "size"],
            "additionalProperties": false,
        });
        let form = Form::JsonSchema(schema.to_string().into());
        let mut rules = bench.form(form.clone());
        let text = bench.draw(&mut *rules, seed, 300).expect("an end");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        prop_assert!(["\"a\"", "\"bb\"", "null", "3"].contains(&value["kind"].to_string().as_str()));
        prop_assert!((-5.0..=120.0).contains(&value["size"].as_f64().expect("a number")));
        prop_assert!(bench.fits(bench.form(form), &text));
    }
}
