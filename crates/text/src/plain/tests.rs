use std::ops::Range;
use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::Plain;
use crate::error::TextError;

const NAMES: [&str; 6] =
    ["byte_level", "byte_fallback", "unigram", "wordpiece", "word_level", "suffix_bpe"];

struct Loaded {
    name: String,
    inner: tokenizers::Tokenizer,
    /// The same tokenizer, with all special tokens switched off.
    without: tokenizers::Tokenizer,
    plain: Plain,
}

static LOADED: LazyLock<Vec<Loaded>> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut all = Vec::new();
    let paths = NAMES.map(|name| format!("tokenizers/{name}.json"));
    for path in paths.into_iter().chain(["tiny-llama-tokenizer.json".to_owned()]) {
        let json = std::fs::read(folder.join(&path)).expect("test data");
        let file: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
        let mut variants = vec![(path.clone(), file.clone())];
        for flag in ["normalized", "lstrip", "rstrip", "single_word"] {
            let mut other = file.clone();
            for token in other["added_tokens"].as_array_mut().expect("a list") {
                token[flag] = json!(true);
            }
            variants.push((format!("{path} {flag}"), other));
        }
        for (name, file) in variants {
            let inner = tokenizers::Tokenizer::from_bytes(file.to_string()).expect("a tokenizer");
            let mut without = inner.clone();
            without.set_encode_special_tokens(true);
            let plain = Plain::new(&inner).expect("tokens");
            all.push(Loaded { name, inner, without, plain });
        }
    }
    all
});

fn reference(tokenizer: &tokenizers::Tokenizer, text: &str) -> Option<Vec<i32>> {
    let encoding = tokenizer.encode_fast(text, false).ok()?;
    Some(encoding.get_ids().iter().map(|id| id.cast_signed()).collect())
}

fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "[ -~]{0,8}",
        any::<char>().prop_map(String::from),
        prop::sample::select(vec![
            "<|im_start|>",
            "<|im_end|>",
            "<s>",
            "</s>",
            "<s",
            "<think>",
            "[UNK]",
            "[SEP]",
            "[unk]",
            " spaced out ",
            "normal form",
            "  ",
            "\n",
            "a",
            "e\u{301}",
            "<\u{ff5c}end\u{ff5c}>",
        ])
        .prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn without_places_it_is_the_library(text in texts()) {
        for Loaded { name, inner, plain, .. } in LOADED.iter() {
            let ours = plain.encode(inner, &text, &[], &|_| true).ok();
            prop_assert_eq!(ours, reference(inner, &text), "{} {:?}", name, text);
        }
    }

    #[test]
    fn with_everything_it_is_the_library_without_special_tokens(text in texts()) {
        for Loaded { name, inner, without, plain } in LOADED.iter() {
            let all: Range<usize> = 0..text.len();
            let ours = plain.encode(inner, &text, &[all], &|_| true).ok();
            prop_assert_eq!(ours, reference(without, &text), "{} {:?}", name, text);
        }
    }

    /// The text between two special tokens of the template is encoded as if special tokens were
    /// switched off.
    #[test]
    fn sections_are_as_by_themselves(texts in prop::collection::vec(texts(), 1..4)) {
        let Some(Loaded { inner, without, plain, .. }) =
            LOADED.iter().find(|loaded| loaded.name == "tiny-llama-tokenizer.json")
        else {
            return Err(TestCaseError::fail("no such tokenizer"));
        };
        let (mut text, mut ranges, mut expected) = (String::new(), Vec::new(), Vec::new());
        for section in &texts {
            text.push_str("<|im_start|>");
            expected.push(1);
            if !section.is_empty() {
                ranges.push(text.len()..text.len() + section.len());
            }
            text.push_str(section);
            expected.extend(reference(without, section).unwrap_or_default());
        }
        let ours = plain.encode(inner, &text, &ranges, &|_| true);
        prop_assert_eq!(ours, Ok(expected), "{:?}", text);
    }
}

#[test]
fn it_stops_before_the_next_word() {
    let Loaded { inner, plain, .. } = &LOADED[0];
    let text = "word and word ".repeat(1000);
    let asked = std::cell::Cell::new(0);
    let go_on = |ids: usize| {
        asked.set(asked.get() + 1);
        ids < 10
    };
    assert_eq!(plain.encode(inner, &text, &[], &go_on), Err(TextError::Closed));
    assert!(asked.get() < 20, "{} words", asked.get());
}

#[test]
fn spelled_tokens_are_found_where_clients_wrote() {
    let Some(loaded) = LOADED.iter().find(|loaded| loaded.name == "tiny-llama-tokenizer.json")
    else {
        panic!("no such tokenizer")
    };
    let text = "<|im_start|>a<|im_end|><|im_end|>";
    let places = |client: &[(usize, usize)]| {
        let client: Vec<Range<usize>> = client.iter().map(|&(from, to)| from..to).collect();
        let spelled = loaded.plain.spelled(text, &client);
        spelled.into_iter().map(|place| (place.start, place.end)).collect::<Vec<_>>()
    };
    assert!(places(&[]).is_empty());
    assert_eq!(places(&[(12, 14)]), [(13, 23)], "an overlap is enough");
    assert_eq!(places(&[(13, 23)]), [(13, 23)]);
    assert_eq!(places(&[(0, 1), (22, 24)]), [(0, 12), (13, 23), (23, 33)]);
}
