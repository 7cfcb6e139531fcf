//! The end-of-text tokens, and a check that tokenizer and model match.

use anyhow::{Result, bail};
use forebay_text::Tokenizer;
use tracing::warn;

use crate::model::Model;

/// The largest number of tokens that a warning lists.
const NAMED: usize = 8;

/// Control tokens that end a text. GGUF files declare only some of their end tokens, so these are
/// added. This is llama.cpp's list, including its padding, repository and file separator tokens of
/// code models.
const GGUF_ENDS: [&str; 33] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// Exceptions: each is a token of the list above with groups of other tokens. If the vocabulary
/// contains all tokens of any of its groups, the token does not end texts but is a mark inside
/// them.
const NO_GGUF_ENDS: [(&str, &[&[&str]]); 2] = [
    ("<|end|>", &[&["<|return|>", "<|call|>"], &["<|flush|>", "<|calls|>"]]),
    ("</s>", &[&["<|tool_response>"]]),
];

/// Returns the ids that end a text and that the model can generate. Ids from the model's
/// configuration files come first, then those of its tokenizer. A warning lists tokenizer ids
/// outside the model's vocabulary: texts that contain them are refused, and all other texts are
/// served.
///
/// # Errors
/// The model generates, but none of its end ids is in its vocabulary, so it would never stop.
pub(crate) fn check(tokenizer: &Tokenizer, model: &Model) -> Result<Vec<i32>> {
    let beyond = tokenizer.ids_from(model.vocab_size);
    if !beyond.is_empty() {
        let named: Vec<String> =
            beyond.iter().take(NAMED).map(|(id, token)| format!("{id} {token:?}")).collect();
        let special = beyond.iter().filter(|(id, _)| tokenizer.is_special(*id)).count();
        warn!(
            "{} tokens of the tokenizer, {special} special ones among them, have ids that the model's vocabulary of {} does not \
             have, and text with them is refused: {}{}",
            beyond.len(),
            model.vocab_size,
            named.join(", "),
            if beyond.len() > NAMED { ", ..." } else { "" },
        );
    }
    let mut named = model.eos_token_ids.clone();
    let of_tokenizer = tokenizer_ends(tokenizer, model.eos_token.as_deref(), &model.format);
    let is_new = |id: &i32| !named.contains(id) && is_own(*id, model.vocab_size);
    let new: Vec<i32> = of_tokenizer.into_iter().filter(is_new).collect();
    named.extend(new);
    ends(&named, model.vocab_size, model.pooling.is_none())
}

/// Returns the tokenizer's own end token and, for a GGUF file, the control tokens of [`GGUF_ENDS`]
/// that the tokenizer has.
fn tokenizer_ends(tokenizer: &Tokenizer, eos_token: Option<&str>, format: &str) -> Vec<i32> {
    let mut found: Vec<i32> =
        eos_token.and_then(|token| tokenizer.token_to_id(token)).into_iter().collect();
    if format != "gguf" {
        return found;
    }
    let special =
        |text: &str| tokenizer.token_to_id(text).filter(|&id| tokenizer.is_special(id)).is_some();
    let ends = |text: &str| {
        let within = NO_GGUF_ENDS.iter().find(|(token, _)| *token == text);
        GGUF_ENDS.contains(&text)
            && !within.is_some_and(|(_, groups)| {
                groups.iter().any(|group| group.iter().all(|token| special(token)))
            })
    };
    let mut known = tokenizer.special_ids(ends);
    known.retain(|id| !found.contains(id));
    found.append(&mut known);
    found
}

fn is_own(id: i32, vocab_size: u32) -> bool {
    u32::try_from(id).is_ok_and(|id| id < vocab_size)
}

fn ends(ids: &[i32], vocab_size: u32, generates: bool) -> Result<Vec<i32>> {
    let (own, foreign): (Vec<i32>, Vec<i32>) = ids.iter().partition(|id| is_own(**id, vocab_size));
    if foreign.is_empty() || !generates {
        return Ok(own);
    }
    if own.is_empty() {
        bail!(
            "the model's vocabulary has {vocab_size} tokens and none of the ids that end its texts ({foreign:?}): it would not \
             stop. Correct eos_token_id in its generation_config.json or config.json"
        );
    }
    warn!(
        "ids that are to end a text are not of the model's vocabulary of {vocab_size} and are left out: {foreign:?}"
    );
    Ok(own)
}

#[cfg(test)]
mod tests {
    use forebay_text::Backend;
    use serde_json::{Map, Value, json};

    use super::*;

