//! Tests of whole datasets, from the flags to the requests.

use std::collections::HashSet;
use std::io::Write as _;
use std::path::PathBuf;

use clap::Parser;
use forebay_text::Tokenizer;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use super::*;
use crate::{Part, Prompt};

/// Tokenizers of all kinds. Most tests use `tiny_llama`, whose vocabulary contains English words.
pub(crate) const TOKENIZERS: [&str; 7] = [
    "tiny_llama",
    "byte_level",
    "byte_fallback",
    "unigram",
    "wordpiece",
    "word_level",
    "suffix_bpe",
];

/// Reads a `tokenizer.json` of the text crate's tests.
pub(crate) fn json(name: &str) -> Value {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../text/tests/data");
    let path = match name {
        "tiny_llama" => data.join("tiny-llama-tokenizer.json"),
        name => data.join(format!("tokenizers/{name}.json")),
    };
    serde_json::from_slice(&std::fs::read(path).expect("test data")).expect("JSON")
}

pub(crate) fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_bytes(json(name).to_string().as_bytes()).expect("a tokenizer")
}

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    dataset: DatasetArgs,
}

fn parse(line: &str) -> Result<DatasetArgs, clap::Error> {
    Line::try_parse_from(std::iter::once("bench").chain(line.split_whitespace()))
        .map(|line| line.dataset)
}

fn try_load(line: &str, seed: u64) -> anyhow::Result<Vec<WorkItem>> {
    load(&parse(line).expect("flags"), seed, Some(&tokenizer("tiny_llama")))
}

fn made(line: &str) -> Vec<WorkItem> {
    try_load(line, 1).expect(line)
}

fn why_not(line: &str) -> String {
    format!("{:#}", try_load(line, 1).expect_err(line))
}

fn text(item: &WorkItem) -> &str {
    match &item.prompt {
        Prompt::Text(text) => text,
        other => panic!("not a text: {other:?}"),
    }
}

fn ids(item: &WorkItem) -> &[u32] {
    match &item.prompt {
        Prompt::Tokens(ids) => ids,
        other => panic!("not ids: {other:?}"),
    }
}

fn count(text: &str) -> u32 {
    tokenizer("tiny_llama").encode(text, false).expect("tokens").len() as u32
}

/// A temporary file that is deleted at the end of a test.
fn file(content: &str) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(content.as_bytes()).expect("a file");
    file
}

fn lines(rows: &[Value]) -> NamedTempFile {
    file(&rows.iter().map(|row| format!("{row}\n")).collect::<String>())
}

/// Ten conversations. The prompts repeat a word ten to nineteen times, and the answers are twice as
/// long.
fn conversations() -> NamedTempFile {
    let turn = |words: usize| json!({"from": "human", "value": vec!["water"; words].join(" ")});
    let record = |index: usize| json!({"conversations": [turn(10 + index), turn(20 + 2 * index)]});
    file(&json!((0..10).map(record).collect::<Vec<_>>()).to_string())
}

#[test]
fn random_prompts_have_the_wanted_lengths_exactly() {
    let items = made("--num-prompts 20 --input-len 100 --output-len 7 --random-range-ratio 1");
    assert_eq!(items.len(), 20);
    for item in &items {
        assert_eq!((item.text_tokens, item.output_tokens), (100, 7));
        assert_eq!(count(text(item)), 100);
        assert_eq!(item.arrival, None);
    }
    assert_eq!(items.iter().map(text).collect::<HashSet<_>>().len(), 20);
}

#[test]
fn ranged_lengths_are_uniform_between_their_ends() {
    let line = "--num-prompts 4000 --random-input 8 --random-output 4";
    let items = made(&format!("{line} --random-range-ratio 0.5"));
    let share =
        |tokens| items.iter().filter(|item| item.text_tokens == tokens).count() as f64 / 4000.0;
    for tokens in 4..=8 {
        assert!((share(tokens) - 0.2).abs() < 0.03, "{tokens}: {}", share(tokens));
    }
    assert!(items.iter().all(|item| (4..=8).contains(&item.text_tokens)));
    assert!(items.iter().all(|item| (2..=4).contains(&item.output_tokens)));
    let from_one = made(line);
    assert_eq!(from_one.iter().map(|item| item.text_tokens).min(), Some(1));
    assert_eq!(from_one.iter().map(|item| item.output_tokens).min(), Some(1));
}

