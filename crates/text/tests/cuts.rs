//! Tests that texts encoded in parts, with and without the cache, have the same ids as texts
//! encoded whole.
//!
//! The tokenizers have the normalizers and pre-tokenizers of real model families with a small
//! vocabulary. Their merges join tokens across every kind of boundary that no pre-tokenizer rule
//! separates.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use forebay_text::{Backend, Encoder, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The pre-tokenizers of Qwen 2 and 3, Llama 3, DeepSeek V3, GPT-OSS, SmolLM2 and GPT-2.
const QWEN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    concat!(
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"##,
        "\r\n",
        r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[",
        "\r\n",
        r"]*|\s*[",
        "\r\n",
        r"]+|\s+(?!\S)|\s+",
    ),
];
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

struct Case {
    name: &'static str,
    json: String,
    cut: Cut,
}

/// The positions at which a tokenizer's texts may be cut.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cut {
    /// Before added tokens and between words.
    Anywhere,
    BeforeTokens,
    Nowhere,
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn removed(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": true})
}

fn sequence(mut steps: Vec<Value>, use_regex: bool) -> Value {
    steps.push(json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex,
    }));
    json!({"type": "Sequence", "pretokenizers": steps})
}

/// Returns a byte-level tokenizer with this normalizer and pre-tokenizer.
fn byte_level(normaliser: Value, pre_tokenizer: Value) -> Value {
    let mut file = read("byte_level");
    file["normalizer"] = normaliser;
    file["pre_tokenizer"] = pre_tokenizer;
    file
}

fn read(name: &str) -> Value {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tokenizers");
    let json = std::fs::read(folder.join(format!("{name}.json"))).expect("test data");
    serde_json::from_slice(&json).expect("JSON")
}

fn cases() -> Vec<Case> {
    let nfc = || json!({"type": "NFC"});
    let digits = |each: bool| json!({"type": "Digits", "individual_digits": each});
    let none = || json!({"type": "Sequence", "normalizers": []});
    let mut cases = vec![
        ("qwen", byte_level(nfc(), sequence(vec![split(QWEN)], false)), Cut::Anywhere),
        ("llama3", byte_level(Value::Null, sequence(vec![split(LLAMA3)], false)), Cut::Anywhere),
        (
            "deepseek",
            byte_level(none(), sequence(DEEPSEEK.map(split).into(), false)),
            Cut::Anywhere,
        ),
        ("gpt-oss", byte_level(Value::Null, sequence(vec![removed(O200K)], false)), Cut::Anywhere),
        ("smollm2", byte_level(Value::Null, sequence(vec![digits(true)], true)), Cut::Anywhere),
        ("starcoder", byte_level(Value::Null, sequence(vec![digits(false)], true)), Cut::Anywhere),
        ("gpt2", byte_level(Value::Null, sequence(Vec::new(), true)), Cut::Anywhere),
        (
            "nfkc",
            byte_level(json!({"type": "NFKC"}), sequence(Vec::new(), true)),
            Cut::BeforeTokens,
        ),
        ("no pattern", byte_level(Value::Null, sequence(Vec::new(), false)), Cut::BeforeTokens),
    ];
    // Added tokens that are matched in normalized text. The added tokens of the file are not in
    // normal form.
    let mut composed = byte_level(nfc(), sequence(vec![split(QWEN)], false));
    for token in composed["added_tokens"].as_array_mut().expect("a list") {
        token["normalized"] = json!(true);
    }
    cases.push(("composed tokens", composed, Cut::Nowhere));
    for name in ["byte_fallback", "unigram", "wordpiece", "word_level", "suffix_bpe"] {
        cases.push((name, read(name), Cut::BeforeTokens));
    }
    let case = |(name, file, cut): (_, Value, _)| Case { name, json: file.to_string(), cut };
    cases.into_iter().map(case).collect()
}

struct Loaded {
    case: Case,
    tokenizer: Arc<Tokenizer>,
    plain: Encoder,
    cached: Encoder,
    /// An encoder whose cache holds only a few parts.
    small: Encoder,
}

static LOADED: LazyLock<Vec<Loaded>> = LazyLock::new(|| {
    let load = |case: Case| {
        let tokenizer = Tokenizer::from_bytes(case.json.as_bytes()).expect("a tokenizer");
        let tokenizer = Arc::new(tokenizer);
        let encoder = |bytes| Encoder::new(Arc::clone(&tokenizer), bytes);
        let (plain, cached, small) = (encoder(0), encoder(64 << 20), encoder(8 << 10));
        Loaded { case, tokenizer, plain, cached, small }
    };
    cases().into_iter().map(load).collect()
});

/// Generates pieces of text with many kinds of boundaries.
fn piece() -> impl Strategy<Value = String> {
    let nasty = prop::sample::select(vec![
        "the ",
        "dog",
        " didn't",
        "'S",
        "'ſ",
        " I'll",
        "x",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\n\n",
        "\t",
        ".",
        ", ",
        "?!",
        "...",
        "/",
        "123",
        "4",
        " 56 ",
        "½",
        "²",
        "日本",
        "語。",
        "，",
        "한국",
        "어 ",
        "é",
        "e\u{301}",
        "\u{301}",
        "ñ ",
        "Ω",
        "Пр",
        "इ",
        "ि",
        "ก",
        "ำ ",
        "م",
        "\u{200d}",
        "👩",
        "\u{a0}",
        "\u{3000}",
        "\u{85}",
        "\u{180e}",
        "\u{1c89}",
        "\0",
        "_",
        "$1",
        "<s>",
        "</s>",
        "<|im_start|>",
        "<|im_start",
        "<｜end｜>",
        "<think>",
        " spaced out ",
        "Ġodd",
        "é\u{301}\u{200d}",
        "▁",
        "<0xE2>",
        "##",
        "normal form",
    ]);
    let any = any::<char>().prop_map(String::from);
    prop_oneof![12 => nasty.prop_map(str::to_owned), 1 => any]
}