    #[test]
    fn ends_that_the_model_does_not_have_are_left_out() {
        assert_eq!(ends(&[2, 7], 8, true).expect("ends"), [2, 7]);
        assert_eq!(ends(&[2, 8, -1], 8, true).expect("ends"), [2]);
        assert!(ends(&[], 8, true).expect("ends").is_empty());
    }

    /// A tokenizer with these tokens after the letters: the special tokens, and one ordinary token.
    fn tokenizer(special: &[&str], plain: &str) -> Tokenizer {
        let token = |content: &str, special: bool| json!({"content": content, "special": special});
        let mut tokens: Vec<Value> = special.iter().map(|text| token(text, true)).collect();
        tokens.push(token(plain, false));
        let numbered = tokens.into_iter().enumerate();
        let decoder: Map<String, Value> =
            numbered.map(|(id, token)| (id.to_string(), token)).collect();
        let config = json!({"added_tokens_decoder": decoder});
        let model = json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"});
        let file = json!({"version": "1.0", "added_tokens": [], "model": model});
        let config = config.as_object().expect("an object");
        Tokenizer::from_bytes_with(file.to_string().as_bytes(), Backend::Hf, config)
            .expect("a tokenizer")
    }

    #[test]
    fn the_tokenizers_own_end_ends_texts() {
        let tokenizer = tokenizer(&["<stop>", "<|im_end|>"], "<eos>");
        for format in ["safetensors", "gguf"] {
            let found = tokenizer_ends(&tokenizer, Some("<stop>"), format);
            assert_eq!(found.first(), tokenizer.token_to_id("<stop>").as_ref(), "{format}");
        }
        assert_eq!(tokenizer_ends(&tokenizer, Some("<stop>"), "safetensors").len(), 1);
        assert!(tokenizer_ends(&tokenizer, Some("<none>"), "safetensors").is_empty());
        assert!(tokenizer_ends(&tokenizer, None, "safetensors").is_empty());
    }

    #[test]
    fn known_control_tokens_of_a_gguf_file_end_texts() {
        for (special, ends) in [
            (
                &["<|endoftext|>", "<|im_start|>", "<|im_end|>"][..],
                &["<|endoftext|>", "<|im_end|>"][..],
            ),
            (&["<s>", "</s>", "<end_of_turn>", "<start_of_turn>"], &["</s>", "<end_of_turn>"]),
            (&["<|eot_id|>", "<|eom_id|>", "<|python_tag|>"], &["<|eot_id|>", "<|eom_id|>"]),
            (&["<|end|>", "<|user|>"], &["<|end|>"]),
            (&["<|end|>", "<|return|>", "<|call|>"], &["<|return|>", "<|call|>"]),
            (&["<|end|>", "<|return|>"], &["<|end|>", "<|return|>"]),
            (&["<|end|>", "<|flush|>", "<|calls|>"], &["<|flush|>", "<|calls|>"]),
            (&["</s>", "<turn|>", "<|tool_response>"], &["<turn|>", "<|tool_response>"]),
            (&["<|fim_pad|>", "<|fim_prefix|>", "<|file_sep|>"], &["<|fim_pad|>", "<|file_sep|>"]),
            (&["]~b]", "[e~["], &["[e~["]),
            (&["<|im_start|>"], &[]),
        ] {
            // A token of the list is ordinary text unless it is a control token.
            let tokenizer = tokenizer(special, "<EOT>");
            let mut found = tokenizer_ends(&tokenizer, special.first().copied(), "gguf");
            if !ends.contains(&special[0]) {
                assert_eq!(Some(found.remove(0)), tokenizer.token_to_id(special[0]));
            }
            let found: Vec<_> = found.iter().filter_map(|&id| tokenizer.id_to_token(id)).collect();
            assert_eq!(found, ends, "{special:?}");
        }
    }

    #[test]
    fn a_model_that_could_not_stop_is_refused() {
        let error = ends(&[8, 9], 8, true).expect_err("no end");
        assert!(error.to_string().contains("[8, 9]"));
        assert!(ends(&[8, 9], 8, false).expect("no ends are needed").is_empty());
    }

    #[test]
    fn tokens_beyond_the_vocabulary_are_named() {
        let file = include_bytes!("../../text/tests/data/tiny-llama-tokenizer.json");
        let tokenizer = Tokenizer::from_bytes(file).expect("a tokenizer");
        let size = u32::try_from(tokenizer.vocab_size()).expect("a size");
        assert!(tokenizer.ids_from(size).is_empty());
        let last = tokenizer.ids_from(size - 2);
        assert_eq!(last.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2046, 2047]);
        assert!(last.iter().all(|(id, token)| tokenizer.token_to_id(token) == Some(*id)));
    }
}