#[test]
fn a_seed_gives_the_same_requests() {
    let sharegpt = conversations();
    let sharegpt = sharegpt.path().display();
    for line in [
        "--num-prompts 5 --input-len 30".to_owned(),
        format!("--num-prompts 5 --input-len 30 --dataset-path {sharegpt}"),
        format!("--dataset-name sharegpt --num-prompts 5 --dataset-path {sharegpt}"),
        "--dataset-name image --image-resolution 8x8 --num-prompts 2 --input-len 5".to_owned(),
        "--dataset-name embeddings --num-prompts 3 --input-len 30".to_owned(),
        "--dataset-name shared-prefix --gsp-num-groups 2 --gsp-prompts-per-group 3".to_owned(),
    ] {
        let once = try_load(&line, 1).expect("items");
        assert_eq!(once, try_load(&line, 1).expect("items"), "{line}");
        assert_ne!(once, try_load(&line, 2).expect("items"), "{line}");
    }
}

#[test]
fn more_requests_leave_the_first_ones_as_they_were() {
    let few = made("--num-prompts 3 --input-len 30");
    let many = made("--num-prompts 9 --input-len 30");
    assert_eq!(few[..], many[..3]);
}

#[test]
fn ids_are_those_of_the_text() {
    let line = "--num-prompts 3 --input-len 30";
    let tokenizer = tokenizer("tiny_llama");
    for (one, other) in made(line).iter().zip(made(&format!("{line} --tokenize-prompt"))) {
        let encoded = tokenizer.encode(text(one), false).expect("tokens");
        let encoded: Vec<u32> = encoded.into_iter().map(i32::cast_unsigned).collect();
        assert_eq!(ids(&other), encoded);
    }
}

#[test]
fn random_prompts_of_a_file_are_its_text_unless_ids_are_wanted() {
    let sharegpt = conversations();
    let line = "--num-prompts 12 --input-len 40 --random-range-ratio 1";
    for item in made(&format!("{line} --dataset-path {}", sharegpt.path().display())) {
        assert!(text(&item).starts_with("water water water"), "{item:?}");
        assert_eq!((item.text_tokens, count(text(&item))), (40, 40));
    }
    let ids = made(&format!("{line} --dataset-name random-ids"));
    assert_eq!(ids, made(line));
}

#[test]
fn unique_requests_are_repeated_in_turn() {
    let items = made("--num-prompts 10 --unique-requests 4 --input-len 20");
    assert_eq!(items.len(), 10);
    assert_eq!(items.iter().map(text).collect::<HashSet<_>>().len(), 4);
    assert_eq!(items[..4], items[4..8]);
    assert_eq!(made("--num-prompts 3 --unique-requests 9 --input-len 20").len(), 3);
}

#[test]
fn sharegpt_has_the_lengths_of_its_conversations() {
    let sharegpt = conversations();
    let path = sharegpt.path().display();
    let items = made(&format!("--dataset-name sharegpt --num-prompts 10 --dataset-path {path}"));
    let words = |item: &WorkItem| text(item).split_whitespace().count();
    for item in &items {
        assert_eq!(item.text_tokens, count(text(item)));
        let answer = vec!["water"; 2 * words(item)].join(" ");
        assert_eq!(item.output_tokens, count(&answer));
    }
    let mut words: Vec<usize> = items.iter().map(words).collect();
    words.sort_unstable();
    assert_eq!(words, (10..20).collect::<Vec<_>>());

    let line = format!("--dataset-name sharegpt --num-prompts 25 --dataset-path {path}");
    let fixed = made(&format!("{line} --sharegpt-output-len 3"));
    assert_eq!(fixed.len(), 25);
    assert!(fixed.iter().all(|item| item.output_tokens == 3));
    assert!(why_not(&format!("{line} --sharegpt-context-len 5")).contains("lengths"));
}