/// Generates texts that repeat pieces, so that they are long enough to be cut and still vary.
fn text() -> impl Strategy<Value = String> {
    (prop::collection::vec(piece(), 1..40), 1..6_usize, prop::collection::vec(piece(), 300..2500))
        .prop_map(|(run, times, pieces)| {
            pieces.concat()
                + &run.concat().repeat(times * 40)
                + &pieces[..pieces.len() / 2].concat()
        })
}

/// Checks that every encoder returns the same ids as the library.
fn check(loaded: &Loaded, text: &str, special: bool) -> Result<(), TestCaseError> {
    let Loaded { case, tokenizer, plain, cached, small } = loaded;
    let expected = tokenizer.encode(text, special).expect("ids");
    for (kind, encoder) in [("cut", plain), ("cached", cached), ("small cache", small)] {
        let ids = encoder.encode(text, special).expect("ids");
        if ids != expected {
            let at = ids.iter().zip(&expected).position(|(a, b)| a != b);
            let from = at.unwrap_or(0).saturating_sub(5);
            let around = tokenizer.decode(&expected[from..(from + 12).min(expected.len())], false);
            return Err(TestCaseError::fail(format!("{} {kind} at {at:?}: {around:?}", case.name)));
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn long_texts_in_parts_have_the_ids_of_the_whole(text in text(), special: bool) {
        for loaded in LOADED.iter() {
            check(loaded, &text, special)?;
        }
    }

    #[test]
    fn turn_after_turn_has_the_ids_of_the_whole(
        turns in prop::collection::vec(prop::collection::vec(piece(), 0..400), 1..12),
        edit in 0..12_usize,
        special: bool,
    ) {
        for loaded in LOADED.iter() {
            let mut chat = String::new();
            for (at, turn) in turns.iter().enumerate() {
                let role = if at % 2 == 0 { "user" } else { "assistant" };
                chat += &format!("<|im_start|>{role}\n{}</s>\n", turn.concat());
                check(loaded, &format!("{chat}<|im_start|>assistant\n"), special)?;
            }
            // An earlier message changes, so the text after it is at another offset.
            let edited = chat.replacen(&turns[edit % turns.len()].concat(), "edited", 1);
            check(loaded, &edited, special)?;
        }
    }
}

#[test]
fn what_was_encoded_in_the_last_turn_is_found() {
    let sentence = "The dog didn't mind; it said so, in 12 words. ";
    for Loaded { case, tokenizer, .. } in LOADED.iter() {
        if case.cut == Cut::Nowhere {
            continue;
        }
        let encoder = Encoder::new(Arc::clone(tokenizer), 1 << 20);
        let mut chat = String::new();
        for turn in 0..8 {
            chat += &format!("<|im_start|>user\n{turn} {}</s>", sentence.repeat(60));
            encoder.encode(&chat, false).expect("ids");
        }
        let (queries, hits, bytes) = encoder.cache_counts();
        assert!(hits * 2 > queries, "{}: {hits} of {queries}", case.name);
        assert!(bytes > 0 && bytes <= 1 << 20);
        let (before, text) = (hits, chat.len() as u64);
        encoder.encode(&chat, false).expect("ids");
        let (_, hits, _) = encoder.cache_counts();
        assert!((hits - before) * 10 > text * 7, "{}: {} of {text}", case.name, hits - before);
    }
}

#[test]
fn texts_without_added_tokens_are_cut_where_that_is_proven_and_only_there() {
    let sentence = "The dog didn't mind; it said so, in 12 words. ";
    for Loaded { case, tokenizer, .. } in LOADED.iter() {
        let encoder = Encoder::new(Arc::clone(tokenizer), 1 << 20);
        encoder.encode(&sentence.repeat(1000), false).expect("ids");
        let (queries, ..) = encoder.cache_counts();
        assert_eq!(queries > 0, case.cut == Cut::Anywhere, "{}", case.name);
    }
}

#[test]
fn fastokens_encodes_as_the_reference_or_refuses_to_load() {
    let mut loaded = 0;
    for case in cases() {
        let Ok(fast) = Tokenizer::from_bytes_with(
            case.json.as_bytes(),
            Backend::Fastokens,
            &serde_json::Map::new(),
        ) else {
            continue;
        };
        assert_ne!(case.name, "byte_fallback");
        loaded += 1;
        let fast = Arc::new(fast);
        let reference = Tokenizer::from_bytes(case.json.as_bytes()).expect("a tokenizer");
        let encoder = Encoder::new(Arc::clone(&fast), 1 << 20);
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::with_cases(100)
        });
        let check = |(text, special): (String, bool)| {
            let expected = reference.encode(&text, special).expect("ids");
            prop_assert_eq!(
                fast.encode(&text, special).expect("ids"),
                expected.clone(),
                "{}",
                case.name
            );
            prop_assert_eq!(
                encoder.encode(&text, special).expect("ids"),
                expected,
                "{} cut",
                case.name
            );
            Ok(())
        };
        let strategies = (
            prop::collection::vec(piece(), 0..60).prop_map(|pieces| pieces.concat()),
            any::<bool>(),
        );
        runner.run(&strategies, check).expect("equal ids");
        runner.run(&(text(), any::<bool>()), check).expect("equal ids");
    }
    assert!(loaded >= 5, "only {loaded} tokenizers");
}
