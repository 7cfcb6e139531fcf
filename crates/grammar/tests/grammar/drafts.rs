//! Tests the masks of drafted tokens: they equal the masks of accepted tokens, and drafts leave the
//! state unchanged.

use std::sync::Arc;

use forebay_engine::{Allowed, Constraint};
use forebay_grammar::{Bounds, Form, GrammarConfig, Markers, Reasoning, Start, WantedForm};
use proptest::prelude::*;

use crate::support::{Bench, EOS, allowed, wanted};

const MOST: usize = 8;

/// Returns the masks that a constraint computes for a row with drafts, as lists of ids.
fn walked(constraint: &mut dyn Constraint, drafts: &[i32]) -> Vec<Vec<i32>> {
    let mut words = vec![vec![7_u32; 64]; 1 + drafts.len()];
    let mut masks: Vec<&mut [u32]> = words.iter_mut().map(|words| &mut words[..]).collect();
    let made = constraint.walk(drafts, &mut masks).expect("the constraint allows a token");
    let ids = |(allowed, words): (&Allowed, &Vec<u32>)| {
        let has = |id: &i32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
        (0..2048).filter(|id| *allowed == Allowed::Everything || has(id)).collect()
    };
    made.iter().zip(&words).map(ids).collect()
}

/// Draws a random answer. Returns it with the ids that were allowed at each position.
fn drawn(constraint: &mut dyn Constraint, mut seed: u64, most: usize) -> (Vec<i32>, Vec<Vec<i32>>) {
    let (mut said, mut masks) = (Vec::new(), Vec::new());
    while said.len() < most {
        let ids = allowed(constraint);
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let token = ids[(seed >> 33) as usize % ids.len()];
        masks.push(ids);
        said.push(token);
        if token == EOS {
            break;
        }
        constraint.accept(token).expect("the mask allowed the token");
    }
    (said, masks)
}

fn forms() -> Vec<WantedForm> {
    let schema = r#"{"type": "object", "properties": {"name": {"enum": ["anna", "bert"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4}},
        "required": ["name", "sizes"], "additionalProperties": false}"#;
    let of = |form: Form| wanted(Some(form.into()));
    let bad: Arc<[Box<[i32]>]> = [[40].into(), [41, 42].into()].into();
    let markers = Markers { open: [1].into(), close: [2, 3, 2].into() };
    let reasoning = Reasoning { markers, start: Start::Open, budget: Some(3) };
    let bounds = |bounds| Bounds { ends: [EOS].into(), ..bounds };
    vec![
        of(Form::JsonSchema(schema.into())),
        of(Form::JsonObject),
        of(Form::Regex("(ab){3}[0-9]{2,6}x+".into())),
        of(Form::Choice(["yes, of course".to_owned(), "no".to_owned()].into())),
        WantedForm {
            bounds: bounds(Bounds { min_tokens: 12, bad_words: bad, ..Bounds::default() }),
            ..of(Form::Regex("[a-z ]{4,60}".into()))
        },
        WantedForm { reasoning: Some(reasoning.clone()), ..of(Form::Regex("(ab){4}".into())) },
        WantedForm { reasoning: Some(reasoning), ..wanted(None) },
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    #[test]
    fn drafts_leave_no_trace_and_each_has_its_mask(
        seed in any::<u64>(),
        places in prop::collection::vec((0..=MOST, prop::option::of((0..MOST, 0..2048_i32)), any::<bool>()), 40),
    ) {
        let bench = Bench::new(GrammarConfig::default());
        for (number, form) in forms().into_iter().enumerate() {
            let (said, masks) = drawn(&mut *bench.rules(form.clone()), seed, places.len());
            let mut rules = bench.rules(form);
            for (at, &(count, wrong, asks)) in places.iter().enumerate().take(said.len()) {
                let right = &said[at..said.len().min(at + count)];
                let mut drafts = right.to_vec();
                let wrong = wrong.filter(|&(nth, _)| nth < drafts.len());
                if let Some((nth, token)) = wrong {
                    drafts[nth] = token;
                }
                if asks {
                    let forced = rules.restrict(MOST, &mut drafts).expect("the constraint goes on");
                    prop_assert!(forced <= drafts.len() && drafts.len() <= MOST);
                    for (draft, mask) in drafts[..forced].iter().zip(&masks[at..]) {
                        prop_assert_eq!(std::slice::from_ref(draft), &mask[..], "form {}, behind {:?}", number, &said[..at]);
                    }
                }
                let made = walked(&mut *rules, &drafts);
                for (nth, made) in made.iter().enumerate() {
                    prop_assert_eq!(&masks[at + nth], made, "place {} behind {:?}", nth, &said[..at]);
                    if said.get(at + nth) != drafts.get(nth) || at + nth + 1 == masks.len() {
                        break;
                    }
                }
                // A mask is missing only after a draft that is not allowed.
                if let Some(draft) = drafts.get(made.len() - 1) {
                    let same = said[at..].iter().zip(&drafts).take_while(|(a, b)| a == b).count();
                    let mask = masks.get(at + made.len() - 1).filter(|_| same + 1 >= made.len());
                    prop_assert!(mask.is_none_or(|mask| !mask.contains(draft)), "{draft}");
                }
                if said[at] != EOS {
                    rules.accept(said[at]).expect("the token is allowed");
                }
            }
        }
    }
}

#[test]
fn what_is_certain_is_drafted_and_what_cannot_come_is_not() {
    let bench = Bench::new(GrammarConfig::default());
    let text = r#"{"name":"anna","size":7}"#;
    let schema = r#"{"type": "object", "properties": {"name": {"const": "anna"}, "size": {"type": "integer"}},
        "required": ["name", "size"], "additionalProperties": false}"#;
    let mut rules = bench.form(Form::JsonSchema(schema.into()));
    let ids = bench.tokenizer.encode_as_text(text).expect("tokens");
    let (mut forced, mut most) = (0, 0);
    for (at, &id) in ids.iter().enumerate() {
        let mut drafts = Vec::new();
        let count = rules.restrict(MOST, &mut drafts).expect("the constraint goes on");
        assert_eq!(count, drafts.len());
        let equal = drafts.iter().zip(&ids[at..]).take_while(|(one, other)| one == other).count();
        (forced, most) = (forced + usize::from(equal > 0), most.max(equal));
        // After the first tokens, `{` is not allowed, so the second draft is wrong.
        let mut wrong = vec![id, bench.tokenizer.encode_as_text("{").expect("tokens")[0]];
        let count = rules.restrict(MOST, &mut wrong).expect("the constraint goes on");
        assert!(at < 2 || count > 0 || wrong == [id], "{wrong:?}");
        rules.accept(id).expect("the id is allowed");
    }
    assert!(forced >= 4 && most >= 2, "{forced} of {}, {most} at once", ids.len());
    let markers = Markers { open: [1].into(), close: [2, 3, 2].into() };
    let reasoning = Reasoning { markers, start: Start::Inside, budget: Some(0) };
    let mut thinks = bench.rules(WantedForm { reasoning: Some(reasoning), ..wanted(None) });
    let mut drafts = vec![9, 9];
    assert_eq!(thinks.restrict(MOST, &mut drafts).expect("the constraint goes on"), 3);
    assert_eq!(drafts, [2, 3, 2], "the budget is spent");
}