#[test]
fn images_come_before_their_text() {
    let line = "--dataset-name image --image-count 2 --image-resolution 8x8 --image-format png";
    let line = format!("{line} --num-prompts 3 --input-len 12 --random-range-ratio 1");
    for item in made(&line) {
        let Prompt::Parts(parts) = &item.prompt else { panic!("{item:?}") };
        let [Part::Image(one), Part::Image(other), Part::Text(text)] = &parts[..] else {
            panic!("{parts:?}")
        };
        assert_ne!(one, other);
        assert_eq!((item.text_tokens, count(text)), (12, 12));
    }
}

#[test]
fn embeddings_have_several_inputs_and_nothing_to_generate() {
    let inputs = |item: &WorkItem| match &item.prompt {
        Prompt::Inputs(inputs) => inputs.clone(),
        other => panic!("{other:?}"),
    };
    let line = "--dataset-name embeddings --num-prompts 4 --embedding-inputs 3";
    let sharegpt = conversations();
    let from_file = format!("{line} --dataset-path {}", sharegpt.path().display());
    for line in [format!("{line} --input-len 20"), from_file.clone()] {
        let items = made(&line);
        assert_eq!(items.len(), 4);
        let mut texts = HashSet::new();
        for item in &items {
            assert_eq!(item.output_tokens, 0);
            assert_eq!(item.text_tokens, inputs(item).iter().map(|text| count(text)).sum::<u32>());
            assert_eq!(inputs(item).len(), 3);
            texts.extend(inputs(item));
        }
        // The file contains only ten prompts.
        assert_eq!(texts.len(), if line == from_file { 10 } else { 12 });
    }
}

#[test]
fn groups_share_their_prefix() {
    let line =
        "--dataset-name generated-shared-prefix --gsp-num-groups 3 --gsp-prompts-per-group 4";
    let line = format!("{line} --gsp-system-prompt-len 50 --gsp-question-len 10");
    let items = made(&format!("{line} --gsp-output-len 6 --tokenize-prompt"));
    assert_eq!(items.len(), 12);
    assert!(items.iter().all(|item| item.output_tokens == 6 && item.text_tokens == 60));
    let prefixes: Vec<&[u32]> = items.iter().map(|item| &ids(item)[..50]).collect();
    assert_eq!(prefixes.iter().collect::<HashSet<_>>().len(), 3);
    for prefix in &prefixes {
        assert_eq!(prefixes.iter().filter(|other| *other == prefix).count(), 4);
    }
    assert_eq!(items.iter().map(ids).collect::<HashSet<_>>().len(), 12);
    assert!(!prefixes.chunks(4).all(|group| group.iter().all(|prefix| prefix == &group[0])));
    assert_eq!(made(&format!("{line} --num-prompts 5")).len(), 5);
    assert_eq!(made(&format!("{line} --num-prompts 20")).len(), 20);
}

fn trace() -> NamedTempFile {
    let row = |time: f64, input: u32, hashes: &[u64]| {
        json!({
            "timestamp": time, "input_length": input, "output_length": 9, "hash_ids": hashes,
        })
    };
    lines(&[
        row(1000.0, 1100, &[5, 6, 7]),
        row(1500.0, 1536, &[5, 6, 8]),
        row(4000.0, 512, &[9]),
        row(4000.0, 30, &[]),
        row(4001.0, 30, &[]),
    ])
}

#[test]
fn equal_hash_ids_of_a_trace_are_equal_tokens() {
    let trace = trace();
    let line = format!("--dataset-name mooncake --dataset-path {}", trace.path().display());
    let items = made(&format!("{line} --tokenize-prompt"));
    let lengths: Vec<usize> = items.iter().map(|item| ids(item).len()).collect();
    assert_eq!(lengths, [1100, 1536, 512, 30, 30]);
    assert_eq!(ids(&items[0])[..1024], ids(&items[1])[..1024]);
    assert_ne!(ids(&items[0])[1024..], ids(&items[1])[1024..1100]);
    assert_ne!(ids(&items[0])[..512], ids(&items[2])[..]);
    assert_ne!(ids(&items[3]), ids(&items[4]));
    let arrivals: Vec<f64> =
        items.iter().filter_map(|item| item.arrival).map(|at| at.as_secs_f64()).collect();
    assert_eq!(arrivals, [0.0, 0.5, 3.0, 3.0, 3.001]);
    assert!(items.iter().all(|item| item.output_tokens == 9));

    for (item, length) in made(&line).iter().zip([1100, 1536, 512, 30, 30]) {
        assert_eq!((item.text_tokens, count(text(item))), (length, length));
    }
}

