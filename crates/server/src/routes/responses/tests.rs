use std::collections::HashMap;

use forebay_api::{CUSTOM_INPUT, ToolKind};
use forebay_dialect::Ids;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Head};
use crate::delta::{Delta, End};
use crate::outlet::Encoder;
use crate::routes::chat::CallIds;
use crate::tally::Tally;

/// One thing that a model says.
#[derive(Debug, Clone)]
enum Said {
    Content(String),
    Reasoning(String),
    Call { custom: bool, arguments: String },
}

fn said() -> impl Strategy<Value = Said> {
    let text = "[a-z\"\\\\\né😀]{1,12}";
    prop_oneof![
        text.prop_map(Said::Content),
        text.prop_map(Said::Reasoning),
        text.prop_map(|text| Said::Call {
            custom: true,
            arguments: json!({CUSTOM_INPUT: text}).to_string()
        }),
        (any::<bool>(), text).prop_map(|(custom, arguments)| Said::Call { custom, arguments }),
    ]
}

fn answer() -> Answer {
    let ids = CallIds { response: "resp_1".into(), form: Ids::Free };
    let kinds = HashMap::from([("edit".to_owned(), ToolKind::Custom)]);
    let (id, model) = ("resp_1".to_owned(), "m".to_owned());
    Answer::new(Head { id, created: 7, model, echo: Map::new(), ids, kinds, sealed: true }, None)
}

/// The deltas of what was said, cut where `cuts` says; each character is a token.
fn deltas(all: &[Said], cuts: &[usize], end: &End) -> Vec<Delta> {
    let (mut deltas, mut delta, mut at, mut calls) = (Vec::new(), Delta::default(), 0, 0);
    let mut tick = |delta: &mut Delta| {
        delta.tokens.push(1);
        at += 1;
        if cuts.contains(&at) {
            deltas.push(std::mem::take(delta));
        }
    };
    for said in all {
        let text = match said {
            Said::Content(text) | Said::Reasoning(text) => text,
            Said::Call { custom, arguments } => {
                let name = if *custom { "edit" } else { "list" };
                delta.parts.call(calls, name, None);
                calls += 1;
                tick(&mut delta);
                arguments
            }
        };
        for c in text.chars() {
            let c = c.to_string();
            match said {
                Said::Content(_) => delta.parts.content(&c),
                Said::Reasoning(_) => delta.parts.reasoning(&c),
                Said::Call { .. } => delta.parts.arguments(calls - 1, &c),
            }
            tick(&mut delta);
        }
    }
    delta.end = Some(end.clone());
    deltas.push(delta);
    deltas
}

fn events(out: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(out).expect("text");
    let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The events of a stream. From delta number `moved` on, another brain goes on with it.
fn streamed(all: Vec<Delta>, moved: usize) -> Vec<Value> {
    let (mut answer_, tally) = (answer(), Tally::new([(1, 1)].into_iter()));
    let (mut out, mut before) = (Vec::new(), Delta::default());
    for (number, mut delta) in all.into_iter().enumerate() {
        if number == moved {
            answer_ = answer();
            answer_.resume(&before);
        }
        let mut copy = delta.clone();
        answer_.delta(0, &mut delta, &tally, &mut out).expect("JSON");
        before.merge(&mut copy);
    }
    answer_.end(&tally, &mut out).expect("JSON");
    events(&out)
}

proptest! {
    #[test]
    fn whole_answers_and_streams_carry_the_same_items(
        all in prop::collection::vec(said(), 0..6),
        cuts in prop::collection::vec(1..60_usize, 0..30),
        cut_off in any::<bool>(),
        moved in 0..40_usize,
    ) {
        let end = if cut_off { End::Length } else { End::Eos(2) };
        let tally = Tally::new([(1, 1)].into_iter());
        let one = deltas(&all, &[], &end).remove(0);
        let whole = answer().whole(&one, &tally).expect("JSON");
        let events = streamed(deltas(&all, &cuts, &end), moved);

        let last = events.last().expect("an event");
        prop_assert_eq!(&last["response"]["output"], &whole["output"]);
        prop_assert_eq!(&last["response"]["status"], &whole["status"]);
        let numbers: Vec<u64> =
            events.iter().map(|event| event["sequence_number"].as_u64().expect("a number")).collect();
        prop_assert!(numbers.is_sorted_by(|a, b| a < b), "{:?}", numbers);

        // What a client puts together of the pieces is that, too.
        let mut items: Vec<Value> = Vec::new();
        let mut texts: Vec<String> = Vec::new();
        for event in &events {
            let kind = event["type"].as_str().expect("a type");
            if kind == "response.output_item.added" {
                prop_assert_eq!(&event["output_index"], items.len());
                items.push(Value::Null);
                texts.push(String::new());
            } else if kind.ends_with(".delta") {
                texts.last_mut().expect("an item").push_str(event["delta"].as_str().expect("text"));
            } else if kind == "response.output_item.done" {
                *items.last_mut().expect("an item") = event["item"].clone();
            }
        }
        prop_assert_eq!(&json!(items), &whole["output"]);
        for (item, text) in items.iter().zip(&texts) {
            let own = ["arguments", "input"].iter().find_map(|name| item[name].as_str());
            let own = own.or_else(|| item["content"][0]["text"].as_str()).expect("a text");
            // What is no text of a custom tool in the end was not known to be none before.
            let is_custom = item["type"] == "custom_tool_call";
            prop_assert!(own == text || is_custom && own.ends_with(text.as_str()), "{own:?} {text:?}");
        }
    }
}
