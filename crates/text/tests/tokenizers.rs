//! Compares tokenization and streaming with Hugging Face. `tests/text/make_tokenizer_cases.py`
//! recorded the results of the Python package; property tests compare with the Rust crate that it
//! wraps.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use forebay_text::{Detokenizer, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;

const NAMES: [&str; 7] = [
    "tiny_llama",
    "byte_level",
    "byte_fallback",
    "unigram",
    "wordpiece",
    "word_level",
    "suffix_bpe",
];

/// Tokenizers whose tokens each add fixed bytes to the text. For any ids, the streamed text equals
/// the decoded text.
const BYTE_LEVEL: [&str; 2] = ["tiny_llama", "byte_level"];

struct Loaded {
    name: &'static str,
    ours: Arc<Tokenizer>,
    reference: tokenizers::Tokenizer,
}

static LOADED: LazyLock<Vec<Loaded>> = LazyLock::new(|| {
    let load = |name| {
        let json = std::fs::read(path(name)).expect("test data");
        Loaded {
            name,
            ours: Arc::new(Tokenizer::from_bytes(&json).expect("a tokenizer")),
            reference: tokenizers::Tokenizer::from_bytes(&json).expect("a tokenizer"),
        }
    };
    NAMES.map(load).into()
});

fn data() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn path(name: &str) -> PathBuf {
    match name {
        "tiny_llama" => data().join("tiny-llama-tokenizer.json"),
        name => data().join(format!("tokenizers/{name}.json")),
    }
}

fn ids(value: &Value) -> Vec<i32> {
    serde_json::from_value(value.clone()).expect("ids")
}

fn stream(tokenizer: &Arc<Tokenizer>, ids: &[i32], skip: bool) -> String {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), skip);
    let mut out = String::new();
    for &id in ids {
        detokenizer.push(id, &mut out);
    }
    detokenizer.finish(&mut out);
    out
}

fn cases(name: &str) -> Value {
    let path = data().join(format!("tokenizers/{name}.cases.json"));
    serde_json::from_slice(&std::fs::read(path).expect("test data")).expect("JSON")
}

#[test]
fn texts_as_the_python_package_has_them() {
    for Loaded { name, ours, .. } in LOADED.iter() {
        let cases = cases(name);
        let texts = cases["texts"].as_array().expect("cases");
        assert!(texts.len() > 30);
        for case in texts {
            let text = case["text"].as_str().expect("a text");
            let with_special = ids(&case["ids_with_special"]);
            assert_eq!(ours.encode(text, false), Ok(ids(&case["ids"])), "{name} {text:?}");
            assert_eq!(ours.encode(text, true).as_ref(), Ok(&with_special), "{name} {text:?}");
            for (skip, expected) in [(false, &case["kept"]), (true, &case["skipped"])] {
                let expected = expected.as_str().expect("a text");
                assert_eq!(
                    ours.decode(&with_special, skip).as_deref(),
                    Ok(expected),
                    "{name} {text:?}"
                );
                assert_eq!(
                    stream(ours, &with_special, skip),
                    expected,
                    "{name} {text:?} skip {skip}"
                );
            }
        }
    }
}

#[test]
fn arbitrary_ids_as_the_python_package_has_them() {
    for Loaded { name, ours, .. } in LOADED.iter() {
        for case in cases(name)["arbitrary"].as_array().expect("cases") {
            let list = ids(&case["ids"]);
            for (skip, expected) in [(false, &case["kept"]), (true, &case["skipped"])] {
                let expected = expected.as_str().expect("a text");
                assert_eq!(ours.decode(&list, skip).as_deref(), Ok(expected), "{name} {list:?}");
                // A byte-fallback run that is not UTF-8 may stream differently; see `Detokenizer`.
                if *name != "byte_fallback" || !expected.contains('\u{fffd}') {
                    assert_eq!(stream(ours, &list, skip), expected, "{name} {list:?} skip {skip}");
                }
            }
        }
    }
}

