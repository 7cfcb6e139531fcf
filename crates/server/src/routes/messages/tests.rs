use forebay_dialect::Ids;
use forebay_egress::{Delta, End, EventEncoder, Tally};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::answer::{Blocks, Writer};
use crate::routes::chat::CallIds;
use crate::routes::scripted::{deltas, events, said};

fn writer() -> Writer {
    let ids = CallIds { response: "msg_1".into(), form: Ids::Free };
    Writer { id: "msg_1".into(), model: "m".into(), ids }
}

/// Encodes a stream. From the delta with index `moved` on, another server continues it.
fn streamed(all: Vec<Delta>, moved: usize) -> Vec<Value> {
    let (mut blocks, tally) = (Blocks::new(writer()), Tally::new([(1, 1)].into_iter()));
    let (mut out, mut before) = (Vec::new(), Delta::default());
    for (number, mut delta) in all.into_iter().enumerate() {
        if number == moved {
            blocks = Blocks::new(writer());
            blocks.resume(&before);
        }
        let mut copy = delta.clone();
        blocks.delta(0, &mut delta, &tally, &mut out).expect("JSON");
        before.merge(&mut copy);
    }
    blocks.end(&tally, &mut out).expect("JSON");
    events(&out)
}

/// Assembles the blocks as a client does.
fn put_together(events: &[Value]) -> Vec<Value> {
    let (mut blocks, mut inputs): (Vec<Value>, Vec<String>) = (Vec::new(), Vec::new());
    for event in events {
        match event["type"].as_str().expect("a type") {
            "content_block_start" => {
                assert_eq!(event["index"], blocks.len());
                blocks.push(event["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                assert_eq!(event["index"], blocks.len() - 1);
                let (block, delta) = (blocks.last_mut().expect("a block"), &event["delta"]);
                let mut add = |field: &str, from: &str| {
                    let text = block[field].as_str().expect("text").to_owned();
                    block[field] = json!(text + delta[from].as_str().expect("text"));
                };
                match delta["type"].as_str().expect("a type") {
                    "text_delta" => add("text", "text"),
                    "thinking_delta" => add("thinking", "thinking"),
                    "signature_delta" => add("signature", "signature"),
                    "input_json_delta" => {
                        let piece = delta["partial_json"].as_str().expect("text");
                        inputs.last_mut().expect("a block").push_str(piece);
                    }
                    other => panic!("{other}"),
                }
            }
            _ => {}
        }
    }
    for (block, input) in blocks.iter_mut().zip(inputs) {
        if block["type"] == "tool_use" && !input.is_empty() {
            let read = serde_json::from_str(&input).ok().filter(Value::is_object);
            block["input"] = read.unwrap_or_else(|| json!({"INVALID_JSON": input}));
        }
    }
    blocks
}

proptest! {
    #[test]
    fn whole_messages_and_streams_carry_the_same_blocks(
        all in prop::collection::vec(said(), 0..6),
        cuts in prop::collection::vec(1..60_usize, 0..30),
        cut_off in any::<bool>(),
        moved in 0..40_usize,
    ) {
        let end = if cut_off { End::Length } else { End::Eos(2) };
        let tally = Tally::new([(1, 1)].into_iter());
        let whole = writer().message(&deltas(&all, &[], &end).remove(0), &tally);
        let events = streamed(deltas(&all, &cuts, &end), moved);
        prop_assert_eq!(&json!(put_together(&events)), &whole["content"]);
        let ends: Vec<&Value> = events.iter().filter(|e| e["type"] == "message_delta").collect();
        prop_assert_eq!(ends.len(), 1);
        prop_assert_eq!(&ends[0]["delta"]["stop_reason"], &whole["stop_reason"]);
        prop_assert_eq!(&events.last().expect("an event")["type"], "message_stop");
        let begun = events.iter().filter(|event| event["type"] == "message_start").count();
        prop_assert_eq!(begun, 1);
    }
}
