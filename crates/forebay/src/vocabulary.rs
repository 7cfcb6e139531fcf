//! A check that the tokenizer and the model belong together, by their numbers.

use anyhow::{Result, bail};
use forebay_text::Tokenizer;
use tracing::warn;

use crate::model::Model;

/// Tokens that a warning names.
const NAMED: usize = 8;

/// The ids that end a text and that the model can make. Ids that it can't have are told, as a
/// warning: a text with one of them is refused, and all others are served.
///
/// # Errors
/// The model generates, and none of the ids that are to end its texts is one of its own: it would
/// never stop.
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
    ends(&model.eos_token_ids, model.vocab_size, model.pooling.is_none())
}

fn ends(ids: &[i32], vocab_size: u32, generates: bool) -> Result<Vec<i32>> {
    let is_own = |id: &i32| u32::try_from(*id).is_ok_and(|id| id < vocab_size);
    let (own, foreign): (Vec<i32>, Vec<i32>) = ids.iter().partition(|id| is_own(id));
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
    use super::*;

    #[test]
    fn ends_that_the_model_does_not_have_are_left_out() {
        assert_eq!(ends(&[2, 7], 8, true).expect("ends"), [2, 7]);
        assert_eq!(ends(&[2, 8, -1], 8, true).expect("ends"), [2]);
        assert!(ends(&[], 8, true).expect("ends").is_empty());
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