/// Generates any text, and text that tokenizers treat specially.
fn text() -> impl Strategy<Value = String> {
    let special = prop::sample::select(vec![
        "<s>",
        "</s>",
        "<|im_start|>",
        "<｜end｜>",
        "<think>",
        " spaced out ",
        "Ġodd",
        "<0xE2>",
        "▁",
        "##",
        " ",
        "\n",
        "normal form",
        "\u{fffd}",
        "é\u{301}",
        "👩‍👩‍👧",
        "the dog",
        "'s",
        ".",
        "\0",
    ]);
    let any = any::<String>().boxed();
    let piece = prop_oneof![any.clone(), special.prop_map(str::to_owned).boxed()];
    prop_oneof![any, prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_text_streams_as_it_decodes(text in text(), add_special: bool, skip: bool) {
        for Loaded { name, ours, reference } in LOADED.iter() {
            let expected: Vec<u32> =
                reference.encode(text.as_str(), add_special).expect("ids").get_ids().to_vec();
            let ids = ours.encode(&text, add_special).expect("ids");
            prop_assert_eq!(ids.iter().map(|id| id.cast_unsigned()).collect::<Vec<_>>(), expected.clone());
            let decoded = reference.decode(&expected, skip).expect("text");
            prop_assert_eq!(ours.decode(&ids, skip), Ok(decoded.clone()));
            prop_assert_eq!(stream(ours, &ids, skip), decoded, "{}", name);
        }
    }

    #[test]
    fn byte_level_streams_any_ids_and_holds_back_one_character(
        seeds in prop::collection::vec(any::<u16>(), 0..60),
        skip: bool,
    ) {
        for Loaded { name, ours, .. } in LOADED.iter().filter(|loaded| BYTE_LEVEL.contains(&loaded.name)) {
            let range = i32::try_from(ours.vocab_size()).expect("small") + 40;
            let ids: Vec<i32> = seeds.iter().map(|&seed| i32::from(seed) % range - 20).collect();
            let mut detokenizer = Detokenizer::new(Arc::clone(ours), skip);
            let mut out = String::new();
            for (at, &id) in ids.iter().enumerate() {
                detokenizer.push(id, &mut out);
                let so_far = ours.decode(&ids[..=at], skip).expect("text");
                let held = so_far.strip_prefix(&out);
                prop_assert!(matches!(held, Some("" | "\u{fffd}")), "{} {:?} {:?}", name, so_far, out);
            }
            detokenizer.finish(&mut out);
            prop_assert_eq!(out, ours.decode(&ids, skip).expect("text"));
        }
    }

    #[test]
    fn any_ids_are_taken_by_every_tokenizer(ids in prop::collection::vec(-5..1000_i32, 0..200), skip: bool) {
        for Loaded { name, ours, .. } in LOADED.iter() {
            let decoded = ours.decode(&ids, skip).expect("text");
            let streamed = stream(ours, &ids, skip);
            if *name == "byte_fallback" {
                // Invalid bytes may be decoded differently, but the text around them is the same.
                let good = |text: &str| text.chars().filter(char::is_ascii_alphabetic).count();
                prop_assert!(good(&streamed) >= good(&decoded));
            } else {
                prop_assert_eq!(streamed, decoded, "{}", name);
            }
        }
    }
}

fn named(name: &str) -> &'static Loaded {
    LOADED.iter().find(|loaded| loaded.name == name).expect("a name")
}

/// Returns every delta of a stream, and the text that `finish` returns at the end.
fn deltas(tokenizer: &Arc<Tokenizer>, tokens: &[&str]) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), false);
    let mut all = Vec::new();
    for token in tokens {
        let mut out = String::new();
        detokenizer.push(tokenizer.token_to_id(token).expect("a token"), &mut out);
        all.push(out);
    }
    let mut out = String::new();
    detokenizer.finish(&mut out);
    all.push(out);
    all
}

