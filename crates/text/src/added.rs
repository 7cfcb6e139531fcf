//! Adds the tokens that are only in `tokenizer_config.json` to the tokenizer, as transformers does.

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use crate::error::TextError;

/// The keys of special tokens in `tokenizer_config.json`, in transformers' order.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// The keys of lists of further special tokens.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// Adds the tokens of `config`, the content of a `tokenizer_config.json`: those of
/// `added_tokens_decoder` in the order of their ids, then all special tokens that are still
/// missing.
///
/// As in transformers, a token of the vocabulary keeps its id, and any other gets the next free id.
/// Returns true if this changed the tokenizer.
pub(crate) fn add(
    inner: &mut tokenizers::Tokenizer,
    config: &Map<String, Value>,
) -> Result<bool, TextError> {
    let mut tokens = Vec::new();
    let decoder = config.get("added_tokens_decoder").and_then(Value::as_object);
    let mut listed: Vec<(u64, &Value)> = decoder
        .into_iter()
        .flatten()
        .filter_map(|(id, token)| Some((id.parse().ok()?, token)))
        .collect();
    listed.sort_unstable_by_key(|(id, _)| *id);
    let known = |content: &str, tokens: &[AddedToken]| {
        let added = inner.get_added_vocabulary();
        let own = added.get_added_tokens_decoder().values().any(|token| token.content == content);
        own || tokens.iter().any(|token| token.content == content)
    };
    let named: Vec<&Value> = NAMED.iter().filter_map(|name| config.get(*name)).collect();
    let is_named = |content: &str| named.iter().any(|value| text(value) == Some(content));
    for (_, value) in listed {
        if let Some(mut token) = token(value) {
            token.special |= is_named(&token.content);
            tokens.push(token);
        }
    }
    for value in named.iter().copied().chain(further(config)) {
        if let Some(mut token) = token(value)
            && !known(&token.content, &tokens)
        {
            token.special = true;
            tokens.push(token);
        }
    }
    let changed = inner.add_tokens(tokens);
    let changed = changed.map_err(|error| TextError::Load(format!("added tokens: {error}")))?;
    Ok(changed > 0)
}

/// Returns the special tokens under [`LISTS`], which have no standard names: the elements of an
/// array, or the values of an object.
fn further(config: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let listed = LISTS.iter().filter_map(|name| config.get(*name));
    listed.flat_map(|value| match value {
        Value::Array(tokens) => tokens.iter().collect::<Vec<_>>(),
        Value::Object(tokens) => tokens.values().collect(),
        _ => Vec::new(),
    })
}

/// Returns the text of a token. The token is a string, or an object with the field `content`.
fn text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Creates a token from its text, or from an object with its properties.
fn token(value: &Value) -> Option<AddedToken> {
    let content = text(value).filter(|content| !content.is_empty())?;
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(value.is_string());
    Some(
        AddedToken::from(content, special)
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false))
            .normalized(flag("normalized").unwrap_or(!special)),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use crate::{Backend, Detokenizer, Tokenizer};

    const FILE: &[u8] = include_bytes!("../tests/data/tiny-llama-tokenizer.json");

    fn loaded(config: &serde_json::Value) -> Tokenizer {
        let config = config.as_object().expect("an object");
        Tokenizer::from_bytes_with(FILE, Backend::Hf, config).expect("a tokenizer")
    }

    #[test]
    fn a_token_of_the_config_is_one_token() {
        let size = i32::try_from(loaded(&json!({})).vocab_size()).expect("a size");
        let token = |content: &str, special| json!({"content": content, "special": special});
        let config = json!({
            "added_tokens_decoder": {
                "90011": token("<mytoken>", false),
                "90002": token("<first>", true),
                "90003": {"content": "<wide>", "lstrip": true, "rstrip": true, "special": false},
            },
            "eos_token": {"content": "<stop>"},
            "pad_token": "<first>",
            "additional_special_tokens": ["<more>"],
        });
        let tokenizer = loaded(&config);
        let ids = ["<first>", "<wide>", "<mytoken>", "<stop>", "<more>"]
            .map(|text| tokenizer.token_to_id(text).expect("a token"));
        assert_eq!(ids, [size, size + 1, size + 2, size + 3, size + 4]);
        for (text, id) in [("<mytoken>", ids[2]), ("<first>", ids[0]), (" <wide> ", ids[1])] {
            assert_eq!(tokenizer.encode(text, false), Ok(vec![id]), "{text}");
        }
        let special = ids.map(|id| tokenizer.is_special(id));
        assert_eq!(special, [true, false, false, true, true]);
        // The detokenizer and the lower bound of the number of ids know the added tokens too.
        let mut detokenizer = Detokenizer::new(Arc::new(loaded(&config)), true);
        let mut text = String::new();
        for id in [ids[2], ids[0]] {
            detokenizer.push(id, &mut text);
        }
        detokenizer.finish(&mut text);
        assert_eq!(text, "<mytoken>");
        assert!(tokenizer.fewest_ids(&"<mytoken>".repeat(20)) <= 20);
    }

    #[test]
    fn tokens_that_are_there_keep_their_ids() {
        let plain = loaded(&json!({}));
        let (id, word) = (300..).find_map(|id| Some((id, plain.id_to_token(id)?))).expect("one");
        let added = json!({"added_tokens_decoder": {"7": {"content": word, "special": false}}});
        let tokenizer = loaded(&added);
        assert_eq!(tokenizer.token_to_id(&word), Some(id));
        assert_eq!(tokenizer.vocab_size(), plain.vocab_size());
    }

    #[test]
    fn what_is_no_token_is_left_out() {
        let size = loaded(&json!({})).vocab_size();
        for config in [
            json!({"added_tokens_decoder": null, "eos_token": null}),
            json!({"added_tokens_decoder": {"x": {"content": "<a>"}, "8": {"content": ""}, "9": 4}}),
            json!({"additional_special_tokens": "<a>", "bos_token": {"name": "<a>"}}),
        ] {
            assert_eq!(loaded(&config).vocab_size(), size, "{config}");
        }
    }
}
