//! Tests of a pool's limits: words that are too long, and cached encodings.

use std::future::Future;
use std::sync::Arc;

use forebay_text::{TextConfig, TextError, TextInput, TextPool, Tokenizer};
use serde_json::Value;

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

fn pool(tokenizer: Arc<Tokenizer>) -> TextPool {
    let config = TextConfig { text_threads: 1, queue: 10, ..TextConfig::default() };
    TextPool::with_config(tokenizer, None, &config)
}

fn text(text: &str) -> TextInput {
    TextInput::Text { text: text.to_owned(), add_special_tokens: false }
}

fn tokenizer() -> Arc<Tokenizer> {
    let json = include_bytes!("data/tiny-llama-tokenizer.json");
    Arc::new(Tokenizer::from_bytes(json).expect("a tokenizer"))
}

/// Returns a text in which each word occurs once.
fn prose(bytes: usize) -> String {
    (0..bytes / 8).map(|number| format!("w{number:06} ")).collect()
}

#[test]
fn a_word_that_is_too_long_is_not_encoded() {
    let json = include_bytes!("data/tokenizers/byte_level.json");
    let tokenizer = Tokenizer::from_bytes(json).expect("a tokenizer");
    let pool = pool(Arc::new(tokenizer));
    let limit = 1 << 20;
    for blanks in [limit + 1, 3_900_000] {
        let blank = format!("a{}", " ".repeat(blanks));
        let long = [
            block_on(pool.within(1 << 30).encode(text(&blank))).map(drop),
            block_on(pool.within(1 << 30).encode_all(vec!["b".into(), blank.clone()], true))
                .map(drop),
            block_on(pool.within(1 << 30).encode_pairs(vec![("b".into(), blank.clone())]))
                .map(drop),
        ];
        for refused in long {
            let Err(TextError::Undivided { bytes, limit: most }) = refused else {
                panic!("{refused:?}")
            };
            assert!((blanks..=blanks + 1).contains(&bytes) && most == limit, "{bytes} {most}");
        }
    }
    assert_eq!(pool.stats().encoded_bytes, 0);
    let divided = "words and blanks ".repeat(150_000);
    assert!(block_on(pool.encode(text(&divided))).is_ok());
}

#[test]
fn a_word_of_a_tokenizer_without_cuts_is_bounded_too() {
    let json = include_bytes!("data/tokenizers/byte_level.json");
    let mut file: Value = serde_json::from_slice(json).expect("JSON");
    // With a normalizer that changes the text, texts are not cut between words.
    file["normalizer"] = serde_json::json!({"type": "Lowercase"});
    let file = file.to_string();
    let tokenizer = Tokenizer::from_bytes(file.as_bytes()).expect("a tokenizer");
    let pool = pool(Arc::new(tokenizer));
    let blank = " ".repeat((1 << 20) + 10);
    let refused = block_on(pool.encode(text(&blank)));
    assert!(matches!(refused, Err(TextError::Undivided { .. })), "{refused:?}");
}

#[test]
fn encodings_are_kept_for_texts_of_the_same_salt() {
    let pool = pool(tokenizer());
    let long = prose(30_000);
    let found = |salt| {
        let before = pool.stats().cache_hits;
        let encoded = block_on(pool.within(None).salted(salt).encode(text(&long)));
        assert!(encoded.is_ok());
        pool.stats().cache_hits - before
    };
    assert_eq!(found(1), 0);
    let all = found(1);
    assert!(all > 20_000);
    assert_eq!(found(2), 0);
    assert_eq!(found(0), 0);
    assert_eq!((found(1), found(2), found(0)), (all, all, all));
}
