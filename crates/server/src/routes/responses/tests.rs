use std::collections::HashMap;

use forebay_api::ToolKind;
use forebay_dialect::Ids;
use forebay_egress::{Delta, End, EventEncoder, Tally};
use forebay_http::{ByteBudget, ClientId};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::answer::{Answer, Head};
use crate::routes::chat::CallIds;
use crate::routes::scripted::{deltas, events, said};

fn answer() -> Answer {
    let ids = CallIds { response: "resp_1".into(), form: Ids::Free };
    let kinds = HashMap::from([("edit".to_owned(), ToolKind::Custom)]);
    let (id, model) = ("resp_1".to_owned(), "m".to_owned());
    Answer::new(
        Head {
            id,
            created: 7,
            model,
            echo: Map::new(),
            ids,
            kinds,
            sealed: true,
            _held: ByteBudget::new(0).open(ClientId(1)),
        },
        None,
    )
}

/// Encodes a stream that another server continues from delta number `moved` on.
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

        // The deltas that a client receives add up to the same items.
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
            // Only the end of a call shows whether its arguments are a custom tool's input. If not,
            // text that was already streamed is a part of them.
            let is_custom = item["type"] == "custom_tool_call";
            prop_assert!(own == text || is_custom && own.ends_with(text.as_str()), "{own:?} {text:?}");
        }
    }
}