#[test]
fn a_character_comes_out_with_its_last_byte() {
    let tokenizer = &named("byte_fallback").ours;
    let euro = ["▁", "<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "<0x9F>"];
    assert_eq!(deltas(tokenizer, &euro), ["", "", "", "€", "", "", "\u{fffd}\u{fffd}"]);
    let tokenizer = &named("byte_level").ours;
    assert_eq!(deltas(tokenizer, &["â", "Ĥ", "¬", "ð", "Ł"]), ["", "", "€", "", "", "\u{fffd}"]);
}

#[test]
fn a_wrong_byte_breaks_the_rest_of_its_run_and_no_more() {
    let tokenizer = &named("byte_fallback").ours;
    let tokens = ["<0xFF>", "<0x41>", "a", "<0x41>"];
    assert_eq!(deltas(tokenizer, &tokens), ["\u{fffd}", "\u{fffd}", "a", "A", ""]);
}

#[test]
fn one_token_alone() {
    let Loaded { ours, .. } = named("byte_level");
    let id = |token: &str| ours.token_to_id(token).expect("a token");
    assert_eq!(ours.token_bytes(id("Ġ")), b" ");
    assert_eq!(ours.token_bytes(id("â")), [0xe2]);
    assert_eq!(ours.token_text(id("â")), "\u{fffd}");
    assert_eq!(ours.token_text(id("<｜end｜>")), "<｜end｜>");
    assert!(
        ours.is_special(id("<｜end｜>")) && !ours.is_special(id("<think>")) && !ours.is_special(-1)
    );
    assert_eq!(ours.id_to_token(id("Ġ")).as_deref(), Some("Ġ"));
    let size = i32::try_from(ours.vocab_size()).expect("small");
    assert!(ours.id_to_token(size - 1).is_some());
    for none in [-1, size, i32::MAX, i32::MIN] {
        assert_eq!((ours.token_bytes(none), ours.id_to_token(none)), (Vec::new(), None));
    }
    let Loaded { ours, .. } = named("byte_fallback");
    let byte = ours.token_to_id("<0xE2>").expect("a token");
    assert_eq!((ours.token_bytes(byte), ours.token_text(byte).as_str()), (vec![0xe2], "\u{fffd}"));
    assert_eq!(ours.token_text(ours.token_to_id("▁").expect("a token")), " ");
    let Loaded { ours, .. } = named("wordpiece");
    assert_eq!(ours.token_text(ours.token_to_id("the").expect("a token")), "the");
}

#[test]
fn long_texts_neither_overflow_nor_change() {
    for text in ["a".repeat(200_000), " ".repeat(200_000), "🙂 é\n".repeat(20_000)] {
        for Loaded { name, ours, .. } in
            LOADED.iter().filter(|loaded| BYTE_LEVEL.contains(&loaded.name))
        {
            let ids = ours.encode(&text, false).expect("ids");
            assert!(stream(ours, &ids, false) == text, "{name}");
        }
        let Loaded { ours, .. } = named("byte_fallback");
        let ids = ours.encode(&text, false).expect("ids");
        assert!(stream(ours, &ids, true) == text);
    }
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused_by_name() {
    for bad in ["tests/data/templates/smollm2.json", "no/such/file.json"] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(bad);
        let error = Tokenizer::from_file(&path).expect_err("no tokenizer");
        assert!(error.to_string().contains(bad), "{error}");
    }
}

#[test]
fn truncation_and_padding_of_the_file_are_off() {
    let mut tokenizer = named("byte_level").reference.clone();
    tokenizer
        .with_truncation(Some(tokenizers::TruncationParams { max_length: 2, ..Default::default() }))
        .expect("truncation");
    let json = tokenizer.to_string(false).expect("JSON");
    let ours = Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer");
    assert!(ours.encode("one two three four five six", false).expect("ids").len() > 5);
}
