use std::path::PathBuf;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::Measure;
use crate::Tokenizer;

const NAMES: [&str; 6] =
    ["byte_level", "byte_fallback", "unigram", "wordpiece", "word_level", "suffix_bpe"];

struct Loaded {
    name: &'static str,
    tokenizer: Tokenizer,
}

/// Tokenizers of all kinds, including some that compose text, drop words or other text, or absorb
/// spaces around tokens.
static LOADED: LazyLock<Vec<Loaded>> = LazyLock::new(|| {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let read = |name: &str| -> serde_json::Value {
        let json = std::fs::read(folder.join(name)).expect("test data");
        serde_json::from_slice(&json).expect("JSON")
    };
    let mut files: Vec<(&str, serde_json::Value)> =
        NAMES.map(|name| (name, read(&format!("tokenizers/{name}.json")))).into();
    files.push(("tiny_llama", read("tiny-llama-tokenizer.json")));
    let byte_level = || read("tokenizers/byte_level.json");
    let mut composes = byte_level();
    composes["normalizer"] = serde_json::json!({"type": "NFC"});
    files.push(("composes", composes));
    let mut strips = byte_level();
    for token in strips["added_tokens"].as_array_mut().expect("a list") {
        token["lstrip"] = true.into();
        token["rstrip"] = true.into();
    }
    files.push(("strips", strips));
    let mut drops = byte_level();
    drops["normalizer"] =
        serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": ""});
    files.push(("drops", drops));
    let mut words = read("tokenizers/wordpiece.json");
    let tokens = words["added_tokens"].as_array_mut().expect("a list");
    tokens.retain(|token| !token["content"].as_str().is_some_and(|text| text.contains(' ')));
    files.push(("words", words));
    files
        .into_iter()
        .map(|(name, file)| {
            let json = file.to_string();
            Loaded { name, tokenizer: Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer") }
        })
        .collect()
});

fn of(name: &str) -> &'static Tokenizer {
    let loaded = LOADED.iter().find(|loaded| loaded.name == name);
    &loaded.expect("a tokenizer of this name").tokenizer
}

#[test]
fn each_kind_of_tokenizer_is_known() {
    let kind = |name: &str| match of(name).measure() {
        Measure::Bytes { composes: false, .. } => "bytes",
        Measure::Bytes { composes: true, .. } => "composed bytes",
        Measure::Known { .. } => "known",
        Measure::Words => "words",
        Measure::Unknown => "unknown",
    };
    let expected = [
        ("byte_level", "bytes"),
        ("byte_fallback", "bytes"),
        ("tiny_llama", "bytes"),
        ("composes", "composed bytes"),
        ("strips", "bytes"),
        ("unigram", "known"),
        ("words", "words"),
        // An added token that contains spaces is several words, but only one token.
        ("wordpiece", "unknown"),
        ("suffix_bpe", "unknown"),
        ("drops", "unknown"),
    ];
    for (name, measure) in expected {
        assert_eq!(kind(name), measure, "{name}");
    }
}

#[test]
fn long_texts_are_measured_without_encoding() {
    for name in ["byte_level", "byte_fallback", "tiny_llama", "composes", "strips"] {
        assert!(of(name).fewest_ids(&"a".repeat(10_000)) >= 20, "{name}");
    }
    assert_eq!(of("words").fewest_ids(&"a b ".repeat(50)), 100);
    let letters: String = ('a'..='z').chain('A'..='Z').chain('0'..='9').collect();
    assert!(of("unigram").fewest_ids(&letters.repeat(100)) >= 1);
    assert_eq!(of("drops").fewest_ids(&"a".repeat(1000)), 0);
}

fn pieces() -> impl Strategy<Value = String> {
    let some = prop_oneof![
        any::<char>().prop_map(String::from),
        "[ -~]{1,20}",
        "[a-c ]{1,40}",
        prop::sample::select(vec![
            "<|im_start|>",
            "<s>",
            "<tool\u{2581}call>",
            " spaced out ",
            "\u{120}odd",
            "\u{2581}",
            "    ",
            "\n\n\t",
            "e\u{301}",
            "\u{1fbe}\u{308}\u{301}",
            "\u{212b}\u{301}",
            "\u{212a}",
            "\u{1fef}",
            "\u{1112}\u{1161}\u{11ab}",
            "\u{200b}\u{c}\u{0}",
            "\u{65e5}\u{672c}\u{8a9e}",
            "[UNK]",
        ])
        .prop_map(str::to_owned),
    ];
    let repeated = (some, 1..30_usize).prop_map(|(piece, times)| piece.repeat(times));
    prop::collection::vec(repeated, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// The lower bound never exceeds the number of ids, so no text that fits is rejected.
    #[test]
    fn no_encoding_has_fewer_ids(text in pieces()) {
        for Loaded { name, tokenizer } in LOADED.iter() {
            let Ok(ids) = tokenizer.encode(&text, false) else { continue };
            let fewest = tokenizer.fewest_ids(&text);
            prop_assert!(fewest <= ids.len(), "{name}: {fewest} > {} of {text:?}", ids.len());
        }
    }
}

#[test]
fn what_is_composed_is_at_least_a_quarter() {
    // NFC composes many of these characters with the marks after them, or replaces them.
    let composes = of("composes");
    let ranges = [0xc0..0x400, 0x1e00..0x2000, 0x2100..0x2130, 0xac00..0xac40, 0x2_f800..0x2_f810];
    for c in ranges.into_iter().flatten().filter_map(char::from_u32) {
        for tail in ["", "\u{301}", "\u{308}\u{301}", "\u{345}", "\u{313}\u{300}\u{345}"] {
            let text = format!("{c}{tail}");
            let count = composes.encode(&text.repeat(8), false).expect("ids").len();
            let fewest = composes.fewest_ids(&text.repeat(8));
            assert!(fewest <= count, "{text:?}: {fewest} > {count}");
        }
    }
}