#[test]
fn a_trace_can_be_cut_but_is_not_repeated() {
    let trace = trace();
    let line = format!("--dataset-name trace --dataset-path {}", trace.path().display());
    let items = made(&format!("{line} --trace-max-input-len 600 --num-prompts 3"));
    let lengths: Vec<u32> = items.iter().map(|item| item.text_tokens).collect();
    assert_eq!(lengths, [600, 600, 512]);
    assert_eq!(text(&items[0]), text(&items[1]));
    assert_eq!(made(&format!("{line} --num-prompts 50")).len(), 5);
}

#[test]
fn custom_prompts_come_in_the_order_of_their_file() {
    let rows = [json!({"prompt": "one", "output_tokens": 5}), json!({"prompt": "two two"})];
    let rows = lines(&rows);
    let line = format!("--dataset-name custom --dataset-path {}", rows.path().display());
    let items = made(&line);
    assert_eq!(items.iter().map(text).collect::<Vec<_>>(), ["one", "two two"]);
    assert_eq!(items.iter().map(|item| item.output_tokens).collect::<Vec<_>>(), [5, 256]);
    assert_eq!(items[1].text_tokens, count("two two"));
    let fixed = made(&format!("{line} --custom-output-len 8 --num-prompts 3"));
    assert_eq!(fixed.iter().map(text).collect::<Vec<_>>(), ["one", "two two", "one"]);
    assert!(fixed.iter().all(|item| item.output_tokens == 8));
    assert_eq!(made(&format!("{line} --unique-requests 1 --num-prompts 3")).len(), 3);

    for wrong in [json!({"prompt": ""}), json!({"text": "a"}), json!({"prompt": 5})] {
        let rows = lines(&[json!({"prompt": "a"}), wrong]);
        let path = rows.path().display();
        let why = why_not(&format!("--dataset-name custom --dataset-path {path}"));
        assert!(why.contains("line 2"), "{why}");
    }
    let empty = file("\n");
    let path = empty.path().display();
    assert!(
        why_not(&format!("--dataset-name custom --dataset-path {path}")).contains("no prompts")
    );
}

#[test]
fn flags_without_a_use_are_refused() {
    for (line, why) in [
        ("--dataset-name sharegpt", "needs --dataset-path"),
        ("--dataset-name trace", "needs --dataset-path"),
        ("--dataset-name custom", "needs --dataset-path"),
        ("--dataset-path /nowhere/at-all.json", "at-all.json"),
        ("--dataset-name random-ids --dataset-path x", "reads no --dataset-path"),
        ("--dataset-name shared-prefix --dataset-path x", "reads no --dataset-path"),
        ("--dataset-name image --tokenize-prompt", "sent as text"),
        ("--dataset-name embeddings --tokenize-prompt", "sent as text"),
        ("--dataset-name trace --unique-requests 3 --dataset-path x", "says itself"),
    ] {
        let found = why_not(line);
        assert!(found.contains(why), "{line}: {found}");
    }
    for line in [
        "--dataset-name nothing",
        "--num-prompts 0",
        "--input-len 0",
        "--random-range-ratio 1.5",
        "--random-range-ratio NaN",
        "--image-resolution 0x0",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
    let args = parse("").expect("flags");
    let error = load(&args, 1, None).expect_err("no tokenizer");
    assert!(error.to_string().contains("needs a tokenizer"), "{error}");
}

#[test]
fn every_name_is_typed_as_it_is_shown() {
    use clap::ValueEnum as _;
    for name in DatasetName::value_variants() {
        let typed = name.to_possible_value().expect("a value that can be typed");
        assert_eq!(typed.get_name(), name.name());
    }
}
