//! Scripted model outputs, for tests of response formats.

use forebay_api::CUSTOM_INPUT;
use forebay_egress::{Delta, End};
use proptest::prelude::*;
use serde_json::{Value, json};

/// An item of a scripted output.
#[derive(Debug, Clone)]
pub(crate) enum Said {
    Content(String),
    Reasoning(String),
    Call { custom: bool, arguments: String },
}

/// Generates any item.
pub(crate) fn said() -> impl Strategy<Value = Said> {
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

/// Converts `all` to deltas, cut at the tokens `cuts`. Each character is a token.
pub(crate) fn deltas(all: &[Said], cuts: &[usize], end: &End) -> Vec<Delta> {
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

/// Parses the data of events.
pub(crate) fn events(out: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(out).expect("text");
    let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
}
