//! Runs the JSON Schema Test Suite: nothing crashes, and every accepted instance is valid.

use crate::support::{Bench, wanted};
use forebay_grammar::{Form, GrammarConfig, GrammarError};
use serde_json::Value;

const DRAFTS: [(&str, &str); 2] = [
    (
        "http://json-schema.org/draft-07/schema#",
        include_str!("../data/json-schema-test-suite/draft7.jsonl"),
    ),
    (
        "https://json-schema.org/draft/2020-12/schema",
        include_str!("../data/json-schema-test-suite/draft2020-12.jsonl"),
    ),
];

/// True for cases on which validators disagree: whether the encoding of a string is checked or is
/// only an annotation, and whether a byte order mark is white space.
fn excused(group: &Value, instance: &Value) -> bool {
    group["file"] == "optional/content" || instance == "\u{feff}"
}

#[test]
fn no_invalid_instance_is_an_answer() {
    let bench = Bench::new(GrammarConfig::default());
    let (mut schemas, mut compiled, mut kept, mut wrong) = (0, 0, 0, Vec::new());
    for (draft, groups) in DRAFTS {
        for line in groups.lines() {
            let mut group: Value = serde_json::from_str(line).unwrap();
            if let Some(schema) = group["schema"].as_object_mut() {
                schema.entry("$schema").or_insert_with(|| draft.into());
            }
            schemas += 1;
            let form = Form::JsonSchema(group["schema"].to_string().into());
            match bench.constraints(wanted(Some(form.clone().into()))) {
                Ok(_) => compiled += 1,
                Err(GrammarError::Invalid { .. }) => continue,
                Err(other) => panic!("{other:?}: {line}"),
            }
            for test in group["tests"].as_array().unwrap() {
                let fits = bench.fits(bench.form(form.clone()), &test[0].to_string());
                kept += u32::from(fits && test[1] == true);
                if fits && test[1] == false && !excused(&group, &test[0]) {
                    let (file, about) = (&group["file"], &group["description"]);
                    wrong.push(format!("{file} {about}: {} {}", group["schema"], test[0]));
                }
            }
        }
    }
    println!(
        "{schemas} schemas, {compiled} compiled, {kept} valid instances taken, {} others",
        wrong.len()
    );
    assert!(schemas >= 500 && compiled >= 200, "{compiled} of {schemas}");
    assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n"));
}
